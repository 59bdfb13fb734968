#include "kvleaf/cache/cache_memory.h"

#include <fmt/format.h>

#include <cstdlib>
#include <cstring>
#include <utility>

namespace kvleaf {
namespace {

constexpr std::size_t alignment = 256;

/// Zeroed host memory, backed by the system where it is first touched.
std::shared_ptr<std::byte> zeroed(std::uint64_t bytes) {
  void* raw = std::calloc(bytes + alignment, 1);
  if (raw == nullptr) throw KVError(fmt::format("{} B of host memory are not to be had", bytes));
  std::shared_ptr<std::byte> whole(static_cast<std::byte*>(raw),
                                   [](std::byte* begin) { std::free(begin); });
  const auto address = reinterpret_cast<std::uintptr_t>(raw);
  std::byte* begin = whole.get() + (alignment - address % alignment) % alignment;
  return std::shared_ptr<std::byte>(std::move(whole), begin);
}

void check_given(const Tensor& given, std::uint64_t bytes) {
  if (given.dtype() != DType::uint8 || given.rank() != 1 || !given.contiguous() ||
      given.device().kind != Device::Kind::cpu)
    throw InvalidArgument(fmt::format(
        "the memory given is {}; expected contiguous uint8 [{}] on cpu", given.to_string(), bytes));
  if (static_cast<std::uint64_t>(given.size()) < bytes)
    throw InvalidArgument(
        fmt::format("the memory given has {} B; the cache takes {} B", given.size(), bytes));
  if (reinterpret_cast<std::uintptr_t>(given.data()) % alignment != 0)
    throw InvalidArgument(
        fmt::format("the memory given begins at no multiple of {} B; expected one", alignment));
}

}  // namespace

CacheMemory::CacheMemory(std::shared_ptr<const CacheLayout> layout, const Tensor& given)
    : layout_(std::move(layout)), given_(given) {
  if (given_.defined()) {
    check_given(given_, layout_->total_bytes);
    arena_base_ = given_.data();
    slab_base_ = given_.data() + layout_->arena_bytes;
    std::memset(given_.data(), 0, layout_->total_bytes);
  } else {
    if (layout_->geometry) {
      arena_ = Arena::host(*layout_->geometry);
      arena_base_ = arena_->bytes().data();
    }
    slabs_ = zeroed(layout_->total_bytes - layout_->arena_bytes);
    slab_base_ = slabs_.get();
  }
  seq_lens.assign(layout_->config.max_seqs, 0);
  encoder_lens.assign(layout_->config.max_seqs, 0);
}

void CacheMemory::clear_states(std::size_t slot) const noexcept {
  for (const SlabPlace& place : layout_->slabs) std::memset(slab(place, slot), 0, place.bytes);
}

Tensor CacheMemory::entries(const std::shared_ptr<CacheMemory>& self, const EntryPlace& place,
                            Half half) {
  const CacheLayout& layout = *self->layout_;
  const std::int64_t heads = place.kv_heads;
  const std::int64_t entries = place.entries;
  const std::int64_t dim = half == Half::values ? place.value_dim : place.key_dim;
  const std::int64_t row = heads * dim;
  std::byte* base = nullptr;
  std::int64_t outer = 0;
  std::int64_t outer_stride = 0;
  const std::uint64_t offset = half == Half::values ? place.value_offset : place.key_offset;
  if (layout.paged()) {
    const LeafGeometry& geometry = layout.geometry->leaf(LeafId{place.leaf});
    base = self->arena_base_ + geometry.base_offset + offset;
    outer = static_cast<std::int64_t>(geometry.blocks) + 1;
    outer_stride = static_cast<std::int64_t>(geometry.page_stride / layout.element_bytes);
  } else {
    base = self->at(offset);
    outer = layout.config.max_seqs;
    outer_stride = entries * row;
  }
  if (half != Half::both) {
    const std::int64_t shape[] = {outer, entries, heads, dim};
    const std::int64_t strides[] = {outer_stride, row, dim, 1};
    return Tensor(base, shape, strides, layout.config.dtype, {}, self);
  }
  const auto between =
      static_cast<std::int64_t>((place.value_offset - place.key_offset) / layout.element_bytes);
  const std::int64_t shape[] = {outer, 2, entries, heads, dim};
  const std::int64_t strides[] = {outer_stride, between, row, dim, 1};
  return Tensor(base, shape, strides, layout.config.dtype, {}, self);
}

Tensor CacheMemory::states(const std::shared_ptr<CacheMemory>& self, const SlabPlace& place) {
  Extents shape;
  shape.push_back(self->layout_->config.max_seqs);
  for (const std::uint32_t extent : place.slab.shape) shape.push_back(extent);
  return Tensor(self->at(place.offset), std::span(shape.data(), shape.size()), {}, place.slab.dtype,
                {}, self);
}

}  // namespace kvleaf
