// Models that keep one entry per token for all heads.
#include <fmt/format.h>

#include "kvleaf/cache/families/family.h"

namespace kvleaf::families {

void deepseek_v3(const Source& source, ModelConfig& model) {
  const std::uint32_t width =
      source.text.count({"kv_lora_rank"}) + source.text.count({"qk_rope_head_dim"});
  model.layers = Layers(layer_count(source.text), KVLayerSpec::latent(width));
}

void deepseek_v32(const Source& source, ModelConfig& model) {
  deepseek_v3(source, model);
  const IndexerCache indexer{.width = source.text.count({"index_head_dim"})};
  for (KVLayerSpec& layer : model.layers) layer = layer.with(indexer);
}

// Every layer keeps the entries of the last sliding_window tokens. With a compression ratio it
// keeps one entry per `ratio` tokens of everything before as well, and the fine ratio an index key
// for each of them, to choose among. Not included: what the compressor holds of tokens that do not
// fill an entry yet, a few entries of fixed size per request. At a boundary that both ratios
// divide, the coarse one holds nothing; the fine one overlaps its predecessor, so an engine
// recomputes its last `ratio` tokens or keeps them in a leaf of its own.
void deepseek_v4(const Source& source, ModelConfig& model) {
  const ConfigReader& text = source.text;
  const std::uint32_t width = text.count({"head_dim"});
  const std::uint32_t window = text.count({"sliding_window"}, ConfigReader::max_tokens);
  const std::uint32_t index = text.count({"index_head_dim"});
  const KVLayerSpec recent{{LatentCache{.width = width, .window = window}}};
  const auto compressed = [&](std::uint32_t ratio) {
    return recent.with(LatentCache{.width = width, .tokens_per_entry = ratio});
  };
  const std::vector<LayerType> types = {
      {"0", [&](std::uint32_t) { return recent; }},
      {"4",
       [&](std::uint32_t) {
         return compressed(4).with(IndexerCache{.width = index, .tokens_per_entry = 4});
       }},
      {"128", [&](std::uint32_t) { return compressed(128); }},
  };
  model.layers = layers_by_number(text, "compress_ratios", types);
}

}  // namespace kvleaf::families
