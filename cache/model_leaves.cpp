#include "kvleaf/cache/model_leaves.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "kvleaf/group/block_manager.h"
#include "kvleaf/leaf/errors.h"

namespace kvleaf {
namespace {

constexpr double cost_of_a_leaf =
    0.001;  // design document, "Geometry": it costs time in every step
constexpr std::uint32_t max_tokens_per_page = 1 << 16;

/// Layers that keep the same thing: one leaf, or equal parts of one.
struct Share {
  LayerCache cache;
  std::vector<std::uint32_t> layers;
  std::string leaf_id;
  std::uint32_t parts = 1;

  bool is_state() const { return std::holds_alternative<StateCache>(cache); }
};

std::string name_of(const LayerCache& cache) {
  struct Name {
    std::string operator()(const AttentionCache& c) const {
      if (c.window) return KVCacheGroupId::sliding_window(*c.window, c.sinks).name;
      if (c.chunk) return KVCacheGroupId::chunked(*c.chunk).name;
      return "full";
    }
    std::string operator()(const LatentCache& c) const {
      if (c.window) return KVCacheGroupId::sliding_window(*c.window).name;
      return c.tokens_per_entry > 1 ? fmt::format("latent_{}", c.tokens_per_entry) : "latent";
    }
    std::string operator()(const IndexerCache& c) const {
      return c.tokens_per_entry > 1 ? fmt::format("indexer_{}", c.tokens_per_entry) : "indexer";
    }
    std::string operator()(const StateCache&) const { return "state"; }
    std::string operator()(const CrossAttentionCache&) const { return "cross"; }
    std::string operator()(const SharedCache&) const { return ""; }
  };
  return std::visit(Name{}, cache);
}

/// In order of the first layer that keeps it.
std::vector<Share> shares_of(const ModelConfig& config) {
  std::vector<Share> shares;
  for (std::uint32_t layer = 0; layer < config.layers.size(); ++layer) {
    for (const LayerCache& cache : config.layers[layer].caches) {
      if (std::holds_alternative<SharedCache>(cache)) continue;
      auto share = std::ranges::find(shares, cache, &Share::cache);
      if (share == shares.end()) share = shares.insert(shares.end(), Share{cache, {}, {}, 1});
      share->layers.push_back(layer);
    }
  }
  // Two shapes of one kind: the second and later are told apart by number.
  std::set<std::string> taken;
  for (Share& share : shares) {
    const std::string name = name_of(share.cache);
    share.leaf_id = name;
    for (int n = 2; !taken.insert(share.leaf_id).second; ++n)
      share.leaf_id = fmt::format("{}_shape_{}", name, n);
  }
  return shares;
}

/// Makes the leaf of `layers` layers that keep the visited thing.
class LeafMaker {
 public:
  LeafMaker(std::string leaf_id, std::uint32_t layers, const LeavesOptions& options,
            const ModelConfig& config)
      : leaf_id_(std::move(leaf_id)),
        layers_(layers),
        options_(options),
        dtype_(options.kv_dtype.value_or(config.dtype)) {}

  Leaves operator()(const AttentionCache& c) const {
    AttentionOptions attention = text(c.kv_heads, c.head_dim);
    attention.value_head_dim = c.value_head_dim;
    if (c.k_eq_v && options_.equal_values == EqualValues::implied) attention.value_head_dim = 0;
    if (c.window)
      return with_scales(std::make_shared<SlidingWindowLeaf>(
          leaf_id_, WindowOptions{.window = *c.window, .sinks = c.sinks}, attention));
    if (c.chunk)
      return with_scales(std::make_shared<ChunkedAttentionLeaf>(leaf_id_, *c.chunk, attention));
    return with_scales(std::make_shared<FullAttentionLeaf>(leaf_id_, attention));
  }
  Leaves operator()(const LatentCache& c) const {
    if (!c.window) return entries(c.width, c.tokens_per_entry);
    AttentionOptions attention = text(1, c.width);
    attention.value_head_dim = 0;  // keys and values are one entry
    return with_scales(std::make_shared<SlidingWindowLeaf>(
        leaf_id_, WindowOptions{.window = *c.window}, attention));
  }
  Leaves operator()(const IndexerCache& c) const { return entries(c.width, c.tokens_per_entry); }
  Leaves operator()(const CrossAttentionCache& c) const {
    return with_scales(
        std::make_shared<CrossAttentionLeaf>(leaf_id_, text(c.kv_heads, c.head_dim)));
  }
  Leaves operator()(const StateCache& c) const {
    StateOptions state;
    state.layers = layers_;
    state.slabs = c.slabs;
    state.kernel = options_.state_kernel;
    state.tokens_per_page = options_.tokens_per_page;
    return {std::make_shared<RecurrentStateLeaf>(leaf_id_, std::move(state))};
  }
  Leaves operator()(const SharedCache&) const { return {}; }

