// A family is a rule that turns one kind of config.json into layer specs. To add a model: write a
// reader here or reuse one, and give its model_type a line in table.cpp; tests/cache holds a line
// per model.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvleaf/cache/families/config_reader.h"
#include "kvleaf/cache/model_config.h"
#include "kvleaf/cache/state_shapes.h"

namespace kvleaf::families {

using Layers = std::vector<KVLayerSpec>;

/// What a reader is given. A config of several parts nests the language model; both may be the
/// same.
struct Source {
  ConfigReader root;
  ConfigReader text;  // the language model's keys
};

/// Fills layers, and the lengths where they are not under max_position_embeddings. `model.dtype`
/// and `model.max_len` are set before.
using Reader = void (*)(const Source& source, ModelConfig& model);

struct Family {
  std::string_view model_type;
  Reader read;
};
std::span<const Family> all();  // sorted by model_type

// ---- readers, one per rule ------------------------------------------------------------------
// attention.cpp: attention over the request's own tokens, nothing else
void plain(const Source&, ModelConfig&);  // every layer full, unless layer_types says otherwise
void windowed(const Source&,
              ModelConfig&);             // every layer within sliding_window, where there is one
void qwen(const Source&, ModelConfig&);  // windows only with use_sliding_window
void gemma2(const Source&, ModelConfig&);
void gemma3(const Source&, ModelConfig&);
void gemma3n(const Source&, ModelConfig&);
void gemma4(const Source&, ModelConfig&);
void gpt_oss(const Source&, ModelConfig&);
void cohere2(const Source&, ModelConfig&);
void exaone4(const Source&, ModelConfig&);
void llama4(const Source&, ModelConfig&);
void mimo_v2(const Source&, ModelConfig&);
void hunyuan(const Source&, ModelConfig&);
void minimax_m3(const Source&, ModelConfig&);
// latent.cpp: one shared entry per token
void deepseek_v3(const Source&, ModelConfig&);
void deepseek_v32(const Source&, ModelConfig&);
void deepseek_v4(const Source&, ModelConfig&);
// hybrid.cpp: states, mostly beside attention
void mamba1(const Source&, ModelConfig&);
void mamba2(const Source&, ModelConfig&);
void jamba(const Source&, ModelConfig&);
void bamba(const Source&, ModelConfig&);
void granite_hybrid(const Source&, ModelConfig&);
void nemotron_h(const Source&, ModelConfig&);
void falcon_h1(const Source&, ModelConfig&);
void zamba2(const Source&, ModelConfig&);
void qwen3_next(const Source&, ModelConfig&);
void kimi_linear(const Source&, ModelConfig&);
void minimax_text_01(const Source&, ModelConfig&);
void recurrent_gemma(const Source&, ModelConfig&);
void phi4flash(const Source&, ModelConfig&);
void lfm2(const Source&, ModelConfig&);
// encoder_decoder.cpp: attention over an encoder's tokens
void mllama(const Source&, ModelConfig&);
void whisper(const Source&, ModelConfig&);
void bart(const Source&, ModelConfig&);

// ---- what readers share (shared.cpp) --------------------------------------------------------
std::uint32_t layer_count(const ConfigReader& config);

/// num_attention_heads queries; KV heads num_key_value_heads or as many as queries, of one rank;
/// head_dim or hidden_size / heads.
AttentionCache attention_heads(const ConfigReader& config);

/// One of the values that a per-layer list may hold.
struct LayerType {
  std::string_view name;
  std::function<KVLayerSpec(std::uint32_t layer)> spec;
};
/// Layers by the list of names under `key`. It may go on for the draft layers that
/// num_nextn_predict_layers announces. Throws ConfigError that names the layer and the accepted
/// names.
Layers layers_by_name(const ConfigReader& config, std::string_view key,
                      std::span<const LayerType> types);
/// The same for a list of numbers; a type's name is its number in decimal.
Layers layers_by_number(const ConfigReader& config, std::string_view key,
                        std::span<const LayerType> types);

enum class Reach { full, window, chunk };
/// Attention layers by layer_types, or by `otherwise` where there is no such list. The window is
/// sliding_window, the chunk attention_chunk_size; read only when a layer needs them.
Layers attention_layers(const ConfigReader& config,
                        const std::function<Reach(std::uint32_t layer)>& otherwise,
                        const std::function<AttentionCache(Reach)>& heads);
Layers attention_layers(const ConfigReader& config,
                        const std::function<Reach(std::uint32_t layer)>& otherwise);

/// The last num_kv_shared_layers layers own nothing: each reads the last earlier layer of its kind.
void share_last_layers(const ConfigReader& config, Layers& layers);

/// Types of a state's slabs: convolution as the model, recurrent as mamba_ssm_dtype says, else
/// float32.
StateDTypes state_dtypes(const ConfigReader& config, const ModelConfig& model);

/// How a config spells the sizes of a Mamba-2 layer.
struct Mamba2Keys {
  std::string_view heads, head_dim, groups, d_state, kernel;
};
/// One layer's state of one rank. A head_dim that is absent or "auto" is mamba_expand · hidden_size
/// / heads.
StateCache mamba2_slabs(const ConfigReader& config, const ModelConfig& model, Mamba2Keys keys);

}  // namespace kvleaf::families
