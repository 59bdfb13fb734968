#include "kvleaf/cache/model_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>

#include "kvleaf/cache/families/family.h"
#include "kvleaf/leaf/errors.h"

namespace kvleaf {
namespace {

/// A window or chunk that the model's positions cannot leave reaches everything.
void widen(LayerCache& cache, std::uint32_t max_len) {
  const auto reaches_all = [&](const std::optional<std::uint32_t>& span) {
    return span && *span >= max_len;
  };
  if (auto* attention = std::get_if<AttentionCache>(&cache)) {
    if (reaches_all(attention->window)) {
      attention->window.reset();
      attention->sinks = 0;
    }
    if (reaches_all(attention->chunk)) attention->chunk.reset();
  } else if (auto* latent = std::get_if<LatentCache>(&cache)) {
    if (reaches_all(latent->window)) latent->window.reset();
  }
}

/// Python writes floats that JSON has no word for as NaN, Infinity and -Infinity (mamba's
/// time_step_limit). No shape depends on one: they become null, which means "not used".
std::string without_infinities(std::string_view json) {
  constexpr std::string_view words[] = {"-Infinity", "Infinity", "NaN"};
  std::string text;
  text.reserve(json.size());
  bool in_string = false;
  for (std::size_t i = 0; i < json.size(); ++i) {
    if (in_string && json[i] == '\\' && i + 1 < json.size()) {
      text += json.substr(i++, 2);  // what it escapes may be a quote
      continue;
    }
    if (json[i] == '"') in_string = !in_string;
    const std::string_view rest = json.substr(i);
    const auto* word = std::ranges::find_if(words, [&](auto w) { return rest.starts_with(w); });
    if (in_string || word == std::end(words)) {
      text += json[i];
    } else {
      text += "null";
      i += word->size() - 1;
    }
  }
  return text;
}

nlohmann::json parsed(std::string_view json, std::string_view source) {
  try {
    nlohmann::json document = nlohmann::json::parse(without_infinities(json));
    if (!document.is_object())
      throw ConfigError(fmt::format("{}: holds no object; expected a model's config.json", source));
    return document;
  } catch (const nlohmann::json::exception& error) {
    // "[json.exception.parse_error.101] parse error at line 3, column 5: …"
    std::string_view what = error.what();
    what.remove_prefix(std::min(what.find("] ") + 2, what.size()));
    throw ConfigError(fmt::format("{}: is not JSON: {}", source, what));
  }
}

}  // namespace

std::vector<std::string_view> known_model_types() {
  std::vector<std::string_view> types;
  for (const families::Family& family : families::all()) types.push_back(family.model_type);
  return types;
}

ModelConfig parse_model_config(std::string_view json, ReadOptions options,
                               std::string_view source_name) {
  if (options.tensor_parallel == 0)
    throw InvalidArgument("tensor_parallel is 0; expected 1 or more");
  const nlohmann::json document = parsed(json, source_name);
  const ConfigReader root(document, std::string(source_name), options.tensor_parallel);
  const families::Source source{root, root.section_or_self("text_config")};

  ModelConfig model;
  model.source = source_name;
  model.model_type = root.word("model_type");
  const auto family =
      std::ranges::find(families::all(), model.model_type, &families::Family::model_type);
  if (family == families::all().end())
    root.fail("model_type",
              fmt::format("is the unknown \"{}\"; expected one of {}. To add one, give it a "
                          "rule in cache/families",
                          model.model_type, fmt::join(known_model_types(), ", ")));

  std::optional<DType> dtype = options.dtype;
  if (!dtype) dtype = source.text.maybe_dtype({"dtype", "torch_dtype"});
  if (!dtype) dtype = root.maybe_dtype({"dtype", "torch_dtype"});
  model.dtype = dtype.value_or(DType::bfloat16);
  model.max_len = source.text.maybe_count({"max_position_embeddings", "model_max_length"},
                                          ConfigReader::max_tokens);
  try {
    family->read(source, model);
  } catch (const InvalidArgument& error) {  // shapes that are too large together
    throw ConfigError(fmt::format("{}: {}", source_name, error.what()));
  }
  if (model.max_len)
    for (KVLayerSpec& layer : model.layers)
      for (LayerCache& cache : layer.caches) widen(cache, *model.max_len);
  return model;
}

ModelConfig read_model_config(const std::filesystem::path& file, ReadOptions options) {
  // A directory opens like a file and reads as an empty one.
  if (std::error_code ignored; std::filesystem::is_directory(file, ignored))
    throw ConfigError(
        fmt::format("{}: is a directory; expected a model's config.json", file.string()));
  errno = 0;
  std::ifstream stream(file, std::ios::binary);
  if (!stream)
    throw ConfigError(fmt::format("{}: cannot be read: {}; expected a model's config.json",
                                  file.string(), std::strerror(errno)));
  const std::string json{std::istreambuf_iterator<char>(stream), {}};
  return parse_model_config(json, options, file.string());
}

}  // namespace kvleaf
