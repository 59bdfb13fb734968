// Windows while requests run, and encoder inputs: what is held, what is asked for, what comes back.
#include "bench.h"

namespace kvleaf {
namespace {
using namespace kvleaf::testing;
using Slots = std::vector<std::uint32_t>;

TEST_CASE("H-21 what slid out of the last kept window goes first") {
  ManagerBench bench({window(4, 4)}, {.huge = 5, .page = 4, .retention = Retention::tail()});
  bench.admit(1, prompt(16));
  bench.step(1, 16);
  CHECK(bench.slots_held(1) == Slots{3});
  bench.admit(2, prompt(12, 5));
  bench.step(2, 12);  // one free block, and slots 0 and 1
  CHECK(bench.findable(prompt(16)) == "0011");
}

TEST_CASE("W-04 a row in the manager and in the table of that same step") {
  ManagerBench bench({window(8, 4)}, {.page = 4, .caching = false});
  StepPlanner planner(*bench.manager, {.max_batch = 2, .max_step_tokens = 64});
  bench.admit(1, prompt(8));
  bench.step(1, 8);
  for (std::uint32_t n = 8; n < 17; ++n) {
    const StepRequest row{RequestId{1}, 1};
    const StepPlan& plan = planner.plan({&row, 1});
    const auto blocks = bench.row(1);
    const auto* table = plan.array(LeafId{0}, "block_table").row<std::int32_t>(0);
    for (std::size_t s = 0; s < blocks.size(); ++s)
      CHECK(table[s] == static_cast<std::int32_t>(blocks[s]));
    planner.settle(plan.step());
  }
  CHECK(bench.slots_held(1) == Slots{2, 3, 4});
}

TEST_CASE("W-06 decode and extension draw the page they enter, not a window") {
  ManagerBench bench({window(128)}, {.caching = false});
  bench.admit(1, prompt(200));
  bench.step(1, 128);
  const std::uint64_t before = bench.live();
  const StepId extended = bench.begin(1, 8);
  CHECK(bench.live() == before + 1);
  bench.settle(extended);
  for (int i = 0; i < 8; ++i) bench.step(1, 1);
  CHECK(bench.live() <= before + 1);
}

TEST_CASE("W-07 a batch is charged for the tokens of its step once") {
  ManagerBench bench({window(128, 4)},
                     {.huge = 4160, .page = 4, .max_step = 128, .caching = false});
  std::vector<StepRequest> batch;
  for (std::uint64_t id = 1; id <= 64; ++id) {
    bench.manager->admit(RequestId{id}, prompt(386, static_cast<std::uint32_t>(id)));
    for (const std::uint32_t tokens : {128u, 128u, 2u}) {
      const StepRequest row{RequestId{id}, tokens};
      bench.manager->settle(bench.manager->begin_step({&row, 1}).id);
    }
    batch.push_back({RequestId{id}, 128});
  }
  bench.manager->audit();
  const Step& step = bench.manager->begin_step(batch);
  CHECK(step.refused.empty());
  CHECK(bench.live() <= 4160);
  bench.settle(step.id);
}

TEST_CASE("W-09 a drafter's window beside long pages asks for what its steps hold") {
  ManagerBench bench({full(2304), window(2048, 16)},
                     {.huge = 7 + 257, .max_step = 2048, .caching = false});
  bench.admit(1, prompt(15'537));
  bench.run(1);
  CHECK(bench.live(0) == 7);
  ManagerBench tight({full(2304), window(2048, 16)},
                     {.huge = 6 + 257, .max_step = 2048, .caching = false});
  CHECK_THROWS_AS(tight.admit(1, prompt(15'537)), PoolExhausted);
}

TEST_CASE("an empty reach needs nothing: chunks resume at their begin whatever else is lost") {
  ManagerBench bench({chunk(8, 4)}, {.huge = 4, .page = 4, .retention = Retention::tail()});
  bench.serve(prompt(13));
  bench.admit(1, prompt(8, 5));
  bench.step(1, 8);  // takes what no kept boundary uses
  bench.release(1, Prefix::drop);
  CHECK(bench.findable(prompt(13)).substr(0, 2) != "11");
  CHECK(bench.hit(sharing(prompt(13), 9, 12, 1)) ==
        8);  // nothing of the first chunk is needed there
}

TEST_CASE("by tail a window smaller than its prefix is kept at a multiple of 512 tokens too") {
  ManagerBench bench({full(), window(32)}, {.huge = 170, .retention = Retention::tail()});
  const auto a = prompt(1300);
  bench.serve(a);
  bench.admit(1, prompt(640, 5));
  bench.step(1, 640);  // takes nearly all that no kept boundary uses
  bench.release(1, Prefix::drop);
  CHECK(bench.hit(sharing(a, 1100, 1300, 1)) == 1024);
  CHECK(bench.hit(a) == 1296);
}

// ---- encoders
// --------------------------------------------------------------------------------------

AdmitOptions encoder(const char* digest, std::uint32_t tokens) {
  AdmitOptions options;
  options.encoder = EncoderInput{digest, tokens, 0};
  return options;
}

TEST_CASE("X-02 losing a page of an encoder's input loses all of it, and shortens no text hit") {
  ManagerBench bench({full(), cross()}, {.huge = 16, .retention = Retention::dense()});
  bench.admit(1, prompt(33), encoder("x", 100));
  bench.manager->encoder_filled(RequestId{1});
  bench.run(1);
  bench.release(1);
  CHECK(bench.cached(1) == 7);
  CHECK(bench.manager->probe(prompt(33), encoder("x", 100)).encoder_cached);
  // Evict one of its pages: the six that are left serve nobody.
  const auto other = prompt(200, 3);
  AdmitOptions same = encoder("y", 100);
  bench.admit(2, prompt(100, 3), same);
  bench.step(2, 100);
  bench.release(2);
  const Admission again = bench.manager->probe(prompt(33), encoder("x", 100));
  if (!again.encoder_cached) CHECK(bench.cached(1) == 0);
  bench.manager->audit();
}

TEST_CASE("X-06 every use is counted, and what a step made is not evicted before it settles") {
  ManagerBench bench({full(), cross()}, {.huge = 20});
  bench.admit(1, prompt(20), encoder("x", 40));
  bench.admit(2, prompt(20, 1), encoder("x", 40));
  CHECK(bench.row(1, 1) == bench.row(2, 1));
  bench.release(1);
  CHECK(bench.live(1) == 3);
  bench.manager->encoder_filled(RequestId{2});
  const StepId step = bench.begin(2, 20);
  bench.release(2);
  CHECK(bench.live(1) == 3);
  bench.settle(step);
  CHECK(bench.live(1) == 0);
  CHECK(bench.cached(1) == 3);
}

TEST_CASE("an encoder that was never filled is not found") {
  ManagerBench bench({full(), cross()}, {.huge = 20});
  bench.admit(1, prompt(20), encoder("x", 40));
  bench.release(1);
  CHECK(bench.live(1) + bench.cached(1) == 0);
  CHECK_FALSE(bench.admit(2, prompt(20), encoder("x", 40)).encoder_cached);
}

}  // namespace
}  // namespace kvleaf
