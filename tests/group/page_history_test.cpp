// The memory of evicted pages, and what a page that is asked for again is worth.
#include "kvleaf/group/page_history.h"

#include <algorithm>
#include <deque>
#include <set>

#include "bench.h"
#include "device.h"

namespace kvleaf {
namespace {
using namespace kvleaf::testing;

TEST_CASE("a history holds the last keys, at most six a page, and forgets the oldest first") {
  constexpr std::uint64_t pages = 512;
  PageHistory history(pages);
  CHECK(history.metadata_bytes() == 64 * pages);
  Random random(7);
  std::deque<std::uint64_t> told;
  const auto lost = [&](std::size_t from, std::size_t to) {  // of the last ones, newest first
    std::size_t count = 0;
    for (std::size_t i = from; i < to; ++i)
      count += history.remembers(told[told.size() - 1 - i]) ? 0 : 1;
    return count;
  };
  for (int i = 0; i < 200'000; ++i) {
    told.push_back(random.next());
    history.remember(told.back());
    if (told.size() > 8 * pages) told.pop_front();
    CHECK(history.size() <= PageHistory::keys_per_page * pages);
  }
  CHECK(history.size() > (PageHistory::keys_per_page - 1) * pages);
  CHECK(lost(0, 5 * pages) <= 5 * pages / 500);    // crowded lines
  CHECK(lost(7 * pages, 8 * pages) >= pages - 5);  // but for keys with one fingerprint
  std::size_t mistaken = 0;
  for (int i = 0; i < 100'000; ++i) mistaken += history.remembers(random.next()) ? 1 : 0;
  CHECK(mistaken <= 100);
}

TEST_CASE("a key that was forgotten by hand leaves its place and its time to older ones") {
  constexpr std::uint64_t pages = 100;
  PageHistory history(pages);
  Random random(11);
  std::vector<std::uint64_t> first(3 * pages);
  for (std::uint64_t& key : first) history.remember(key = random.next());
  // Ten times what it holds passes by, but each key is forgotten again: the first ones stay.
  for (std::uint64_t i = 0; i < 60 * pages; ++i) {
    const std::uint64_t key = random.next();
    history.remember(key);
    CHECK(history.remembers(key));
    history.forget(key);
    CHECK(!history.remembers(key));
  }
  CHECK(std::ranges::count_if(first, [&](std::uint64_t key) { return history.remembers(key); }) >=
        static_cast<std::ptrdiff_t>(first.size() - 3));
  history.clear();
  CHECK(history.size() == 0);
  CHECK(std::ranges::none_of(first, [&](std::uint64_t key) { return history.remembers(key); }));
}

TEST_CASE("the smallest pools have a history, and none remembers nothing") {
  for (const std::uint64_t pages : {1u, 2u, 3u, 42u, 43u}) {
    PageHistory history(pages);
    Random random(pages);
    for (int i = 0; i < 30'000; ++i) {  // its epochs' numbers come round several times
      const std::uint64_t key = random.next();
      history.remember(key);
      CHECK(history.remembers(key));
      CHECK(history.size() <= PageHistory::keys_per_page * pages);
    }
  }
  PageHistory none(0);
  none.remember(1);
  none.forget(1);
  CHECK(!none.remembers(1));
  CHECK(none.size() == 0);
}

TEST_CASE("the second request for a page that is long gone proves it, in any cache") {
  for (const bool again : {false, true}) {
    for (const EvictionOrder order : {EvictionOrder::value, EvictionOrder::lru}) {
      ManagerBench bench({full(4)}, {.huge = 10, .page = 4, .eviction = order});
      bench.serve(prompt(8, 1));
      for (std::uint32_t k = 10; k < 20; ++k) bench.serve(prompt(8, k));  // twice what it holds
      REQUIRE(bench.findable(prompt(8, 1)) == "00");
      bench.serve(again ? prompt(8, 1) : prompt(8, 2));
      // Once-asked pages pass by: what was asked for twice outlives them, though it is older.
      for (std::uint32_t k = 20; k < 30; ++k) bench.serve(prompt(8, k));
      const std::string expected = again && order == EvictionOrder::value ? "11" : "00";
      CHECK(bench.findable(prompt(8, again ? 1 : 2)) == expected);
    }
  }
}

TEST_CASE("only the part of a path that was asked for before is proven by asking for it again") {
  ManagerBench bench({full(4)}, {.huge = 12, .page = 4});
  const auto first = prompt(16, 1);
  bench.serve(first);
  for (std::uint32_t k = 10; k < 20; ++k) bench.serve(prompt(8, k));
  const auto second = sharing(first, 8, 16, 2);  // two pages of the old path, two new ones
  bench.serve(second);
  for (std::uint32_t k = 20; k < 30; ++k) bench.serve(prompt(8, k));
  CHECK(bench.findable(second) == "1100");
  AdmitOptions other;  // and nothing crosses tenants
  other.salt = "other";
  bench.serve(prompt(8, 5));
  for (std::uint32_t k = 30; k < 40; ++k) bench.serve(prompt(8, k));
  bench.serve(prompt(8, 5), 900, other);
  for (std::uint32_t k = 40; k < 50; ++k) bench.serve(prompt(8, k));
  CHECK(bench.manager->probe(prompt(8, 5), other).hit_tokens == 0);
}

TEST_CASE("proven pages keep nineteen twentieths of what is findable; the oldest make way") {
  ManagerBench bench({full(4)}, {.huge = 41, .page = 4});
  for (std::uint32_t round = 0; round < 2; ++round) {
    for (std::uint32_t k = 0; k < 20; ++k) bench.serve(prompt(8, k));  // 40 pages, all proven
  }
  REQUIRE(bench.cached() == 40);
  // Newcomers must not evict each other at once: two of the forty pages are theirs.
  for (std::uint32_t k = 100; k < 110; ++k) bench.serve(prompt(8, k));
  CHECK(bench.findable(prompt(8, 109)) == "11");
  std::uint32_t proven = 0;
  for (std::uint32_t k = 0; k < 20; ++k) {
    proven += static_cast<std::uint32_t>(std::ranges::count(bench.findable(prompt(8, k)), '1'));
  }
  CHECK(proven >= 36);
  CHECK(proven <= 39);
  CHECK(bench.findable(prompt(8, 19)) == "11");
}

TEST_CASE("a page that stands in two branches is remembered under its path, whatever was split") {
  ManagerBench bench({full(1)}, {.huge = 60, .page = 1});
  const auto trunk = prompt(20, 1);
  bench.serve(trunk);
  bench.serve(sharing(trunk, 7, 20, 2));   // splits
  bench.serve(sharing(trunk, 13, 20, 3));  // and again
  bench.serve(prompt(60, 9));              // takes all there is
  REQUIRE(bench.findable(trunk) == std::string(20, '0'));
  const auto again = sharing(trunk, 20, 30, 4);
  bench.serve(again);
  for (std::uint32_t k = 20; k < 30; ++k) bench.serve(prompt(20, k));
  CHECK(bench.findable(again) == std::string(20, '1') + std::string(10, '0'));
}

}  // namespace
}  // namespace kvleaf
