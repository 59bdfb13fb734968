// What each published configuration is read into: which layer keeps what.
#include "kvleaf/cache/model_config.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "cache/model_files.h"
#include "kvleaf/leaf/errors.h"

namespace kvleaf {
namespace {

using test::model_file;
using test::model_json;

/// One letter per layer.
///   F full   W window   C chunk   L latent   S state   X cross attention   . nothing   = shared
///   H full and state    B full and cross attention    I full and indexer   J latent and indexer
///   V windowed latent   4, 8  the same and one entry per 4 tokens with its indexer, per 128 tokens
char letter_of(const KVLayerSpec& spec) {
  std::string parts;
  for (const LayerCache& cache : spec.caches) {
    struct Letter {
      char operator()(const AttentionCache& c) const {
        return c.window ? 'W' : c.chunk ? 'C' : 'F';
      }
      char operator()(const LatentCache& c) const {
        if (c.window) return 'V';
        return c.tokens_per_entry == 1 ? 'L' : c.tokens_per_entry == 4 ? '4' : '8';
      }
      char operator()(const IndexerCache& c) const { return c.tokens_per_entry == 1 ? 'I' : 'i'; }
      char operator()(const StateCache&) const { return 'S'; }
      char operator()(const CrossAttentionCache&) const { return 'X'; }
      char operator()(const SharedCache&) const { return '='; }
    };
    parts += std::visit(Letter{}, cache);
  }
  static const std::map<std::string, char> letters = {{"", '.'},    {"FS", 'H'}, {"SF", 'H'},
                                                      {"FX", 'B'},  {"FI", 'I'}, {"LI", 'J'},
                                                      {"V4i", '4'}, {"V8", '8'}};
  if (parts.size() == 1) return parts[0];
  const auto it = letters.find(parts);
  return it == letters.end() ? '?' : it->second;
}

std::string letters_of(const ModelConfig& model) {
  std::string letters;
  for (const KVLayerSpec& spec : model.layers) letters += letter_of(spec);
  return letters;
}

/// "(WWF)2 W" → "WWFWWFW"
std::string expand(std::string_view pattern) {
  std::string out;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] == ' ') continue;
    if (pattern[i] != '(') {
      out += pattern[i];
      continue;
    }
    const std::size_t close = pattern.find(')', i);
    const std::string_view unit = pattern.substr(i + 1, close - i - 1);
    std::size_t times = 0;
    for (i = close + 1; i < pattern.size() && pattern[i] >= '0' && pattern[i] <= '9'; ++i)
      times = times * 10 + static_cast<std::size_t>(pattern[i] - '0');
    --i;
    while (times-- > 0) out += unit;
  }
  return out;
}

struct Expected {
  std::string_view file;
  std::string_view layers;
  std::uint32_t max_len;         // 0: the file does not say
  std::uint32_t encoder_tokens;  // 0: no encoder
};

