// CacheLayout: where everything of a KVCache lies, worked out once from its configuration. What a
// layer keeps is taken from its spec; leaves and geometry (paged) or plain arrays (slotted) follow.
//
//   memory = [arena of the pool][slabs: states, and in a slotted cache keys and values]
//
// A slotted layer's keys and values are two arrays, one behind the other:
//   keys [max_seqs, entries, kv_heads, key_dim]   values [max_seqs, entries, kv_heads, value_dim]
// Internal to KVCache.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kvleaf/cache/cache_config.h"
#include "kvleaf/cache/kv_part.h"
#include "kvleaf/cache/layer_spec.h"
#include "kvleaf/cache/model_leaves.h"
#include "kvleaf/pool/geometry.h"

namespace kvleaf {

/// Pages (or entries) that so many entries (or tokens) take.
constexpr std::uint32_t pages_for(std::uint32_t count, std::uint32_t per_page) noexcept {
  return count / per_page + (count % per_page != 0 ? 1 : 0);
}

/// One thing that a layer keeps entry by entry.
struct EntryPlace {
  KVPart part = KVPart::own;
  std::uint32_t kv_heads = 1;
  std::uint32_t key_dim = 0;
  std::uint32_t value_dim = 0;  // 0: no values
  std::uint32_t tokens_per_entry = 1;
  std::uint32_t entries = 0;  // of a page, or of a slot
  bool encoder = false;       // of the encoder's tokens
  // paged
  std::uint32_t leaf = 0;        // index in leaves
  std::uint64_t key_offset = 0;  // bytes in the page; slotted: in the memory
  std::uint64_t value_offset = 0;
};

/// One slab of a state layer: [max_seqs, shape] at `offset` of the memory, and a copy in each page.
struct SlabPlace {
  std::uint32_t layer = 0;
  Slab slab;
  bool conv = false;
  std::uint64_t bytes = 0;   // of one slot
  std::uint64_t offset = 0;  // of slot 0, in the memory
  std::uint32_t leaf = 0;
  std::uint64_t page_offset = 0;  // bytes in the page
};

struct LayerPlaces {
  std::vector<EntryPlace> entries;
  std::vector<std::uint32_t> slabs;         // indices into CacheLayout::slabs
  std::optional<std::uint32_t> reads = {};  // the layer whose entries it shares
};

struct CacheLayout {
  /// Throws as KVCache::make.
  CacheLayout(KVCacheConfig config, std::span<const KVLayerSpec> layer_specs);

  KVCacheConfig config;  // 0s filled in
  std::vector<KVLayerSpec> specs;
  std::uint32_t element_bytes = 0;  // of keys and values
  std::vector<LayerPlaces> layers;
  std::vector<SlabPlace> slabs;
  Leaves leaves;                     // paged, else none
  std::optional<Geometry> geometry;  // paged
  bool any_encoder = false;
  std::uint64_t arena_bytes = 0;
  std::uint64_t total_bytes = 0;

  bool paged() const noexcept { return config.mode == KVCacheMode::paged; }
  /// Throws InvalidArgument past the last layer.
  const LayerPlaces& layer(std::int64_t index) const;
  /// The entries that `part` of a layer names, sharing followed; null where it keeps none. Throws
  /// as layer().
  const EntryPlace* find(std::int64_t layer, KVPart part) const;
  /// The same where no layer is named: what all layers have in common. Throws InvalidArgument where
  /// they keep it in different places.
  const EntryPlace* find(std::optional<std::int64_t> layer, KVPart part) const;
  /// Most tokens that one sequence computes in one step.
  std::uint32_t row_step_tokens() const noexcept;

 private:
  void check() const;
  void place_layers(const ModelLeaves* model);
  void plan_pool();
  std::uint64_t add(std::uint64_t bytes);  // to the slabs; returns the offset
};

}  // namespace kvleaf
