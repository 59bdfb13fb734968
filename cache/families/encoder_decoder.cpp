// Models that attend to an encoder's output as well.
#include <fmt/format.h>

#include "kvleaf/cache/families/family.h"

namespace kvleaf::families {
namespace {

/// Decoder layers of BART's kind: each keeps its own keys and values, which grow, and the
/// encoder's, which do not.
void decoder(const ConfigReader& text, ModelConfig& model) {
  const std::uint32_t heads = text.count({"decoder_attention_heads"});
  const std::uint32_t width = text.count({"d_model"}, ConfigReader::max_width);
  if (width % heads != 0)
    text.fail("d_model", fmt::format("is {}; expected a multiple of decoder_attention_heads {}",
                                     width, heads));
  const AttentionCache self{.kv_heads = text.shard_or_replicate(heads, "decoder_attention_heads"),
                            .head_dim = width / heads};
  const KVLayerSpec both = KVLayerSpec::attention(self).with(
      CrossAttentionCache{.kv_heads = self.kv_heads, .head_dim = self.head_dim});
  model.layers = Layers(text.count({"decoder_layers"}, ConfigReader::max_layers), both);
}

}  // namespace

void mllama(const Source& source, ModelConfig& model) {
  const ConfigReader& text = source.text;
  const AttentionCache self = attention_heads(text);
  model.layers = Layers(layer_count(text), KVLayerSpec::attention(self));
  // These layers attend to the image alone: no keys of the text.
  for (const std::uint32_t layer : text.counts("cross_attention_layers", layer_count(text) - 1))
    model.layers[layer] = KVLayerSpec::cross_attention(self.kv_heads, self.head_dim);
  const ConfigReader vision = source.root.section("vision_config");
  const std::uint32_t patches = vision.count({"image_size"}) / vision.count({"patch_size"});
  const std::uint64_t tokens =
      std::uint64_t{vision.count({"max_num_tiles"})} * (std::uint64_t{patches} * patches + 1);
  if (patches == 0 || tokens > ConfigReader::max_tokens)
    vision.fail("image_size",
                fmt::format("and patch_size, max_num_tiles make {} image tokens; expected 1 "
                            "to {}",
                            patches == 0 ? 0 : tokens, ConfigReader::max_tokens));
  model.encoder_tokens =
      static_cast<std::uint32_t>(tokens);  // of one image; each tile has a class token
}

void whisper(const Source& source, ModelConfig& model) {
  decoder(source.text, model);
  model.max_len = source.text.count({"max_target_positions"}, ConfigReader::max_tokens);
  model.encoder_tokens = source.text.count({"max_source_positions"}, ConfigReader::max_tokens);
}

void bart(const Source& source, ModelConfig& model) {
  decoder(source.text, model);
  // Encoder and decoder have as many positions.
  model.encoder_tokens = source.text.count({"max_position_embeddings"}, ConfigReader::max_tokens);
}

}  // namespace kvleaf::families
