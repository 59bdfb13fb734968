// What eviction makes of the published traces, beside LRU and an optimum that knows the future.
//
// One full leaf, pages of the trace's own block, prompts alone (answers are of length 0), one
// request after another, and a pool of exactly 1,000,000 or 4,000,000 tokens: the request being
// served holds its own pages of it.
#include <doctest/doctest.h>

#include <set>

#include "bound.h"
#include "replay.h"

using namespace kvleaf;
using namespace kvleaf::cli;

namespace {

Trace prompts(const char* file) {
  Trace trace = read_trace(std::string(KVLEAF_TRACES "/") + file + ".jsonl.gz");
  for (TraceRow& row : trace.rows) row.output_length = 0;
  return trace;
}

double replayed(const Trace& trace, std::uint64_t pages, EvictionOrder order) {
  const std::uint32_t page = trace.block_tokens;
  const Leaf leaf =
      std::make_shared<FullAttentionLeaf>("full", AttentionOptions{.layers = 1,
                                                                   .kv_heads = 1,
                                                                   .head_dim = 8,
                                                                   .value_head_dim = {},
                                                                   .dtype = DType::bfloat16,
                                                                   .tokens_per_page = page,
                                                                   .slots_per_page = {},
                                                                   .table = TableFormat::dense});
  const std::vector<PageSpec> specs = {PageSpec::of(*leaf)};
  BlockManager manager({leaf},
                       {.page_tokens = page,
                        .max_len = trace.longest(),
                        .geometry = Geometry::by_hand(specs, {.huge_bytes = leaf->bytes_per_page(),
                                                              .huge_blocks = pages,
                                                              .ratios = {1},
                                                              .alignment = 64}),
                        .eviction = order});
  const Replay result = replay(trace, manager, {.max_live = 1});
  CHECK(result.refused == 0);
  manager.audit();
  return result.hit_pct();
}

struct Figures {
  const char* file;
  std::uint64_t tokens;
  double lru;       // by count
  double optimum;   // by count
  double at_least;  // of the pool, by value
};
constexpr Figures figures[] = {
    {"mooncake_conversation", 1'000'000, 5.59, 25.76, 10.50},
    {"mooncake_conversation", 4'000'000, 18.50, 37.22, 20.51},
    {"mooncake_synthetic", 1'000'000, 15.01, 38.26, 16.14},
    {"mooncake_synthetic", 4'000'000, 38.43, 60.27, 40.82},
    {"rtp_llm_online", 1'000'000, 12.11, 20.53, 14.89},
    {"rtp_llm_online", 4'000'000, 16.41, 20.56, 18.10},
};

}  // namespace

TEST_CASE("the bounds of the traces are those that an independent count gave") {
  for (const Figures& f : figures) {
    CAPTURE(f.file);
    const Trace trace = prompts(f.file);
    const Bound b = bound(trace, trace.block_tokens, f.tokens / trace.block_tokens);
    CHECK(b.lru_pct() == doctest::Approx(f.lru).epsilon(0.0005));
    CHECK(b.optimum_pct() == doctest::Approx(f.optimum).epsilon(0.0005));
    CHECK(b.tokens() <= f.tokens);
  }
}

TEST_CASE(
    "eviction by value reaches what remembering evicted pages can give; by lru, what LRU does") {
  for (const Figures& f : figures) {
    CAPTURE(f.file);
    CAPTURE(f.tokens);
    const Trace trace = prompts(f.file);
    const std::uint64_t pages = f.tokens / trace.block_tokens;
    const double value = replayed(trace, pages, EvictionOrder::value);
    MESSAGE(f.file << ", " << f.tokens << " tokens: " << value << " %");
    CHECK(value >= f.at_least);
    CHECK(value <= f.optimum);
    // The pool makes room before a prompt's pages come, the count afterwards: a few pages differ.
    CHECK(std::abs(replayed(trace, pages, EvictionOrder::lru) - f.lru) < 0.02);
  }
}

