// Prefix reuse: which boundary is hit, what was lost, what is kept.
#include "bench.h"

namespace kvleaf {
namespace {
using namespace kvleaf::testing;
using Slots = std::vector<std::uint32_t>;

TEST_CASE("a repeated prompt hits all but the page of its last token") {
  ManagerBench bench({full()});
  CHECK(bench.serve(prompt(100)) == 0);
  CHECK(bench.serve(prompt(100)) == 96);
  CHECK(bench.serve(prompt(96)) == 80);
  CHECK(bench.live() == 0);
}

TEST_CASE("H-03 full and window, repeated, and with window pages lost") {
  ManagerBench bench({full(10), window(100, 10)}, {.huge = 400, .page = 10});
  bench.serve(prompt(1000));
  CHECK(bench.hit(prompt(1000)) == 990);
}

TEST_CASE("H-06 while memory is free a shorter common prefix hits a window too") {
  ManagerBench bench({window(4, 1, 0, "w4"), window(16, 1, 0, "w16")},
                     {.huge = 64, .page = 1, .retention = Retention::tail()});
  bench.serve(prompt(8));
  CHECK(bench.hit(sharing(prompt(8), 4, 9, 1)) == 4);
  CHECK(bench.hit(sharing(prompt(8), 8, 9, 2)) == 8);
}

TEST_CASE("H-07 a state's checkpoints: at the tail, then at the junction") {
  ManagerBench bench({full(528), state()},
                     {.huge = 100, .page = 528, .retention = Retention::tail()});
  const auto a = prompt(2200);
  bench.admit(1, a);
  CHECK(bench.manager->next_stop(RequestId{1}) == 2112);
  bench.run(1);
  bench.release(1);
  const Admission b = bench.admit(2, sharing(a, 1500, 2200, 1));
  CHECK(b.hit_tokens == 0);
  CHECK(bench.lost(b, "state") == 1056);
  CHECK(b.next_stop == 1056);
  bench.run(2);
  bench.release(2);
  CHECK(bench.admit(3, sharing(a, 1500, 2200, 2)).hit_tokens == 1056);
}

TEST_CASE("H-07 with checkpoints at an interval the second prompt hits") {
  ManagerBench bench({full(528), state()},
                     {.huge = 100, .page = 528, .retention = Retention::every(1056)});
  bench.serve(prompt(2200));
  CHECK(bench.hit(sharing(prompt(2200), 1500, 2200, 1)) == 1056);
}

TEST_CASE("H-08 window pages that no kept boundary uses serve while memory is free") {
  ManagerBench bench({full(), window(32)}, {.huge = 400, .retention = Retention::tail()});
  const auto a = prompt(321);
  bench.serve(a);
  for (std::uint32_t k = 1; k <= 3; ++k) CHECK(bench.serve(sharing(a, 200, 321, k)) == 192);
}

TEST_CASE("H-09 two prompts that share a system prompt: reused by states from the third on") {
  for (const StateKernel kernel : {StateKernel::in_place, StateKernel::in_out}) {
    ManagerBench bench({full(4), state(kernel)},
                       {.huge = 100, .page = 4, .retention = Retention::tail()});
    const auto a = prompt(32);
    bench.admit(1, a);
    bench.step(1, 32);
    bench.release(1);
    CHECK(bench.serve(sharing(a, 8, 32, 1)) == 0);
    CHECK(bench.serve(sharing(a, 8, 32, 2)) == 8);
  }
}

TEST_CASE("H-10 less than a page in common says so") {
  ManagerBench bench({full(784)}, {.huge = 100, .page = 784});
  bench.serve(prompt(2000));
  const Admission short_one = bench.manager->probe(sharing(prompt(2000), 240, 2000, 1));
  CHECK(short_one.hit_tokens == 0);
  CHECK(short_one.reason.find("shorter than a page") != std::string::npos);
  CHECK(bench.hit(sharing(prompt(2000), 785, 2000, 1)) == 784);
}

TEST_CASE("H-11 pages of different length hit where all end") {
  ManagerBench bench({full(16, "short"), full(64, "long")}, {.huge = 400});
  bench.serve(prompt(256));
  CHECK(bench.hit(sharing(prompt(256), 48, 200, 1)) == 0);
  CHECK(bench.hit(sharing(prompt(256), 64, 200, 1)) == 64);
  CHECK(bench.hit(sharing(prompt(256), 100, 200, 1)) == 64);
}

TEST_CASE("H-13 two windows repeated") {
  ManagerBench bench({full(), window(48, 16, 0, "w48"), window(64, 16, 0, "w64")},
                     {.huge = 400, .retention = Retention::tail()});
  bench.serve(prompt(103));
  CHECK(bench.hit(prompt(103)) == 96);
}

TEST_CASE("H-14 the kept boundary is a joint one") {
  ManagerBench bench({full(32), window(8, 8)},
                     {.huge = 400, .page = 8, .retention = Retention::tail()});
  bench.serve(prompt(128));
  CHECK(bench.hit(prompt(128)) == 96);
  const auto other = prompt(40, 3);
  bench.serve(other);
  CHECK(bench.hit(sharing(other, 40, 100, 4)) == 32);
}

TEST_CASE("H-15 an aborted prompt keeps what it computed") {
  ManagerBench bench({full()});
  bench.admit(1, prompt(96));
  bench.step(1, 32);
  bench.release(1);
  CHECK(bench.cached() == 2);
  CHECK(bench.hit(prompt(96)) == 32);
}

TEST_CASE("H-17 hits are counted once, and not for resumed requests") {
  ManagerBench bench({full(1, "a"), full(1, "b")}, {.page = 1});
  bench.serve(prompt(4));
  CHECK(bench.admit(2, prompt(4)).hit_tokens == 3);
  CHECK(bench.manager->stats().hit_tokens == 3);
  bench.run(2);
  bench.manager->preempt(RequestId{2});
  bench.admit(2, prompt(4));
  CHECK(bench.manager->stats().hit_tokens == 3);
  CHECK(bench.manager->stats().resumed == 1);
}

TEST_CASE("H-18 twins: the second adopts what is findable and returns its own") {
  ManagerBench bench({full()});
  bench.admit(1, prompt(40));
  bench.admit(2, prompt(40));
  bench.step(1, 32);
  bench.step(2, 32);
  CHECK(bench.live() == 2);
  CHECK(bench.row(1) == bench.row(2));
  CHECK(bench.manager->pool().references(LeafId{0}, BlockId{bench.row(1)[0]}) == 2);
  bench.release(1);
  bench.release(2);
  CHECK(bench.cached() == 2);
  CHECK(bench.hit(prompt(40)) == 32);
}

TEST_CASE("H-19 a refused prompt leaves the prefix it would have hit") {
  ManagerBench bench({window(25, 10), full(10)},
                     {.huge = 7, .ratios = {1, 16}, .page = 10, .retention = Retention::tail()});
  bench.serve(prompt(20));
  CHECK_THROWS_AS(bench.admit(2, sharing(prompt(20), 20, 5020, 1)), PoolExhausted);
  CHECK(bench.admit(3, sharing(prompt(20), 20, 25, 1)).hit_tokens == 20);
}

TEST_CASE(
    "H-20 an unshared checkpoint becomes the live state where there is no room for one beside it") {
  ManagerBench bench({full(4), state()}, {.huge = 6, .page = 4, .retention = Retention::tail()});
  bench.serve(prompt(13));
  CHECK(bench.cached(0) == 3);
  CHECK(bench.cached(1) == 1);
  CHECK(bench.admit(2, sharing(prompt(13), 12, 20, 1)).hit_tokens == 12);
  bench.run(2);
  CHECK(bench.live(0) == 5);
  CHECK(bench.live(1) == 1);
}

TEST_CASE("W-01 a window returns what it slid over") {
  ManagerBench bench({window(4, 1)}, {.huge = 9, .page = 1, .caching = false});
  bench.admit(1, prompt(6));
  bench.admit(2, prompt(1, 7));
  bench.settle(bench.begin(1, 6));
  CHECK(bench.slots_held(1) == Slots{3, 4, 5});
  CHECK(bench.manager->pool().stats().empty == 6);
}

TEST_CASE("W-02 decoding never needs more than the window") {
  ManagerBench bench({window(4, 1)}, {.huge = 5, .page = 1});
  bench.admit(1, prompt(2));
  bench.run(1);
  for (int i = 0; i < 50; ++i) {
    bench.decode(1, 1);
    CHECK(bench.live() <= 3);
  }
}

TEST_CASE("W-03 the window of the end stays, the rest goes first") {
  ManagerBench bench({window(4, 1)}, {.huge = 10, .page = 1, .retention = Retention::tail()});
  bench.serve(prompt(10));
  CHECK(bench.cached() == 10);
  for (std::uint64_t id = 1; id <= 6; ++id) {
    bench.admit(id, prompt(1, 40 + static_cast<std::uint32_t>(id)));
    bench.step(id, 1);
  }
  CHECK(bench.hit(sharing(prompt(10), 10, 11, 1)) == 10);
}

TEST_CASE("W-05 chunks let go of all at their end") {
  ManagerBench bench({chunk(8, 4)}, {.page = 4, .caching = false});
  const std::vector<std::pair<std::uint32_t, Slots>> expected = {
      {8, {}}, {9, {2}}, {15, {2, 3}}, {16, {}}, {17, {4}}};
  bench.admit(1, prompt(17));
  std::uint32_t at = 0;
  for (const auto& [tokens, slots] : expected) {
    bench.step(1, tokens - at);
    at = tokens;
    CHECK(bench.slots_held(1) == slots);
  }
}

TEST_CASE("W-08 sinks stay, and are counted once") {
  ManagerBench bench({window(8, 4, 4)}, {.page = 4, .caching = false});
  bench.admit(1, prompt(40));
  bench.step(1, 6);
  CHECK(bench.slots_held(1) == Slots{0, 1});
  bench.step(1, 34);
  CHECK(bench.slots_held(1) == Slots{0, 8, 9});
}

TEST_CASE("W-10 what a prompt asks for is what its steps hold at once") {
  {
    ManagerBench bench({full(), window(64)}, {.huge = 45, .max_step = 128});
    CHECK(bench.admit(1, prompt(512)).hit_tokens == 0);
    bench.run(1);
  }
  ManagerBench small({full(), window(64)}, {.huge = 44, .max_step = 128});
  CHECK_THROWS_AS(small.admit(1, prompt(512)), PoolExhausted);
  ManagerBench tiny({full(), window(64)}, {.huge = 4, .max_step = 128});
  CHECK_THROWS_AS(tiny.admit(1, prompt(256)), PoolExhausted);
}

TEST_CASE("S-01 a state is one block without caching, never more than two with") {
  for (const StateKernel kernel : {StateKernel::in_place, StateKernel::in_out}) {
    ManagerBench off({state(kernel)}, {.page = 4, .caching = false});
    off.admit(1, prompt(1));
    off.run(1);
    for (int i = 0; i < 12; ++i) {
      off.decode(1, 1);
      CHECK(off.live() == 1);
    }
    ManagerBench on({full(4), state(kernel)}, {.page = 4});
    on.admit(1, prompt(1));
    on.run(1);
    for (int i = 0; i < 12; ++i) {
      on.decode(1, 1);
      CHECK(on.live(1) <= 2);
    }
    on.release(1);
    CHECK(on.live(1) == 0);
  }
}

TEST_CASE("S-02 a repeated prompt resumes at its last boundary") {
  for (const StateKernel kernel : {StateKernel::in_place, StateKernel::in_out}) {
    for (const auto& [length, hit] : {std::pair{3u, 0u}, {15u, 12u}, {17u, 16u}, {18u, 16u}}) {
      ManagerBench bench({full(4), state(kernel)}, {.page = 4, .retention = Retention::tail()});
      bench.serve(prompt(length));
      CHECK(bench.hit(prompt(length)) == hit);
    }
  }
}

TEST_CASE("S-03 a state is never attached at another length") {
  ManagerBench bench({full(32), state()},
                     {.huge = 100, .page = 32, .retention = Retention::every(64)});
  bench.serve(prompt(192));
  CHECK(bench.hit(sharing(prompt(192), 96, 192, 1)) == 64);
  ManagerBench plain({full(32), state()},
                     {.huge = 100, .page = 32, .retention = Retention::tail()});
  plain.serve(prompt(192));
  CHECK(plain.hit(sharing(prompt(192), 96, 192, 1)) == 0);
}

TEST_CASE("S-06 stops lie on boundaries, and no step is empty") {
  ManagerBench bench({full(544), state()},
                     {.huge = 100, .page = 544, .max_step = 512, .retention = Retention::tail()});
  bench.admit(1, prompt(600));
  bench.step(1, 512);
  CHECK(bench.manager->next_stop(RequestId{1}) == 544);
  bench.step(1, 32);
  bench.step(1, 56);
  bench.release(1);
  CHECK(bench.hit(prompt(600)) == 544);
}

TEST_CASE("A-01 what a step in flight reaches comes back when it settles") {
  ManagerBench bench({window(16)}, {.caching = false});
  bench.admit(1, prompt(100));
  const StepId first = bench.begin(1, 100);
  CHECK(bench.live() == 7);
  bench.append(1, {5});
  const StepId second = bench.begin(1, 1);
  CHECK(bench.live() == 7);
  CHECK(bench.slots_held(1) == Slots{5, 6});
  bench.settle(first);
  CHECK(bench.live() == 2);
  bench.settle(second);
  CHECK(bench.slots_held(1) == Slots{5, 6});
}

TEST_CASE("A-02 a request released in flight returns its blocks when the step settles") {
  ManagerBench bench({full()});
  bench.admit(1, prompt(100));
  const StepId step = bench.begin(1, 100);
  const std::uint64_t live = bench.live();
  bench.release(1);
  CHECK(bench.live() == live);
  bench.settle(step);
  CHECK(bench.live() == 0);
  CHECK(bench.hit(prompt(100)) == 0);
}

TEST_CASE("A-03 nothing is findable before its step has settled") {
  ManagerBench bench({full()});
  bench.admit(1, prompt(64));
  const StepId step = bench.begin(1, 64);
  CHECK(bench.hit(sharing(prompt(64), 64, 80, 1)) == 0);
  bench.settle(step);
  CHECK(bench.hit(sharing(prompt(64), 64, 80, 1)) == 64);
}

TEST_CASE("A-04 steps settle in order, each once") {
  ManagerBench bench({full()});
  bench.admit(1, prompt(64));
  const StepId first = bench.begin(1, 16);
  const StepId second = bench.begin(1, 16);
  CHECK_THROWS_AS(bench.manager->settle(second), StepError);
  bench.settle(first);
  CHECK_THROWS_AS(bench.manager->settle(first), StepError);
  bench.settle(second);
}

TEST_CASE("F-01 forks share full pages and draw their own") {
  ManagerBench bench({full()});
  bench.admit(1, prompt(32));
  bench.run(1);
  bench.manager->fork(RequestId{1}, RequestId{2});
  bench.manager->fork(RequestId{1}, RequestId{3});
  bench.manager->audit();
  CHECK(bench.live() == 2);
  for (std::uint64_t id = 1; id <= 3; ++id) bench.decode(id, 1);
  CHECK(bench.live() == 5);
  for (std::uint64_t id = 1; id <= 3; ++id) bench.release(id);
  CHECK(bench.live() == 0);
}

TEST_CASE("F-02 F-03 a rewind keeps what lies below, and writes beside what is committed") {
  ManagerBench bench({full()});
  bench.admit(1, prompt(40));
  bench.run(1);
  bench.manager->rewind(RequestId{1}, 36);
  bench.manager->audit();
  CHECK(bench.live() == 3);
  bench.manager->rewind(RequestId{1}, 32);
  CHECK(bench.live() == 2);
  bench.manager->rewind(RequestId{1}, 20);
  bench.append(1, prompt(20, 9));
  const StepRequest row{RequestId{1}, 20};
  const Step& step = bench.manager->begin_step({&row, 1});
  CHECK(step.copies.size() == 1);
  bench.settle(step.id);
  CHECK(bench.hit(sharing(prompt(40), 32, 40, 3)) == 32);
}

TEST_CASE("F-04 F-05 states go back to a checkpoint or not at all") {
  ManagerBench bench({full(32), state()},
                     {.huge = 100, .page = 32, .retention = Retention::every(96)});
  bench.admit(1, prompt(200));
  bench.run(1);
  CHECK_THROWS_WITH_AS(bench.manager->rewind(RequestId{1}, 150), doctest::Contains("96"),
                       RequestError);
  bench.manager->rewind(RequestId{1}, 200);
  bench.manager->rewind(RequestId{1}, 96);
  bench.manager->audit();
  CHECK(bench.manager->computed(RequestId{1}) == 96);
  bench.append(1, prompt(40, 5));
  bench.run(1);
  bench.release(1);
  CHECK(bench.live(1) == 0);
}

TEST_CASE("F-06 a preempted request gets back what was committed") {
  ManagerBench bench({full()});
  bench.admit(1, prompt(55));
  bench.run(1);
  bench.manager->preempt(RequestId{1});
  CHECK(bench.cached() == 3);
  CHECK(bench.live() == 0);
  CHECK(bench.admit(1, prompt(55)).hit_tokens == 48);
}

TEST_CASE("F-07 a child holds what its parent let go") {
  ManagerBench bench({window(32)}, {.caching = false});
  bench.admit(1, prompt(40));
  bench.run(1);
  bench.manager->fork(RequestId{1}, RequestId{2});
  bench.append(1, prompt(24, 6));
  bench.step(1, 24);
  CHECK(bench.slots_held(1) == Slots{2, 3});
  CHECK(bench.slots_held(2) == Slots{0, 1, 2});
}

TEST_CASE("F-08 a fork gets its own last page, state and scratch; page and state are copied") {
  ManagerBench bench({full(), state(), scratch()}, {.huge = 100});
  bench.admit(1, prompt(40));
  bench.run(1);
  const auto live = bench.live(0) + bench.live(1) + bench.live(2);
  bench.manager->fork(RequestId{1}, RequestId{2});
  CHECK(bench.live(0) + bench.live(1) + bench.live(2) == live + 3);
  bench.append(1, {7});
  const StepRequest row{RequestId{1}, 1};
  const Step& step = bench.manager->begin_step({&row, 1});
  CHECK(step.copies.size() == 2);
  bench.settle(step.id);
}

TEST_CASE("K-02 K-07 nothing crosses adapters, salts, or media") {
  ManagerBench bench({full()});
  bench.serve(prompt(64), 1, {.adapter = "a@1"});
  CHECK(bench.hit(prompt(64), {.adapter = "a@1"}) == 48);
  CHECK(bench.hit(prompt(64), {.adapter = "a@2"}) == 0);
  CHECK(bench.hit(prompt(64)) == 0);
  CHECK(bench.hit(prompt(64), {.salt = "a@1"}) == 0);
  bench.serve(prompt(64, 2), 1, {.media = {{20, 10, "11"}}});
  CHECK(bench.hit(prompt(64, 2), {.media = {{20, 10, "11"}}}) == 48);
  CHECK(bench.hit(prompt(64, 2), {.media = {{20, 10, "22"}}}) == 16);
}

TEST_CASE(
    "K-08 after a reset nothing computed before is found, nor what its requests commit later") {
  ManagerBench bench({full(), state()}, {.huge = 200});
  bench.serve(prompt(64));
  bench.admit(1, prompt(64));
  bench.run(1);
  bench.manager->reset_cache();
  bench.manager->audit();
  bench.decode(1, 40);
  bench.release(1);
  CHECK(bench.hit(prompt(64)) == 0);
  CHECK(bench.live(0) + bench.cached(0) + bench.live(1) + bench.cached(1) == 0);
}

TEST_CASE("X-01 X-03 X-05 encoder pages: from admission, shared, found by digest") {
  ManagerBench bench({full(32), cross(32)}, {.huge = 200, .page = 32});
  AdmitOptions options;
  options.encoder = EncoderInput{"digest", 1500, 0};
  CHECK_FALSE(bench.admit(1, prompt(40), options).encoder_cached);
  CHECK(bench.live(1) == 47);
  bench.step(1, 40);
  bench.append(1, {1});
  const StepRequest row{RequestId{1}, 1};
  CHECK_THROWS_AS(bench.manager->begin_step({&row, 1}), RequestError);
  bench.manager->encoder_filled(RequestId{1});
  bench.step(1, 1);
  for (std::uint64_t id = 2; id <= 4; ++id) bench.manager->fork(RequestId{1}, RequestId{id});
  CHECK(bench.manager->pool().references(LeafId{1}, BlockId{bench.row(1, 1)[0]}) == 4);
  for (std::uint64_t id = 1; id <= 4; ++id) bench.release(id);
  CHECK(bench.cached(1) == 47);
  const Admission again = bench.admit(5, prompt(40), options);
  CHECK(again.hit_tokens == 32);
  CHECK(again.encoder_cached);
  bench.release(5);
}

TEST_CASE("C-05 the longest request is what an empty pool serves") {
  CHECK(ManagerBench({full()}, {.huge = 33, .max_len = 512}).manager->longest_request() == 512);
  CHECK(ManagerBench({full()}, {.huge = 31, .max_len = 512}).manager->longest_request() == 496);
}

}  // namespace
}  // namespace kvleaf