constexpr Expected models[] = {
    {"bamba-9b", "(S)9 F (S)8 F (S)8 F (S)4", 0, 0},
    {"bart-large", "(B)12", 1024, 1024},
    {"command-a-111b", "(WWWF)16", 0, 0},
    {"command-r7b", "(WWWF)8", 8192, 0},
    {"deepseek-v3", "(L)61", 163840, 0},
    {"deepseek-v3.2", "(J)61", 163840, 0},
    {"deepseek-v4-flash", "VV (48)20 4", 1048576, 0},
    {"deepseek-v4-pro", "8 (84)30", 1048576, 0},
    {"exaone-4.0-32b", "(WWWF)16", 131072, 0},
    {"falcon-h1-0.5b", "(H)36", 16384, 0},
    {"falcon-h1-7b", "(H)44", 262144, 0},
    {"florence-2-large", "(B)12", 4096, 4096},
    {"gemma-2-27b", "(WF)23", 8192, 0},
    {"gemma-3-27b", "(WWWWWF)10 WW", 131072, 0},
    {"gemma-3n-e4b", "(WWWWF)4 (=)15", 32768, 0},
    {"gemma-4-26b-a4b", "(WWWWWF)5", 262144, 0},
    {"gpt-oss-120b", "(WF)18", 131072, 0},
    {"gpt-oss-20b", "(WF)12", 131072, 0},
    {"granite-4.0-h-micro", "(S)5 F (S)9 F (S)9 F (S)9 F (S)4", 131072, 0},
    {"granite-4.0-h-small", "(S)5 F (S)9 F (S)9 F (S)9 F (S)4", 131072, 0},
    {"hunyuan-a13b", "(F)32", 32768, 0},
    {"hunyuan-large", "(F=)32", 262144, 0},
    {"jamba-1.5-mini", "(SSSSFSSS)4", 262144, 0},
    {"jamba-v0.1", "(SSSSFSSS)4", 262144, 0},
    {"kimi-k3", "(SSSL)23 L", 1048576, 0},
    {"kimi-linear-48b-a3b", "(SSSL)6 SSL", 1048576, 0},
    {"lfm2-1.2b", "SSF SSF SSF SF SF SF S", 128000, 0},
    {"llama-3.1-70b", "(F)80", 131072, 0},
    {"llama-3.2-11b-vision", "(FFFXF)8", 131072, 6404},
    {"llama-3.2-90b-vision", "(FFFXF)20", 131072, 6404},
    {"llama-4-scout", "(CCCF)12", 10485760, 0},
    {"mimo-v2-flash", "F WWWW (FWWWWW)7 F", 262144, 0},
    {"minimax-m2.7", "(F)62", 204800, 0},
    {"minimax-m3", "FFF (I)57", 1048576, 0},
    {"minimax-text-01", "(SSSSSSSF)10", 10240000, 0},
    {"ministral-8b-2410", "(F)36", 32768, 0},
    {"mistral-7b-v0.1", "(W)32", 32768, 0},
    {"nemotron-3-nano-30b-a3b", "S.S.SF .S.S.SF .S.S.SF .S.S.SF .S.S.SF .S.S.S.SF .S.S.S.S.",
     262144, 0},
    {"nemotron-3-super-120b-a12b",
     "S.S.S.SF .S.S.S.SF .S.S.S.SF .S.S.S.S.SF .S.S.S.S.SF .S.S.S.S.SF .S.S.S.S.SF .S.S.S.SF "
     ".S.S.S.S.",
     262144, 0},
    {"nemotron-h-56b", "S.S.S.SF (.S.S.S.S.SF)9 .S.S.S.S.S.", 8192, 0},
    {"nemotron-h-8b", "S.S.S.SF (.S.S.S.S.SF)3 .S.S.S.S.S.", 8192, 0},
    {"nemotron-nano-12b-v2", "S.S.S.SF (.S.S.S.SF)5 .S.S.S.S.", 131072, 0},
    {"phi-4-mini-flash", "(SW)8 SF (.=)7", 0, 0},
    {"qwen3-next-80b-a3b", "(SSSF)12", 262144, 0},
    {"qwen3-vl-8b", "(F)36", 262144, 0},
    {"qwen3.5-27b", "(SSSF)16", 262144, 0},
    {"qwen3.5-35b-a3b", "(SSSF)10", 262144, 0},
    {"recurrentgemma-9b", "(SSW)12 SS", 0, 0},
    {"step-3.7-flash", "(FWWW)11 F", 65536, 0},
    {"whisper-large-v3", "(B)32", 448, 1500},
    {"zamba2-2.7b", "(S)6 H (S)5 H (S)5 H (S)5 H (S)5 H (S)5 H (S)5 H (S)4 H (S)3 H SS", 4096, 0},
};

TEST_CASE("each layer of every published configuration is read as its model's code has it") {
  for (const Expected& expected : models) {
    CAPTURE(expected.file);
    const ModelConfig model = read_model_config(model_file(expected.file));
    CHECK(letters_of(model) == expand(expected.layers));
    CHECK(model.max_len.value_or(0) == expected.max_len);
    CHECK(model.encoder_tokens.value_or(0) == expected.encoder_tokens);
    CHECK(model.dtype == DType::bfloat16);
    CHECK(model.model_type == model_json(expected.file).at("model_type").get<std::string>());
  }
}

