// The replay: its hits against a count that knows no cache, its rules on small traces, its report.
#include "replay.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <numeric>

#include "infinite_cache.h"
#include "replay_report.h"

using namespace kvleaf;
using namespace kvleaf::cli;

namespace {

Leaf full(std::uint32_t tokens_per_page = 16) {
  return std::make_shared<FullAttentionLeaf>("full",
                                             AttentionOptions{.layers = 1,
                                                              .kv_heads = 1,
                                                              .head_dim = 8,
                                                              .value_head_dim = {},
                                                              .dtype = DType::bfloat16,
                                                              .tokens_per_page = tokens_per_page,
                                                              .slots_per_page = {},
                                                              .table = TableFormat::dense});
}

/// Bytes in which nothing is ever evicted: every page of every prompt and answer, and some to
/// spare.
std::uint64_t endless_budget(const Trace& trace, std::uint32_t page, std::uint64_t page_bytes) {
  std::uint64_t pages = 4096;
  for (const TraceRow& row : trace.rows) pages += (row.input_length + row.output_length) / page + 1;
  return pages * page_bytes * 5 / 4;
}

Trace lengths(const std::string& rows) {
  return parse_trace("ContextTokens,GeneratedTokens\n" + rows, "lengths.csv");
}

BlockManager small_manager(std::uint32_t pages, std::uint32_t max_len, std::uint32_t step = 64) {
  const Leaf leaf = full();
  const std::vector<PageSpec> specs = {PageSpec::of(*leaf)};
  return BlockManager({leaf},
                      {.page_tokens = 16,
                       .max_len = max_len,
                       .max_step_tokens = step,
                       .geometry = Geometry::by_hand(specs, {.huge_bytes = leaf->bytes_per_page(),
                                                             .huge_blocks = pages,
                                                             .ratios = {1},
                                                             .alignment = 64})});
}

}  // namespace

TEST_CASE("with room for everything each request hits what an endless cache would, to the token") {
  for (const char* file :
       {"mooncake_conversation", "mooncake_synthetic", "agent_sessions", "rtp_llm_online"}) {
    CAPTURE(file);
    const Trace trace = read_trace(fmt::format("{}/{}.jsonl.gz", KVLEAF_TRACES, file));
    const Leaf leaf = full(trace.block_tokens);
    BlockManager manager(
        {leaf}, {.budget_bytes = endless_budget(trace, trace.block_tokens, leaf->bytes_per_page()),
                 .page_tokens = trace.block_tokens,
                 .max_len = trace.longest()});
    const Replay replay = cli::replay(trace, manager, {});
    const std::vector<std::uint32_t> expected = test::infinite_cache_hits(trace);
    REQUIRE(replay.requests.size() == expected.size());
    std::size_t different = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      different += replay.requests[i].hit != expected[i];
    }
    CHECK(different == 0);
    CHECK(replay.hit_tokens == std::accumulate(expected.begin(), expected.end(), std::uint64_t{0}));
    CHECK(replay.prompt_tokens == trace.prompt_tokens());
    CHECK(replay.refused == 0);
    CHECK(replay.growth_refused == 0);
    manager.audit();
  }
}

TEST_CASE(
    "a full set of live requests gives way from its oldest, which grows by its answer first") {
  const Trace trace = lengths("20,5\n30,0\n40,3\n17,1\n");
  BlockManager manager = small_manager(64, 128);
  std::vector<std::vector<std::uint64_t>> live;
  const Replay replay =
      cli::replay(trace, manager, {.max_live = 2, .on_request = [&](std::uint64_t) {
                                     live.emplace_back();
                                     for (std::uint64_t id = 1; id <= 4; ++id) {
                                       if (manager.contains(RequestId{id}))
                                         live.back().push_back(id);
                                     }
                                   }});
  CHECK(live == std::vector<std::vector<std::uint64_t>>{{1}, {1, 2}, {2, 3}, {3, 4}});
  CHECK(replay.computed_tokens == 20 + 5 + 30 + 40 + 3 + 17 + 1);
  CHECK(replay.step_us.size() == 7);
  CHECK(manager.stats().requests == 0);
}

TEST_CASE("prompts are computed in chunks of at most max_step_tokens") {
  const Trace trace = lengths("200,130\n");
  BlockManager manager = small_manager(64, 400, 64);
  std::vector<std::int32_t> lengths_seen;
  const Replay replay = cli::replay(trace, manager, {.on_plan = [&](const StepPlan& plan, Check) {
                                      lengths_seen.push_back(plan.seq_lens()[0]);
                                    }});
  REQUIRE(lengths_seen.size() >= 7);
  for (std::size_t i = 0; i < lengths_seen.size(); ++i) {
    CHECK(lengths_seen[i] - (i == 0 ? 0 : lengths_seen[i - 1]) <= 64);
  }
  CHECK(lengths_seen.back() == 330);
  CHECK(replay.computed_tokens == 330);
}

TEST_CASE("a newcomer that does not fit ends older requests, and is refused only when alone") {
  // Ten pages of 16. The third prompt needs all of them; the fourth needs more than there are.
  const Trace trace = lengths("60,4\n60,0\n160,0\n161,0\n20,0\n");
  BlockManager manager = small_manager(10, 1000);
  const Replay replay = cli::replay(trace, manager, {});
  REQUIRE(replay.requests.size() == 5);
  CHECK_FALSE(replay.requests[2].refused);
  CHECK(replay.requests[3].refused);
  CHECK_FALSE(replay.requests[4].refused);
  CHECK(replay.refused == 1);
  REQUIRE(replay.refusals.size() == 1);
  CHECK(replay.refusals[0].reason == "does not fit an empty pool");
  CHECK(replay.refusals[0].row == 4);
  CHECK(replay.refusals[0].example.find("full") != std::string::npos);
  CHECK(replay.prompt_tokens == 60 + 60 + 160 + 161 + 20);
}

