// Workload "facade": a decode step of 256 slots, one token each, through KVCache::prepare_step. The
// floor is the same step through StepPlanner alone: plan, and settle of the step before. What
// KVCache adds (checks, the tables by slot, lengths) may cost a fifth of it. Both go through the
// same lengths in turn, a page at a time.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/bench.h"
#include "kvleaf/cache/cache.h"
#include "kvleaf/group/group.h"

namespace {

using namespace kvleaf;

constexpr std::uint32_t batch = 256;
constexpr std::uint32_t page = 16;
constexpr std::uint32_t layers = 2;    // one leaf each
constexpr std::uint32_t steps = 1200;  // of one server
constexpr int rounds = 64;             // of a page of steps each, on one server

std::vector<KVLayerSpec> specs() {
  return {KVLayerSpec::attention({.kv_heads = 1, .head_dim = 8}),
          KVLayerSpec::attention({.kv_heads = 1, .head_dim = 8, .window = 1024})};
}
std::uint32_t prompt_tokens(std::uint32_t length, std::uint32_t slot) {
  return length - slot % page;  // spread over the page
}

struct Facade {
  explicit Facade(std::uint32_t length)
      : cache(KVCache::make({.num_layers = layers,
                             .max_seqs = batch,
                             .max_len = length + steps,
                             .page_tokens = page,
                             .max_step_tokens = 8192},
                            specs())) {
    cu.push_back(0);
    for (std::uint32_t i = 0; i < batch; ++i) {
      const std::vector<Token> prompt(prompt_tokens(length, i), static_cast<Token>(i));
      const auto slot = static_cast<std::int32_t>(i);
      cache.admit(slot, Tensor::of(std::span<const Token>(prompt)));
      for (std::uint32_t at = 0; at < prompt.size(); at += 8192) {
        const auto past = static_cast<std::int32_t>(at);
        const auto count =
            static_cast<std::int32_t>(std::min<std::size_t>(8192, prompt.size() - at));
        cache.prepare_step({0, count}, {past}, {slot});
      }
      slots.push_back(slot);
      past_len.push_back(static_cast<std::int32_t>(prompt.size()));
      cu.push_back(slot + 1);
    }
  }
  void step() {
    benchmark::DoNotOptimize(cache.prepare_step(cu, past_len, slots).num_tokens());
    for (std::int32_t& past : past_len) ++past;
  }
  KVCache cache;
  std::vector<std::int32_t> cu, past_len, slots;
};

struct Planner {
  explicit Planner(std::uint32_t length) {
    const AttentionOptions attention{
        .layers = 1, .kv_heads = 1, .head_dim = 8, .tokens_per_page = page};
    const Leaves leaves = {std::make_shared<FullAttentionLeaf>("full", attention),
                           std::make_shared<SlidingWindowLeaf>(
                               "window_1024", WindowOptions{.window = 1024}, attention)};
    ManagerOptions options;
    options.max_len = length + steps;
    options.page_tokens = page;
    // The pool of the facade.
    const KVCacheConfig config{.num_layers = layers,
                               .max_seqs = batch,
                               .max_len = length + steps,
                               .page_tokens = page,
                               .max_step_tokens = 8192};
    options.budget_bytes = KVCache::memory_bytes(config, specs());
    manager = std::make_unique<BlockManager>(leaves, options);
    planner = std::make_unique<StepPlanner>(
        *manager, PlannerOptions{.max_batch = batch, .max_step_tokens = 8192});
    for (std::uint32_t i = 0; i < batch; ++i) {
      const std::vector<Token> prompt(prompt_tokens(length, i), static_cast<Token>(i));
      manager->admit(RequestId{i}, prompt);
      for (std::uint32_t at = 0; at < prompt.size(); at += 8192) {
        const StepRequest row{RequestId{i}, static_cast<std::uint32_t>(
                                                std::min<std::size_t>(8192, prompt.size() - at))};
        const Step& step = manager->begin_step({&row, 1});
        if (!step.refused.empty()) throw std::logic_error(step.refused.front().why);
        manager->settle(step.id);
      }
      rows.push_back({RequestId{i}, 1});
    }
  }
  void step() {
    if (under_way) planner->settle(*under_way);
    const StepPlan& plan = planner->plan(rows);
    if (!plan.refused().empty()) throw std::logic_error(plan.refused().front().why);
    under_way = plan.step();
  }
  std::unique_ptr<BlockManager> manager;
  std::unique_ptr<StepPlanner> planner;
  std::vector<StepRequest> rows;
  std::optional<StepId> under_way;
};

/// A page of steps: each row takes one page per leaf in it.
template <class Server>
bench::Round page_of_steps(Server& server) {
  return [&server] {
    return bench::seconds_of([&server] {
      for (std::uint32_t i = 0; i < page; ++i) server.step();
    });
  };
}

std::vector<bench::Figure> measure(std::uint32_t length, bool quick) {
  bench::InTurn turns;
  for (int servers = 0; servers < (quick ? 1 : 5); ++servers) {
    Facade facade(length);
    Planner planner(length);
    const bench::Round works[] = {page_of_steps(facade), page_of_steps(planner)};
    for (const bench::Round& warm_up : works) warm_up();
    turns.run(works, quick ? 1 : rounds);
  }
  const double to_ns = 1e9 / (double{page} * batch * layers);
  const std::string name = fmt::format("{} tokens", length);
  return {{.name = name,
           .metric = "prepare_step_ns_per_row_and_leaf",
           .unit = "ns",
           .value = turns.least(0) * to_ns,
           .floor = turns.least(1) * to_ns},
          {.name = name,
           .metric = "prepare_step_to_plan",
           .unit = "ratio",
           .value = turns.ratio(0, 1),
           .floor = 1.0}};
}

}  // namespace

int main(int argc, char** argv) {
  bench::Suite suite("facade", argc, argv);
  for (const std::uint32_t length : {1024u, 8192u})
    suite.add([=](bool quick) { return measure(length, quick); });
  return suite.run();
}