 private:
  AttentionOptions text(std::uint32_t kv_heads, std::uint32_t head_dim) const {
    AttentionOptions attention;
    attention.layers = layers_;
    attention.kv_heads = kv_heads;
    attention.head_dim = head_dim;
    attention.dtype = dtype_;
    attention.tokens_per_page = options_.tokens_per_page;
    return attention;
  }
  /// Entries that several tokens share fill pages of a whole number of entries.
  Leaves entries(std::uint32_t width, std::uint32_t tokens_per_entry) const {
    LatentOptions latent;
    latent.layers = layers_;
    latent.width = width;
    latent.dtype = dtype_;
    latent.tokens_per_page = std::lcm(options_.tokens_per_page, tokens_per_entry);
    if (tokens_per_entry > 1) latent.slots_per_page = latent.tokens_per_page / tokens_per_entry;
    return with_scales(std::make_shared<LatentAttentionLeaf>(leaf_id_, latent));
  }
  Leaves with_scales(std::shared_ptr<AttentionLeaf> values) const {
    Leaves leaves{values};
    if (options_.scales) leaves.push_back(std::make_shared<ScalesLeaf>(*values, *options_.scales));
    return leaves;
  }

  std::string leaf_id_;
  std::uint32_t layers_;
  const LeavesOptions& options_;
  DType dtype_;
};

void make_leaves(const std::vector<Share>& shares, const LeavesOptions& options,
                 ModelLeaves& model) {
  model.leaves.clear();
  model.layers_of.clear();
  model.holds.clear();
  for (const Share& share : shares) {
    const std::uint32_t size = static_cast<std::uint32_t>(share.layers.size()) / share.parts;
    for (std::uint32_t part = 0; part < share.parts; ++part) {
      const std::string id =
          share.parts == 1 ? share.leaf_id : fmt::format("{}_{}", share.leaf_id, part);
      const auto first = share.layers.begin() + std::ptrdiff_t{part} * size;
      for (Leaf& leaf : std::visit(LeafMaker(id, size, options, model.config), share.cache)) {
        model.leaves.push_back(std::move(leaf));
        model.layers_of.emplace_back(first, first + size);
        model.holds.push_back(share.cache);
      }
    }
  }
}

/// Divides the layers of one state, the others as they are, where the pool then costs least.
StateSplit split(std::vector<Share>& shares, Share& share, const LeavesOptions& options,
                 ModelLeaves& model) {
  const std::uint32_t layers = static_cast<std::uint32_t>(share.layers.size());
  StateSplit split{.leaf = share.leaf_id, .layers = layers, .parts = 0, .candidates = {}};
  double least_cost = 0;
  std::optional<GeometryError> refused;  // the one that a little more budget would have spared
  for (std::uint32_t parts = 1; parts <= layers; ++parts) {
    if (layers % parts != 0) continue;
    share.parts = parts;
    make_leaves(shares, options, model);
    StateSplit::Candidate candidate{.parts = parts, .fits = true, .cost = 0};
    try {
      const std::vector<PageSpec> pages =
          page_specs(model.leaves, options.tokens_per_page, options.expected_tokens);
      candidate.cost =
          plan_geometry(*options.budget_bytes, pages).cost() + cost_of_a_leaf * (parts - 1);
      if (split.parts == 0 || candidate.cost < least_cost) {
        split.parts = parts;
        least_cost = candidate.cost;
      }
    } catch (const GeometryError& error) {
      candidate.fits = false;
      if (!refused || error.least_budget < refused->least_budget) refused = error;
    }
    split.candidates.push_back(candidate);
  }
  if (split.parts == 0) throw *refused;
  share.parts = split.parts;
  return split;
}

ReadOptions read_options(const LeavesOptions& options) {
  return {.dtype = options.dtype, .tensor_parallel = options.tensor_parallel};
}

}  // namespace

ModelLeaves compose_leaves(ModelConfig config, const LeavesOptions& options) {
  if (options.tokens_per_page == 0 || options.tokens_per_page > max_tokens_per_page)
    throw InvalidArgument(fmt::format("tokens_per_page is {}; expected 1 to {}",
                                      options.tokens_per_page, max_tokens_per_page));
  if (options.expected_tokens == 0)
    throw InvalidArgument("expected_tokens is 0; expected 1 or more");
  if (options.scales && size_of(options.kv_dtype.value_or(config.dtype)) > 1)
    throw InvalidArgument(
        "scales are of quantised values; expected a kv_dtype of one byte, as "
        "float8_e4m3 or int8, beside them");
  std::vector<Share> shares = shares_of(config);
  if (shares.empty())
    throw ConfigError(fmt::format("{}: no layer of this {} keeps anything; expected at least one",
                                  config.source, config.model_type));
  ModelLeaves model;
  model.config = std::move(config);
  if (options.budget_bytes)
    for (Share& share : shares)
      if (share.is_state()) model.splits.push_back(split(shares, share, options, model));
  make_leaves(shares, options, model);
  return model;
}

ModelLeaves model_from_config(const std::filesystem::path& file, const LeavesOptions& options) {
  return compose_leaves(read_model_config(file, read_options(options)), options);
}

ModelLeaves model_from_json(std::string_view json, const LeavesOptions& options,
                            std::string_view source) {
  return compose_leaves(parse_model_config(json, read_options(options), source), options);
}

Leaves leaves_from_config(const std::filesystem::path& file, const LeavesOptions& options) {
  return model_from_config(file, options).leaves;
}

Leaves leaves_from_json(std::string_view json, const LeavesOptions& options,
                        std::string_view source) {
  return model_from_json(json, options, source).leaves;
}

}  // namespace kvleaf
