// Workload "prompt": one request of 131,072 tokens in pages of 16, in a manager that has a million
// pages cached: admitted cold (reserve, settle and commit in chunks of 8,192) and again, as a full
// hit.
//
// The floor of both is what no manager can do without: comparing, or copying, the tokens
// themselves.
#define XXH_INLINE_ALL
#include <benchmark/benchmark.h>
#include <xxhash.h>

#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/bench.h"
#include "kvleaf/group/group.h"
#include "kvleaf/group/page_key.h"

namespace {

using namespace kvleaf;

constexpr std::uint32_t page = 16;
constexpr std::uint32_t length = 131'072;
constexpr std::uint32_t chunk = 8'192;
constexpr std::uint32_t prompts = 128;  // cached beside the one that is measured: a million pages

Leaf paged(std::string name, KVCacheGroupId group) {
  return std::make_shared<KVLeafRegion>(std::move(name), std::move(group), 4096,
                                        KVLeafRegion::Options{256, page});
}

std::vector<Token> some_prompt(std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<Token> tokens(length);
  for (Token& token : tokens) token = static_cast<Token>(random() % 150'000);
  return tokens;
}

struct Server {
  /// interleaved: prompts are computed in turn, chunk by chunk of a few pages, so that no prompt's
  /// blocks lie together.
  Server(Leaves leaves, std::uint32_t cached_prompts, bool interleaved) {
    ManagerOptions options;
    options.max_len = length + page;
    std::vector<PageSpec> pages = page_specs(leaves, page, length);
    const std::uint64_t blocks =
        std::uint64_t{cached_prompts + 6} * (length / page) * leaves.size();
    options.geometry =
        Geometry::by_hand(pages, {.huge_bytes = 4096 * 16,
                                  .huge_blocks = blocks / 16,
                                  .ratios = std::vector<std::uint64_t>(leaves.size(), 16)});
    manager = std::make_unique<BlockManager>(std::move(leaves), options);
    if (!interleaved) {
      for (std::uint32_t k = 0; k < cached_prompts; ++k) {
        admit(k, some_prompt(k + 1));
        compute(k, chunk);
        manager->release(RequestId{k});
      }
      return;
    }
    constexpr std::uint32_t at_once = 8;
    for (std::uint32_t k = 0; k < cached_prompts; k += at_once) {
      for (std::uint32_t i = 0; i < at_once; ++i) admit(k + i, some_prompt(k + i + 1));
      for (std::uint32_t at = 0; at < length; at += page) {
        for (std::uint32_t i = 0; i < at_once; ++i) step(k + i, page);
      }
      for (std::uint32_t i = 0; i < at_once; ++i) manager->release(RequestId{k + i});
    }
  }
  std::uint32_t admit(std::uint64_t id, const std::vector<Token>& tokens) {
    return manager->admit(RequestId{id}, tokens).hit_tokens;
  }
  void step(std::uint64_t id, std::uint32_t tokens) {
    const StepRequest row{RequestId{id}, tokens};
    const Step& step = manager->begin_step({&row, 1});
    if (!step.refused.empty()) throw std::logic_error(step.refused.front().why);
    manager->settle(step.id);
  }
  void compute(std::uint64_t id, std::uint32_t tokens) {
    for (std::uint32_t at = manager->planned(RequestId{id}); at < length; at += tokens) {
      step(id, std::min(tokens, length - at));
    }
  }
  std::unique_ptr<BlockManager> manager;
};

void add(bench::Suite& suite, const std::string& name, Leaves (*leaves)(), bool interleaved) {
  const auto floor = [](benchmark::State& state) {
    const std::vector<Token> a = some_prompt(1);
    const std::vector<Token> b = a;
    for (auto _ : state) {
      int equal = std::memcmp(a.data(), b.data(), a.size() * sizeof(Token));
      benchmark::DoNotOptimize(equal);
    }
  };
  const std::string where = interleaved ? ", scattered" : ", contiguous";
  suite.add(
      {.name = name + where, .metric = "warm_us", .unit = "us", .iterations = 100},
      [=](benchmark::State& state) {
        const bool quick = state.max_iterations < 10;
        Server server(leaves(), quick ? 8 : prompts, interleaved);
        std::uint32_t k = 0;
        for (auto _ : state) {
          state.PauseTiming();
          const auto tokens = some_prompt(k++ % (quick ? 8 : prompts) + 1);
          state.ResumeTiming();
          if (server.admit(1 << 20, tokens) != length - page)
            throw std::logic_error("not a full hit");
          state.PauseTiming();
          server.manager->release(RequestId{1 << 20});
          state.ResumeTiming();
        }
      },
      floor);
  if (interleaved) return;
  suite.add(
      {.name = name + ", chunks of 8192", .metric = "cold_us", .unit = "us", .iterations = 50},
      [=](benchmark::State& state) {
        const bool quick = state.max_iterations < 10;
        Server server(leaves(), quick ? 2 : 16, false);
        std::uint32_t k = 1'000;
        for (auto _ : state) {
          state.PauseTiming();
          const auto tokens = some_prompt(++k);
          state.ResumeTiming();
          server.admit(k, tokens);
          server.compute(k, chunk);
          state.PauseTiming();
          server.manager->release(RequestId{k}, Prefix::drop);
          state.ResumeTiming();
        }
      },
      [](benchmark::State& state) {
        const std::vector<Token> a = some_prompt(1);
        std::vector<Token> b(a.size());
        for (auto _ : state) {
          std::memcpy(b.data(), a.data(), a.size() * sizeof(Token));
          benchmark::DoNotOptimize(b.data());
        }
      });
}

/// The chained keys of all pages; the floor hashes the same bytes, each page behind 16 others.
void add_keys(bench::Suite& suite) {
  suite.add(
      {.name = "128-bit keys of 8192 pages, xxh3",
       .metric = "hash_us",
       .unit = "us",
       .iterations = 200},
      [](benchmark::State& state) {
        const std::vector<Token> tokens = some_prompt(1);
        const PageHasher hasher(KeyHash::xxh3_128, 7);
        const PageDigest root = hasher.root("", "");
        std::vector<PageDigest> keys(length / page);
        for (auto _ : state) {
          hasher.pages(root, tokens, keys);
          benchmark::DoNotOptimize(keys.data());
        }
      },
      [](benchmark::State& state) {
        const std::vector<Token> tokens = some_prompt(1);
        for (auto _ : state) {
          struct {
            XXH128_hash_t parent;
            Token tokens[page];
          } bytes{};
          for (std::size_t at = 0; at < tokens.size(); at += page) {
            std::memcpy(bytes.tokens, tokens.data() + at, sizeof bytes.tokens);
            bytes.parent = XXH3_128bits_withSeed(&bytes, sizeof bytes, 7);
          }
          benchmark::DoNotOptimize(bytes);
        }
      });
}

Leaves one() { return {paged("full", KVCacheGroupId::full())}; }
Leaves two() {
  return {paged("full", KVCacheGroupId::full()),
          paged("window", KVCacheGroupId::sliding_window(1024))};
}
Leaves three() {
  return {paged("full", KVCacheGroupId::full()), paged("keys", KVCacheGroupId::full()),
          paged("scales", KVCacheGroupId::full())};
}

}  // namespace

int main(int argc, char** argv) {
  bench::Suite suite("prompt", argc, argv);
  add_keys(suite);
  add(suite, "one full leaf", one, false);
  add(suite, "full and window 1024", two, false);
  add(suite, "three full leaves", three, false);
  add(suite, "three full leaves", three, true);
  return suite.run();
}