TEST_CASE("no file of the models folder is left out of the table") {
  std::set<std::string> listed;
  for (const Expected& expected : models) listed.insert(std::string(expected.file));
  std::set<std::string> there;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::filesystem::path(KVLEAF_TEST_DATA) / "models"))
    if (entry.path().extension() == ".json") there.insert(entry.path().stem().string());
  CHECK(listed == there);
}

const AttentionCache& attention(const ModelConfig& model, std::size_t layer) {
  return std::get<AttentionCache>(model.layers.at(layer).caches.at(0));
}

TEST_CASE("windows, chunks and widths are those of the file") {
  const ModelConfig gemma = read_model_config(model_file("gemma-4-26b-a4b"));
  CHECK(attention(gemma, 0) == AttentionCache{.kv_heads = 8, .head_dim = 256, .window = 1024});
  CHECK(attention(gemma, 5) == AttentionCache{.kv_heads = 2, .head_dim = 512, .k_eq_v = true});
  const ModelConfig mimo = read_model_config(model_file("mimo-v2-flash"));
  CHECK(attention(mimo, 0) ==
        AttentionCache{.kv_heads = 4, .head_dim = 192, .value_head_dim = 128});
  CHECK(attention(mimo, 1) ==
        AttentionCache{.kv_heads = 8, .head_dim = 192, .value_head_dim = 128, .window = 128});
  CHECK(attention(read_model_config(model_file("llama-4-scout")), 0).chunk == 8192);
  CHECK(attention(read_model_config(model_file("mistral-7b-v0.1")), 0).window == 4096);
  CHECK(attention(read_model_config(model_file("recurrentgemma-9b")), 2).window == 2048);
  CHECK(attention(read_model_config(model_file("phi-4-mini-flash")), 1).window == 512);
  // The sinks of gpt-oss are logits, not tokens.
  CHECK(attention(read_model_config(model_file("gpt-oss-20b")), 0) ==
        AttentionCache{.kv_heads = 8, .head_dim = 64, .window = 128});
}

TEST_CASE("a layer that owns nothing names the layer it reads") {
  const auto source = [](const ModelConfig& model, std::size_t layer) {
    return std::get<SharedCache>(model.layers.at(layer).caches.at(0)).layer;
  };
  // M-05: the last 15 of 35 layers read the last layer of their kind that owns: 18 windowed, 19
  // full.
  const ModelConfig gemma = read_model_config(model_file("gemma-3n-e4b"));
  CHECK(source(gemma, 20) == 18);
  CHECK(source(gemma, 24) == 19);
  CHECK(source(gemma, 33) == 18);
  CHECK(source(gemma, 34) == 19);
  const ModelConfig phi = read_model_config(model_file("phi-4-mini-flash"));
  for (const std::size_t layer : {19, 21, 31}) CHECK(source(phi, layer) == 17);
  const ModelConfig hunyuan = read_model_config(model_file("hunyuan-large"));
  CHECK(source(hunyuan, 1) == 0);
  CHECK(source(hunyuan, 63) == 62);
}

// ---- rules that no published file shows ---------------------------------------------------------

nlohmann::json small_llama() {
  return {{"model_type", "llama"},
          {"hidden_size", 4096},
          {"num_hidden_layers", 2},
          {"num_attention_heads", 32}};
}
ModelConfig parse(const nlohmann::json& json, ReadOptions options = {}) {
  return parse_model_config(json.dump(), options);
}

TEST_CASE("M-06: no head_dim is hidden / heads, no KV heads are as many as heads") {
  const ModelConfig model = parse(small_llama());
  CHECK(attention(model, 0) == AttentionCache{.kv_heads = 32, .head_dim = 128});
}

