#include "convert.h"

#include <fmt/format.h>

#include <cstring>
#include <limits>
#include <type_traits>
#include <unordered_set>

namespace kvleaf::python {

// ---- whole numbers
// ----------------------------------------------------------------------------------

bool Whole::read(nb::handle source, Whole& out) noexcept {
  if (PyFloat_Check(source.ptr()) || !PyIndex_Check(source.ptr())) return false;
  PyObject* integer = PyNumber_Index(source.ptr());
  if (integer == nullptr) {
    PyErr_Clear();
    return false;
  }
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(integer, &overflow);
  out = Whole();
  if (overflow == 0) {
    out.negative_ = value < 0;
    out.magnitude_ =
        out.negative_ ? 0 - static_cast<std::uint64_t>(value) : static_cast<std::uint64_t>(value);
  } else {
    out.negative_ = overflow < 0;
    out.magnitude_ = out.negative_ ? 0 : PyLong_AsUnsignedLongLong(integer);
    out.huge_ = out.negative_ || PyErr_Occurred() != nullptr;
    PyErr_Clear();
  }
  Py_DECREF(integer);
  return true;
}

std::string Whole::to_string() const {
  if (huge_) return negative_ ? "below -2^63" : "2^64 or more";
  return fmt::format("{}{}", negative_ ? "-" : "", magnitude_);
}

namespace {

template <class T>
InvalidArgument out_of_range(std::string_view name, std::string_view value) {
  return InvalidArgument(fmt::format("{} is {}; accepted: {} to {}", name, value,
                                     std::numeric_limits<T>::min(), std::numeric_limits<T>::max()));
}

}  // namespace

std::uint32_t Whole::u32(const char* name) const {
  if (huge_ || negative_ || magnitude_ > std::numeric_limits<std::uint32_t>::max()) {
    throw out_of_range<std::uint32_t>(name, to_string());
  }
  return static_cast<std::uint32_t>(magnitude_);
}

std::uint64_t Whole::u64(const char* name) const {
  if (huge_ || negative_) throw out_of_range<std::uint64_t>(name, to_string());
  return magnitude_;
}

std::int32_t Whole::i32(const char* name) const {
  constexpr std::uint64_t most = std::numeric_limits<std::int32_t>::max();
  if (huge_ || magnitude_ > most + (negative_ ? 1 : 0)) {
    throw out_of_range<std::int32_t>(name, to_string());
  }
  const auto value = static_cast<std::int64_t>(magnitude_);
  return static_cast<std::int32_t>(negative_ ? -value : value);
}

BlockId Whole::block() const {
  if (huge_ || negative_ || magnitude_ > std::numeric_limits<std::int32_t>::max()) {
    throw BlockError(fmt::format("block {} does not exist", to_string()));
  }
  return BlockId(static_cast<std::uint32_t>(magnitude_));
}

std::uint64_t Whole::saturated(const char* name) const {
  if (negative_) throw out_of_range<std::uint64_t>(name, to_string());
  return huge_ ? std::numeric_limits<std::uint64_t>::max() : magnitude_;
}

// ---- text and types
// ---------------------------------------------------------------------------------

std::string name_in(nb::handle source, const char* name) {
  if (PyUnicode_Check(source.ptr())) return nb::cast<std::string>(source);
  throw InvalidArgument(fmt::format("{} is {}; accepted: a str", name, nb::repr(source).c_str()));
}

bool truth_of(nb::handle source) {
  const int truth = PyObject_IsTrue(source.ptr());
  if (truth < 0) throw nb::python_error();
  return truth == 1;
}

std::string text_of(nb::handle source, const char* name) {
  if (PyUnicode_Check(source.ptr())) return nb::cast<std::string>(source);
  if (PyBytes_Check(source.ptr())) {
    return {PyBytes_AS_STRING(source.ptr()),
            static_cast<std::size_t>(PyBytes_GET_SIZE(source.ptr()))};
  }
  if (PyLong_Check(source.ptr())) return nb::str(source).c_str();
  throw InvalidArgument(fmt::format("{} is of type {}; accepted: bytes, str or int", name,
                                    Py_TYPE(source.ptr())->tp_name));
}

DType dtype_of_python(nb::handle source) {
  nb::object name;
  if (PyUnicode_Check(source.ptr())) {
    name = nb::borrow(source);
  } else if (PyType_Check(source.ptr())) {  // numpy.float32, ml_dtypes.bfloat16
    name = source.attr("__name__");
  } else {  // numpy.dtype has a name; torch.dtype only its text, "torch.bfloat16"
    name = nb::getattr(source, "name", nb::none());
    if (!PyUnicode_Check(name.ptr())) name = nb::str(source);
  }
  return require_dtype(nb::str(name).c_str());
}

nb::object numpy_dtype(DType dtype) {
  const nb::object make = nb::module_::import_("numpy").attr("dtype");
  switch (dtype) {
    case DType::uint8: return make("uint8");
    case DType::int8: return make("int8");
    case DType::int32: return make("int32");
    case DType::int64: return make("int64");
    case DType::float16: return make("float16");
    case DType::float32: return make("float32");
    case DType::bfloat16:
    case DType::float8_e4m3:
    case DType::float8_e5m2: break;
  }
  const char* name = dtype == DType::bfloat16      ? "bfloat16"
                     : dtype == DType::float8_e4m3 ? "float8_e4m3fn"
                                                   : "float8_e5m2";
  try {
    return make(nb::module_::import_("ml_dtypes").attr(name));
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_ImportError)) throw;
    return make(size_of(dtype) == 1 ? "uint8" : "uint16");
  }
}