TEST_CASE(
    "a cache without end, pages shorter or longer than the trace's block, and no ids at all") {
  const Trace trace = prompts("mooncake_synthetic");
  const Bound endless = bound(trace, trace.block_tokens, {});
  CHECK(endless.lru_pct() == doctest::Approx(65.043).epsilon(0.00002));
  CHECK(endless.optimum_hit_tokens == endless.lru_hit_tokens);
  // Each page of 1,024 tokens is two blocks of 512; of 128, a quarter of one.
  CHECK(bound(trace, 1024, {}).lru_hit_tokens < endless.lru_hit_tokens);
  CHECK(bound(trace, 128, {}).lru_hit_tokens > endless.lru_hit_tokens);
  const Trace csv = parse_trace("ContextTokens,GeneratedTokens\n40,1\n40,1\n", "lengths.csv");
  CHECK(bound(csv, 16, {}).lru_hit_tokens == 0);
  CHECK(bound(csv, 16, {}).prompt_tokens == 80);
  CHECK_THROWS_AS(bound(csv, 0, {}), InvalidArgument);
}

TEST_CASE("the bounds of small traces agree with a search of all that a cache could keep") {
  // Every set of at most `most` pages that the cache can hold behind each request, from those it
  // held and those that came by: no rule does better than the best of all.
  const auto best = [](const std::vector<std::vector<int>>& asked, std::size_t most) {
    std::set<std::pair<std::set<int>, std::uint64_t>> now = {{{}, 0}};
    for (const auto& row : asked) {
      std::set<std::pair<std::set<int>, std::uint64_t>> then;
      for (const auto& [held, hits] : now) {
        std::uint64_t hit = 0;
        while (hit < row.size() && held.contains(row[hit])) ++hit;
        std::vector<int> all(held.begin(), held.end());
        for (const int page : row) {
          if (!held.contains(page)) all.push_back(page);
        }
        for (std::uint32_t chosen = 0; chosen < 1u << all.size(); ++chosen) {
          if (static_cast<std::size_t>(std::popcount(chosen)) != std::min(most, all.size()))
            continue;
          std::set<int> kept;
          for (std::size_t i = 0; i < all.size(); ++i) {
            if (chosen >> i & 1) kept.insert(all[i]);
          }
          then.emplace(std::move(kept), hits + hit);
        }
      }
      now = std::move(then);
    }
    std::uint64_t most_hits = 0;
    for (const auto& [held, hits] : now) most_hits = std::max(most_hits, hits);
    return most_hits;
  };
  std::uint32_t better_than_lru = 0;
  for (std::uint32_t seed = 1; seed <= 30; ++seed) {
    std::uint32_t state = seed * 2654435761u;
    const auto below = [&](std::uint32_t n) {
      return (state = state * 1664525u + 1013904223u) / 65536 % n;
    };
    std::vector<std::vector<int>> asked;
    std::string rows;
    for (int i = 0; i < 7; ++i) {  // chains: page d of branch b below a common first page
      const auto branch = static_cast<int>(below(3));
      const int depth = 1 + static_cast<int>(below(3));
      asked.emplace_back();
      std::string ids;
      for (int d = 0; d < depth; ++d) {
        asked.back().push_back(d == 0 ? 1 : 1 + 10 * (branch + 1) + d);
        ids += (d == 0 ? "" : ", ") + std::to_string(asked.back().back());
      }
      // One token more, so that the last page may be hit; the block is told by the first row.
      rows += "{\"timestamp\": " + std::to_string(i) +
              ", \"input_length\": " + std::to_string(depth * 512 + 1) +
              ", \"output_length\": 1, \"hash_ids\": [" + ids + ", " + std::to_string(1000 + i) +
              "]}\n";
    }
    const Trace trace = parse_trace(rows, "small.jsonl");
    REQUIRE(trace.block_tokens == 512);
    for (const std::size_t pages : {1u, 2u, 3u}) {
      const Bound b = bound(trace, 512, pages);
      CHECK(b.optimum_hit_tokens == 512 * best(asked, pages));
      CHECK(b.lru_hit_tokens <= b.optimum_hit_tokens);
      better_than_lru += b.optimum_hit_tokens > b.lru_hit_tokens ? 1 : 0;
    }
  }
  CHECK(better_than_lru > 10);
}