TEST_CASE("growth that does not fit is skipped and counted, and the request is released") {
  const Trace trace = lengths("100,100\n40,1\n");
  BlockManager manager = small_manager(10, 1000);
  const Replay replay = cli::replay(trace, manager, {});
  CHECK(replay.refused == 0);
  CHECK(replay.growth_refused == 1);
  REQUIRE(replay.refusals.size() == 1);
  CHECK(replay.refusals[0].reason == "growth: no room for the answer");
  CHECK(manager.stats().requests == 0);
}

TEST_CASE("a prompt longer than max_len is refused with its reason, and the rest is served") {
  const Trace trace = lengths("100,0\n101,0\n50,51\n99,1\n");
  BlockManager manager = small_manager(64, 100);
  const Replay replay = cli::replay(trace, manager, {});
  CHECK(replay.requests.size() == 4);
  CHECK(replay.refused == 1);
  CHECK(replay.requests[1].refused);
  CHECK(replay.growth_refused == 1);
  REQUIRE(replay.refusals.size() == 2);
  CHECK(replay.refusals[0].reason == "the prompt is longer than max_len");
  CHECK(replay.refusals[0].row == 2);
  CHECK(replay.refusals[0].example == "101 tokens; at most 100 would be accepted");
  CHECK(replay.refusals[1].reason == "growth: the answer ends past max_len");
  CHECK(replay.refusals[1].row == 3);
}

TEST_CASE("the report's bytes agree with each other and with the arena") {
  const Trace trace =
      read_trace(std::string(KVLEAF_TRACES) + "/mooncake_conversation.jsonl.gz", 300);
  const Leaf all = full();
  const Leaf window = std::make_shared<SlidingWindowLeaf>(
      "window", WindowOptions{.window = 64, .sinks = 4, .compact = false},
      AttentionOptions{.layers = 3,
                       .kv_heads = 1,
                       .head_dim = 8,
                       .value_head_dim = {},
                       .dtype = DType::bfloat16,
                       .tokens_per_page = 16,
                       .slots_per_page = {},
                       .table = TableFormat::dense});
  const Leaf state = std::make_shared<RecurrentStateLeaf>(
      "state", StateOptions{.layers = 1,
                            .slabs = {{.name = "s", .shape = {512}, .dtype = DType::float32}},
                            .tokens_per_page = 16});
  BlockManager manager({all, window, state},
                       {.budget_bytes = 24 << 20, .page_tokens = 16, .max_len = trace.longest()});
  const Replay replay = cli::replay(trace, manager, {.max_live = 8});
  const ReplaySubject subject{.trace = "t.jsonl", .arena_bytes = manager.geometry().arena_bytes()};
  const nlohmann::json json = to_json(replay, subject);

  for (const char* key :
       {"requests", "prompt_tokens", "hit_tokens", "hit_pct", "refused", "growth_refused",
        "preemptions", "us_per_request", "peak_bytes", "leaves"}) {
    CHECK_MESSAGE(json.contains(key), key);
  }
  CHECK(json["requests"] == 300);
  CHECK(json["hit_pct"].get<double>() == doctest::Approx(100.0 * json["hit_tokens"].get<double>() /
                                                         json["prompt_tokens"].get<double>()));
  std::int64_t at_peak = 0;
  for (const char* id : {"full", "window", "state"}) {
    const nlohmann::json& leaf = json["leaves"][id];
    for (const char* key : {"live", "cached", "clean", "padding", "blocks", "lost_tokens"}) {
      CHECK_MESSAGE(leaf.contains(key), key);
    }
    for (const char* key : {"live", "cached", "padding"}) {
      at_peak += leaf[key].get<std::int64_t>();
      CHECK(leaf["peak"][key] >= leaf[key]);
      CHECK(leaf["peak"][key] >= leaf["mean"][key]);
    }
  }
  CHECK(at_peak == json["peak_bytes"]);
  CHECK(json["peak_bytes"] <= manager.geometry().arena_bytes());
  CHECK(json["mean_bytes"] <= json["peak_bytes"]);
  CHECK(json["step_us"]["median"] <= json["step_us"]["p99"]);
  CHECK(replay.moments.size() > 100);
  std::uint64_t lost = 0;
  for (const GroupStats& group : replay.groups) lost += group.lost_tokens;
  CHECK(lost > 0);  // not every boundary has a state
  CHECK(json["leaves"]["state"]["lost_tokens"] > 0);

  const std::string text = to_text(replay, subject);
  for (const char* words :
       {"300", "reused", "lost to", "refused", "median", "p99", "window", "padding"}) {
    CHECK_MESSAGE(text.find(words) != std::string::npos, words);
  }
  const std::string html = to_html(replay, subject);
  CHECK(html.find("<svg") != std::string::npos);
  CHECK(html.find("http") == std::string::npos);  // it needs nothing else
  CHECK(html.find("nan") == std::string::npos);
  CHECK(html.find("inf") == std::string::npos);
}

TEST_CASE("a quantile of step times is one of them, and nothing of none") {
  Replay replay;
  CHECK(replay.step_quantile(0.5) == 0);
  replay.step_us = {5, 1, 4, 2, 3};
  CHECK(replay.step_quantile(0.5) == 3);
  CHECK(replay.step_quantile(0.99) == 5);
  CHECK(replay.step_quantile(1) == 5);
  CHECK(replay.step_quantile(0.2) == 1);
}