// ---- sequences of integers
// --------------------------------------------------------------------------

namespace {

/// The value as T if it fits.
template <class T, class From>
bool fits(From value, T& out) noexcept {
  if (!std::in_range<T>(value)) return false;
  out = static_cast<T>(value);
  return true;
}

template <class T, class From>
void convert(const nb::ndarray<nb::ro>& array, const char* name, std::vector<T>& out) {
  const auto* data = static_cast<const From*>(array.data());
  const std::int64_t stride = array.stride(0);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const From value = data[static_cast<std::int64_t>(i) * stride];
    if (!fits(value, out[i])) {
      throw out_of_range<T>(fmt::format("{}[{}]", name, i), std::to_string(value));
    }
  }
}

/// A 1-D integer array on the host, if `source` is an array at all.
bool import_array(nb::handle source, const char* name, nb::ndarray<nb::ro>& out) {
  if (PyList_Check(source.ptr()) || PyTuple_Check(source.ptr()) ||
      !nb::try_cast<nb::ndarray<nb::ro>>(source, out)) {
    return false;
  }
  const nb::dlpack::dtype type = out.dtype();
  const bool integer = type.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Int) ||
                       type.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::UInt);
  if (out.ndim() != 1 || !integer || type.lanes != 1) {
    throw InvalidArgument(
        fmt::format("{}: want a one-dimensional array of integers, got {} dimensions of {}", name,
                    out.ndim(), integer ? "integers" : "something else"));
  }
  if (out.device_type() != nb::device::cpu::value) {
    throw InvalidArgument(fmt::format("{}: the array is not in host memory", name));
  }
  return true;
}

template <class T>
std::vector<T> from_array(const nb::ndarray<nb::ro>& array, const char* name) {
  std::vector<T> out(array.shape(0));
  const nb::dlpack::dtype type = array.dtype();
  const bool is_signed = type.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Int);
  switch (type.bits) {
    case 8:
      is_signed ? convert<T, std::int8_t>(array, name, out)
                : convert<T, std::uint8_t>(array, name, out);
      break;
    case 16:
      is_signed ? convert<T, std::int16_t>(array, name, out)
                : convert<T, std::uint16_t>(array, name, out);
      break;
    case 32:
      is_signed ? convert<T, std::int32_t>(array, name, out)
                : convert<T, std::uint32_t>(array, name, out);
      break;
    case 64:
      is_signed ? convert<T, std::int64_t>(array, name, out)
                : convert<T, std::uint64_t>(array, name, out);
      break;
    default:
      throw InvalidArgument(
          fmt::format("{}: integers of {} bits are not accepted", name, type.bits));
  }
  return out;
}

template <class T>
std::vector<T> from_iterable(nb::handle source, const char* name) {
  PyObject* fast = PySequence_Fast(source.ptr(), "");
  if (fast == nullptr) {
    if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) throw nb::python_error();
    PyErr_Clear();
    throw InvalidArgument(fmt::format("{} is of type {}; accepted: a sequence or array of integers",
                                      name, Py_TYPE(source.ptr())->tp_name));
  }
  const nb::object held = nb::steal(fast);
  std::vector<T> out(static_cast<std::size_t>(PySequence_Fast_GET_SIZE(fast)));
  // The size is asked again each time: an element's __index__ is Python code, which may shrink a
  // list.
  for (std::size_t i = 0;
       i < out.size() && PySequence_Fast_GET_SIZE(fast) > static_cast<Py_ssize_t>(i); ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(fast, static_cast<Py_ssize_t>(i));
    int overflow = 0;
    long long value = 0;
    if (PyLong_CheckExact(item)) {
      value = PyLong_AsLongLongAndOverflow(item, &overflow);
    } else {
      const nb::object keep = nb::borrow(item);
      Whole whole;
      if (!Whole::read(item, whole)) {
        throw InvalidArgument(
            fmt::format("{}[{}] is of type {}; accepted: an int", name, i, Py_TYPE(item)->tp_name));
      }
      const nb::object integer = nb::steal(PyNumber_Index(item));
      if (!integer.is_valid()) throw nb::python_error();
      value = PyLong_AsLongLongAndOverflow(integer.ptr(), &overflow);
    }
    if (overflow != 0 || !fits(value, out[i])) {
      throw out_of_range<T>(fmt::format("{}[{}]", name, i), overflow > 0   ? "2^63 or more"
                                                            : overflow < 0 ? "below -2^63"
                                                                           : std::to_string(value));
    }
  }
  return out;
}

template <class T>
std::vector<T> integers_of(nb::handle source, const char* name) {
  nb::ndarray<nb::ro> array;
  return import_array(source, name, array) ? from_array<T>(array, name)
                                           : from_iterable<T>(source, name);
}

}  // namespace