TEST_CASE("M-06: a window or chunk of all positions is full attention") {
  nlohmann::json json = small_llama();
  json["model_type"] = "mistral";
  json["max_position_embeddings"] = 4096;
  json["sliding_window"] = 4095;
  CHECK(attention(parse(json), 0).window == 4095);
  json["sliding_window"] = 4096;
  CHECK_FALSE(attention(parse(json), 0).window);
  json = model_json("llama-4-scout");
  json["text_config"]["max_position_embeddings"] = 8192;
  CHECK_FALSE(attention(parse(json), 0).chunk);
}

TEST_CASE("a key that is null is as absent") {
  nlohmann::json json = small_llama();
  json["model_type"] = "mistral";
  json["sliding_window"] = nullptr;
  json["head_dim"] = nullptr;
  CHECK(attention(parse(json), 0) == AttentionCache{.kv_heads = 32, .head_dim = 128});
}

TEST_CASE(
    "qwen has windows only where use_sliding_window switches them on, from max_window_layers") {
  nlohmann::json json = small_llama();
  json["model_type"] = "qwen2";
  json["num_hidden_layers"] = 4;
  json["sliding_window"] = 1024;
  json["max_window_layers"] = 3;
  CHECK(letters_of(parse(json)) == "FFFF");
  json["use_sliding_window"] = true;
  CHECK(letters_of(parse(json)) == "FFFW");
}

TEST_CASE("layer_types decide where they are given") {
  nlohmann::json json = small_llama();
  json["sliding_window"] = 1024;
  json["attention_chunk_size"] = 2048;
  json["num_hidden_layers"] = 3;
  json["layer_types"] = {"sliding_attention", "chunked_attention", "full_attention"};
  CHECK(letters_of(parse(json)) == "WCF");
}

TEST_CASE(
    "without layer_types the patterns of gemma 3, cohere 2, exaone 4 and gpt-oss are the models' "
    "own") {
  const std::pair<const char*, const char*> cases[] = {{"gemma-3-27b", "(WWWWWF)10 WW"},
                                                       {"exaone-4.0-32b", "(WWWF)16"},
                                                       {"gpt-oss-20b", "(WF)12"},
                                                       {"gemma-3n-e4b", "(WWWWF)4 (=)15"},
                                                       {"gemma-4-26b-a4b", "(WWWWWF)5"}};
  for (const auto& named : cases) {
    const auto [file, pattern] = named;
    CAPTURE(named.first);
    nlohmann::json json = model_json(file);
    (json.contains("text_config") ? json["text_config"] : json).erase("layer_types");
    CHECK(letters_of(parse(json)) == expand(pattern));
  }
}

TEST_CASE("a per-layer list may go on for the announced draft layers, and no further") {
  nlohmann::json json = model_json("step-3.7-flash");
  for (int i = 0; i < 3; ++i) json["layer_types"].push_back("sliding_attention");
  CHECK(parse(json).layers.size() == 45);
  json["layer_types"].push_back("sliding_attention");
  CHECK_THROWS_WITH_AS(parse(json),
                       "config: layer_types names 49 layers, num_hidden_layers 45; expected 45",
                       ConfigError);
}

TEST_CASE("an index value that is not disabled doubles the indexer's entry") {
  nlohmann::json json = model_json("minimax-m3");
  json["sparse_attention_config"]["sparse_disable_index_value"][3] = 0;
  const ModelConfig model = parse(json);
  CHECK(std::get<IndexerCache>(model.layers[3].caches[1]).width == 256);
  CHECK(std::get<IndexerCache>(model.layers[4].caches[1]).width == 128);
}

TEST_CASE("the dtype is the caller's, else the text's, else the root's, else bfloat16") {
  nlohmann::json json = {{"model_type", "qwen3_vl"}, {"text_config", small_llama()}};
  CHECK(parse(json).dtype == DType::bfloat16);
  json["torch_dtype"] = "float32";
  CHECK(parse(json).dtype == DType::float32);
  json["text_config"]["dtype"] = "float16";
  CHECK(parse(json).dtype == DType::float16);
  CHECK(parse(json, {.dtype = DType::float32}).dtype == DType::float32);
}

// ---- states -------------------------------------------------------------------------------------

