#include "model_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "numbers.h"

namespace kvleaf::cli {
namespace {

/// Layers that keep nothing of their own, and those of them that read another layer's entries.
struct Idle {
  std::size_t all = 0;
  std::size_t sharing = 0;
};

Idle idle_layers(const ModelConfig& config) {
  Idle idle;
  for (const KVLayerSpec& spec : config.layers) {
    const bool shares = std::ranges::any_of(spec.caches, [](const LayerCache& cache) {
      return std::holds_alternative<SharedCache>(cache);
    });
    if (shares) ++idle.sharing;
    if (shares || spec.caches.empty()) ++idle.all;
  }
  return idle;
}

}  // namespace

std::string model_text(const ModelLeaves& model, const ModelArguments& arguments) {
  const ModelConfig& config = model.config;
  const Idle idle = idle_layers(config);
  std::string text =
      fmt::format("{}: {}, {} layers", config.source, config.model_type, config.layers.size());
  if (idle.all > 0) text += fmt::format(", {} of which keep nothing", idle.all);
  if (idle.sharing > 0) text += fmt::format(" ({} read an earlier layer)", idle.sharing);
  if (config.max_len) text += fmt::format(", {} positions", grouped(*config.max_len));
  if (config.encoder_tokens)
    text += fmt::format(", {} encoder tokens", grouped(*config.encoder_tokens));
  text += fmt::format("\n{}", name_of(config.dtype));
  if (arguments.leaves.kv_dtype)
    text += fmt::format(", KV {}", name_of(*arguments.leaves.kv_dtype));
  if (arguments.leaves.tensor_parallel > 1)
    text += fmt::format(", one of {} ranks", arguments.leaves.tensor_parallel);
  return text + "\n";
}

nlohmann::ordered_json model_json(const ModelLeaves& model, const ModelArguments& arguments) {
  const ModelConfig& config = model.config;
  nlohmann::ordered_json out = {
      {"config", config.source},
      {"model_type", config.model_type},
      {"model_layers", config.layers.size()},
      {"max_position", nullptr},
      {"encoder_tokens", nullptr},
      {"dtype", name_of(config.dtype)},
      {"kv_dtype", name_of(arguments.leaves.kv_dtype.value_or(config.dtype))},
      {"tensor_parallel", arguments.leaves.tensor_parallel},
      {"page_tokens", arguments.leaves.tokens_per_page},
  };
  if (config.max_len) out["max_position"] = *config.max_len;
  if (config.encoder_tokens) out["encoder_tokens"] = *config.encoder_tokens;
  return out;
}

}  // namespace kvleaf::cli
