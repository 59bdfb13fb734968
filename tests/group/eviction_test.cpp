// What is evicted first, what a hit pins, and what keys and events say of it.
#include <set>

#include "bench.h"

namespace kvleaf {
namespace {
using namespace kvleaf::testing;

TEST_CASE("P-12 hits are not free as well") {
  ManagerBench bench({full(4)}, {.huge = 5, .page = 4});
  bench.serve(prompt(16));
  CHECK(bench.cached() == 4);
  CHECK_THROWS_AS(bench.admit(1, sharing(prompt(16), 16, 21, 1)), PoolExhausted);
  CHECK(bench.cached() == 4);
  CHECK(bench.live() == 0);
  CHECK(bench.manager->pool().stats().empty == 1);
  ManagerBench idle({full(4)}, {.huge = 4, .page = 4});
  idle.serve(prompt(16));
  CHECK_THROWS_AS(idle.admit(1, sharing(prompt(16), 8, 20, 1)), PoolExhausted);
  CHECK(idle.cached() == 4);
}

TEST_CASE("P-13 blocks that a hit has pinned are not drawn, however old") {
  ManagerBench bench({full(4, "a"), full(4, "b")}, {.huge = 16, .page = 4});
  bench.serve(prompt(20));
  for (int i = 0; i < 3; ++i) {
    CHECK(bench.admit(1, sharing(prompt(20), 20, 32, 1)).hit_tokens >= 20);
    bench.run(1);
    std::set<std::uint32_t> blocks;
    for (const std::uint32_t leaf : {0u, 1u}) {
      for (const std::uint32_t block : bench.row(1, leaf)) blocks.insert(block);
    }
    CHECK(blocks.size() == 16);
    CHECK(bench.live(0) == 8);
    CHECK(bench.live(1) == 8);
    bench.release(1);
  }
}

TEST_CASE("P-17 of one chain the deepest goes first; a higher priority outlives it") {
  ManagerBench bench({full(4)}, {.huge = 4, .page = 4, .retention = Retention::dense()});
  AdmitOptions dear;
  dear.priority = 5;
  bench.serve(prompt(4, 9), 1, dear);
  const auto chain = prompt(12);
  bench.serve(chain);
  // Each newcomer holds its block, so each evicts one more.
  const std::vector<std::pair<std::string, std::string>> expected = {
      {"110", "1"}, {"100", "1"}, {"000", "1"}, {"000", "0"}};
  for (std::uint32_t i = 0; i < expected.size(); ++i) {
    bench.admit(10 + i, prompt(1, 20 + i));
    bench.step(10 + i, 1);
    CHECK(bench.findable(chain) == expected[i].first);
    CHECK(bench.findable(prompt(4, 9)) == expected[i].second);
  }
}

TEST_CASE("P-18 what lost an ancestor goes before what is older") {
  ManagerBench bench({full(4)}, {.huge = 5, .page = 4, .retention = Retention::dense()});
  bench.serve(prompt(4, 9));  // Y, the oldest
  const auto chain = prompt(16);
  bench.serve(chain);
  bench.admit(1, chain);
  const BlockId second{bench.row(1)[1]};
  bench.release(1);
  // Page 1 of the chain is taken away: pages 2 and 3 behind it serve nobody.
  bench.manager->pool().revalue(LeafId{0}, second, 0);
  bench.admit(2, prompt(1, 30));
  bench.step(2, 1);
  CHECK(bench.findable(chain) == "1011");
  for (const char* left : {"1010", "1000"}) {
    bench.admit(left[2], prompt(1, static_cast<std::uint32_t>(left[2])));
    bench.step(left[2], 1);
    CHECK(bench.findable(chain) == left);
    CHECK(bench.findable(prompt(4, 9)) == "1");
  }
  bench.admit(9, prompt(1, 40));
  bench.step(9, 1);
  CHECK(bench.findable(prompt(4, 9)) == "0");
  CHECK(bench.findable(chain) == "1000");
}

TEST_CASE(
    "K-01 where in its page an item lies tells pages apart; one that ends with a page adds nothing "
    "behind it") {
  ManagerBench bench({full()});
  std::vector<Token> tokens(48, 7);
  AdmitOptions first;
  first.media = {{0, 8, "x"}};
  AdmitOptions second;
  second.media = {{8, 8, "x"}};
  bench.serve(tokens, 1, first);
  CHECK(bench.hit(tokens, first) == 32);
  CHECK(bench.hit(tokens, second) == 0);
  bench.serve(tokens, 1, second);
  CHECK(bench.hit(tokens, second) == 32);
  CHECK(bench.hit(tokens) == 0);
}

TEST_CASE("K-04 a leaf with long pages files where its page ends") {
  ManagerBench bench({full(128, "short"), full(1536, "long")}, {.huge = 200, .page = 128});
  bench.serve(prompt(1536 * 2 + 5));
  CHECK(bench.cached(1) == 2);
  CHECK(bench.hit(sharing(prompt(1536 * 2 + 5), 1536 + 700, 4000, 1)) == 1536);
}

TEST_CASE(
    "T-03 one event when a page is first found, one when the last copy goes; parents before "
    "children") {
  std::vector<PageSpec> specs{PageSpec::of(*full(4))};
  ManagerOptions options;
  options.page_tokens = 4;
  options.max_len = 100;
  options.events = true;
  options.hash = KeyHash::sha256;
  options.geometry = Geometry::by_hand(specs, {.huge_bytes = 64, .huge_blocks = 4, .ratios = {1}});
  BlockManager manager({full(4)}, options);
  const auto serve = [&](const std::vector<Token>& tokens) {
    manager.admit(RequestId{1}, tokens);
    const StepRequest row{
        RequestId{1}, static_cast<std::uint32_t>(tokens.size()) - manager.planned(RequestId{1})};
    manager.settle(manager.begin_step({&row, 1}).id);
    manager.release(RequestId{1});
  };
  serve(prompt(10));
  const auto stored = manager.take_events();
  REQUIRE(stored.size() == 2);  // the part-filled page announces nothing
  CHECK(stored[0].kind == Event::Kind::stored);
  CHECK(stored[0].parent_key == std::array<std::uint8_t, 16>{});
  CHECK(stored[1].parent_key == stored[0].key);
  CHECK(stored[0].tokens == 4);
  CHECK(stored[1].tokens == 8);
  serve(prompt(10));
  CHECK(manager.take_events().empty());
  serve(prompt(16, 1));
  std::set<std::array<std::uint8_t, 16>> removed;
  for (const Event& event : manager.take_events()) {
    if (event.kind == Event::Kind::removed) removed.insert(event.key);
  }
  CHECK(removed == std::set<std::array<std::uint8_t, 16>>{stored[0].key, stored[1].key});
  manager.reset_cache();
  const auto cleared = manager.take_events();
  REQUIRE(cleared.size() == 1);
  CHECK(cleared[0].kind == Event::Kind::cleared);
}

TEST_CASE("a leaf fed the next token is resumed only where that token is known and the same") {
  const auto draft = std::make_shared<KVLeafRegion>(
      "draft",
      KVCacheGroupId(
          "draft",
          AccessPattern::custom({.tail_begin = [](std::uint32_t) { return 0u; }, .ahead = 1}),
          Writing::append),
      64, KVLeafRegion::Options{1, 4});
  ManagerBench bench({full(4), draft}, {.page = 4});
  bench.serve(prompt(9));
  CHECK(bench.hit(sharing(prompt(9), 9, 12, 1)) == 8);
  CHECK(bench.hit(sharing(prompt(9), 8, 12, 1)) == 4);  // token 8 differs
  AdmitOptions options;
  options.media = {{8, 1, "11"}};
  CHECK(bench.hit(prompt(9), options) == 4);  // the same id, but another input
}

TEST_CASE("a partial hit copies the common part of a page and never writes to it") {
  ManagerBench bench({full()});
  bench.serve(prompt(32));
  AdmitOptions options;
  options.partial = true;
  for (const std::uint32_t common : {5u, 21u}) {
    const Admission admission =
        bench.admit(common, sharing(prompt(32), common, 40, common), options);
    CHECK(admission.hit_tokens == common);
    const StepRequest row{RequestId{common}, 10};
    const Step& step = bench.manager->begin_step({&row, 1});
    REQUIRE(step.copies.size() == 1);
    bench.settle(step.id);
    bench.release(common);
    CHECK(bench.hit(sharing(prompt(32), 32, 40, 1)) == 32);
  }
}

}  // namespace
}  // namespace kvleaf