std::vector<Slab> slabs(const ModelConfig& model) {
  for (const KVLayerSpec& spec : model.layers)
    for (const LayerCache& cache : spec.caches)
      if (const auto* state = std::get_if<StateCache>(&cache)) return state->slabs;
  return {};
}

TEST_CASE("states have the shapes that their kernels index") {
  using Shape = std::vector<std::uint32_t>;
  struct Case {
    std::string_view file;
    Shape conv, recurrent;  // empty: none
  };
  const Case cases[] = {
      {"jamba-v0.1", {8192, 3}, {8192, 16}},
      {"phi-4-mini-flash", {5120, 3}, {5120, 16}},
      {"nemotron-3-nano-30b-a3b", {6144, 3}, {64, 64, 128}},  // M-04
      {"nemotron-h-56b", {20480, 3}, {256, 64, 256}},
      {"bamba-9b", {8448, 3}, {128, 64, 128}},
      {"granite-4.0-h-micro", {4352, 3}, {64, 64, 128}},
      {"falcon-h1-7b", {3584, 3}, {24, 128, 256}},
      {"falcon-h1-0.5b", {1792, 3}, {24, 64, 128}},
      {"zamba2-2.7b", {5248, 3}, {80, 64, 64}},
      {"qwen3-next-80b-a3b", {8192, 3}, {32, 128, 128}},
      {"qwen3.5-27b", {10240, 3}, {48, 128, 128}},
      {"kimi-linear-48b-a3b", {12288, 3}, {32, 128, 128}},
      {"kimi-k3", {36864, 3}, {96, 128, 128}},
      {"minimax-text-01", {}, {64, 128, 128}},
      {"recurrentgemma-9b", {4096, 3}, {4096}},
      {"lfm2-1.2b", {2048, 2}, {}},
  };
  for (const Case& c : cases) {
    CAPTURE(c.file);
    Shape conv, recurrent;
    for (const Slab& slab : slabs(read_model_config(model_file(c.file)))) {
      CHECK(slab.dtype == (slab.name == "conv" ? DType::bfloat16 : DType::float32));
      (slab.name == "conv" ? conv : recurrent) = slab.shape;
    }
    CHECK(conv == c.conv);
    CHECK(recurrent == c.recurrent);
  }
}

TEST_CASE("mamba_ssm_dtype decides the recurrent slab, the model's dtype the convolution") {
  nlohmann::json json = model_json("nemotron-3-nano-30b-a3b");
  json["mamba_ssm_cache_dtype"] = "bfloat16";
  json["torch_dtype"] = "float16";
  const std::vector<Slab> both = slabs(parse(json));
  CHECK(both.at(0).dtype == DType::float16);
  CHECK(both.at(1).dtype == DType::bfloat16);
}

TEST_CASE("layer names as newer releases of transformers write them are read") {
  nlohmann::json json = model_json("nemotron-3-nano-30b-a3b");
  const std::vector<KVLayerSpec> published = parse(json).layers;
  nlohmann::json names = nlohmann::json::array();
  for (const char letter : json["hybrid_override_pattern"].get<std::string>())
    names.push_back(letter == 'M'   ? "linear_attention"
                    : letter == '*' ? "full_attention"
                    : letter == 'E' ? "moe"
                                    : "mlp");
  json.erase("hybrid_override_pattern");
  json.erase("num_hidden_layers");
  json["layers_block_type"] = names;
  CHECK(parse(json).layers == published);
  json["layers_block_type"][3] = "conv";
  CHECK_THROWS_WITH_AS(parse(json),
                       doctest::Contains("layers_block_type[3] is the unknown layer type \"conv\""),
                       ConfigError);

  json = model_json("granite-4.0-h-small");
  const std::vector<KVLayerSpec> granite = parse(json).layers;
  for (nlohmann::json& name : json["layer_types"])
    name = name == "mamba" ? "linear_attention" : "full_attention";
  CHECK(parse(json).layers == granite);
}

