#include "kvleaf/cache/arena_tensor.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "kvleaf/kernels/device_memory.h"

namespace kvleaf {
namespace {

/// Keeps an arena for views on it.
struct ArenaOwner : TensorOwner {
  explicit ArenaOwner(const Arena& kept) : arena(kept) {}
  Arena arena;
};

Tensor bytes_of(const Arena& arena, std::span<std::byte> bytes) {
  const std::int64_t shape[] = {static_cast<std::int64_t>(bytes.size())};
  return Tensor(bytes.data(), shape, {}, DType::uint8, arena.device(),
                std::make_shared<ArenaOwner>(arena));
}

template <class Make>
Arena adopt(const Geometry& geometry, Device device, Make make) {
  try {
    return Arena::adopted(geometry, make(), geometry.arena_bytes(), device);
  } catch (const kernels::DeviceError& error) {
    throw DeviceError(fmt::format("an arena: {}", error.what()));
  }
}

}  // namespace

Arena make_arena(const Geometry& geometry, Device device) {
  if (device.kind == Device::Kind::cpu) return Arena::host(geometry);
  return adopt(geometry, device,
               [&] { return kernels::device_memory(geometry.arena_bytes(), device.index); });
}

Arena make_pinned_arena(const Geometry& geometry) {
  return adopt(geometry, {}, [&] { return kernels::pinned_memory(geometry.arena_bytes()); });
}

Arena arena_in(const Geometry& geometry, const Tensor& memory) {
  if (!memory.defined() || memory.dtype() != DType::uint8 || memory.rank() != 1 ||
      !memory.contiguous()) {
    throw InvalidArgument(fmt::format("the memory given is {}; expected contiguous uint8 [{}]",
                                      memory.to_string(), geometry.arena_bytes()));
  }
  std::byte* data = memory.data();
  return Arena::adopted(geometry, {std::make_shared<Tensor>(memory), data},
                        static_cast<std::uint64_t>(memory.size()), memory.device());
}

Tensor arena_bytes(const Arena& arena) { return bytes_of(arena, arena.bytes()); }

Tensor page_bytes(const Arena& arena, LeafId leaf, BlockId block) {
  return bytes_of(arena, arena.page(leaf, block));
}

Tensor leaf_pages(const Arena& arena, LeafId leaf, DType dtype,
                  std::span<const std::int64_t> page_shape, std::uint64_t page_offset) {
  const LeafGeometry& view = arena.geometry().leaf(leaf);
  const std::uint64_t element = size_of(dtype);
  const auto whole = [&](const char* what, std::uint64_t bytes) {
    if (bytes % element != 0)
      throw InvalidArgument(
          fmt::format("leaf '{}' as {}: {} {} is no multiple of an element's {} B", view.name,
                      name_of(dtype), what, bytes, element));
  };
  whole("the page stride", view.page_stride);
  whole("the page offset", page_offset);
  whole("the address of block 0", reinterpret_cast<std::uintptr_t>(arena.view(leaf)));
  const std::uint64_t room =
      page_offset < view.bytes_per_page ? (view.bytes_per_page - page_offset) / element : 0;

  Extents shape{static_cast<std::int64_t>(view.blocks) + 1};
  if (page_shape.empty()) {
    whole("bytes_per_page", view.bytes_per_page);
    shape.push_back(static_cast<std::int64_t>(room));
  }
  std::uint64_t elements = 1;
  for (const std::int64_t extent : page_shape) {
    const bool fits = extent > 0 && static_cast<std::uint64_t>(extent) <= room / elements;
    if (!fits || shape.size() == max_tensor_rank)
      throw InvalidArgument(fmt::format(
          "leaf '{}' as {} [{}] from byte {} on: a page has {} B, room for {} elements; expected "
          "positive extents, at most {}",
          view.name, name_of(dtype), fmt::join(page_shape, ", "), page_offset, view.bytes_per_page,
          room, max_tensor_rank - 1));
    elements *= static_cast<std::uint64_t>(extent);
    shape.push_back(extent);
  }
  if (elements > room)  // no extent at all, and no room for one element
    throw InvalidArgument(fmt::format("leaf '{}' as {} from byte {} on: a page has {} B", view.name,
                                      name_of(dtype), page_offset, view.bytes_per_page));

  Extents strides(shape.size(), 1);
  for (std::size_t d = shape.size(); d-- > 2;) strides[d - 1] = strides[d] * shape[d];
  strides[0] = static_cast<std::int64_t>(view.page_stride / element);
  return Tensor(arena.view(leaf) + page_offset, std::span(shape.data(), shape.size()),
                std::span(strides.data(), strides.size()), dtype, arena.device(),
                std::make_shared<ArenaOwner>(arena));
}

}  // namespace kvleaf
