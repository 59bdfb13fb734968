// Tensor: a view of a cache's memory, for NumPy and for every framework that speaks DLPack.
#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <utility>
#include <vector>

#include "bind.h"
#include "convert.h"
#include "tensor_convert.h"

namespace kvleaf::python {
namespace {

using namespace nb::literals;

/// Keeps a Python object alive for views on its memory.
class Held : public TensorOwner {
 public:
  explicit Held(nb::object object) : object_(std::move(object)) {}
  ~Held() override {
    if (!Py_IsInitialized()) {  // the interpreter and all its objects are gone
      (void)object_.release();
      return;
    }
    const nb::gil_scoped_acquire acquire;
    object_.reset();
  }

 private:
  nb::object object_;
};

nb::tuple tuple_of(std::span<const std::int64_t> values, std::int64_t factor = 1) {
  nb::list list;
  for (const std::int64_t value : values) list.append(value * factor);
  return nb::tuple(list);
}

/// As the array interface names element types; of what NumPy has no name for, the unsigned integer
/// that wide.
const char* typestr(DType dtype) {
  switch (dtype) {
    case DType::uint8:
    case DType::float8_e4m3:
    case DType::float8_e5m2: return "|u1";
    case DType::int8: return "|i1";
    case DType::int32: return "<i4";
    case DType::int64: return "<i8";
    case DType::float16: return "<f2";
    case DType::bfloat16: return "<u2";
    case DType::float32: return "<f4";
  }
  return "|u1";
}

nb::dict array_interface(const Tensor& self) {
  nb::dict interface;
  const auto address = reinterpret_cast<std::uintptr_t>(self.data());
  if (self.device().kind != Device::Kind::cpu)
    throw InvalidArgument(
        fmt::format("{} is not in host memory; expected a tensor on cpu", self.to_string()));
  interface["version"] = 3;
  interface["shape"] = tuple_of(self.shape());
  interface["strides"] = tuple_of(self.strides(), size_of(self.dtype()));
  interface["typestr"] = typestr(self.dtype());
  interface["data"] = nb::make_tuple(address, false);
  return interface;
}

/// A NumPy array that has `self` for its base, so that it keeps the memory.
nb::object bits_of(nb::handle self) {
  // Asked first: what the interface raises, NumPy would take for there being none.
  (void)array_interface(*nb::inst_ptr<Tensor>(self));
  return nb::module_::import_("numpy").attr("asarray")(self);
}

nb::object numpy_of(nb::handle self) {
  nb::object bits = bits_of(self);
  switch (nb::inst_ptr<Tensor>(self)->dtype()) {
    case DType::bfloat16:
    case DType::float8_e4m3:
    case DType::float8_e5m2:
      return bits.attr("view")(numpy_dtype(nb::inst_ptr<Tensor>(self)->dtype()));
    default: return bits;
  }
}

template <class Managed>
nb::object capsule_of(Managed* managed, const char* name) {
  PyObject* capsule = PyCapsule_New(managed, name, [](PyObject* self) {
    // A consumer that took it has renamed the capsule.
    const char* given =
        std::is_same_v<Managed, DLManagedTensor> ? "dltensor" : "dltensor_versioned";
    if (PyCapsule_IsValid(self, given) == 0) return;
    auto* unused = static_cast<Managed*>(PyCapsule_GetPointer(self, given));
    unused->deleter(unused);
  });
  if (capsule == nullptr) {
    managed->deleter(managed);
    throw nb::python_error();
  }
  return nb::steal(capsule);
}

nb::object dlpack_of(const Tensor& self, nb::handle stream, nb::handle max_version,
                     nb::handle dl_device, nb::handle copy) {
  if (!copy.is_none() && truth_of(copy))
    throw InvalidArgument("copy=True: a tensor is handed out as it is; expected None or False");
  if (!dl_device.is_none()) {
    const auto wanted = nb::cast<std::pair<int, int>>(nb::tuple(nb::borrow(dl_device)));
    const DLDevice device = dlpack_device(self.device());
    if (wanted != std::pair(static_cast<int>(device.device_type), device.device_id))
      throw InvalidArgument(fmt::format("dl_device ({}, {}): this tensor is on {}; expected that",
                                        wanted.first, wanted.second,
                                        kvleaf::to_string(self.device())));
  }
  if (!stream.is_none() && self.device().kind == Device::Kind::cpu)
    throw InvalidArgument("stream: a tensor in host memory has none; expected None");
  if (!max_version.is_none() && nb::cast<int>(max_version[0]) >= DLPACK_MAJOR_VERSION)
    return capsule_of(to_dlpack_versioned(self), "dltensor_versioned");
  return capsule_of(to_dlpack(self), "dltensor");
}

}  // namespace

std::optional<DType> dtype_named(nb::handle source) {
  return source.is_none() ? std::nullopt : std::optional(dtype_of_python(source));
}

Tensor tensor_of(nb::handle source, const char* name, std::optional<DType> wanted) {
  if (const Tensor* tensor = instance_of<Tensor>(source)) return *tensor;
  if (nb::hasattr(source, "__array_interface__")) {
    const nb::dict interface = nb::cast<nb::dict>(source.attr("__array_interface__"));
    // The element type by its name, since the interface has none for bfloat16 and float8. Bits of
    // an unsigned integer pass for a type of that width.
    DType dtype = DType::uint8;
    const nb::object type = source.attr("dtype");
    const auto width = nb::cast<std::uint64_t>(type.attr("itemsize"));
    const auto kind = nb::cast<std::string>(type.attr("kind"));
    if (kind == "u" && wanted && width == size_of(*wanted)) {
      dtype = *wanted;
    } else {
      dtype = dtype_of_python(type);
    }
    Extents shape;
    Extents strides;
    for (nb::handle extent : nb::tuple(source.attr("shape")))
      shape.push_back(nb::cast<std::int64_t>(extent));
    for (nb::handle stride : nb::tuple(source.attr("strides"))) {
      const auto bytes = nb::cast<std::int64_t>(stride);
      if (bytes % size_of(dtype) != 0)
        throw InvalidArgument(
            fmt::format("{}: a stride of {} B is no whole number of elements of "
                        "{}",
                        name, bytes, name_of(dtype)));
      strides.push_back(bytes / size_of(dtype));
    }
    const auto address = nb::cast<std::uintptr_t>(nb::tuple(interface["data"])[0]);
    return Tensor(reinterpret_cast<std::byte*>(address), std::span(shape.data(), shape.size()),
                  std::span(strides.data(), strides.size()), dtype, {},
                  std::make_shared<Held>(nb::borrow(source)));
  }
  if (!nb::hasattr(source, "__dlpack__"))
    throw InvalidArgument(fmt::format(
        "{} is of type {}; accepted: a kvleaf.Tensor, a NumPy array, or what speaks DLPack", name,
        Py_TYPE(source.ptr())->tp_name));
  const nb::object capsule = source.attr("__dlpack__")();
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor") == 0)
    throw InvalidArgument(fmt::format("{}: its __dlpack__ gives no DLPack capsule", name));
  auto* given = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  Tensor tensor = from_dlpack(given);
  PyCapsule_SetName(capsule.ptr(), "used_dltensor");
  // A producer's deleter may be Python's: it runs with the GIL.
  const auto shape = tensor.shape();
  const auto strides = tensor.strides();
  return Tensor(tensor.data(), shape, strides, tensor.dtype(), tensor.device(),
                std::make_shared<Held>(nb::cast(tensor)));
}

nb::object object_of(Tensor tensor) {
  if (!tensor.defined()) return nb::none();
  return nb::cast(std::move(tensor));
}

void bind_tensor(nb::module_& m) {
  nb::class_<Tensor> tensor(
      m, "Tensor",
      "A view of memory: of a cache, or taken over by from_dlpack. It computes nothing. numpy() "
      "and "
      "indexing give\n"
      "NumPy views, __dlpack__ hands it to PyTorch, JAX, CuPy and the like; none of them copies, "
      "and all of them\n"
      "keep the memory alive. Once its cache was reset, or a step's arrays serve a later step, a "
      "view is stale and\n"
      "hands out nothing any more. NumPy knows no bfloat16 and float8: numpy() gives ml_dtypes' "
      "types where that\n"
      "package is installed, and __array_interface__ (numpy.asarray) always the bits, as uint16 or "
      "uint8.");
  tensor
      .def_prop_ro(
          "shape", [](const Tensor& self) { return tuple_of(self.shape()); },
          nb::sig("def shape(self) -> tuple[int, ...]"))
      .def_prop_ro(
          "strides", [](const Tensor& self) { return tuple_of(self.strides()); },
          nb::sig("def strides(self) -> tuple[int, ...]"), "In elements.")
      .def_prop_ro("dtype", [](const Tensor& self) { return name_of(self.dtype()); })
      .def_prop_ro("device", [](const Tensor& self) { return kvleaf::to_string(self.device()); })
      .def_prop_ro("ndim", [](const Tensor& self) { return self.rank(); })
      .def_prop_ro("size", &Tensor::size, "Elements.")
      .def_prop_ro("contiguous", &Tensor::contiguous)
      .def_prop_ro("stale", &Tensor::stale)
      .def_prop_ro(
          "data_ptr",
          [](const Tensor& self) { return reinterpret_cast<std::uintptr_t>(self.data()); },
          "Address of the first element.")
      .def(
          "numpy", [](nb::handle self) { return numpy_of(self); },
          nb::sig("def numpy(self) -> numpy.typing.NDArray[typing.Any]"),
          "A NumPy view. Raises StepError of a stale tensor.")
      .def(
          "permuted",
          [](const Tensor& self, const nb::args& order) {
            std::vector<std::size_t> from;
            for (const std::uint32_t d : u32s_of(order, "order")) from.push_back(d);
            return self.permuted(from);
          },
          "order"_a, nb::sig("def permuted(self, *order: int) -> Tensor"),
          "The dimensions in another order, without a copy.")
      .def_static(
          "from_dlpack",
          [](nb::handle source) { return tensor_of(source, "source", std::nullopt); }, "source"_a,
          nb::sig("def from_dlpack(source: object) -> Tensor"),
          "A view of another framework's tensor, without a copy. Raises InvalidArgument for an "
          "element type or device\n"
          "without a name here.")
      .def_prop_ro("__array_interface__", &array_interface,
                   nb::sig("def __array_interface__(self) -> dict[str, typing.Any]"))
      .def(
          "__array__",
          [](nb::handle self, nb::handle dtype, nb::handle copy) {
            nb::object array = numpy_of(self);
            const bool other =
                !dtype.is_none() && !nb::cast<bool>(array.attr("dtype").attr("__eq__")(dtype));
            if (other) return nb::object(array.attr("astype")(dtype));
            if (!copy.is_none() && truth_of(copy)) return nb::object(array.attr("copy")());
            return array;
          },
          "dtype"_a = nb::none(), "copy"_a = nb::none(),
          nb::sig("def __array__(self, dtype: object = None, copy: object = None) -> typing.Any"))
      .def("__dlpack__", &dlpack_of, nb::kw_only(), "stream"_a = nb::none(),
           "max_version"_a = nb::none(), "dl_device"_a = nb::none(), "copy"_a = nb::none(),
           nb::sig("def __dlpack__(self, *, stream: object = None, max_version: object = None, "
                   "dl_device: object = None, copy: object = None) -> typing.Any"))
      .def(
          "__dlpack_device__",
          [](const Tensor& self) {
            const DLDevice device = dlpack_device(self.device());
            return nb::make_tuple(static_cast<int>(device.device_type), device.device_id);
          },
          nb::sig("def __dlpack_device__(self) -> tuple[int, int]"))
      .def("__len__",
           [](const Tensor& self) {
             if (self.rank() == 0) throw InvalidArgument("a tensor of no dimension has no length");
             return self.shape()[0];
           })
      .def(
          "__getitem__",
          [](nb::handle self, nb::handle key) { return nb::object(numpy_of(self)[key]); }, "key"_a,
          nb::sig("def __getitem__(self, key: typing.Any) -> typing.Any"), "As of numpy().")
      .def(
          "__setitem__",
          [](nb::handle self, nb::handle key, nb::handle value) {
            numpy_of(self).attr("__setitem__")(key, value);
          },
          "key"_a, "value"_a,
          nb::sig("def __setitem__(self, key: typing.Any, value: typing.Any) -> None"),
          "As of numpy().")
      .def("__repr__", [](const Tensor& self) {
        return fmt::format("Tensor({}{})", self.to_string(), self.stale() ? ", stale" : "");
      });
  refuse_pickle(tensor, "it is a view of one process's memory; numpy().copy() can be");
}

}  // namespace kvleaf::python