Tokens::Tokens(nb::handle source) {
  if (import_array(source, "tokens", array_)) {
    const bool as_they_are =
        array_.dtype() == nb::dtype<Token>() && (array_.shape(0) < 2 || array_.stride(0) == 1);
    if (as_they_are) {
      view_ = {static_cast<const Token*>(array_.data()), array_.shape(0)};
      return;
    }
    copy_ = from_array<Token>(array_, "tokens");
  } else {
    copy_ = from_iterable<Token>(source, "tokens");
  }
  view_ = copy_;
}

std::vector<std::uint32_t> u32s_of(nb::handle source, const char* name) {
  return integers_of<std::uint32_t>(source, name);
}

std::vector<BlockId> blocks_of(nb::handle source) {
  std::vector<std::uint32_t> numbers;
  try {
    numbers = integers_of<std::uint32_t>(source, "blocks");
  } catch (const InvalidArgument& error) {
    throw BlockError(error.what());
  }
  std::vector<BlockId> blocks;
  blocks.reserve(numbers.size());
  for (const std::uint32_t number : numbers) blocks.emplace_back(number);
  return blocks;
}

nb::list list_of(std::span<const BlockId> blocks) {
  nb::list list;
  for (const BlockId block : blocks) list.append(block.value());
  return list;
}

// ---- arrays
// -----------------------------------------------------------------------------------------

namespace {

nb::dlpack::dtype dlpack_dtype(DType dtype) {
  switch (dtype) {
    case DType::uint8: return nb::dtype<std::uint8_t>();
    case DType::int8: return nb::dtype<std::int8_t>();
    case DType::int32: return nb::dtype<std::int32_t>();
    case DType::int64: return nb::dtype<std::int64_t>();
    case DType::float32: return nb::dtype<float>();
    case DType::float16:
    case DType::bfloat16: return nb::dtype<std::uint16_t>();
    case DType::float8_e4m3:
    case DType::float8_e5m2: return nb::dtype<std::uint8_t>();
  }
  return nb::dtype<std::uint8_t>();
}

}  // namespace

nb::object view_of(const StagedArray& array, nb::handle owner) {
  const std::vector<std::size_t> shape(array.shape.begin(), array.shape.end());
  // Exported by width and then seen as its type, since NumPy alone knows no bfloat16.
  nb::object view =
      nb::cast(nb::ndarray<nb::numpy>(array.data, shape.size(), shape.data(), owner,
                                      array.strides.data(), dlpack_dtype(array.dtype)),
               nb::rv_policy::reference);
  switch (array.dtype) {
    case DType::float16:
    case DType::bfloat16:
    case DType::float8_e4m3:
    case DType::float8_e5m2: return view.attr("view")(numpy_dtype(array.dtype));
    default: return view;
  }
}

nb::object array_of(std::vector<std::int32_t> values) {
  auto* owned = new std::vector<std::int32_t>(std::move(values));
  const nb::capsule owner(
      owned, [](void* p) noexcept { delete static_cast<std::vector<std::int32_t>*>(p); });
  return view_of(std::span<const std::int32_t>(*owned), owner);
}

StagedArray staged_of(std::string_view key, nb::handle source, std::vector<nb::ndarray<>>& keep) {
  StagedArray array;
  array.key = interned(key);
  array.dtype = dtype_of_python(source.attr("dtype"));
  nb::object raw = nb::borrow(source);
  if (array.dtype == DType::bfloat16 || size_of(array.dtype) == 1) {
    raw = source.attr("view")(size_of(array.dtype) == 1 ? "uint8" : "uint16");
  }
  nb::ndarray<> imported;
  if (!nb::try_cast<nb::ndarray<>>(raw, imported) ||
      imported.device_type() != nb::device::cpu::value) {
    throw InvalidArgument(
        fmt::format("into['{}']: want a writable NumPy array in host memory", key));
  }
  if (imported.ndim() == 0 || imported.ndim() > max_staged_rank) {
    throw InvalidArgument(fmt::format("into['{}'] has {} dimensions; accepted: 1 to {}", key,
                                      imported.ndim(), max_staged_rank));
  }
  array.data = static_cast<std::byte*>(imported.data());
  for (std::size_t i = 0; i < imported.ndim(); ++i) {
    if (imported.stride(i) < 0) {
      throw InvalidArgument(fmt::format("into['{}']: dimension {} runs backwards", key, i));
    }
    array.shape.push_back(static_cast<std::int64_t>(imported.shape(i)));
    array.strides.push_back(imported.stride(i));
  }
  keep.push_back(std::move(imported));
  return array;
}

const char* class_name(nb::handle object) noexcept {
  const char* name = Py_TYPE(object.ptr())->tp_name;
  const char* dot = std::strrchr(name, '.');
  return dot == nullptr ? name : dot + 1;
}

std::string_view interned(std::string_view text) {
  static std::unordered_set<std::string> texts;  // nodes: an entry never moves
  return *texts.emplace(text).first;
}

}  // namespace kvleaf::python
