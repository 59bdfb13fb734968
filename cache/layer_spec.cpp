#include "kvleaf/cache/layer_spec.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "kvleaf/leaf/errors.h"

namespace kvleaf {
namespace {

struct Describe {
  std::string operator()(const AttentionCache& c) const {
    std::string reach = "full";
    if (c.window) reach = fmt::format("window {}", *c.window);
    if (c.sinks > 0) reach += fmt::format(" sinks {}", c.sinks);
    if (c.chunk) reach = fmt::format("chunk {}", *c.chunk);
    std::string text = fmt::format("{}, {} x {}", reach, c.kv_heads, c.head_dim);
    if (c.value_head_dim) text += fmt::format("/{}", *c.value_head_dim);
    if (c.k_eq_v) text += " k=v";
    return text;
  }
  std::string operator()(const LatentCache& c) const {
    std::string text = fmt::format("latent {}", c.width);
    if (c.window) text += fmt::format(" window {}", *c.window);
    if (c.tokens_per_entry > 1) text += fmt::format(" per {} tokens", c.tokens_per_entry);
    return text;
  }
  std::string operator()(const IndexerCache& c) const {
    std::string text = fmt::format("indexer {}", c.width);
    if (c.tokens_per_entry > 1) text += fmt::format(" per {} tokens", c.tokens_per_entry);
    return text;
  }
  std::string operator()(const StateCache& c) const {
    std::string text = "state";
    for (const Slab& slab : c.slabs)
      text += fmt::format(" {}[{}]", slab.name, fmt::join(slab.shape, ","));
    return text;
  }
  std::string operator()(const CrossAttentionCache& c) const {
    return fmt::format("cross, {} x {}", c.kv_heads, c.head_dim);
  }
  std::string operator()(const SharedCache& c) const {
    return fmt::format("shared with layer {}", c.layer);
  }
};

}  // namespace

bool StateCache::operator==(const StateCache& other) const {
  return std::ranges::equal(slabs, other.slabs, [](const Slab& a, const Slab& b) {
    return a.name == b.name && a.shape == b.shape && a.dtype == b.dtype;
  });
}

KVLayerSpec KVLayerSpec::state(const LayerState& state) {
  StateCache cache;
  for (std::size_t i = 0; i < state.conv.size(); ++i) {
    const LayerState::Window& window = state.conv[i];
    if (window.dim == 0 || window.width == 0)
      throw InvalidArgument(fmt::format(
          "state: convolution window {} is [{}, {}]; expected a dim and a width of 1 or more", i,
          window.dim, window.width));
    cache.slabs.push_back({.name = state.conv.size() == 1 ? "conv" : fmt::format("conv_{}", i),
                           .shape = {window.dim, window.width},
                           .dtype = state.conv_dtype.value_or(state.dtype)});
  }
  const bool any = state.heads > 0 || state.k_dim > 0 || state.v_dim > 0;
  if (any && (state.heads == 0 || state.k_dim == 0 || state.v_dim == 0))
    throw InvalidArgument(
        fmt::format("state: heads {}, k_dim {}, v_dim {}; expected all of them 1 or more, or none",
                    state.heads, state.k_dim, state.v_dim));
  if (any)
    cache.slabs.push_back({.name = "recurrent",
                           .shape = {state.heads, state.k_dim, state.v_dim},
                           .dtype = state.dtype});
  if (cache.slabs.empty())
    throw InvalidArgument("state: it has neither a convolution window nor heads; expected one");
  return {{std::move(cache)}};
}

KVLayerSpec KVLayerSpec::with(LayerCache cache) const {
  KVLayerSpec both = *this;
  both.caches.push_back(std::move(cache));
  return both;
}

std::string to_string(const LayerCache& cache) { return std::visit(Describe{}, cache); }

std::string to_string(const KVLayerSpec& spec) {
  if (spec.caches.empty()) return "none";
  std::string text;
  for (const LayerCache& cache : spec.caches) {
    if (!text.empty()) text += " + ";
    text += to_string(cache);
  }
  return text;
}

}  // namespace kvleaf