TEST_CASE("floats that Python writes and JSON does not have stand for nothing") {
  std::string text = model_json("nemotron-3-nano-30b-a3b").dump();
  const std::vector<KVLayerSpec> published = parse_model_config(text).layers;
  text.insert(1, R"("time_step_limit": [0.0, Infinity], "low": -Infinity, "no":NaN,
      "text": "not NaN, \" nor Infinity\\", "rope": {"factor":Infinity},)");
  CHECK(parse_model_config(text).layers == published);

  const auto with = [](const char* value) {
    return std::string(R"({"model_type": "llama", "num_attention_heads": )") + value + "}";
  };
  CHECK_THROWS_WITH_AS(parse_model_config(with("Infinity")),
                       doctest::Contains("num_attention_heads is missing"), ConfigError);
  // Inside a string they are text.
  CHECK_THROWS_WITH_AS(parse_model_config(R"({"model_type": "NaN\\\"-Infinity"})"),
                       doctest::Contains("the unknown \"NaN\\\"-Infinity\""), ConfigError);
  for (const char* wrong : {"-NaN", "Infinit", "Infinity1", "nan", "\"NaN", "\"NaN\\", "1e999"})
    CHECK_THROWS_WITH_AS(parse_model_config(with(wrong)), doctest::Contains("is not JSON"),
                         ConfigError);
}

TEST_CASE("models of nothing but states are read") {
  const ModelConfig mamba = parse({{"model_type", "mamba"},
                                   {"num_hidden_layers", 3},
                                   {"intermediate_size", 1536},
                                   {"state_size", 16},
                                   {"conv_kernel", 4}});
  CHECK(letters_of(mamba) == "SSS");
  CHECK(slabs(mamba).at(1).shape == std::vector<std::uint32_t>{1536, 16});
  const ModelConfig mamba2 = parse({{"model_type", "mamba2"},
                                    {"num_hidden_layers", 2},
                                    {"num_heads", 128},
                                    {"head_dim", 64},
                                    {"n_groups", 8},
                                    {"state_size", 128},
                                    {"conv_kernel", 4}});
  CHECK(slabs(mamba2).at(0).shape == std::vector<std::uint32_t>{10240, 3});
}

TEST_CASE("a Mamba-2 head_dim of \"auto\" is the expanded width over the heads") {
  nlohmann::json json = model_json("bamba-9b");
  json["mamba_d_head"] = "auto";
  CHECK(slabs(parse(json)).at(1).shape == std::vector<std::uint32_t>{128, 64, 128});
}

// ---- tensor parallelism -------------------------------------------------------------------------

TEST_CASE("ranks divide KV heads, and hold the same head where there are fewer") {
  const auto kv_heads = [](std::uint32_t ranks) {
    return attention(read_model_config(model_file("llama-3.1-70b"), {.tensor_parallel = ranks}), 0)
        .kv_heads;
  };
  CHECK(kv_heads(1) == 8);
  CHECK(kv_heads(2) == 4);
  CHECK(kv_heads(8) == 1);
  CHECK(kv_heads(16) == 1);
  CHECK_THROWS_WITH_AS(
      kv_heads(3),
      doctest::Contains("num_key_value_heads gives 8, which tensor_parallel 3 does "
                        "not divide; expected a divisor of 8"),
      ConfigError);
  CHECK_THROWS_WITH_AS(kv_heads(12), doctest::Contains("a divisor or a multiple of 8"),
                       ConfigError);
  CHECK_THROWS_AS(kv_heads(0), InvalidArgument);
}

