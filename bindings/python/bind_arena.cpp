// Arena: the bytes that a geometry tiles, in memory of every kind, read as tensors.
#include <fmt/format.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "bind.h"
#include "convert.h"
#include "kvleaf/cache/arena_tensor.h"
#include "tensor_convert.h"

namespace kvleaf::python {
namespace {

using namespace nb::literals;

std::vector<ByteRange> ranges_of(nb::handle source) {
  std::vector<ByteRange> ranges;
  for (nb::handle range : nb::iter(source)) {
    std::pair<Whole, Whole> ends;
    if (!nb::try_cast(range, ends))
      throw InvalidArgument(fmt::format("ranges[{}] is {}; expected (begin, end)", ranges.size(),
                                        nb::repr(range).c_str()));
    ranges.push_back({ends.first.u64("begin"), ends.second.u64("end")});
  }
  return ranges;
}

/// Makes an arena without the GIL: the system may take its time.
template <class Make>
Arena made(Make make) {
  const nb::gil_scoped_release release;
  return make();
}

Tensor view_of_leaf(const Arena& self, std::string_view leaf, nb::handle dtype, nb::handle shape,
                    Whole offset) {
  Extents extents;
  if (!shape.is_none()) {
    for (const std::uint32_t extent : u32s_of(shape, "shape")) {
      if (extents.size() == extents.capacity())
        throw InvalidArgument(fmt::format("shape has more than {} extents", extents.size()));
      extents.push_back(extent);
    }
    if (extents.empty()) throw InvalidArgument("shape is empty; expected extents, or None");
  }
  return leaf_pages(self, self.geometry().find(leaf), dtype_of_python(dtype),
                    std::span<const std::int64_t>(extents.data(), extents.size()),
                    offset.u64("offset"));
}

}  // namespace

void bind_arena(nb::module_& m) {
  nb::class_<Arena> arena(
      m, "Arena",
      "The bytes that a geometry tiles: host(), pinned(), cuda(), or over() memory that somebody "
      "else made. Read and\n"
      "written through tensors; all of them keep the memory. The arena itself writes nothing. As a "
      "whole it speaks\n"
      "DLPack too: uint8 [arena_bytes].");
  arena
      .def_static(
          "host",
          [](const Geometry& geometry) { return made([&] { return make_arena(geometry, {}); }); },
          "geometry"_a,
          "Zeroed host memory, aligned to huge pages where the system has them, bound to no NUMA "
          "node, and backed where\n"
          "it is first touched. Raises KVError where the system refuses.")
      .def_static(
          "pinned",
          [](const Geometry& geometry) {
            return made([&] { return make_pinned_arena(geometry); });
          },
          "geometry"_a,
          "Zeroed host memory that a CUDA device reads fast. Raises DeviceError, with the "
          "runtime's "
          "message, where there\n"
          "is none, or where kvleaf was built without CUDA.")
      .def_static(
          "cuda",
          [](const Geometry& geometry, Whole device) {
            const std::int32_t index = device.i32("device");
            if (index < 0)
              throw InvalidArgument(fmt::format("device is {}; expected 0, 1, …", index));
            return made([&] { return make_arena(geometry, {Device::Kind::cuda, index}); });
          },
          "geometry"_a, "device"_a = 0,
          "Zeroed memory of a CUDA device. Raises DeviceError as pinned().")
      .def_static(
          "over",
          [](const Geometry& geometry, nb::handle memory) {
            return arena_in(geometry, tensor_of(memory, "memory", DType::uint8));
          },
          "geometry"_a, "memory"_a,
          nb::sig("def over(geometry: Geometry, memory: object) -> Arena"),
          "In a NumPy array, or what speaks DLPack: uint8, one dimension, contiguous, at least "
          "arena_bytes, on any\n"
          "device; kept as long as it is used. Its null region must be zeros.")
      .def_prop_ro("geometry", [](const Arena& self) { return self.geometry(); })
      .def_prop_ro("device", [](const Arena& self) { return to_string(self.device()); })
      .def_prop_ro("bytes", &arena_bytes, "All of it, uint8 [arena_bytes].")
      .def("view", &view_of_leaf, "leaf"_a, "dtype"_a = "uint8", "shape"_a = nb::none(),
           nb::kw_only(), "offset"_a = 0,
           nb::sig("def view(self, leaf: str, dtype: object = 'uint8', shape: "
                   "collections.abc.Sequence[int] | None = None, *, offset: int = 0) -> Tensor"),
           "The pages of a leaf, [blocks + 1, *shape]: a block id is an index, and 0 is the null "
           "page of zeros. shape:\n"
           "elements of one page; None: all of them in one dimension. offset: bytes in the page "
           "where they begin.\n"
           "strides[0] is the page stride. Raises InvalidArgument for what does not fit a page.")
      .def(
          "page",
          [](const Arena& self, std::string_view leaf, Whole block) {
            return page_bytes(self, self.geometry().find(leaf), block.block());
          },
          "leaf"_a, "block"_a, "The data of one block, uint8 [bytes_per_page].")
      .def(
          "unmap",
          [](const Arena& self, nb::handle ranges) { return self.unmap(ranges_of(ranges)); },
          "ranges"_a,
          nb::sig("def unmap(self, ranges: collections.abc.Iterable[tuple[int, int]]) -> int"),
          "Gives memory of these ranges back to the system, as BlockPool.resize names them when it "
          "shrinks. Of host()\n"
          "only. Touching it ends the process. Gives the bytes that changed hands: whole pages of "
          "the system.")
      .def(
          "map", [](const Arena& self, nb::handle ranges) { return self.map(ranges_of(ranges)); },
          "ranges"_a,
          nb::sig("def map(self, ranges: collections.abc.Iterable[tuple[int, int]]) -> int"),
          "Takes memory for ranges that were unmapped; it reads as zeros.")
      .def(
          "__dlpack__",
          [](const Arena& self, const nb::kwargs& how) {
            return nb::cast(arena_bytes(self)).attr("__dlpack__")(**how);
          },
          "how"_a, nb::sig("def __dlpack__(self, **how: object) -> typing.Any"))
      .def(
          "__dlpack_device__",
          [](const Arena& self) { return nb::cast(arena_bytes(self)).attr("__dlpack_device__")(); },
          nb::sig("def __dlpack_device__(self) -> tuple[int, int]"))
      .def("__repr__", [](const Arena& self) {
        return fmt::format("Arena({} bytes on {}, {} leaves)", self.bytes().size(),
                           to_string(self.device()), self.geometry().leaves().size());
      });
  refuse_pickle(arena, "it is one process's memory; the bytes of bytes.numpy() can be");
}

}  // namespace kvleaf::python
