// ModelConfig: what a published config.json says of a model's cache, in kvleaf's own terms: one
// KVLayerSpec per layer and the lengths that bound it. The first of two steps; the second,
// composing leaves from it, is model_leaves.h.
//
// A file is recognised by its `model_type`. Which layer is what follows the rules that the model's
// own code applies, not only the keys: see families/ for each one's rule, and CONTRIBUTING for
// adding one.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvleaf/cache/layer_spec.h"

namespace kvleaf {

struct ReadOptions {
  /// Of the weights and so of keys, values and convolution states. None: the config's, else
  /// bfloat16.
  std::optional<DType> dtype = {};
  /// Ranks that divide the heads among them; the specs are those of one rank. Where there are fewer
  /// KV heads than ranks, several ranks hold the same head. A latent entry is held by every rank.
  std::uint32_t tensor_parallel = 1;
};

struct ModelConfig {
  std::string source;      // file name, for messages
  std::string model_type;  // as the config names it
  DType dtype = DType::bfloat16;
  std::vector<KVLayerSpec> layers;              // one per layer of the model
  std::optional<std::uint32_t> max_len;         // positions it was made for; none: it does not say
  std::optional<std::uint32_t> encoder_tokens;  // most of one request; none: no encoder
};

/// Throws ConfigError that names the file, the key and what would be accepted; InvalidArgument for
/// tensor_parallel 0.
ModelConfig read_model_config(const std::filesystem::path& file, ReadOptions options = {});
/// The same from JSON text; `source` stands for the file in messages.
ModelConfig parse_model_config(std::string_view json, ReadOptions options = {},
                               std::string_view source = "config");

/// Every model_type that is read, sorted.
std::vector<std::string_view> known_model_types();

}  // namespace kvleaf
