// Models whose layers keep keys and values of the text, each over all of it, a window, or a chunk.
#include <fmt/format.h>

#include "kvleaf/cache/families/family.h"

namespace kvleaf::families {
namespace {

/// Every n-th layer full, the others within the window; `key` holds n.
Layers every_nth_full(const ConfigReader& text, ConfigReader::Key key, std::uint32_t usual) {
  const std::uint32_t period = text.count(key, ConfigReader::max_layers, usual);
  return attention_layers(text, [&](std::uint32_t layer) {
    return (layer + 1) % period == 0 ? Reach::full : Reach::window;
  });
}

Layers alternating(const ConfigReader& text) {
  return attention_layers(
      text, [](std::uint32_t layer) { return layer % 2 == 0 ? Reach::window : Reach::full; });
}

}  // namespace

void plain(const Source& source, ModelConfig& model) {
  model.layers = attention_layers(source.text, [](std::uint32_t) { return Reach::full; });
}

void windowed(const Source& source, ModelConfig& model) {
  const Reach reach = source.text.has("sliding_window") ? Reach::window : Reach::full;
  model.layers = attention_layers(source.text, [&](std::uint32_t) { return reach; });
}

void qwen(const Source& source, ModelConfig& model) {
  // The published files carry a sliding_window that use_sliding_window switches off.
  const bool windows = source.text.flag("use_sliding_window", false);
  const std::uint32_t first =
      windows ? source.text.count_or_zero("max_window_layers", ConfigReader::max_layers) : 0;
  model.layers = attention_layers(source.text, [&](std::uint32_t layer) {
    return windows && layer >= first ? Reach::window : Reach::full;
  });
}

void gemma2(const Source& source, ModelConfig& model) { model.layers = alternating(source.text); }

// The sinks of gpt-oss are learned logits, one per head: no token is kept for them.
void gpt_oss(const Source& source, ModelConfig& model) { model.layers = alternating(source.text); }

void gemma3(const Source& source, ModelConfig& model) {
  model.layers =
      every_nth_full(source.text, {"sliding_window_pattern", "_sliding_window_pattern"}, 6);
}

void cohere2(const Source& source, ModelConfig& model) {
  model.layers =
      every_nth_full(source.text, {"sliding_window_pattern", "_sliding_window_pattern"}, 4);
}

void gemma3n(const Source& source, ModelConfig& model) {
  model.layers = every_nth_full(source.text, {"sliding_window_pattern"}, 5);
  share_last_layers(source.text, model.layers);
}

void gemma4(const Source& source, ModelConfig& model) {
  const ConfigReader& text = source.text;
  const AttentionCache window = attention_heads(text);
  AttentionCache full = window;
  if (const auto heads = text.maybe_count({"num_global_key_value_heads"}))
    full.kv_heads = text.shard_or_replicate(*heads, "num_global_key_value_heads");
  if (const auto width = text.maybe_count({"global_head_dim"})) full.head_dim = *width;
  full.k_eq_v = text.flag("attention_k_eq_v", false);
  model.layers = attention_layers(
      text, [](std::uint32_t layer) { return (layer + 1) % 6 == 0 ? Reach::full : Reach::window; },
      [&](Reach reach) { return reach == Reach::full ? full : window; });
  share_last_layers(text, model.layers);
}

void exaone4(const Source& source, ModelConfig& model) {
  const ConfigReader& text = source.text;
  // "LLLG": local or global, repeated. Small models of the family have no window at all.
  std::string pattern = "G";
  if (!text.has("layer_types") && text.has("sliding_window_pattern")) {
    pattern = text.word("sliding_window_pattern");
    if (pattern.empty() || pattern.find_first_not_of("LG") != std::string::npos)
      text.fail("sliding_window_pattern",
                fmt::format("is \"{}\"; expected letters L (local) and G (global)", pattern));
  }
  model.layers = attention_layers(text, [&](std::uint32_t layer) {
    return pattern[layer % pattern.size()] == 'G' ? Reach::full : Reach::window;
  });
}

void llama4(const Source& source, ModelConfig& model) {
  const ConfigReader& text = source.text;
  // Layers with rotary positions (1 in no_rope_layers) are chunked, those without see everything.
  std::vector<std::uint32_t> rotary;
  if (text.has("no_rope_layers")) rotary = text.counts("no_rope_layers", 1);
  if (!rotary.empty() && rotary.size() != layer_count(text))
    text.fail("no_rope_layers", fmt::format("has {} entries; expected one per layer, {}",
                                            rotary.size(), layer_count(text)));
  const std::uint32_t period = text.count({"no_rope_layer_interval"}, ConfigReader::max_layers, 4);
  const bool chunks = text.has("attention_chunk_size");
  model.layers = attention_layers(text, [&](std::uint32_t layer) {
    const bool is_rotary = rotary.empty() ? (layer + 1) % period != 0 : rotary[layer] == 1;
    return chunks && is_rotary ? Reach::chunk : Reach::full;
  });
}

void mimo_v2(const Source& source, ModelConfig& model) {
  const ConfigReader& text = source.text;
  AttentionCache full = attention_heads(text);
  full.value_head_dim = text.count({"v_head_dim"});
  AttentionCache window;
  window.kv_heads =
      text.shard_or_replicate(text.count({"swa_num_key_value_heads"}), "swa_num_key_value_heads");
  window.head_dim = text.count({"swa_head_dim"});
  window.value_head_dim = text.count({"swa_v_head_dim"});
  window.window = text.count({"sliding_window"}, ConfigReader::max_tokens);
  const std::vector<LayerType> types = {
      {"0", [&](std::uint32_t) { return KVLayerSpec::attention(full); }},
      {"1", [&](std::uint32_t) { return KVLayerSpec::attention(window); }},
  };
  model.layers = layers_by_number(text, "hybrid_layer_pattern", types);
}

void hunyuan(const Source& source, ModelConfig& model) {
  plain(source, model);
  if (!source.text.flag("use_cla", false)) return;
  const std::uint32_t share = source.text.count({"cla_share_factor"}, ConfigReader::max_layers);
  for (std::uint32_t layer = 0; layer < model.layers.size(); ++layer)
    if (layer % share != 0) model.layers[layer] = KVLayerSpec::shared(layer - layer % share);
}

void minimax_m3(const Source& source, ModelConfig& model) {
  plain(source, model);
  if (!source.text.has("sparse_attention_config")) return;
  const ConfigReader sparse = source.text.section("sparse_attention_config");
  if (!sparse.flag("use_sparse_attention", true)) return;
  const auto per_layer = [&](std::string_view key) {
    std::vector<std::uint32_t> list = sparse.counts(key, 1);
    if (list.size() < model.layers.size())
      sparse.fail(key, fmt::format("has {} entries; expected one per layer, {}", list.size(),
                                   model.layers.size()));
    return list;
  };
  const std::vector<std::uint32_t> chosen = per_layer("sparse_attention_freq");
  // A sparse layer keeps one index key per token, whatever the number of index heads: they are
  // queries. Only where it is not disabled, a value of the same width beside it.
  std::vector<std::uint32_t> no_value(model.layers.size(), 1);
  if (sparse.has("sparse_disable_index_value")) no_value = per_layer("sparse_disable_index_value");
  const std::uint32_t width = sparse.count({"sparse_index_dim"});
  for (std::uint32_t layer = 0; layer < model.layers.size(); ++layer)
    if (chosen[layer] == 1)
      model.layers[layer] =
          model.layers[layer].with(IndexerCache{.width = no_value[layer] == 1 ? width : 2 * width});
}

}  // namespace kvleaf::families
