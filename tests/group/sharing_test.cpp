// Forks, rewinds, drafts, promises and steps in flight, by case.
#include "bench.h"

namespace kvleaf {
namespace {
using namespace kvleaf::testing;

TEST_CASE("H-16 a request gives back what it took, whatever was added to its path since") {
  ManagerBench bench({window(20, 10)}, {.huge = 40, .page = 10, .retention = Retention::dense()});
  bench.serve(prompt(40));
  bench.admit(1, sharing(prompt(40), 40, 50, 1));
  CHECK(bench.slots_held(1) == std::vector<std::uint32_t>{2, 3});
  bench.admit(2, prompt(40));
  bench.run(2);
  bench.release(1);
  bench.release(2);
  CHECK(bench.live() == 0);
}

TEST_CASE("F-09 a fork that does not fit changes nothing; one that needs nothing always fits") {
  ManagerBench bench({full()}, {.huge = 2, .caching = false});
  bench.admit(1, prompt(20));
  bench.run(1);
  CHECK_THROWS_AS(bench.manager->fork(RequestId{1}, RequestId{2}), PoolExhausted);
  bench.manager->audit();
  CHECK_FALSE(bench.manager->contains(RequestId{2}));
  bench.decode(1, 5);
  ManagerBench whole({full()}, {.huge = 2, .caching = false});
  whole.admit(1, prompt(32));
  whole.run(1);
  whole.manager->fork(RequestId{1}, RequestId{2});
  whole.manager->audit();
  CHECK(whole.live() == 2);
}

TEST_CASE("F-10 K-03 rejected drafts leave nothing behind, and are never found") {
  ManagerBench bench({full(4)}, {.page = 4});
  bench.admit(1, prompt(5));
  bench.run(1);
  for (std::uint32_t i = 0; i < 1000; ++i) {
    const std::uint32_t known = bench.manager->length(RequestId{1});
    if (known > 200) break;
    bench.append(1, {static_cast<Token>(500 + i)});
    const StepId step = bench.begin(1, 5);  // the sampled token and four drafts, all rejected
    bench.settle(step, {{RequestId{1}, 1}});
    CHECK(bench.manager->computed(RequestId{1}) == known + 1);
    CHECK(bench.live() == (known + 1 + 3) / 4);
  }
  ManagerBench drafts({full(4)}, {.page = 4});
  drafts.admit(1, {1, 2, 3});
  drafts.run(1);
  drafts.append(1, {99});
  drafts.settle(drafts.begin(1, 1),
                {{RequestId{1}, 0}});  // its id was known, so it is rejected with it
  CHECK(drafts.manager->length(RequestId{1}) == 3);
  drafts.append(1, {4});
  drafts.step(1, 1);
  CHECK(drafts.hit({1, 2, 3, 99, 5}) == 0);
  CHECK(drafts.hit({1, 2, 3, 4, 5}) == 4);
}

TEST_CASE("an id that came after its step was begun outlives the rejection of drafts behind it") {
  ManagerBench bench({full(4)}, {.page = 4});
  bench.admit(1, prompt(4));
  bench.run(1);
  const StepId step = bench.begin(1, 4);
  bench.append(1, {7, 8});  // one stands, and the one sampled from it
  bench.settle(step, {{RequestId{1}, 1}});
  CHECK(bench.manager->computed(RequestId{1}) == 5);
  CHECK(bench.manager->length(RequestId{1}) == 6);
}

TEST_CASE("A-05 blocks in quarantine are not there") {
  ManagerBench bench({full()}, {.huge = 4, .caching = false});
  bench.admit(1, prompt(48));
  const StepId step = bench.begin(1, 48);
  bench.release(1);
  CHECK(bench.manager->stats().quarantined == 3);
  CHECK_THROWS_AS(bench.admit(2, prompt(32, 1)), PoolExhausted);
  bench.admit(3, prompt(16, 1));
  bench.settle(step);
  bench.admit(2, prompt(32, 1));
}

TEST_CASE("A-06 a full pool of requests in flight refuses rows and takes nothing from anybody") {
  ManagerBench bench({full(4)}, {.huge = 4, .page = 4, .caching = false});
  std::vector<StepRequest> batch;
  for (std::uint64_t id = 1; id <= 4; ++id) {
    bench.admit(id, prompt(4, static_cast<std::uint32_t>(id)));
    batch.push_back({RequestId{id}, 4});
  }
  const StepId step = bench.manager->begin_step(batch).id;
  for (StepRequest& row : batch) row.new_tokens = 1;
  const Step& none = bench.manager->begin_step(batch);
  CHECK(none.served.empty());
  CHECK(none.refused.size() == 4);
  bench.settle(step);
  CHECK(bench.manager->stats().preemptions == 0);
  for (std::uint64_t id = 1; id <= 4; ++id) CHECK(bench.manager->computed(RequestId{id}) == 4);
}

TEST_CASE(
    "A-07 a step that settles after its request was released commits nothing and frees once") {
  ManagerBench bench({full()}, {.huge = 3});
  bench.admit(1, prompt(48));
  const StepId step = bench.begin(1, 48);
  bench.release(1);
  bench.settle(step);
  CHECK(bench.manager->pool().stats().empty == 3);
}

TEST_CASE(
    "two steps may read states where neither writes, and a step may fail behind one that stands") {
  for (const StateKernel kernel : {StateKernel::in_place, StateKernel::in_out}) {
    ManagerBench bench({full(4), state(kernel)},
                       {.huge = 100, .page = 4, .retention = Retention::dense()});
    bench.admit(1, prompt(20));
    bench.step(1, 8);
    const StepId first = bench.begin(1, 4);
    const StepId second = bench.begin(1, 4);
    const auto lengths = bench.manager->abandon(second);
    bench.manager->audit();
    REQUIRE(lengths.size() == 1);
    CHECK(lengths[0].second <= 12);
    bench.settle(first);
    CHECK(bench.manager->computed(RequestId{1}) == lengths[0].second);
    bench.run(1);
    bench.release(1);
    CHECK(bench.live(1) == 0);
  }
}

TEST_CASE("a promise is kept beside others who grow, and refuses what would break it") {
  ManagerBench bench({full(4), window(8, 4)}, {.huge = 22, .page = 4, .caching = false});
  AdmitOptions promised;
  promised.guarantee = 40;  // 10 blocks of the full leaf, and the window's
  bench.admit(1, prompt(4), promised);
  bench.admit(2, prompt(4, 1));
  bench.run(2);
  std::uint32_t grown = 0;
  while (bench.fits(2, 1)) ++grown;  // as far as the promise allows
  CHECK(grown < 40);
  for (std::uint32_t n = 0; n < 40; n += 4) {
    const StepRequest row{RequestId{1}, 4};
    const Step& step = bench.manager->begin_step({&row, 1});
    CHECK(step.refused.empty());
    bench.settle(step.id);
  }
  CHECK_THROWS_AS(bench.admit(3, prompt(4, 2), promised), PoolExhausted);
}

TEST_CASE("media that is whole is never cut by a hit or a step") {
  ManagerBench bench({full(4)}, {.page = 4});
  AdmitOptions options;
  options.media = {{2, 9, "11", true}};
  bench.admit(1, prompt(20), options);
  const StepRequest inside{RequestId{1}, 6};
  CHECK_THROWS_AS(bench.manager->begin_step({&inside, 1}), RequestError);
  bench.manager->audit();
  bench.run(1);
  bench.release(1);
  CHECK(bench.hit(prompt(20), options) == 16);
  CHECK(bench.hit(sharing(prompt(20), 10, 20, 1), options) == 0);
}

TEST_CASE(
    "what is not addressable is neither matched nor committed, and a dropped request leaves "
    "nothing") {
  ManagerBench bench({full(4)}, {.page = 4});
  AdmitOptions options;
  options.addressable = 8;
  bench.serve(prompt(20), 1, options);
  CHECK(bench.cached() == 2);
  CHECK(bench.hit(prompt(20)) == 8);
  bench.admit(2, prompt(20, 3));
  bench.run(2);
  bench.release(2, Prefix::drop);
  CHECK(bench.hit(prompt(20, 3)) == 0);
  CHECK(bench.cached() == 2);
}

}  // namespace
}  // namespace kvleaf
