// Leaves composed from configurations: which layers share a page, and how many bytes each keeps.
#include "kvleaf/cache/model_leaves.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <numeric>
#include <set>
#include <string>

#include "cache/model_files.h"
#include "kvleaf/group/block_manager.h"
#include "kvleaf/leaf/errors.h"

namespace kvleaf {
namespace {

using test::model_file;
using test::model_json;

ModelLeaves load(std::string_view file, LeavesOptions options = {}) {
  return model_from_config(model_file(file), options);
}

const KVLeafRegion& leaf(const ModelLeaves& model, std::string_view id) {
  for (const Leaf& candidate : model.leaves)
    if (candidate->leaf_id() == id) return *candidate;
  std::string ids;
  for (const Leaf& candidate : model.leaves) ids += candidate->leaf_id() + " ";
  FAIL("no leaf " << id << " among " << ids);
  throw 0;
}

/// Bytes that one layer keeps of one token (of one request, for states: their page has no tokens).
std::uint64_t bytes_per_layer(const KVLeafRegion& leaf) {
  const std::uint64_t tokens =
      leaf.group_id().writing == Writing::in_place ? 1 : leaf.tokens_per_page().value();
  return leaf.bytes_per_page() / leaf.layers() / tokens;
}

std::string ids(const ModelLeaves& model) {
  std::string list;
  for (const Leaf& leaf : model.leaves)
    list += fmt::format("{}{}:{}", list.empty() ? "" : " ", leaf->leaf_id(), leaf->layers());
  return list;
}

// ---- every model --------------------------------------------------------------------------------

struct Sizes {
  std::string_view file;
  std::string_view leaves;  // id:layers in order of the first layer
  std::uint64_t attention;  // bytes per token and layer of the first leaf that is no state; 0: none
  std::uint64_t state;      // bytes per layer, conv + recurrent
};

constexpr Sizes models[] = {
    {"bamba-9b", "state:29 full:3", 4096, 50688 + 4194304},
    {"bart-large", "full:12 cross:12", 4096, 0},
    {"command-a-111b", "window_4096:48 full:16", 4096, 0},
    {"command-r7b", "window_4096:24 full:8", 4096, 0},
    {"deepseek-v3", "latent:61", 1152, 0},
    {"deepseek-v3.2", "latent:61 indexer:61", 1152, 0},
    {"deepseek-v4-flash", "window_128:43 latent_4:21 indexer_4:21 latent_128:20", 1024, 0},
    {"deepseek-v4-pro", "window_128:61 latent_128:31 latent_4:30 indexer_4:30", 1024, 0},
    {"exaone-4.0-32b", "window_4096:48 full:16", 4096, 0},
    {"falcon-h1-0.5b", "full:36 state:36", 512, 10752 + 786432},
    {"falcon-h1-7b", "full:44 state:44", 1024, 21504 + 3145728},
    {"florence-2-large", "full:12 cross:12", 4096, 0},
    {"gemma-2-27b", "window_4096:23 full:23", 8192, 0},
    {"gemma-3-27b", "window_1024:52 full:10", 8192, 0},
    {"gemma-3n-e4b", "window_512:16 full:4", 2048, 0},
    {"gemma-4-26b-a4b", "window_1024:25 full:5", 8192, 0},
    {"gpt-oss-120b", "window_128:18 full:18", 2048, 0},
    {"gpt-oss-20b", "window_128:12 full:12", 2048, 0},
    {"granite-4.0-h-micro", "state:36 full:4", 2048, 26112 + 2097152},
    {"granite-4.0-h-small", "state:36 full:4", 4096, 50688 + 4194304},
    {"hunyuan-a13b", "full:32", 4096, 0},
    {"hunyuan-large", "full:32", 2560, 0},
    {"jamba-1.5-mini", "state:28 full:4", 4096, 49152 + 524288},
    {"jamba-v0.1", "state:28 full:4", 4096, 49152 + 524288},
    {"kimi-k3", "state:69 latent:24", 1152, 221184 + 6291456},
    {"kimi-linear-48b-a3b", "state:20 latent:7", 1152, 73728 + 2097152},
    {"lfm2-1.2b", "state:10 full:6", 2048, 8192},
    {"llama-3.1-70b", "full:80", 4096, 0},
    {"llama-3.2-11b-vision", "full:32 cross:8", 4096, 0},
    {"llama-3.2-90b-vision", "full:80 cross:20", 4096, 0},
    {"llama-4-scout", "chunk_8192:36 full:12", 4096, 0},
    {"mimo-v2-flash", "full:9 window_128:39", 2560, 0},
    {"minimax-m2.7", "full:62", 4096, 0},
    {"minimax-m3", "full:60 indexer:57", 2048, 0},
    {"minimax-text-01", "state:70 full:10", 4096, 4194304},
    {"ministral-8b-2410", "full:36", 4096, 0},
    {"mistral-7b-v0.1", "window_4096:32", 4096, 0},
    {"nemotron-3-nano-30b-a3b", "state:23 full:6", 1024, 36864 + 2097152},
    {"nemotron-3-super-120b-a12b", "state:40 full:8", 1024, 61440 + 4194304},
    {"nemotron-h-56b", "state:54 full:10", 4096, 122880 + 16777216},
    {"nemotron-h-8b", "state:24 full:4", 4096, 61440 + 4194304},
    {"nemotron-nano-12b-v2", "state:28 full:6", 4096, 73728 + 5242880},
    {"phi-4-mini-flash", "state:9 window_512:8 full:1", 5120, 30720 + 327680},
    {"qwen3-next-80b-a3b", "state:36 full:12", 2048, 49152 + 2097152},
    {"qwen3-vl-8b", "full:36", 4096, 0},
    {"qwen3.5-27b", "state:48 full:16", 4096, 61440 + 3145728},
    {"qwen3.5-35b-a3b", "state:30 full:10", 2048, 49152 + 2097152},
    {"recurrentgemma-9b", "state:26 window_2048:12", 1024, 24576 + 16384},
    {"step-3.7-flash", "full:12 window_512:33", 4096, 0},
    {"whisper-large-v3", "full:32 cross:32", 5120, 0},
    {"zamba2-2.7b", "state:54 full:9", 20480, 31488 + 1310720},
};

TEST_CASE("every published configuration composes the leaves, and keeps the bytes, of its model") {
  for (const Sizes& expected : models) {
    CAPTURE(expected.file);
    const ModelLeaves model = load(expected.file);
    CHECK(ids(model) == expected.leaves);
    std::uint64_t attention = 0, state = 0;
    for (const Leaf& leaf : model.leaves) {
      const bool is_state = leaf->group_id().writing == Writing::in_place;
      std::uint64_t& bytes = is_state ? state : attention;
      if (bytes == 0) bytes = bytes_per_layer(*leaf);
    }
    CHECK(attention == expected.attention);
    CHECK(state == expected.state);
  }
}

TEST_CASE("the second kind of a model keeps its own bytes") {
  CHECK(bytes_per_layer(leaf(load("mimo-v2-flash"), "window_128")) == 5120);
  CHECK(bytes_per_layer(leaf(load("gemma-4-26b-a4b"), "full")) == 4096);
  CHECK(bytes_per_layer(leaf(load("deepseek-v3.2"), "indexer")) == 256);
  CHECK(bytes_per_layer(leaf(load("minimax-m3"), "indexer")) == 256);
  const ModelLeaves whisper = load("whisper-large-v3");
  CHECK(bytes_per_layer(leaf(whisper, "cross")) * whisper.config.encoder_tokens.value() == 7680000);
  const ModelLeaves mllama = load("llama-3.2-11b-vision");
  CHECK(bytes_per_layer(leaf(mllama, "cross")) * mllama.config.encoder_tokens.value() == 26230784);
}

TEST_CASE("a layer's state costs as many tokens of a layer's attention as published") {
  struct Worth {
    std::string_view file;
    std::uint64_t tokens;
  };
  for (const Worth& worth : {Worth{"qwen3-next-80b-a3b", 1048},
                             {"qwen3.5-27b", 783},
                             {"nemotron-3-nano-30b-a3b", 2084},
                             {"nemotron-3-super-120b-a12b", 4156},
                             {"nemotron-h-8b", 1039},
                             {"jamba-v0.1", 140},
                             {"granite-4.0-h-small", 1037},
                             {"granite-4.0-h-micro", 1037},
                             {"bamba-9b", 1037},
                             {"falcon-h1-7b", 3093},
                             {"zamba2-2.7b", 66},
                             {"kimi-linear-48b-a3b", 1885},
                             {"kimi-k3", 5654},
                             {"minimax-text-01", 1024},
                             {"phi-4-mini-flash", 70},
                             {"recurrentgemma-9b", 40},
                             {"lfm2-1.2b", 4}}) {
    CAPTURE(worth.file);
    const ModelLeaves model = load(worth.file);
    std::uint64_t attention = 0, state = 0;
    for (const Leaf& leaf : model.leaves) {
      const bool is_state = leaf->group_id().writing == Writing::in_place;
      (is_state ? state : attention) = bytes_per_layer(*leaf);
    }
    CHECK((state + attention - 1) / attention == worth.tokens);  // whole tokens
  }
}

TEST_CASE("each layer of a model is held by exactly the leaves its spec names") {
  for (const Sizes& expected : models) {
    CAPTURE(expected.file);
    const ModelLeaves model = load(expected.file);
    REQUIRE(model.layers_of.size() == model.leaves.size());
    std::vector<std::uint32_t> kept(model.config.layers.size(), 0);
    std::set<std::string> names;
    for (std::size_t i = 0; i < model.leaves.size(); ++i) {
      CHECK(names.insert(model.leaves[i]->leaf_id()).second);
      CHECK(model.layers_of[i].size() == model.leaves[i]->layers());
      CHECK(std::ranges::is_sorted(model.layers_of[i]));
      for (const std::uint32_t layer : model.layers_of[i]) ++kept.at(layer);
    }
    for (std::size_t layer = 0; layer < kept.size(); ++layer) {
      const auto& caches = model.config.layers[layer].caches;
      const auto owned = std::ranges::count_if(
          caches, [](const LayerCache& c) { return !std::holds_alternative<SharedCache>(c); });
      CHECK(kept[layer] == owned);
    }
  }
}

// ---- the case catalogue -------------------------------------------------------------------------

TEST_CASE("M-01: two reaches are two leaves of the bytes of their layers") {
  const ModelLeaves gemma = load("gemma-3-27b");
  CHECK(ids(gemma) == "window_1024:52 full:10");
  CHECK(leaf(gemma, "full").bytes_per_page() == 1310720);
  CHECK(leaf(gemma, "window_1024").bytes_per_page() == 6815744);
  CHECK(leaf(gemma, "window_1024").group_id() == KVCacheGroupId::sliding_window(1024));
  const ModelLeaves oss = load("gpt-oss-20b");
  CHECK(leaf(oss, "full").bytes_per_page() == 393216);
  CHECK(leaf(oss, "window_128").bytes_per_page() == 393216);
}

TEST_CASE("M-02: chunks, and one latent leaf of 61 layers") {
  const ModelLeaves scout = load("llama-4-scout");
  CHECK(leaf(scout, "chunk_8192").layers() == 36);
  CHECK(leaf(scout, "chunk_8192").group_id() == KVCacheGroupId::chunked(8192));
  CHECK(leaf(scout, "full").layers() == 12);
  const ModelLeaves deepseek = load("deepseek-v3", {.tokens_per_page = 64});
  CHECK(ids(deepseek) == "latent:61");
  CHECK(leaf(deepseek, "latent").bytes_per_page() == 4497408);
}

TEST_CASE("M-03: one state leaf holds both slabs of 36 layers") {
  const ModelLeaves qwen = load("qwen3-next-80b-a3b");
  CHECK(leaf(qwen, "state").bytes_per_page() == 77266944);
  CHECK(leaf(qwen, "state").layers() == 36);
  CHECK(leaf(qwen, "full").layers() == 12);
}

TEST_CASE("M-04: slabs of 847,872 and 48,234,496 bytes make a page of 49,082,368") {
  const ModelLeaves nemotron = load("nemotron-3-nano-30b-a3b");
  CHECK(leaf(nemotron, "state").bytes_per_page() == 49082368);
  const auto& state = std::get<StateCache>(nemotron.config.layers[0].caches[0]);
  CHECK(state.slabs[0].bytes() * 23 == 847872);
  CHECK(state.slabs[1].bytes() * 23 == 48234496);
}

TEST_CASE("M-05: an encoder of 1,500 positions; KV bytes only for layers that keep KV") {
  const ModelLeaves whisper = load("whisper-large-v3");
  CHECK(whisper.config.encoder_tokens == 1500);
  CHECK(leaf(whisper, "cross").group_id().pattern.domain() == AccessPattern::Domain::encoder);
  CHECK(leaf(whisper, "cross").group_id().writing == Writing::write_once);
  // 40 layers of which 4 attend: pages of 4 layers.
  CHECK(leaf(load("granite-4.0-h-small"), "full").bytes_per_page() == 4 * 4096 * 16);
  // 35 layers of which 20 keep KV.
  const ModelLeaves gemma = load("gemma-3n-e4b");
  CHECK(gemma.leaves[0]->layers() + gemma.leaves[1]->layers() == 20);
}

TEST_CASE("compressed attention stores one entry for several tokens, in pages of whole entries") {
  const ModelLeaves model = load("deepseek-v4-flash");
  const KVLeafRegion& fine = leaf(model, "latent_4");
  CHECK(fine.tokens_per_page() == 16);
  CHECK(fine.slots_per_page(16) == 4);
  CHECK(fine.bytes_per_page() == 21 * 4 * 512 * 2);
  CHECK(leaf(model, "indexer_4").bytes_per_page() == 21 * 4 * 128 * 2);
  const KVLeafRegion& coarse = leaf(model, "latent_128");
  CHECK(coarse.tokens_per_page() == 128);
  CHECK(coarse.slots_per_page(128) == 1);
  CHECK(coarse.bytes_per_page() == 20 * 512 * 2);
  const KVLeafRegion& recent = leaf(model, "window_128");
  CHECK(recent.group_id() == KVCacheGroupId::sliding_window(128));
  CHECK(recent.bytes_per_page() == 43 * 16 * 512 * 2);  // keys and values are one entry
}

TEST_CASE("a broken file composes leaves of honest sizes, or is refused: never anything else") {
  // Any one value of any file is replaced by values that a broken or hostile file may hold.
  const nlohmann::json values[] = {0,
                                   1,
                                   2,
                                   3,
                                   65535,
                                   65536,
                                   1u << 20,
                                   1 << 30,
                                   -1,
                                   0.5,
                                   "full",
                                   true,
                                   nlohmann::json::array(),
                                   nlohmann::json::object(),
                                   nlohmann::json::array({0, 1, 4, 128})};
  std::uint64_t composed = 0, refused = 0;
  for (const Sizes& expected : models) {
    const nlohmann::json flat = model_json(expected.file).flatten();
    for (const auto& [pointer, unused] : flat.items()) {
      // Of a list, the first entry stands for all.
      if (std::isdigit(static_cast<unsigned char>(pointer.back())) && !pointer.ends_with("/0"))
        continue;
      for (const nlohmann::json& value : values) {
        nlohmann::json json = model_json(expected.file);
        json[nlohmann::json::json_pointer(pointer)] = value;
        CAPTURE(expected.file);
        CAPTURE(json.dump());
        try {
          const ModelLeaves model = model_from_json(json.dump(), {.tokens_per_page = 65536});
          ++composed;
          for (const Leaf& leaf : model.leaves) {
            const std::uint64_t layers = leaf->layers();
            REQUIRE(layers > 0);
            REQUIRE(leaf->bytes_per_page() / layers > 0);
            REQUIRE(leaf->bytes_per_page() % layers == 0);
          }
        } catch (const KVError&) {
          ++refused;
        }
      }
    }
  }
  CHECK(composed > 1000);
  CHECK(refused > 1000);
}

// ---- options ------------------------------------------------------------------------------------

TEST_CASE("a kv_dtype of one byte halves attention and leaves states as they are") {
  for (const std::string_view file : {"qwen3-next-80b-a3b", "deepseek-v3.2", "whisper-large-v3"}) {
    const ModelLeaves wide = load(file);
    const ModelLeaves narrow = load(file, {.kv_dtype = DType::float8_e4m3});
    CHECK(ids(wide) == ids(narrow));
    for (std::size_t i = 0; i < wide.leaves.size(); ++i) {
      const bool is_state = wide.leaves[i]->group_id().writing == Writing::in_place;
      CHECK(narrow.leaves[i]->bytes_per_page() * (is_state ? 1 : 2) ==
            wide.leaves[i]->bytes_per_page());
    }
  }
}

TEST_CASE("scales stand beside each quantised leaf, in its group, only when asked for") {
  const ModelLeaves model = load(
      "gemma-3-27b", {.kv_dtype = DType::float8_e4m3, .scales = ScalesOptions{.granularity = 128}});
  CHECK(ids(model) == "window_1024:52 window_1024.scales:52 full:10 full.scales:10");
  CHECK(leaf(model, "full.scales").group_id() == leaf(model, "full").group_id());
  CHECK(leaf(model, "full.scales").bytes_per_page() == 10 * 16 * 16 * 2 * 4);
  CHECK(model.layers_of[2] == model.layers_of[3]);
  CHECK_THROWS_WITH_AS(load("gemma-3-27b", {.scales = ScalesOptions{.granularity = 128}}),
                       doctest::Contains("scales are of quantised values"), InvalidArgument);
}

TEST_CASE("values that equal keys are stored, or implied when the kernel derives them") {
  const ModelLeaves stored = load("gemma-4-26b-a4b");
  const ModelLeaves implied = load("gemma-4-26b-a4b", {.equal_values = EqualValues::implied});
  CHECK(leaf(implied, "full").bytes_per_page() * 2 == leaf(stored, "full").bytes_per_page());
  CHECK(leaf(implied, "window_1024").bytes_per_page() ==
        leaf(stored, "window_1024").bytes_per_page());
}

TEST_CASE("ranks divide the bytes of heads, and each holds all of a latent") {
  CHECK(leaf(load("llama-3.1-70b", {.tensor_parallel = 4}), "full").bytes_per_page() * 4 ==
        leaf(load("llama-3.1-70b"), "full").bytes_per_page());
  CHECK(leaf(load("llama-3.1-70b", {.tensor_parallel = 16}), "full").bytes_per_page() * 8 ==
        leaf(load("llama-3.1-70b"), "full").bytes_per_page());
  CHECK(leaf(load("deepseek-v3", {.tensor_parallel = 16}), "latent").bytes_per_page() ==
        leaf(load("deepseek-v3"), "latent").bytes_per_page());
}

TEST_CASE("options out of range are refused") {
  CHECK_THROWS_AS(load("llama-3.1-70b", {.tokens_per_page = 0}), InvalidArgument);
  CHECK_THROWS_AS(load("llama-3.1-70b", {.tokens_per_page = 1u << 20}), InvalidArgument);
  CHECK_THROWS_AS(load("llama-3.1-70b", {.expected_tokens = 0}), InvalidArgument);
}

TEST_CASE("two shapes with one reach are two leaves of the same group") {
  ModelConfig config;
  config.source = "hand-made";
  config.layers = {KVLayerSpec::attention({.kv_heads = 8, .head_dim = 128}),
                   KVLayerSpec::attention({.kv_heads = 4, .head_dim = 128}),
                   KVLayerSpec::attention({.kv_heads = 8, .head_dim = 128}), KVLayerSpec::none()};
  const ModelLeaves model = compose_leaves(config);
  CHECK(ids(model) == "full:2 full_shape_2:1");
  CHECK(model.leaves[0]->group_id() == model.leaves[1]->group_id());
  CHECK(model.layers_of == std::vector<std::vector<std::uint32_t>>{{0, 2}, {1}});
}

TEST_CASE("a model that keeps nothing is refused") {
  ModelConfig config;
  config.source = "hand-made";
  config.layers = {KVLayerSpec::none()};
  CHECK_THROWS_WITH_AS(compose_leaves(config), doctest::Contains("keeps anything"), ConfigError);
}

TEST_CASE("sinks are kept beside a window") {
  ModelConfig config;
  config.layers = {
      KVLayerSpec::attention({.kv_heads = 8, .head_dim = 64, .window = 128, .sinks = 4})};
  CHECK(compose_leaves(config).leaves[0]->group_id() == KVCacheGroupId::sliding_window(128, 4));
}

// ---- splitting a state --------------------------------------------------------------------------

constexpr std::uint64_t GiB = std::uint64_t{1} << 30;

TEST_CASE("given a budget, a state is split where the pool then costs least") {
  for (const std::string_view file :
       {"qwen3-next-80b-a3b", "nemotron-3-nano-30b-a3b", "jamba-v0.1", "recurrentgemma-9b"}) {
    for (const std::uint64_t budget : {4 * GiB, 16 * GiB, 80 * GiB}) {
      CAPTURE(file);
      CAPTURE(budget);
      const ModelLeaves model = load(file, {.budget_bytes = budget});
      REQUIRE(model.splits.size() == 1);
      const StateSplit& split = model.splits[0];
      const ModelLeaves whole = load(file);
      CHECK(split.layers == leaf(whole, "state").layers());

      // The choice, made again by hand: a divisor of the layers, the cost of the geometry and the
      // leaves.
      double least = 1e9;
      std::uint32_t chosen = 0;
      std::size_t divisors = 0;
      for (std::uint32_t parts = 1; parts <= split.layers; ++parts) {
        if (split.layers % parts != 0) continue;
        ++divisors;
        std::vector<PageSpec> pages = page_specs(whole.leaves, 16, 2048);
        const PageSpec state = *std::ranges::find(pages, "state", &PageSpec::name);
        std::erase_if(pages, [](const PageSpec& page) { return page.name == "state"; });
        for (std::uint32_t part = 0; part < parts; ++part) {
          PageSpec piece = state;
          piece.name = fmt::format("state_{}", part);
          piece.bytes_per_page /= parts;
          piece.weight /= parts;
          pages.push_back(piece);
        }
        const double cost = plan_geometry(budget, pages).cost() + 0.001 * (parts - 1);
        if (cost < least - 1e-12) {
          least = cost;
          chosen = parts;
        }
      }
      CHECK(split.candidates.size() == divisors);
      CHECK(split.parts == chosen);

      // The parts are equal, and hold every state layer once.
      std::uint64_t bytes = 0, parts = 0;
      std::vector<std::uint32_t> layers;
      for (std::size_t i = 0; i < model.leaves.size(); ++i) {
        if (model.leaves[i]->group_id().writing != Writing::in_place) continue;
        ++parts;
        bytes += model.leaves[i]->bytes_per_page();
        CHECK(model.leaves[i]->group_id() == leaf(whole, "state").group_id());
        layers.insert(layers.end(), model.layers_of[i].begin(), model.layers_of[i].end());
      }
      CHECK(parts == split.parts);
      CHECK(bytes == leaf(whole, "state").bytes_per_page());
      const auto state_index =
          std::ranges::find(whole.leaves, "state", [](const Leaf& l) { return l->leaf_id(); });
      CHECK(layers ==
            whole.layers_of[static_cast<std::size_t>(state_index - whole.leaves.begin())]);
    }
  }
}

TEST_CASE("qwen3-next in 16 GiB is served best by three state leaves") {
  const ModelLeaves model = load("qwen3-next-80b-a3b", {.budget_bytes = 16 * GiB});
  CHECK(ids(model) == "state_0:12 state_1:12 state_2:12 full:12");
  CHECK(leaf(model, "state_0").bytes_per_page() == 77266944 / 3);
}

TEST_CASE("a split lets a state start in a budget that the whole page would not fit") {
  // Null region and one huge block per leaf: the state of 77,266,944 bytes needs three such
  // regions.
  const std::uint64_t budget = 100ull << 20;
  CHECK_THROWS_AS(plan_geometry(budget, page_specs(load("qwen3-next-80b-a3b").leaves, 16, 2048)),
                  GeometryError);
  const ModelLeaves model = load("qwen3-next-80b-a3b", {.budget_bytes = budget});
  CHECK(model.splits[0].parts > 1);
  CHECK_FALSE(model.splits[0].candidates[0].fits);
  CHECK_NOTHROW(plan_geometry(budget, page_specs(model.leaves, 16, 2048)));
}

TEST_CASE("a budget that no split fits is refused with the least that would start") {
  std::uint64_t least = 0;
  try {
    load("qwen3-next-80b-a3b", {.budget_bytes = 1 << 20});
    FAIL("1 MiB was accepted");
  } catch (const GeometryError& error) {
    least = error.least_budget;
    CHECK(least > 1 << 20);
  }
  CHECK_NOTHROW(load("qwen3-next-80b-a3b", {.budget_bytes = least}));
}

TEST_CASE("a model without states is not split") {
  const ModelLeaves model = load("gemma-3-27b", {.budget_bytes = 16 * GiB});
  CHECK(model.splits.empty());
  CHECK(ids(model) == "window_1024:52 full:10");
}

}  // namespace
}  // namespace kvleaf