TEST_CASE("ranks divide the heads of states, and every rank holds a latent entry") {
  const auto shapes = [](std::string_view file, std::uint32_t ranks) {
    std::vector<std::vector<std::uint32_t>> list;
    for (const Slab& slab : slabs(read_model_config(model_file(file), {.tensor_parallel = ranks})))
      list.push_back(slab.shape);
    return list;
  };
  using Shapes = std::vector<std::vector<std::uint32_t>>;
  CHECK(shapes("qwen3-next-80b-a3b", 4) == Shapes{{2048, 3}, {8, 128, 128}});
  CHECK(shapes("nemotron-3-nano-30b-a3b", 2) == Shapes{{3072, 3}, {32, 64, 128}});
  // One group of B and C is held by both ranks: 4,096 inner channels and 2 x 128 beside them.
  CHECK(shapes("bamba-9b", 2) == Shapes{{4352, 3}, {64, 64, 128}});
  CHECK(shapes("kimi-linear-48b-a3b", 8) == Shapes{{1536, 3}, {4, 128, 128}});
  CHECK(shapes("jamba-v0.1", 4) == Shapes{{2048, 3}, {2048, 16}});
  CHECK(shapes("recurrentgemma-9b", 4) == Shapes{{1024, 3}, {1024}});
  CHECK(shapes("lfm2-1.2b", 2) == Shapes{{1024, 2}});
  CHECK(shapes("minimax-text-01", 8) == Shapes{{8, 128, 128}});
  CHECK_THROWS_WITH_AS(shapes("qwen3-next-80b-a3b", 3), doctest::Contains("tensor_parallel 3"),
                       ConfigError);
  const ModelConfig model = read_model_config(model_file("deepseek-v3"), {.tensor_parallel = 8});
  CHECK(std::get<LatentCache>(model.layers[0].caches[0]).width == 576);
}

// ---- errors -------------------------------------------------------------------------------------

TEST_CASE("M-06: an unknown layer type is refused with its name, its layer, and how to add it") {
  nlohmann::json json = model_json("gemma-3-27b");
  json["text_config"]["layer_types"][7] = "dilated_attention";
  CHECK_THROWS_WITH_AS(
      parse_model_config(json.dump(), {}, "gemma.json"),
      "gemma.json: text_config.layer_types[7] is the unknown layer type \"dilated_attention\"; "
      "expected \"full_attention\" or \"sliding_attention\" or \"chunked_attention\". To add a "
      "type, "
      "give its family in cache/families a rule, or make the leaves by hand",
      ConfigError);
  json = model_json("nemotron-h-8b");
  json["hybrid_override_pattern"] = "M-M-M-MQ-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-";
  CHECK_THROWS_WITH_AS(
      parse(json), doctest::Contains("hybrid_override_pattern[7] is the unknown layer type 'Q'"),
      ConfigError);
  json = model_json("deepseek-v4-flash");
  json["compress_ratios"][7] = 16;
  CHECK_THROWS_WITH_AS(
      parse(json),
      doctest::Contains("compress_ratios[7] is the unknown layer type 16; expected 0 or 4 or 128"),
      ConfigError);
  json = model_json("recurrentgemma-9b");
  json["block_types"][1] = "fourier";
  CHECK_THROWS_WITH_AS(parse(json), doctest::Contains("unknown layer type \"fourier\" (layer 1)"),
                       ConfigError);
}

TEST_CASE("an unknown model_type lists the known ones") {
  nlohmann::json json = small_llama();
  json["model_type"] = "retnet";
  CHECK_THROWS_WITH_AS(parse(json),
                       doctest::Contains("model_type is the unknown \"retnet\"; expected "
                                         "one of bamba, bart, "),
                       ConfigError);
  for (const std::string_view type : known_model_types())
    CHECK_THROWS_WITH_AS(parse(json), doctest::Contains(std::string(type).c_str()), ConfigError);
  json.erase("model_type");
  CHECK_THROWS_WITH_AS(parse(json), "config: model_type is missing; expected a string",
                       ConfigError);
}

TEST_CASE(
    "any key that a file cannot do without is named when it is missing, and nothing else happens") {
  // Each key is taken away in turn: the result is a model or a ConfigError that names the file.
  for (const Expected& expected : models) {
    const nlohmann::json whole = model_json(expected.file);
    const auto without = [&](const nlohmann::json::json_pointer& path, const std::string& key) {
      nlohmann::json json = whole;
      json[path].erase(key);
      CAPTURE(expected.file);
      CAPTURE(key);
      try {
        parse_model_config(json.dump(), {}, "a.json");
      } catch (const ConfigError& error) {
        CHECK(std::string_view(error.what()).starts_with("a.json: "));
        CHECK(std::string_view(error.what()).find("expected") != std::string_view::npos);
      }
    };
    for (const auto& [key, value] : whole.items()) {
      without(nlohmann::json::json_pointer(""), key);
      if (value.is_object())
        for (const auto& [inner, unused] : value.items())
          without(nlohmann::json::json_pointer("/" + key), inner);
    }
  }
}

