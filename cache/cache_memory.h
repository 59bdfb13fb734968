// CacheMemory: the bytes that a cache lies in, and the arrays that it keeps up to date in place.
// Views on any of them keep all of them. Internal to KVCache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kvleaf/cache/cache_layout.h"
#include "kvleaf/cache/tensor.h"
#include "kvleaf/pool/arena.h"

namespace kvleaf {

class CacheMemory : public TensorOwner {
 public:
  /// Zeroed. given: what to lay it in; undefined: host memory of its own, backed by the system
  /// where it is first touched. Throws InvalidArgument for memory that does not do.
  CacheMemory(std::shared_ptr<const CacheLayout> layout, const Tensor& given);

  /// Of the layout's offsets.
  std::byte* at(std::uint64_t offset) const noexcept {
    return offset < layout_->arena_bytes ? arena_base_ + offset
                                         : slab_base_ + (offset - layout_->arena_bytes);
  }
  /// A slot's part of a slab.
  std::byte* slab(const SlabPlace& place, std::size_t slot) const noexcept {
    return at(place.offset + slot * place.bytes);
  }
  /// Zeroes a slot's part of all of them.
  void clear_states(std::size_t slot) const noexcept;
  /// Paged: the bytes that the pool tiles.
  std::span<std::byte> arena_bytes() const noexcept {
    return {arena_base_, layout_->geometry->arena_bytes()};
  }
  /// Paged: a block's page.
  std::byte* page(LeafId leaf, BlockId block) const {
    const LeafGeometry& geometry = layout_->geometry->leaf(leaf);
    return arena_base_ + geometry.base_offset + block.value() * geometry.page_stride;
  }
  std::uint64_t page_bytes(LeafId leaf) const {
    return layout_->geometry->leaf(leaf).bytes_per_page;
  }
  /// What a layer keeps as a tensor, [pages + 1 or max_seqs, entries, kv_heads, dim]: keys, values,
  /// or both, with a dimension of 2 behind the first. `self`: this memory.
  enum class Half : std::uint8_t { keys, values, both };
  static Tensor entries(const std::shared_ptr<CacheMemory>& self, const EntryPlace& place,
                        Half half);
  /// [max_seqs, shape of the slab].
  static Tensor states(const std::shared_ptr<CacheMemory>& self, const SlabPlace& place);

  std::vector<std::int32_t> seq_lens;             // per slot
  std::vector<std::int32_t> encoder_lens;         // per slot
  std::vector<std::vector<std::int32_t>> tables;  // per leaf: [max_seqs, columns]; empty: no pages

 private:
  std::shared_ptr<const CacheLayout> layout_;
  Tensor given_;  // by the caller; else arena and slabs
  std::optional<Arena> arena_;
  std::shared_ptr<std::byte> slabs_;
  std::byte* arena_base_ = nullptr;
  std::byte* slab_base_ = nullptr;
};

}  // namespace kvleaf
