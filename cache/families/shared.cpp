#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "kvleaf/cache/families/family.h"

namespace kvleaf::families {
namespace {

/// Layers that a checkpoint carries behind the model's own, to draft tokens: per-layer lists count
/// them.
std::uint32_t draft_layers(const ConfigReader& config) {
  return std::max(config.count_or_zero("num_nextn_predict_layers", ConfigReader::max_layers),
                  config.count_or_zero("mtp_num_hidden_layers", ConfigReader::max_layers));
}

Layers layers_of(const ConfigReader& config, std::string_view key,
                 const std::vector<std::string>& names, std::span<const LayerType> types,
                 std::string_view quote) {
  const std::uint32_t layers = layer_count(config);
  const std::uint32_t most = layers + draft_layers(config);
  if (names.size() < layers || names.size() > most)
    config.fail(key, fmt::format("names {} layers, num_hidden_layers {}; expected {}", names.size(),
                                 layers, layers));
  Layers specs;
  specs.reserve(layers);
  for (std::uint32_t i = 0; i < layers; ++i) {
    const auto type = std::ranges::find(types, std::string_view(names[i]), &LayerType::name);
    if (type == types.end()) {
      std::vector<std::string> known;
      for (const LayerType& t : types) known.push_back(fmt::format("{}{}{}", quote, t.name, quote));
      config.fail(
          fmt::format("{}[{}]", key, i),
          fmt::format("is the unknown layer type {}{}{}; expected {}. To add a type, give its "
                      "family in cache/families a rule, or make the leaves by hand",
                      quote, names[i], quote, fmt::join(known, " or ")));
    }
    specs.push_back(type->spec(i));
  }
  return specs;
}

}  // namespace

std::uint32_t layer_count(const ConfigReader& config) {
  return config.count({"num_hidden_layers"}, ConfigReader::max_layers);
}

AttentionCache attention_heads(const ConfigReader& config) {
  const std::uint32_t heads = config.count({"num_attention_heads"});
  const std::uint32_t kv_heads =
      config.count({"num_key_value_heads"}, ConfigReader::max_count, heads);
  AttentionCache cache;
  cache.kv_heads = config.shard_or_replicate(kv_heads, "num_key_value_heads");
  if (const auto given = config.maybe_count({"head_dim", "attention_head_dim"})) {
    cache.head_dim = *given;
    return cache;
  }
  const std::uint32_t hidden = config.count({"hidden_size"}, ConfigReader::max_width);
  if (hidden % heads != 0)
    config.fail("head_dim", fmt::format("is missing and hidden_size {} is no multiple of "
                                        "num_attention_heads {}; expected one of both",
                                        hidden, heads));
  cache.head_dim = hidden / heads;
  return cache;
}

Layers layers_by_name(const ConfigReader& config, std::string_view key,
                      std::span<const LayerType> types) {
  return layers_of(config, key, config.words(key), types, "\"");
}

Layers layers_by_number(const ConfigReader& config, std::string_view key,
                        std::span<const LayerType> types) {
  std::vector<std::string> names;
  for (const std::uint32_t n : config.counts(key)) names.push_back(fmt::format("{}", n));
  return layers_of(config, key, names, types, "");
}

Layers attention_layers(const ConfigReader& config,
                        const std::function<Reach(std::uint32_t layer)>& otherwise,
                        const std::function<AttentionCache(Reach)>& heads) {
  const auto spec = [&](Reach reach) {
    AttentionCache cache = heads(reach);
    if (reach == Reach::window)
      cache.window = config.count({"sliding_window"}, ConfigReader::max_tokens);
    if (reach == Reach::chunk)
      cache.chunk = config.count({"attention_chunk_size"}, ConfigReader::max_tokens);
    return KVLayerSpec::attention(cache);
  };
  if (config.has("layer_types")) {
    const std::vector<LayerType> types = {
        {"full_attention", [&](std::uint32_t) { return spec(Reach::full); }},
        {"sliding_attention", [&](std::uint32_t) { return spec(Reach::window); }},
        {"chunked_attention", [&](std::uint32_t) { return spec(Reach::chunk); }},
    };
    return layers_by_name(config, "layer_types", types);
  }
  Layers layers(layer_count(config));
  for (std::uint32_t i = 0; i < layers.size(); ++i) layers[i] = spec(otherwise(i));
  return layers;
}

Layers attention_layers(const ConfigReader& config,
                        const std::function<Reach(std::uint32_t layer)>& otherwise) {
  const AttentionCache heads = attention_heads(config);
  return attention_layers(config, otherwise, [&](Reach) { return heads; });
}

void share_last_layers(const ConfigReader& config, Layers& layers) {
  const std::uint32_t shared =
      config.count_or_zero("num_kv_shared_layers", ConfigReader::max_layers);
  if (shared == 0) return;
  if (shared >= layers.size())
    config.fail("num_kv_shared_layers",
                fmt::format("is {} of {} layers; expected fewer", shared, layers.size()));
  const std::uint32_t owners = static_cast<std::uint32_t>(layers.size()) - shared;
  for (std::uint32_t i = owners; i < layers.size(); ++i) {
    std::uint32_t source = owners;
    while (source > 0 && layers[source - 1] != layers[i]) --source;
    if (source == 0)
      config.fail("num_kv_shared_layers",
                  fmt::format("is {}, but layer {} has no earlier layer of its kind to share with; "
                              "expected fewer",
                              shared, i));
    layers[i] = KVLayerSpec::shared(source - 1);
  }
}

StateDTypes state_dtypes(const ConfigReader& config, const ModelConfig& model) {
  return {.conv = model.dtype,
          .recurrent = config.maybe_dtype({"mamba_ssm_dtype", "mamba_ssm_cache_dtype"})
                           .value_or(DType::float32)};
}

StateCache mamba2_slabs(const ConfigReader& config, const ModelConfig& model, Mamba2Keys keys) {
  const std::uint32_t heads = config.count({keys.heads});
  std::uint32_t head_dim = 0;
  const nlohmann::json* given = config.find({keys.head_dim});
  if (given == nullptr || *given == "auto") {
    const std::uint64_t inner = std::uint64_t{config.count({"mamba_expand", "expand"})} *
                                config.count({"hidden_size"}, ConfigReader::max_width);
    if (inner % heads != 0 || inner / heads > ConfigReader::max_count)
      config.fail(keys.head_dim,
                  fmt::format("is not given and expand x hidden_size is {}; expected a "
                              "multiple of {} {}",
                              inner, keys.heads, heads));
    head_dim = static_cast<std::uint32_t>(inner / heads);
  } else {
    head_dim = config.count({keys.head_dim});
  }
  if (const auto inner = config.maybe_count({"mamba_d_ssm"}, ConfigReader::max_width);
      inner && *inner != std::uint64_t{heads} * head_dim)
    config.fail("mamba_d_ssm", fmt::format("is {}; expected {} x {} = {}", *inner, keys.heads,
                                           keys.head_dim, std::uint64_t{heads} * head_dim));
  const std::uint32_t groups = config.count({keys.groups});
  return mamba2_state({.heads = config.shard(heads, keys.heads),
                       .head_dim = head_dim,
                       .groups = config.shard_or_replicate(groups, keys.groups),
                       .d_state = config.count({keys.d_state}),
                       .kernel = config.kernel(keys.kernel)},
                      state_dtypes(config, model));
}

}  // namespace kvleaf::families