TEST_CASE("a value of the wrong kind or out of range is named with what is accepted") {
  const nlohmann::json bad[] = {"many",
                                0,
                                -1,
                                4.5,
                                1e300,
                                true,
                                nlohmann::json::array({1}),
                                nlohmann::json::object(),
                                18446744073709551615ULL};
  for (const nlohmann::json& value : bad) {
    CAPTURE(value.dump());
    nlohmann::json json = small_llama();
    json["num_attention_heads"] = value;
    CHECK_THROWS_WITH_AS(parse(json), doctest::Contains("num_attention_heads is "), ConfigError);
    CHECK_THROWS_WITH_AS(parse(json), doctest::Contains("; expected an integer from 1 to 65536"),
                         ConfigError);
  }
  nlohmann::json json = small_llama();
  json["num_attention_heads"] = 33;
  CHECK_THROWS_WITH_AS(parse(json), doctest::Contains("head_dim is missing and hidden_size 4096"),
                       ConfigError);
  json = small_llama();
  json["torch_dtype"] = "float12";
  CHECK_THROWS_WITH_AS(parse(json), doctest::Contains("torch_dtype is \"float12\"; expected "),
                       ConfigError);
  json = model_json("qwen3-next-80b-a3b");
  json["linear_conv_kernel_dim"] = 1;
  CHECK_THROWS_WITH_AS(parse(json),
                       doctest::Contains("linear_conv_kernel_dim is 1; expected an integer from 2"),
                       ConfigError);
  json = model_json("kimi-linear-48b-a3b");
  json["linear_attn_config"]["kda_layers"][0] = 2;
  CHECK_THROWS_WITH_AS(
      parse(json),
      doctest::Contains("linear_attn_config.full_attn_layers and kda_layers do not name "
                        "layer 1 (counted from 1)"),
      ConfigError);
  json = model_json("bamba-9b");
  json["attn_layer_indices"][2] = 32;
  CHECK_THROWS_WITH_AS(
      parse(json),
      doctest::Contains("attn_layer_indices[2] is 32; expected an integer from 0 to 31"),
      ConfigError);
  json = model_json("gemma-3n-e4b");
  json["text_config"]["num_kv_shared_layers"] = 32;
  CHECK_THROWS_WITH_AS(parse(json), doctest::Contains("no earlier layer of its kind"), ConfigError);
}

TEST_CASE("what is not a configuration is refused with the file's name") {
  CHECK_THROWS_WITH_AS(parse_model_config("{\"model_type\": ", {}, "cut.json"),
                       doctest::Contains("cut.json: is not JSON: parse error at line 1, column"),
                       ConfigError);
  CHECK_THROWS_WITH_AS(parse_model_config("", {}, "empty.json"),
                       doctest::Contains("empty.json: is not JSON"), ConfigError);
  CHECK_THROWS_WITH_AS(parse_model_config("[1, 2]", {}, "list.json"),
                       "list.json: holds no object; expected a model's config.json", ConfigError);
  CHECK_THROWS_WITH_AS(read_model_config("/nowhere/config.json"),
                       doctest::Contains("/nowhere/config.json: cannot be read: No such file"),
                       ConfigError);
  CHECK_THROWS_WITH_AS(read_model_config(KVLEAF_TEST_DATA), doctest::Contains("is a directory"),
                       ConfigError);
  // Nesting that a recursive reader would not survive.
  const std::string deep =
      "{\"model_type\": \"llama\", \"num_attention_heads\": " + std::string(200000, '[') +
      std::string(200000, ']') + "}";
  CHECK_THROWS_WITH_AS(parse_model_config(deep), doctest::Contains("num_attention_heads is a list"),
                       ConfigError);
}

}  // namespace
}  // namespace kvleaf
