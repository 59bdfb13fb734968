// KVLayerSpec: what one layer of a model keeps between tokens, in numbers and without any leaf. It
// is what a model configuration is read into, and what leaves are composed from.
//
// A layer may keep several things (attention and a state side by side, self and cross attention),
// one, or nothing. The numbers are those of one rank: with tensor parallelism they are divided
// already.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "kvleaf/leaf/recurrent_state.h"

namespace kvleaf {

/// Keys and values of the request's own tokens.
struct AttentionCache {
  std::uint32_t kv_heads = 0;
  std::uint32_t head_dim = 0;
  std::optional<std::uint32_t> value_head_dim = {};  // none: head_dim
  std::optional<std::uint32_t> window = {};          // tokens, the query counted; none: all
  std::uint32_t sinks = 0;                           // leading tokens kept beside the window
  std::optional<std::uint32_t> chunk = {};           // tokens; excludes a window
  bool k_eq_v = false;                               // values are made from the keys' projection
  bool operator==(const AttentionCache&) const = default;
};

/// One entry shared by all heads, keys and values: MLA, or compressed attention.
struct LatentCache {
  std::uint32_t width = 0;                   // elements per entry
  std::uint32_t tokens_per_entry = 1;        // above 1: compressed attention
  std::optional<std::uint32_t> window = {};  // tokens; none: all
  bool operator==(const LatentCache&) const = default;
};

/// The key by which a sparse layer chooses the entries it attends to.
struct IndexerCache {
  std::uint32_t width = 0;             // elements per entry
  std::uint32_t tokens_per_entry = 1;  // above 1: one key for several tokens
  bool operator==(const IndexerCache&) const = default;
};

/// One state of fixed size, overwritten by every step.
struct StateCache {
  std::vector<Slab> slabs;  // of one layer
  bool operator==(const StateCache&) const;
};

/// The same in a state layer's usual numbers. Slabs: "conv" (or "conv_0", "conv_1", …),
/// "recurrent".
struct LayerState {
  struct Window {
    std::uint32_t dim = 0;
    std::uint32_t width = 0;  // inputs kept
  };
  std::vector<Window> conv = {};
  std::uint32_t heads = 0;  // 0: no recurrent slab
  std::uint32_t k_dim = 0;
  std::uint32_t v_dim = 0;
  DType dtype = DType::float32;
  std::optional<DType> conv_dtype = {};  // none: dtype
};

/// Keys and values of an encoder's tokens.
struct CrossAttentionCache {
  std::uint32_t kv_heads = 0;
  std::uint32_t head_dim = 0;
  bool operator==(const CrossAttentionCache&) const = default;
};

/// Owns nothing: reads what an earlier layer keeps.
struct SharedCache {
  std::uint32_t layer = 0;
  bool operator==(const SharedCache&) const = default;
};

using LayerCache = std::variant<AttentionCache, LatentCache, IndexerCache, StateCache,
                                CrossAttentionCache, SharedCache>;

struct KVLayerSpec {
  std::vector<LayerCache> caches;

  static KVLayerSpec attention(AttentionCache cache) { return {{cache}}; }
  static KVLayerSpec latent(std::uint32_t width) { return {{LatentCache{.width = width}}}; }
  static KVLayerSpec state(StateCache cache) { return {{std::move(cache)}}; }
  /// Throws InvalidArgument for no slab at all, or a zero in one.
  static KVLayerSpec state(const LayerState& state);
  static KVLayerSpec cross_attention(std::uint32_t kv_heads, std::uint32_t head_dim) {
    return {{CrossAttentionCache{.kv_heads = kv_heads, .head_dim = head_dim}}};
  }
  static KVLayerSpec shared(std::uint32_t layer) { return {{SharedCache{.layer = layer}}}; }
  static KVLayerSpec none() { return {}; }

  /// The same layer with one thing more.
  KVLayerSpec with(LayerCache cache) const;

  bool operator==(const KVLayerSpec&) const = default;
};

/// "window 1024, 16 x 128", "state conv[8192,3] recurrent[32,128,128]", "shared with layer 13",
/// "none", …
std::string to_string(const LayerCache& cache);
std::string to_string(const KVLayerSpec& spec);

}  // namespace kvleaf
