// Models with recurrent states: state-space, linear attention, short convolutions; alone, or
// between, or beside layers of attention.
#include <fmt/format.h>

#include <algorithm>

#include "kvleaf/cache/families/family.h"

namespace kvleaf::families {
namespace {

constexpr Mamba2Keys granite_keys{"mamba_n_heads", "mamba_d_head", "mamba_n_groups",
                                  "mamba_d_state", "mamba_d_conv"};

/// A spec per layer, from its index.
Layers by_index(const ConfigReader& config,
                const std::function<KVLayerSpec(std::uint32_t layer)>& spec) {
  Layers layers(layer_count(config));
  for (std::uint32_t i = 0; i < layers.size(); ++i) layers[i] = spec(i);
  return layers;
}

/// Indices of layers, each below the number of layers.
std::vector<std::uint32_t> layer_ids(const ConfigReader& config, std::string_view key) {
  return config.counts(key, layer_count(config) - 1);
}

/// Keys as jamba spells them.
StateCache mamba1_slabs(const ConfigReader& config, const ModelConfig& model) {
  const std::uint64_t inner = std::uint64_t{config.count({"mamba_expand"})} *
                              config.count({"hidden_size"}, ConfigReader::max_width);
  if (inner > ConfigReader::max_tokens)
    config.fail("mamba_expand", fmt::format("makes an inner width of {}; expected at most {}",
                                            inner, ConfigReader::max_tokens));
  return mamba1_state({.inner = config.shard(static_cast<std::uint32_t>(inner), "mamba_expand"),
                       .d_state = config.count({"mamba_d_state"}),
                       .kernel = config.kernel("mamba_d_conv")},
                      state_dtypes(config, model));
}

/// Attention at the layers of `ids`, the state elsewhere.
Layers attention_at(const ConfigReader& config, const std::vector<std::uint32_t>& ids,
                    const StateCache& state) {
  const AttentionCache heads = attention_heads(config);
  return by_index(config, [&](std::uint32_t layer) {
    return std::ranges::count(ids, layer) > 0 ? KVLayerSpec::attention(heads)
                                              : KVLayerSpec::state(state);
  });
}

/// layer_types of attention under one name and a state under another. The state's keys are read
/// only when a layer has one.
Layers attention_or_state(const ConfigReader& config, std::string_view attention,
                          std::string_view state_name, const std::function<StateCache()>& state) {
  const AttentionCache heads = attention_heads(config);
  const std::vector<LayerType> types = {
      {attention, [&](std::uint32_t) { return KVLayerSpec::attention(heads); }},
      {state_name, [&](std::uint32_t) { return KVLayerSpec::state(state()); }},
  };
  return layers_by_name(config, "layer_types", types);
}

}  // namespace

void mamba1(const Source& source, ModelConfig& model) {
  const ConfigReader& text = source.text;
  std::uint32_t inner = text.count({"intermediate_size"}, ConfigReader::max_tokens);
  const StateCache state = mamba1_state({.inner = text.shard(inner, "intermediate_size"),
                                         .d_state = text.count({"state_size"}),
                                         .kernel = text.kernel("conv_kernel")},
                                        state_dtypes(text, model));
  model.layers = Layers(layer_count(text), KVLayerSpec::state(state));
}

void mamba2(const Source& source, ModelConfig& model) {
  const StateCache state = mamba2_slabs(
      source.text, model, {"num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"});
  model.layers = Layers(layer_count(source.text), KVLayerSpec::state(state));
}

void jamba(const Source& source, ModelConfig& model) {
  const ConfigReader& text = source.text;
  const std::uint32_t period = text.count({"attn_layer_period"}, ConfigReader::max_layers);
  const std::uint32_t offset = text.count_or_zero("attn_layer_offset", ConfigReader::max_layers);
  const AttentionCache heads = attention_heads(text);
  const StateCache state = mamba1_slabs(text, model);
  model.layers = by_index(text, [&](std::uint32_t layer) {
    return layer % period == offset ? KVLayerSpec::attention(heads) : KVLayerSpec::state(state);
  });
}

void bamba(const Source& source, ModelConfig& model) {
  const StateCache state = mamba2_slabs(source.text, model, granite_keys);
  std::vector<std::uint32_t> attention;
  if (source.text.has("attn_layer_indices"))
    attention = layer_ids(source.text, "attn_layer_indices");
  model.layers = attention_at(source.text, attention, state);
}

void granite_hybrid(const Source& source, ModelConfig& model) {
  const AttentionCache heads = attention_heads(source.text);
  const auto attention = [&](std::uint32_t) { return KVLayerSpec::attention(heads); };
  const auto state = [&](std::uint32_t) {
    return KVLayerSpec::state(mamba2_slabs(source.text, model, granite_keys));
  };
  // The published names, and those that newer releases of transformers write.
  const std::vector<LayerType> types = {{"attention", attention},
                                        {"mamba", state},
                                        {"full_attention", attention},
                                        {"linear_attention", state}};
  model.layers = layers_by_name(source.text, "layer_types", types);
}

void nemotron_h(const Source& source, ModelConfig& model) {
  const ConfigReader& text = source.text;
  const AttentionCache heads = attention_heads(text);
  const StateCache state = mamba2_slabs(
      text, model,
      {"mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"});
  if (!text.has("hybrid_override_pattern") && text.has("layers_block_type")) {
    // What newer releases of transformers write: names, and no count of layers beside them.
    const std::vector<std::string> names = text.words("layers_block_type");
    for (std::size_t layer = 0; layer < names.size(); ++layer) {
      if (names[layer] == "linear_attention" || names[layer] == "mamba")
        model.layers.push_back(KVLayerSpec::state(state));
      else if (names[layer] == "full_attention" || names[layer] == "attention")
        model.layers.push_back(KVLayerSpec::attention(heads));
      else if (names[layer] == "mlp" || names[layer] == "moe")
        model.layers.push_back(KVLayerSpec::none());
      else
        text.fail(fmt::format("layers_block_type[{}]", layer),
                  fmt::format("is the unknown layer type \"{}\"; expected \"linear_attention\", "
                              "\"full_attention\", \"mlp\" or \"moe\". To add a type, give its "
                              "family in cache/families a rule, or make the leaves by hand",
                              names[layer]));
    }
    return;
  }
  const std::string pattern = text.word("hybrid_override_pattern");
  if (pattern.size() != layer_count(text))
    text.fail("hybrid_override_pattern",
              fmt::format("has {} letters; expected one per layer, num_hidden_layers {}",
                          pattern.size(), layer_count(text)));
  model.layers = by_index(text, [&](std::uint32_t layer) {
    switch (pattern[layer]) {
      case 'M': return KVLayerSpec::state(state);
      case '*': return KVLayerSpec::attention(heads);
      case '-':
      case 'E': return KVLayerSpec::none();  // feed-forward, dense or of experts
      default:
        text.fail(
            fmt::format("hybrid_override_pattern[{}]", layer),
            fmt::format("is the unknown layer type '{}'; expected M (Mamba-2), * (attention), - "
                        "(MLP) or E (experts). To add a type, give its family in cache/families a "
                        "rule, or make the leaves by hand",
                        pattern[layer]));
    }
  });
}

void falcon_h1(const Source& source, ModelConfig& model) {
  // Attention and state run side by side in every layer.
  const KVLayerSpec both = KVLayerSpec::attention(attention_heads(source.text))
                               .with(mamba2_slabs(source.text, model, granite_keys));
  model.layers = Layers(layer_count(source.text), both);
}

void zamba2(const Source& source, ModelConfig& model) {
  const ConfigReader& text = source.text;
  AttentionCache heads;
  heads.kv_heads =
      text.shard_or_replicate(text.count({"num_key_value_heads"}, ConfigReader::max_count,
                                         text.count({"num_attention_heads"})),
                              "num_key_value_heads");
  // Attention sees the layer's input and the embedding side by side: twice the usual width.
  if (const auto given = text.maybe_count({"attention_head_dim"})) {
    heads.head_dim = *given;
  } else {
    const std::uint32_t width = 2 * text.count({"hidden_size"}, ConfigReader::max_width);
    const std::uint32_t queries = text.count({"num_attention_heads"});
    if (width % queries != 0)
      text.fail("attention_head_dim",
                fmt::format("is missing and 2 x hidden_size {} is no multiple of "
                            "num_attention_heads {}",
                            width, queries));
    heads.head_dim = width / queries;
  }
  // The blocks of attention weights are shared by several layers, what they keep is not.
  const std::vector<std::uint32_t> hybrid = layer_ids(text, "hybrid_layer_ids");
  const KVLayerSpec state = KVLayerSpec::state(mamba2_slabs(
      text, model,
      {"n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state", "mamba_d_conv"}));
  model.layers = by_index(text, [&](std::uint32_t layer) {
    return std::ranges::count(hybrid, layer) > 0 ? state.with(heads) : state;
  });
}

void qwen3_next(const Source& source, ModelConfig& model) {
  const ConfigReader& text = source.text;
  const std::uint32_t k_heads = text.count({"linear_num_key_heads"});
  const std::uint32_t v_heads = text.count({"linear_num_value_heads"});
  const StateCache state =
      delta_net_state({.k_heads = text.shard(k_heads, "linear_num_key_heads"),
                       .k_dim = text.count({"linear_key_head_dim"}),
                       .v_heads = text.shard(v_heads, "linear_num_value_heads"),
                       .v_dim = text.count({"linear_value_head_dim"}),
                       .kernel = text.kernel("linear_conv_kernel_dim")},
                      state_dtypes(text, model));
  if (text.has("layer_types")) {
    model.layers =
        attention_or_state(text, "full_attention", "linear_attention", [&] { return state; });
    return;
  }
  const std::uint32_t period = text.count({"full_attention_interval"}, ConfigReader::max_layers);
  const AttentionCache heads = attention_heads(text);
  model.layers = by_index(text, [&](std::uint32_t layer) {
    return (layer + 1) % period == 0 ? KVLayerSpec::attention(heads) : KVLayerSpec::state(state);
  });
}

void kimi_linear(const Source& source, ModelConfig& model) {
  const ConfigReader& text = source.text;
  const ConfigReader linear = text.section("linear_attn_config");
  const KVLayerSpec latent =
      KVLayerSpec::latent(text.count({"kv_lora_rank"}) + text.count({"qk_rope_head_dim"}));
  const KVLayerSpec state =
      KVLayerSpec::state(kda_state({.heads = linear.shard(linear.count({"num_heads"}), "num_heads"),
                                    .head_dim = linear.count({"head_dim"}),
                                    .kernel = linear.kernel("short_conv_kernel_size")},
                                   state_dtypes(text, model)));
  // Both lists count layers from 1.
  const std::uint32_t layers = layer_count(text);
  const std::vector<std::uint32_t> full = linear.counts("full_attn_layers", layers);
  const std::vector<std::uint32_t> kda = linear.counts("kda_layers", layers);
  model.layers = by_index(text, [&](std::uint32_t layer) {
    const bool is_full = std::ranges::count(full, layer + 1) > 0;
    const bool is_kda = std::ranges::count(kda, layer + 1) > 0;
    if (is_full == is_kda)
      linear.fail(
          "full_attn_layers",
          fmt::format("and kda_layers {} name layer {} (counted from 1); expected one of them to",
                      is_full ? "both" : "do not", layer + 1));
    return is_full ? latent : state;
  });
}

void minimax_text_01(const Source& source, ModelConfig& model) {
  const ConfigReader& text = source.text;
  const AttentionCache heads = attention_heads(text);
  const std::uint32_t queries = text.count({"num_attention_heads"});
  const std::vector<LayerType> types = {
      {"0",
       [&](std::uint32_t) {
         return KVLayerSpec::state(lightning_state(
             {.heads = text.shard(queries, "num_attention_heads"), .head_dim = heads.head_dim},
             state_dtypes(text, model)));
       }},
      {"1", [&](std::uint32_t) { return KVLayerSpec::attention(heads); }},
  };
  model.layers = layers_by_number(text, "attn_type_list", types);
}

void recurrent_gemma(const Source& source, ModelConfig& model) {
  const ConfigReader& text = source.text;
  AttentionCache local = attention_heads(text);
  local.window = text.count({"attention_window_size"}, ConfigReader::max_tokens);
  const std::uint32_t hidden = text.count({"hidden_size"}, ConfigReader::max_width);
  const std::uint32_t width = text.count({"lru_width"}, ConfigReader::max_width, hidden);
  const StateCache state =
      rg_lru_state({.width = text.shard(width, "lru_width"), .kernel = text.kernel("conv1d_width")},
                   state_dtypes(text, model));
  const std::vector<std::string> blocks = text.words("block_types");  // repeated over the layers
  if (blocks.empty())
    text.fail("block_types", "is empty; expected \"recurrent\" and \"attention\"");
  model.layers = by_index(text, [&](std::uint32_t layer) {
    const std::string& type = blocks[layer % blocks.size()];
    if (type == "recurrent") return KVLayerSpec::state(state);
    if (type == "attention") return KVLayerSpec::attention(local);
    text.fail(fmt::format("block_types[{}]", layer % blocks.size()),
              fmt::format(
                  "is the unknown layer type \"{}\" (layer {}); expected \"recurrent\" or "
                  "\"attention\". To add a type, give its family in cache/families a rule, or make "
                  "the leaves by hand",
                  type, layer));
  });
}

// The first half of the layers alternates Mamba-1 and windows. Behind it stands the one layer that
// keeps all keys and values; the second half alternates gates, which keep nothing, and layers that
// read them.
void phi4flash(const Source& source, ModelConfig& model) {
  const ConfigReader& text = source.text;
  const std::uint32_t half = layer_count(text) / 2;
  const std::uint32_t full_layer = half + 1;
  const AttentionCache full = attention_heads(text);
  AttentionCache window = full;
  window.window = text.count({"sliding_window"}, ConfigReader::max_tokens);
  const StateCache state = mamba1_slabs(text, model);
  if (layer_count(text) % 4 != 0)
    text.fail("num_hidden_layers",
              fmt::format("is {}; expected a multiple of 4", layer_count(text)));
  model.layers = by_index(text, [&](std::uint32_t layer) {
    if (layer % 2 == 0) return layer <= half ? KVLayerSpec::state(state) : KVLayerSpec::none();
    if (layer < half) return KVLayerSpec::attention(window);
    return layer == full_layer ? KVLayerSpec::attention(full) : KVLayerSpec::shared(full_layer);
  });
}

void lfm2(const Source& source, ModelConfig& model) {
  const ConfigReader& text = source.text;
  const std::uint32_t hidden = text.count({"hidden_size"}, ConfigReader::max_width);
  const std::uint32_t width = text.count({"conv_dim"}, ConfigReader::max_width, hidden);
  const StateCache state = short_conv_state(
      {.width = text.shard(width, "conv_dim"), .kernel = text.kernel("conv_L_cache")},
      state_dtypes(text, model));
  model.layers = attention_or_state(text, "full_attention", "conv", [&] { return state; });
}

}  // namespace kvleaf::families
