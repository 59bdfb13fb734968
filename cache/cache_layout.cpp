#include "kvleaf/cache/cache_layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "kvleaf/cache/tensor.h"
#include "kvleaf/group/block_manager.h"

namespace kvleaf {
namespace {

constexpr std::uint64_t alignment = 256;  // of the arena and of each array behind it
constexpr std::uint32_t default_step_tokens = 32768;
constexpr std::uint32_t expected_tokens = 2048;  // of a typical sequence: weighs the leaves

std::uint64_t round_up(std::uint64_t bytes) {
  return (bytes + alignment - 1) / alignment * alignment;
}

bool is_conv(const Slab& slab) { return slab.name.starts_with("conv"); }

/// What a cache kept entry by entry looks like; nothing for states and shared layers.
std::optional<EntryPlace> entries_of(const LayerCache& cache) {
  struct Read {
    std::optional<EntryPlace> operator()(const AttentionCache& c) const {
      return EntryPlace{.kv_heads = c.kv_heads,
                        .key_dim = c.head_dim,
                        .value_dim = c.value_head_dim.value_or(c.head_dim)};
    }
    std::optional<EntryPlace> operator()(const LatentCache& c) const {
      return EntryPlace{.part = c.tokens_per_entry > 1 ? KVPart::compressed : KVPart::own,
                        .key_dim = c.width,
                        .tokens_per_entry = c.tokens_per_entry};
    }
    std::optional<EntryPlace> operator()(const IndexerCache& c) const {
      return EntryPlace{
          .part = KVPart::indexer, .key_dim = c.width, .tokens_per_entry = c.tokens_per_entry};
    }
    std::optional<EntryPlace> operator()(const CrossAttentionCache& c) const {
      return EntryPlace{.part = KVPart::cross,
                        .kv_heads = c.kv_heads,
                        .key_dim = c.head_dim,
                        .value_dim = c.head_dim,
                        .encoder = true};
    }
    std::optional<EntryPlace> operator()(const StateCache&) const { return {}; }
    std::optional<EntryPlace> operator()(const SharedCache&) const { return {}; }
  };
  return std::visit(Read{}, cache);
}

/// Where the model's leaves hold this of a layer: the leaf, and the layer's place in it.
struct LeafPlace {
  std::uint32_t leaf = 0;
  std::uint32_t index = 0;
  std::uint32_t layers = 0;  // of the leaf
};
LeafPlace leaf_of(const ModelLeaves& model, std::uint32_t layer, const LayerCache& cache) {
  for (std::uint32_t leaf = 0; leaf < model.leaves.size(); ++leaf) {
    if (model.holds[leaf] != cache) continue;
    const auto& layers = model.layers_of[leaf];
    const auto at = std::ranges::find(layers, layer);
    if (at != layers.end())
      return {leaf, static_cast<std::uint32_t>(at - layers.begin()),
              static_cast<std::uint32_t>(layers.size())};
  }
  throw KVError(fmt::format("layer {} keeps '{}', and no leaf does", layer, to_string(cache)));
}

}  // namespace

CacheLayout::CacheLayout(KVCacheConfig given, std::span<const KVLayerSpec> layer_specs)
    : config(std::move(given)), specs(layer_specs.begin(), layer_specs.end()) {
  check();
  element_bytes = size_of(config.dtype);
  const std::uint64_t all = std::uint64_t{config.max_seqs} * config.max_len;
  if (config.max_step_tokens == 0)
    config.max_step_tokens = static_cast<std::uint32_t>(
        std::min<std::uint64_t>(all, std::max(config.max_len, default_step_tokens)));

  std::optional<ModelLeaves> model;
  if (paged()) {
    ModelConfig read;
    read.source = "layer_specs";
    read.model_type = "model";
    read.dtype = config.dtype;
    read.layers = specs;
    LeavesOptions options;
    options.tokens_per_page = config.page_tokens;
    options.kv_dtype = config.dtype;
    options.budget_bytes = config.budget_bytes;
    options.expected_tokens = std::min(config.max_len, expected_tokens);
    model = compose_leaves(std::move(read), options);
    leaves = model->leaves;
    plan_pool();
    arena_bytes = round_up(geometry->arena_bytes());
  }
  total_bytes = arena_bytes;
  place_layers(model ? &*model : nullptr);
}

void CacheLayout::check() const {
  const auto want = [](bool good, const char* name, std::uint64_t value) {
    if (!good) throw InvalidArgument(fmt::format("{} is {}; expected 1 or more", name, value));
  };
  want(config.num_layers > 0, "num_layers", config.num_layers);
  want(config.max_seqs > 0, "max_seqs", config.max_seqs);
  want(config.max_len > 0, "max_len", config.max_len);
  want(config.page_tokens > 0, "page_tokens", config.page_tokens);
  constexpr std::uint32_t most = std::numeric_limits<std::int32_t>::max();
  if (config.max_len > most || config.max_seqs > most || config.max_encoder_len > most)
    throw InvalidArgument(
        fmt::format("max_seqs {}, max_len {}, max_encoder_len {}; expected at most {}: lengths and "
                    "slots are int32",
                    config.max_seqs, config.max_len, config.max_encoder_len, most));
  if (specs.size() != config.num_layers)
    throw InvalidArgument(fmt::format("{} layer specs for num_layers {}; expected one per layer",
                                      specs.size(), config.num_layers));
  const Device device = require_device(config.device);
  if (device.kind != Device::Kind::cpu)
    throw InvalidArgument(fmt::format(
        "device {}: a KVCache lies in host memory; expected cpu. (Pools on a device: BlockManager "
        "and StepPlanner know no device, and their tables can be uploaded.)",
        kvleaf::to_string(device)));
  bool keeps = false;
  for (std::uint32_t layer = 0; layer < specs.size(); ++layer) {
    for (const LayerCache& cache : specs[layer].caches) {
      const auto* shared = std::get_if<SharedCache>(&cache);
      keeps = keeps || shared == nullptr;
      if (shared != nullptr && shared->layer >= layer)
        throw InvalidArgument(
            fmt::format("layer {} shares what layer {} keeps; expected a layer before it", layer,
                        shared->layer));
      if (std::holds_alternative<CrossAttentionCache>(cache) && config.max_encoder_len == 0)
        throw InvalidArgument(fmt::format(
            "layer {} has cross attention and max_encoder_len is 0; expected the most tokens of an "
            "encoder's input",
            layer));
    }
  }
  if (!keeps) throw InvalidArgument("no layer keeps anything; expected at least one that does");
}

void CacheLayout::place_layers(const ModelLeaves* model) {
  const std::uint64_t seqs = config.max_seqs;
  layers.resize(specs.size());
  for (std::uint32_t layer = 0; layer < specs.size(); ++layer) {
    LayerPlaces& places = layers[layer];
    for (const LayerCache& cache : specs[layer].caches) {
      if (const auto* shared = std::get_if<SharedCache>(&cache)) {
        places.reads = shared->layer;
        continue;
      }
      if (const auto* state = std::get_if<StateCache>(&cache)) {
        const std::optional<LeafPlace> at =
            model ? std::optional(leaf_of(*model, layer, cache)) : std::nullopt;
        std::uint64_t page_offset = 0;
        for (const Slab& slab : state->slabs) {
          const std::uint64_t bytes = slab.bytes();
          SlabPlace place{.layer = layer,
                          .slab = slab,
                          .conv = is_conv(slab),
                          .bytes = bytes,
                          .offset = add(bytes * seqs)};
          if (at) {
            place.leaf = at->leaf;
            place.page_offset = page_offset + at->index * bytes;
            page_offset += at->layers * bytes;
          }
          places.slabs.push_back(static_cast<std::uint32_t>(slabs.size()));
          slabs.push_back(std::move(place));
        }
        continue;
      }
      EntryPlace place = *entries_of(cache);
      const auto taken = [&](KVPart part) {
        return std::ranges::find(places.entries, part, &EntryPlace::part) != places.entries.end();
      };
      if (taken(place.part))
        throw InvalidArgument(fmt::format("layer {} keeps two things that are its '{}' entries: {}",
                                          layer, name_of(place.part), to_string(specs[layer])));
      any_encoder = any_encoder || place.encoder;
      const std::uint64_t key_row = std::uint64_t{place.kv_heads} * place.key_dim * element_bytes;
      const std::uint64_t value_row =
          std::uint64_t{place.kv_heads} * place.value_dim * element_bytes;
      if (model != nullptr) {
        const LeafPlace at = leaf_of(*model, layer, cache);
        const KVLeafRegion& leaf = *model->leaves[at.leaf];
        place.leaf = at.leaf;
        place.entries = leaf.slots_per_page(leaf.tokens_per_page().value_or(config.page_tokens));
        place.key_offset = at.index * place.entries * (key_row + value_row);
        place.value_offset = place.key_offset + place.entries * key_row;
      } else {
        place.entries = place.encoder ? config.max_encoder_len
                                      : pages_for(config.max_len, place.tokens_per_entry);
        place.key_offset = add(seqs * place.entries * (key_row + value_row));
        place.value_offset = place.key_offset + seqs * place.entries * key_row;
      }
      places.entries.push_back(place);
    }
  }
}

std::uint64_t CacheLayout::add(std::uint64_t bytes) {
  const std::uint64_t offset = total_bytes;
  if (bytes > std::numeric_limits<std::uint64_t>::max() / 4 - offset)
    throw InvalidArgument("the cache would pass 2^62 bytes; expected smaller bounds");
  total_bytes += round_up(bytes);
  return offset;
}

void CacheLayout::plan_pool() {
  const std::vector<PageSpec> pages =
      page_specs(leaves, config.page_tokens, std::min(config.max_len, expected_tokens));
  if (config.budget_bytes) {
    geometry = plan_geometry(*config.budget_bytes, pages);
    return;
  }
  // What lets every slot reach max_len: so many blocks, and the least budget that has them.
  std::vector<std::uint64_t> blocks;
  std::uint64_t budget = 0;
  for (const Leaf& leaf : leaves) {
    const std::uint32_t page = leaf->tokens_per_page().value_or(config.page_tokens);
    const bool encoder = leaf->group_id().writing == Writing::write_once;
    const std::uint32_t slots = pages_for(encoder ? config.max_encoder_len : config.max_len, page);
    const ReserveOptions reserve{config.enable_prefix_caching, row_step_tokens()};
    blocks.push_back(std::uint64_t{config.max_seqs} *
                     leaf->blocks_to_reserve(slots, page, reserve));
    budget += (blocks.back() + 1) * leaf->bytes_per_page();
  }
  budget += budget / 64;
  for (int tries = 0; tries < 64; ++tries) {
    try {
      geometry = plan_geometry(budget, pages);
    } catch (const GeometryError& error) {
      if (error.least_budget <= budget) throw;
      budget = error.least_budget;
      continue;
    }
    std::vector<std::uint64_t> per_class(geometry->page_classes(), 0);
    for (std::uint32_t leaf = 0; leaf < leaves.size(); ++leaf)
      per_class[geometry->leaf(LeafId{leaf}).page_class.value()] += blocks[leaf];
    std::uint64_t huge = 0;
    for (std::uint32_t c = 0; c < per_class.size(); ++c) {
      const std::uint64_t ratio = geometry->class_ratio(PageClassId{c});
      huge += (per_class[c] + ratio - 1) / ratio;
    }
    if (huge <= geometry->huge_blocks()) return;
    budget += std::max((huge - geometry->huge_blocks()) * geometry->huge_bytes(), budget / 64);
  }
  throw KVError("no budget was found that serves max_seqs sequences of max_len tokens; give one");
}

std::uint32_t CacheLayout::row_step_tokens() const noexcept {
  return std::min(config.max_len, config.max_step_tokens);
}

const LayerPlaces& CacheLayout::layer(std::int64_t index) const {
  if (index < 0 || index >= static_cast<std::int64_t>(layers.size()))
    throw InvalidArgument(
        fmt::format("layer {}; the cache has layers 0 to {}", index, layers.size() - 1));
  return layers[static_cast<std::size_t>(index)];
}

const EntryPlace* CacheLayout::find(std::int64_t index, KVPart part) const {
  const LayerPlaces& asked = layer(index);
  const LayerPlaces* places = &asked;
  const auto in = [&](KVPart wanted) -> const EntryPlace* {
    const auto at = std::ranges::find(places->entries, wanted, &EntryPlace::part);
    return at == places->entries.end() ? nullptr : &*at;
  };
  while (true) {
    if (const EntryPlace* found = in(part)) return found;
    if (!places->reads) break;
    places = &layers[*places->reads];
  }
  // A layer with one thing only: that is its own.
  if (part == KVPart::own && asked.entries.size() == 1) return asked.entries.data();
  return nullptr;
}

const EntryPlace* CacheLayout::find(std::optional<std::int64_t> index, KVPart part) const {
  if (index) return find(*index, part);
  const EntryPlace* only = nullptr;
  for (const LayerPlaces& places : layers) {
    for (const EntryPlace& place : places.entries) {
      if (place.part != part) continue;
      if (only != nullptr && (only->leaf != place.leaf || only->entries != place.entries ||
                              only->tokens_per_entry != place.tokens_per_entry))
        throw InvalidArgument(
            fmt::format("layers of this cache have several tables; name a layer of 0 to {}",
                        layers.size() - 1));
      only = &place;
    }
  }
  return only;
}

}  // namespace kvleaf
