// States and checkpoints: where they are taken, what they are attached to, and what they never
// cost.
#include "bench.h"

namespace kvleaf {
namespace {
using namespace kvleaf::testing;

std::uint64_t states_held(const ManagerBench& bench, std::uint32_t leaf = 1) {
  return bench.live(leaf) + bench.cached(leaf);
}

TEST_CASE(
    "S-04 a long path may not take all checkpoints: what is shared later is hit, and kept from "
    "then on") {
  ManagerBench bench({full(64), state()},
                     {.huge = 400, .ratios = {64, 1}, .page = 64, .retention = Retention::dense()});
  const auto a = prompt(700);
  bench.serve(a);
  const std::uint32_t first = bench.hit(sharing(a, 320, 700, 1));
  CHECK(first > 0);
  CHECK(first <= 320);
  bench.serve(sharing(a, 320, 700, 1));
  CHECK(bench.hit(sharing(a, 320, 700, 2)) == 320);
}

TEST_CASE("S-05 a hit ends at the checkpoint, not where the tokens part") {
  ManagerBench bench({full(64), state()},
                     {.huge = 400, .page = 64, .retention = Retention::tail()});
  bench.serve(prompt(5000));  // its last boundary before the end: 4,992
  CHECK(bench.hit(sharing(prompt(5000), 5000, 5100, 1)) == 4992);
  ManagerBench small({full(), state()}, {.huge = 400, .retention = Retention::tail()});
  const auto a = prompt(72);
  small.serve(a);
  small.admit(1, sharing(a, 72, 100, 1));
  CHECK(small.manager->computed(RequestId{1}) == 64);
}

TEST_CASE("S-07 drafts on a ring of states draw no more state blocks") {
  ManagerBench bench({full(), state(StateKernel::in_place, 16)},
                     {.huge = 200, .retention = Retention::tail()});
  bench.admit(1, prompt(8));
  bench.run(1);
  const std::uint64_t held = bench.live(1);
  CHECK(held == 17);
  for (int i = 0; i < 20; ++i) {
    const StepId step = bench.begin(1, 2);  // one token and one draft, ids not known
    bench.settle(step, {{RequestId{1}, 1 + static_cast<std::uint32_t>(i % 2)}});
    CHECK(bench.live(1) <= held + 1);
  }
}

TEST_CASE(
    "S-08 a checkpoint that finds no room is skipped and counted; nothing is evicted for it") {
  for (const StateKernel kernel : {StateKernel::in_place, StateKernel::in_out}) {
    ManagerBench bench({full(4), state(kernel)},
                       {.huge = 5, .page = 4, .retention = Retention::dense()});
    bench.admit(1, prompt(16));
    bench.step(1, 4);
    bench.step(1, 4);
    bench.step(1, 4);
    bench.step(1, 4);  // four pages and the live state: full
    CHECK(bench.manager->stats().checkpoints_skipped > 0);
    CHECK(bench.live(0) == 4);
    CHECK(bench.live(1) == 1);
    bench.release(1);
    CHECK(bench.findable(prompt(16), 0) == "1111");
    CHECK(bench.findable(prompt(16), 1) == "0001");  // the live state itself: it took no memory
  }
}

TEST_CASE("S-09 all state leaves of a boundary are published or none") {
  // Four pages, both live states, and one block more where two are wanted.
  ManagerBench bench({full(4), state(StateKernel::in_place, 0, "conv"),
                      state(StateKernel::in_place, 0, "recurrent")},
                     {.huge = 7, .page = 4, .retention = Retention::dense()});
  bench.admit(1, prompt(17));
  bench.step(1, 12);
  bench.step(1, 3);
  CHECK(bench.manager->stats().checkpoints_skipped == 1);
  CHECK(bench.live(1) == 1);
  CHECK(bench.live(2) == 1);
  CHECK(bench.findable(prompt(12), 1) == "000");
  CHECK(bench.findable(prompt(12), 2) == "000");
}

TEST_CASE("S-10 a prompt that is refused or aborted leaves every checkpoint as it was") {
  ManagerBench bench({full(4), state()}, {.huge = 9, .page = 4, .retention = Retention::dense()});
  bench.serve(prompt(13));
  const std::uint64_t held = states_held(bench);
  const std::uint64_t pages = bench.cached(0);
  CHECK_THROWS_AS(bench.admit(1, sharing(prompt(13), 12, 400, 1)), PoolExhausted);
  CHECK(states_held(bench) == held);
  CHECK(bench.cached(0) == pages);
  bench.admit(2, sharing(prompt(13), 12, 20, 1));
  bench.release(2);
  CHECK(states_held(bench) == held);
  CHECK(bench.live(1) == 0);
}

TEST_CASE("S-11 padding draws no state and writes none") {
  ManagerBench bench({state()}, {.huge = 8, .page = 4, .caching = false});
  StepPlanner planner(*bench.manager, {.max_batch = 16, .max_step_tokens = 64});
  std::vector<StepRequest> batch;
  for (std::uint64_t id = 1; id <= 8; ++id) {
    bench.admit(id, prompt(4, static_cast<std::uint32_t>(id)));
    batch.push_back({RequestId{id}, 4});
  }
  const StepPlan& plan = planner.plan(batch, 9);
  CHECK(plan.batch() == 9);
  CHECK(plan.refused().empty());
  CHECK(plan.array(LeafId{0}, "state_rows").row<std::int32_t>(0)[8] == -1);
  CHECK(bench.live(0) == 8);
}

TEST_CASE("S-12 a state with long pages is filed in its own slots") {
  ManagerBench bench(
      {full(128), state(StateKernel::in_place, 0, "state", 2176)},
      {.huge = 2000, .page = 128, .max_len = 1 << 17, .retention = Retention::tail()});
  bench.admit(1, prompt(100'096));
  CHECK(bench.manager->next_stop(RequestId{1}) == 2176 * 45);  // the last boundary before its end
  bench.run(1);
  bench.release(1);
  CHECK(bench.hit(sharing(prompt(100'096), 100'000, 100'096, 1)) == 2176 * 45);
}

TEST_CASE("S-13 a new state is cleared once, a resumed one never; each reads its own") {
  for (const StateKernel kernel : {StateKernel::in_place, StateKernel::in_out}) {
    ManagerBench bench({full(4), state(kernel)},
                       {.huge = 60, .page = 4, .retention = Retention::tail()});
    const auto clears = [&](const std::vector<StepRequest>& batch) {
      const Step& step = bench.manager->begin_step(batch);
      std::uint32_t count = 0;
      for (const ZeroFill& fill : step.zero_fills) count += fill.leaf == LeafId{1} ? 1 : 0;
      bench.settle(step.id);
      return count;
    };
    bench.admit(1, prompt(13));
    CHECK(clears({{RequestId{1}, 12}}) == 1);
    CHECK(clears({{RequestId{1}, 1}}) == 0);
    bench.release(1);
    bench.admit(2, sharing(prompt(13), 13, 20, 1));
    bench.admit(3, sharing(prompt(13), 13, 20, 2));
    CHECK(bench.manager->computed(RequestId{2}) == 12);
    CHECK(clears({{RequestId{2}, 4}, {RequestId{3}, 4}}) == 0);
    CHECK(bench.manager->live_block(RequestId{2}, LeafId{1}) !=
          bench.manager->live_block(RequestId{3}, LeafId{1}));
  }
}

TEST_CASE("S-14 resuming moves no bytes with in_out, and is one copy with in_place") {
  for (const StateKernel kernel : {StateKernel::in_place, StateKernel::in_out}) {
    ManagerBench bench({full(), state(kernel)}, {.huge = 60, .retention = Retention::tail()});
    StepPlanner planner(*bench.manager, {.max_batch = 4, .max_step_tokens = 64});
    bench.serve(prompt(20));
    CHECK(bench.admit(1, sharing(prompt(20), 20, 40, 1)).hit_tokens == 16);
    const StepRequest row{RequestId{1}, 8};
    const StepPlan& plan = planner.plan({&row, 1});
    if (kernel == StateKernel::in_out) {
      CHECK(plan.copies().empty());
      CHECK(*plan.array(LeafId{1}, "state_read_rows").row<std::int32_t>(0) !=
            *plan.array(LeafId{1}, "state_write_rows").row<std::int32_t>(0));
    } else {
      CHECK(plan.copies().size() == 1);
      CHECK(plan.copies()[0].leaf == LeafId{1});
    }
    planner.settle(plan.step());
    CHECK(bench.hit(sharing(prompt(20), 20, 30, 2)) == 16);
  }
}

TEST_CASE("a live state found as a checkpoint stays as it is, through a reset of the cache too") {
  for (const bool reset : {false, true}) {
    ManagerBench bench({full(4), state()}, {.huge = 60, .page = 4});
    bench.admit(1, prompt(12));
    bench.step(1, 8);
    bench.admit(2, sharing(prompt(12), 8, 12, 1));
    CHECK(bench.manager->computed(RequestId{2}) == 8);
    if (reset) bench.manager->reset_cache();
    const auto before = bench.manager->live_block(RequestId{1}, LeafId{1});
    bench.step(1, 2);  // must not write over what the other one is to read
    CHECK(bench.manager->live_block(RequestId{1}, LeafId{1}) != before);
    bench.step(2, 2);
    bench.release(1);
    bench.release(2);
    CHECK(bench.live(1) == 0);
  }
}

TEST_CASE(
    "a checkpoint that its request wrote but no longer stands for is not filed under other "
    "tokens") {
  ManagerBench bench({full(4), state(StateKernel::in_place, 4)},
                     {.huge = 100, .page = 4, .retention = Retention::dense()});
  bench.admit(1, prompt(7));
  bench.run(1);
  bench.settle(bench.begin(1, 1));  // token 7, its id not known yet: the state after 8 waits for it
  bench.settle(bench.begin(1, 1));
  bench.manager->rewind(RequestId{1}, 7);
  bench.append(1, {99});
  bench.step(1, 1);
  bench.append(1, {100, 101});
  bench.step(1, 2);
  bench.manager->audit();
  bench.release(1);
  CHECK(bench.live(1) == 0);
}

TEST_CASE(
    "by tail a prompt leaves its state at a multiple of 512 tokens too, if pages are shorter") {
  const auto first_stop = [](std::uint32_t page, std::uint32_t tokens) {
    ManagerBench bench({full(page), state()},
                       {.huge = 200, .page = page, .retention = Retention::tail()});
    bench.admit(1, prompt(tokens));
    return bench.manager->next_stop(RequestId{1});
  };
  CHECK(first_stop(16, 1300) == 1024);
  CHECK(first_stop(16, 512) == 496);    // there is none before the last token
  CHECK(first_stop(16, 513) == 512);    // the last boundary itself
  CHECK(first_stop(48, 1300) == 1056);  // of 528 tokens, the first whole pages past 512
  CHECK(first_stop(528, 1300) == 1056);
  // A prompt that leaves another one shortly before its end resumes there.
  ManagerBench bench({full(), state()}, {.huge = 400, .retention = Retention::tail()});
  bench.serve(prompt(1300));
  CHECK(bench.serve(sharing(prompt(1300), 1200, 1300, 1)) == 1024);
}

}  // namespace
}  // namespace kvleaf
