// What published models reuse of published traces where memory is ample and a page is as long as
// the trace's block: with attention alone all that an infinite cache would, with states what the
// checkpoints of each rule of retention allow. One trace a process: the trace's name is among the
// arguments, and picks the test case.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <cmath>
#include <string>

#include "infinite_cache.h"
#include "kvleaf/cache/model_leaves.h"
#include "replay.h"

using namespace kvleaf;
using namespace kvleaf::cli;
using kvleaf::test::Checkpoints;

namespace {

/// Bytes in which nothing is ever evicted: every page of every prompt and answer in every leaf, and
/// as many checkpoints as the rules leave, more than twice over.
std::uint64_t ample(const Trace& trace, const Leaves& leaves) {
  const std::uint32_t page = trace.block_tokens;
  std::uint64_t pages = 4096;
  for (const TraceRow& row : trace.rows) pages += (row.input_length + row.output_length) / page + 1;
  std::uint64_t bytes = std::uint64_t{4} << 30;
  for (const Leaf& leaf : leaves) {
    const bool state = leaf->group_id().writing == Writing::in_place;
    bytes += (state ? 10 * trace.rows.size() : pages) * leaf->bytes_per_page();
  }
  return bytes;
}

struct Rule {
  Retention retention;
  Checkpoints checkpoints;
};
const Rule attention{Retention::tail(), Checkpoints::everywhere};
const Rule tail{Retention::tail(), Checkpoints::tail};
const Rule spaced{Retention::spaced(), Checkpoints::spaced};

/// Every hit is the counted one. Returns hits in % of prompt tokens.
double reused(const Trace& trace, const std::string& model, const Rule& rule,
              std::uint32_t max_live) {
  CAPTURE(model);
  CAPTURE(max_live);
  const std::uint32_t page = trace.block_tokens;
  const Leaves leaves = leaves_from_config(fmt::format("{}/{}.json", KVLEAF_MODELS, model),
                                           {.tokens_per_page = page});
  BlockManager manager(leaves, {.budget_bytes = ample(trace, leaves),
                                .page_tokens = page,
                                .max_len = trace.longest(),
                                .retention = rule.retention});
  const Replay replay = cli::replay(trace, manager, {.max_live = max_live});
  const std::vector<std::uint32_t> counted =
      test::infinite_cache_hits(trace, rule.checkpoints, max_live);
  REQUIRE(replay.requests.size() == counted.size());
  std::size_t different = 0;
  for (std::size_t i = 0; i < counted.size(); ++i) {
    if (replay.requests[i].hit == counted[i]) continue;
    if (++different <= 3) {
      CAPTURE(replay.requests[i].row);
      CHECK(replay.requests[i].hit == counted[i]);
    }
  }
  CHECK(different == 0);
  CHECK(replay.refused == 0);
  CHECK(replay.growth_refused == 0);
  manager.audit();
  const double per_cent =
      100.0 * static_cast<double>(replay.hit_tokens) / static_cast<double>(trace.prompt_tokens());
  MESSAGE(model << ": " << per_cent << " % of " << trace.file);
  return per_cent;
}

struct Figures {  // %, to two digits
  double attention;
  double tail;    // of models with states
  double spaced;  // the same
};

void check_models(const char* file, Figures figures) {
  const Trace trace = read_trace(fmt::format("{}/{}.jsonl.gz", KVLEAF_TRACES, file));
  const auto rounded = [](double per_cent) { return std::round(100 * per_cent) / 100; };
  for (const char* model : {"llama-3.1-70b", "gemma-3-27b", "gpt-oss-20b"})
    CHECK(rounded(reused(trace, model, attention, 64)) == doctest::Approx(figures.attention));
  // The figures are counted one request after another: live states of others resume nobody.
  for (const char* model : {"qwen3-next-80b-a3b", "nemotron-3-nano-30b-a3b"}) {
    CHECK(rounded(reused(trace, model, tail, 1)) == doctest::Approx(figures.tail));
    CHECK(rounded(reused(trace, model, spaced, 1)) == doctest::Approx(figures.spaced));
  }
  CHECK(reused(trace, "qwen3-next-80b-a3b", tail, 64) >= figures.tail - 0.005);
}

}  // namespace

TEST_CASE("mooncake_conversation: each model reuses what its rule allows, to the token") {
  check_models("mooncake_conversation", {.attention = 37.34, .tail = 35.86, .spaced = 37.12});
}
TEST_CASE("mooncake_synthetic: each model reuses what its rule allows, to the token") {
  check_models("mooncake_synthetic", {.attention = 65.04, .tail = 58.20, .spaced = 65.03});
}
TEST_CASE("agent_sessions: each model reuses what its rule allows, to the token") {
  check_models("agent_sessions", {.attention = 89.66, .tail = 87.67, .spaced = 89.38});
}
TEST_CASE("rtp_llm_online: each model reuses what its rule allows, to the token") {
  check_models("rtp_llm_online", {.attention = 20.56, .tail = 17.77, .spaced = 20.38});
}
