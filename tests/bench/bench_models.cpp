// Workloads "prompt", "decode" and "replay" over published models, as `./dev bench peers` compares
// them: pages of 16, bfloat16, chunks of 8,192 tokens, and the very leaves that a configuration
// gives.
//
//   prompt   one request of 131,072 tokens: cold (admit, compute, commit), then released and
//            admitted again (warm: all of it but the last token's page is reused)
//   decode   256 live requests of L tokens, 256 steps of one token each: reserve, write tables,
//   slot
//            mappings and lengths, settle and commit
//   replay   a trace in arrival order, at most 64 live; see cli/replay.h
#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/bench.h"
#include "kvleaf/cache/cache.h"
#include "kvleaf/group/group.h"
#include "replay.h"

namespace {

using namespace kvleaf;

constexpr std::uint32_t chunk = 8192;
constexpr int repeats = 6;  // the first warms up
constexpr const char* models[] = {"llama-3.1-70b", "gemma-3-27b", "gpt-oss-20b",
                                  "qwen3-next-80b-a3b", "nemotron-3-nano-30b-a3b"};

double now_us() {
  return std::chrono::duration<double, std::micro>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

double quantile(std::vector<double> times, double share) {
  const auto at =
      times.begin() + static_cast<std::ptrdiff_t>(share * static_cast<double>(times.size() - 1));
  std::nth_element(times.begin(), at, times.end());
  return *at;
}

ModelLeaves model_of(const std::string& name, std::uint64_t budget) {
  return model_from_config(std::string(KVLEAF_TEST_DATA) + "/models/" + name + ".json",
                           {.budget_bytes = budget});
}

/// Computes all known tokens, in chunks that end where the manager asks for it.
void compute(BlockManager& manager, RequestId id) {
  const std::uint32_t end = manager.length(id);
  while (manager.planned(id) < end) {
    const std::uint32_t at = manager.planned(id);
    const std::uint32_t stop = std::min(manager.next_stop(id).value_or(end), end);
    const StepRequest row{id, std::min(chunk, stop - at)};
    const Step& step = manager.begin_step({&row, 1});
    if (!step.refused.empty()) throw std::logic_error(step.refused.front().why);
    manager.settle(step.id);
  }
}

std::vector<bench::Figure> prompt(const std::string& name, bool quick) {
  const std::uint32_t length = quick ? 16'384 : 131'072;
  const ModelLeaves model = model_of(name, 256ull << 30);
  BlockManager manager(model.leaves, {.budget_bytes = 256ull << 30, .max_len = length});
  std::vector<Token> tokens(length);
  std::iota(tokens.begin(), tokens.end(), 0);
  std::vector<double> cold, warm;
  std::uint32_t hit = 0;
  const RequestId id{1};
  for (int i = 0; i < (quick ? 2 : repeats); ++i) {
    double start = now_us();
    manager.admit(id, tokens);
    compute(manager, id);
    cold.push_back(now_us() - start);
    manager.release(id);
    start = now_us();
    hit = manager.admit(id, tokens).hit_tokens;
    compute(manager, id);
    warm.push_back(now_us() - start);
    manager.release(id);
    manager.reset_cache();
  }
  cold.erase(cold.begin());
  warm.erase(warm.begin());
  const std::string where = fmt::format("{} P=16 n={}, chunks of {}", name, length, chunk);
  return {{where, "cold_us", "us", quantile(cold, 0.5)},
          {fmt::format("{}; {} tokens hit", where, hit), "warm_us", "us", quantile(warm, 0.5)}};
}

std::vector<bench::Figure> decode(const std::string& name, std::uint32_t length, bool quick) {
  constexpr std::uint32_t warm_up = 8;
  const std::uint32_t batch = quick ? 8 : 256;
  const std::uint32_t steps = quick ? 4 : 256;
  const std::uint32_t longest = length + steps + warm_up + 16;
  // Enough for all of them: nothing is evicted or refused here.
  const ModelLeaves model = model_of(name, 1ull << 40);
  std::uint64_t bytes = 0;
  for (const Leaf& leaf : model.leaves) {
    const std::uint32_t P = leaf->tokens_per_page().value_or(16);
    bytes += leaf->bytes_per_page() *
             (leaf->blocks_to_reserve((longest + P - 1) / P, P, {true, chunk}) + 2ull);
  }
  BlockManager manager(model.leaves,
                       {.budget_bytes = bytes * batch + (4ull << 30), .max_len = longest});
  StepPlanner planner(manager, {.max_batch = batch, .max_step_tokens = chunk});
  std::vector<StepRequest> rows;
  std::vector<Token> tokens(length);
  for (std::uint32_t i = 0; i < batch; ++i) {
    std::iota(tokens.begin(), tokens.end(), static_cast<Token>(i * length));
    manager.admit(RequestId{i}, tokens);
    compute(manager, RequestId{i});
    rows.push_back({RequestId{i}, 1});
  }
  std::vector<double> times;
  for (std::uint32_t step = 0; step < warm_up + steps; ++step) {
    double start = now_us();
    const StepPlan& plan = planner.plan(rows);
    if (!plan.refused().empty()) throw std::logic_error(plan.refused().front().why);
    double spent = now_us() - start;
    for (std::uint32_t i = 0; i < batch; ++i) {
      const Token token = static_cast<Token>(step);
      manager.append(RequestId{i}, {&token, 1});
    }
    start = now_us();
    planner.settle(plan.step());
    spent += now_us() - start;
    if (step >= warm_up) times.push_back(spent);
  }
  const std::string where = fmt::format(
      "{} L={} B={} P=16; plan and settle, tables, slot mapping, lengths", name, length, batch);
  return {{where, "step_us_median", "us", quantile(times, 0.5)},
          {where, "step_us_p99", "us", quantile(times, 0.99)}};
}

std::vector<bench::Figure> replay_of(const std::string& name, const std::string& file, bool quick) {
  constexpr std::uint64_t budget = 64ull << 30;
  const cli::Trace trace = cli::read_trace(
      std::string(KVLEAF_TEST_DATA) + "/traces/" + file + ".jsonl.gz", quick ? 50 : UINT64_MAX);
  const ModelLeaves model = model_of(name, budget);
  BlockManager manager(model.leaves, {.budget_bytes = budget, .max_len = trace.longest()});
  const cli::Replay result = cli::replay(trace, manager, {.max_live = 64});
  const std::string where =
      fmt::format("{} {} P=16 R=64 64 GiB, {} rows", name, file, trace.rows.size());
  return {{where, "hit_tokens_pct", "%", result.hit_pct()},
          {where, "refused", "requests", static_cast<double>(result.refused)},
          {where, "growth_refused", "requests", static_cast<double>(result.growth_refused)},
          {where, "us_per_request", "us", result.us_per_request()}};
}

}  // namespace

int main(int argc, char** argv) {
  bench::Suite prompts("prompt", argc, argv);
  bench::Suite decodes("decode", argc, argv);
  bench::Suite replays("replay", argc, argv);
  replays.only_when_named();
  for (const std::string name : models) {
    prompts.add([=](bool quick) { return prompt(name, quick); });
    for (const std::uint32_t length : {1024u, 8192u, 32768u}) {
      decodes.add([=](bool quick) { return decode(name, length, quick); });
    }
    for (const char* trace : {"mooncake_conversation", "rtp_llm_online", "agent_sessions"}) {
      replays.add([=](bool quick) { return replay_of(name, trace, quick); });
    }
  }
  for (bench::Suite* suite : {&prompts, &decodes, &replays}) {
    if (const int code = suite->run(); code != 0) return code;
  }
  return 0;
}
