// Reach: what each pattern holds, and the exact count of what it holds at most.
#include "kvleaf/leaf/access_pattern.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kvleaf/leaf/errors.h"

using kvleaf::AccessPattern;
using kvleaf::InvalidArgument;
using Slots = std::vector<std::uint32_t>;

namespace {

constexpr std::uint32_t largest = std::numeric_limits<std::uint32_t>::max();

AccessPattern custom(std::uint32_t head, AccessPattern::TailBegin tail_begin) {
  return AccessPattern::custom({.head = head, .tail_begin = std::move(tail_begin)});
}

// The definition, token by token: [0, head) and [tail_begin, n), and the page that token n goes
// into where a part of it is filled.
Slots obvious_reach(const AccessPattern& pattern, std::uint32_t n, std::uint32_t page) {
  Slots slots;
  for (std::uint32_t token = 0; token < n; ++token) {
    const bool needed = token < pattern.head() || token >= pattern.tail_begin(n);
    const bool beside_n = n % page != 0 && token / page == n / page;
    if (!needed && !beside_n) continue;
    if (slots.empty() || slots.back() != token / page) slots.push_back(token / page);
  }
  return slots;
}

// Every start n and every number of planned tokens, counted.
std::uint32_t obvious_most(const AccessPattern& pattern, std::uint32_t page,
                           std::uint32_t num_slots, std::uint32_t step_tokens) {
  std::size_t most = 0;
  for (std::uint32_t n = 0; n <= num_slots * page; ++n) {
    Slots held = obvious_reach(pattern, n, page);
    for (std::uint32_t planned = 0; planned <= step_tokens && n + planned <= num_slots * page;
         ++planned) {
      for (std::uint32_t slot = (n + page - 1) / page; slot * page < n + planned; ++slot) {
        if (held.empty() || held.back() < slot) held.push_back(slot);
      }
      most = std::max(most, held.size());
    }
  }
  return static_cast<std::uint32_t>(most);
}

// A tail that stands still, creeps and jumps, by the seed.
AccessPattern random_custom(std::uint32_t seed, std::uint32_t length) {
  std::mt19937 random(seed);
  auto table = std::make_shared<std::vector<std::uint32_t>>();
  std::uint32_t begin = 0;
  const std::uint32_t eagerness = 1 + random() % 4;
  for (std::uint32_t n = 0; n <= length; ++n) {
    if (random() % 8 < eagerness && begin < n) begin += random() % (n - begin + 1);
    table->push_back(begin);
  }
  return custom(random() % 7, [table](std::uint32_t n) { return table->at(n); });
}

std::vector<AccessPattern> small_patterns() {
  std::vector<AccessPattern> patterns = {AccessPattern::full(), AccessPattern::point()};
  for (std::uint32_t window : {1, 2, 3, 4, 5, 7, 8, 9, 13}) {
    for (std::uint32_t sinks : {0, 1, 3, 4, 5, 9}) {
      patterns.push_back(AccessPattern::window(window, sinks));
    }
  }
  for (std::uint32_t chunk = 1; chunk <= 13; ++chunk)
    patterns.push_back(AccessPattern::chunk(chunk));
  for (std::uint32_t seed = 0; seed < 40; ++seed) patterns.push_back(random_custom(seed, 80));
  return patterns;
}

}  // namespace

TEST_CASE("L-01 a full pattern reaches every page, the partly filled one included") {
  const AccessPattern full = AccessPattern::full();
  CHECK(full.reach(40, 16) == Slots{0, 1, 2});
  CHECK(full.slots(40, 16).count() == 3);
  CHECK(full.slots(48, 16).count() == 3);
  CHECK(full.slots(49, 16).count() == 4);
  CHECK(full.most_slots(16, 3, 1) == 3);
  CHECK(full.most_slots(16, 4, 1) == 4);
}

TEST_CASE("L-02 a window in decode reserves its span, reaches it and never passes it") {
  struct Case {
    std::uint32_t window, page, most;
  };
  for (const Case c : {Case{512, 128, 5}, Case{1024, 16, 65}, Case{4, 4, 2}}) {
    CAPTURE(c.window);
    const AccessPattern pattern = AccessPattern::window(c.window);
    const std::uint32_t tokens = 5 * c.window;
    const std::uint32_t reserved = pattern.most_slots(c.page, tokens / c.page, 1);
    CHECK(reserved == c.most);
    std::uint32_t seen = 0;
    for (std::uint32_t n = 0; n < tokens; ++n) {
      const auto held = pattern.slots(n, c.page);
      const std::uint32_t next = n / c.page + 1;  // the page token n goes into is held as well
      seen = std::max(seen, held.head_end + next - held.tail_begin);
    }
    CHECK(seen == c.most);
  }
}

TEST_CASE("L-03 a step of many tokens holds the window before it and all it writes") {
  CHECK(AccessPattern::window(3).most_slots(1, 1000, 20) == 22);
  CHECK(AccessPattern::window(1024).most_slots(16, 1000, 1024) == 129);
  CHECK(AccessPattern::window(64).most_slots(16, 1000, 128) == 13);
  CHECK(AccessPattern::window(64).most_slots(16, 7, 128) == 7);  // never more than the request has
}

TEST_CASE("L-04 sinks add their pages, and chunks hold most where they begin inside a page") {
  CHECK(AccessPattern::window(1024, 4).most_slots(16, 1000, 1) == 66);
  CHECK(AccessPattern::window(8, 5).most_slots(4, 1000, 1) == 5);
  CHECK(AccessPattern::chunk(8192).most_slots(16, 10000, 1) == 512);
  CHECK(AccessPattern::chunk(8192).most_slots(16, 10000, 2048) == 640);
  CHECK(AccessPattern::chunk(8).most_slots(4, 1000, 1) == 2);
  CHECK(AccessPattern::chunk(8).most_slots(4, 1000, 4) == 3);
  CHECK(AccessPattern::chunk(8).most_slots(4, 1000, 8) == 4);
}

TEST_CASE("L-09 a window longer than the request behaves as full") {
  const AccessPattern window = AccessPattern::window(8192);
  CHECK(window.most_slots(16, 256, 1) == 256);
  CHECK(window.most_slots(16, 256, 4096) == 256);
  for (std::uint32_t n = 0; n <= 4096; ++n) {
    REQUIRE(window.slots(n, 16) == AccessPattern::full().slots(n, 16));
  }
}

TEST_CASE("L-10 a half-filled page is always held, whatever the tail says") {
  CHECK(AccessPattern::chunk(6).reach(6, 4) == Slots{1});   // token 6 joins tokens 4 and 5
  CHECK(AccessPattern::window(1).reach(5, 4) == Slots{1});  // token 5 joins token 4
  CHECK(custom(0, [](std::uint32_t n) { return n; }).reach(7, 4) == Slots{1});
  CHECK(AccessPattern::window(1).reach(8, 4).empty());
}

TEST_CASE("W-05 a chunk lets go of everything where it ends") {
  const AccessPattern chunk = AccessPattern::chunk(8);
  CHECK(chunk.reach(8, 4).empty());
  CHECK(chunk.reach(9, 4) == Slots{2});
  CHECK(chunk.reach(15, 4) == Slots{2, 3});
  CHECK(chunk.reach(16, 4).empty());
  CHECK(chunk.reach(17, 4) == Slots{4});
}

TEST_CASE("W-08 a slot that sinks and window share is counted once") {
  const AccessPattern pattern = AccessPattern::window(8, 4);
  CHECK(pattern.reach(40, 4) == Slots{0, 8, 9});
  CHECK(pattern.reach(6, 4) == Slots{0, 1});
  CHECK(pattern.slots(6, 4).count() == 2);
}

TEST_CASE("an encoder's slots are all of its pages whatever n is, and nothing has none") {
  const AccessPattern encoder = AccessPattern::encoder();
  CHECK(encoder.slots(0, 32, 1500).count() == 47);
  CHECK(encoder.slots(400, 32, 1500) == encoder.slots(0, 32, 1500));
  CHECK(encoder.most_slots(32, 47, 1) == 47);
  CHECK(encoder.domain() == AccessPattern::Domain::encoder);
  CHECK(AccessPattern::none().reach(100, 16, 1500).empty());
  CHECK(AccessPattern::none().most_slots(16, 100, 1) == 0);
}

TEST_CASE("a point is the one slot that ends at n") {
  CHECK(AccessPattern::point().reach(0, 16).empty());
  CHECK(AccessPattern::point().reach(16, 16) == Slots{0});
  CHECK(AccessPattern::point().reach(4992, 64) == Slots{77});
}

TEST_CASE("slots are those of the definition, for every small pattern") {
  for (const AccessPattern& pattern : small_patterns()) {
    for (std::uint32_t page = 1; page <= 6; ++page) {
      for (std::uint32_t n = 0; n <= 60; ++n) {
        CAPTURE(pattern.to_string());
        CAPTURE(page);
        CAPTURE(n);
        const Slots expected = obvious_reach(pattern, n, page);
        REQUIRE(pattern.reach(n, page) == expected);
        const kvleaf::SlotReach slots = pattern.slots(n, page);
        REQUIRE(slots.count() == expected.size());
        REQUIRE(slots.head_end <= slots.tail_begin);
        REQUIRE(slots.tail_begin <= slots.end);
        for (std::uint32_t slot = 0; slot < 62; ++slot) {
          REQUIRE(slots.contains(slot) ==
                  std::binary_search(expected.begin(), expected.end(), slot));
        }
      }
    }
  }
}

TEST_CASE("L-11 a slot out of reach stays out of reach") {
  std::vector<AccessPattern> patterns = small_patterns();
  patterns.push_back(AccessPattern::window(1024, 4));
  patterns.push_back(AccessPattern::chunk(48));
  for (const AccessPattern& pattern : patterns) {
    for (std::uint32_t page : {1U, 3U, 4U, 16U}) {
      std::vector<char> gone(100, 0);
      const std::uint32_t limit = pattern.to_string().starts_with("custom") ? 80 : 5 * 16;
      for (std::uint32_t n = 0; n <= limit; ++n) {
        const kvleaf::SlotReach held = pattern.slots(n, page);
        for (std::uint32_t slot = 0; slot * page < n; ++slot) {
          CAPTURE(pattern.to_string());
          CAPTURE(page);
          CAPTURE(n);
          CAPTURE(slot);
          REQUIRE_FALSE((gone[slot] != 0 && held.contains(slot)));
          if (!held.contains(slot)) gone[slot] = 1;
        }
      }
    }
  }
}

TEST_CASE("most_slots is what counting every start and step gives, for every small pattern") {
  for (const AccessPattern& pattern : small_patterns()) {
    for (std::uint32_t page : {1U, 2U, 3U, 4U, 6U}) {
      for (std::uint32_t num_slots : {0U, 1U, 2U, 3U, 5U, 8U, 12U}) {
        for (std::uint32_t step : {0U, 1U, 2U, 3U, 4U, 5U, 8U, 17U}) {
          CAPTURE(pattern.to_string());
          CAPTURE(page);
          CAPTURE(num_slots);
          CAPTURE(step);
          REQUIRE(pattern.most_slots(page, num_slots, step) ==
                  obvious_most(pattern, page, num_slots, step));
        }
      }
    }
  }
}

TEST_CASE("a custom function is searched, not called for every token") {
  std::uint64_t calls = 0;
  const AccessPattern window = custom(0, [&calls](std::uint32_t n) {
    ++calls;
    return n < 4096 ? 0 : n - 4095;
  });
  CHECK(window.most_slots(16, 8192, 1) == 257);
  CHECK(calls < 8192 * 2);  // of 131,073 tokens
  calls = 0;
  CHECK(custom(0, [&calls](std::uint32_t) {
          ++calls;
          return 0U;
        }).most_slots(16, 8192, 1) == 8192);
  CHECK(calls < 64);
}

TEST_CASE("sizes near 2^32 neither wrap nor take long") {
  CHECK(AccessPattern::window(largest, largest).most_slots(1, largest, largest) == largest);
  CHECK(AccessPattern::window(largest).most_slots(largest, largest, largest) == 3);
  CHECK(AccessPattern::window(largest).most_slots(2, largest, largest) == largest);
  CHECK(AccessPattern::window(largest).most_slots(16, largest, 1) == 268435457);  // ⌈(2^32-2)/16⌉+1
  CHECK(AccessPattern::chunk(largest).most_slots(16, largest, largest) == 536870913);
  CHECK(AccessPattern::chunk(largest).most_slots(largest, largest, largest) == 2);
  CHECK(AccessPattern::full().most_slots(largest, largest, largest) == largest);
  CHECK(custom(7, [](std::uint32_t) { return 0U; }).most_slots(1, largest, 1) == largest);
  const AccessPattern last = custom(largest, [](std::uint32_t n) { return n; });
  CHECK(last.most_slots(largest, largest, largest) == 2);
  CHECK(last.most_slots(1U << 31, 4, 1) == 2);
  CHECK(AccessPattern::full().slots(largest, 16).end == 1U << 28);
  CHECK(AccessPattern::window(1).tail_begin(largest) == largest);
  CHECK(AccessPattern::window(largest).tail_begin(largest) == 1);
  CHECK(AccessPattern::chunk(16).tail_begin(largest) == largest - 15);
}

TEST_CASE("tabulated calls the function once for each n and never again") {
  std::vector<std::uint32_t> called;
  const AccessPattern pattern = custom(3, [&called](std::uint32_t n) {
    called.push_back(n);
    return n < 10 ? 0 : n - 10;
  });
  const AccessPattern table = pattern.tabulated(50);
  REQUIRE(called.size() == 51);
  for (std::uint32_t n = 0; n <= 50; ++n) {
    CHECK(called[n] == n);
    CHECK(table.tail_begin(n) == (n < 10 ? 0 : n - 10));
  }
  CHECK(table.tail_begin(51) == 40);  // beyond the table the tail stands still
  CHECK(table.most_slots(4, 13, 2) == pattern.most_slots(4, 13, 2));
  const std::size_t before = called.size();
  CHECK(table.most_slots(4, 13, 2) > 0);
  CHECK(table.reach(50, 4).back() == 12);
  CHECK(called.size() == before);
  CHECK(table == pattern);
  CHECK(AccessPattern::full().tabulated(10) == AccessPattern::full());
}

TEST_CASE("a custom tail that decreases or passes n is refused, and n is named") {
  const auto message = [](AccessPattern::TailBegin function) -> std::string {
    try {
      (void)custom(0, std::move(function)).tabulated(100);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "accepted";
  };
  CHECK(message([](std::uint32_t n) {
          return n == 30 ? 9U : std::min(n, 10U);
        }).find("tail_begin(30) is 9") != std::string::npos);
  CHECK(message([](std::uint32_t n) { return n == 7 ? 8U : 0U; }).find("tail_begin(7) is 8") !=
        std::string::npos);
  CHECK(message([](std::uint32_t n) { return n / 2; }) == "accepted");
  // Untabulated, what passes n is cut, so that a reach is never past its end.
  CHECK(custom(0, [](std::uint32_t n) { return n + 9; }).tail_begin(5) == 5);
}

TEST_CASE("L-12 patterns of nothing are refused, and a window of 1 is legal") {
  CHECK_THROWS_AS(AccessPattern::window(0), InvalidArgument);
  CHECK_THROWS_AS(AccessPattern::chunk(0), InvalidArgument);
  CHECK_THROWS_AS(AccessPattern::custom({}), InvalidArgument);
  CHECK_THROWS_AS(
      AccessPattern::custom({.tail_begin = [](std::uint32_t) { return 0U; }, .ahead = 2}),
      InvalidArgument);
  CHECK_THROWS_AS(AccessPattern::full().slots(1, 0), InvalidArgument);
  CHECK_THROWS_AS(AccessPattern::full().most_slots(0, 1, 1), InvalidArgument);
  CHECK_NOTHROW(AccessPattern::window(1));
}

TEST_CASE("patterns are equal when they declare the same") {
  CHECK(AccessPattern::window(8, 4) == AccessPattern::window(8, 4));
  CHECK_FALSE(AccessPattern::window(8, 4) == AccessPattern::window(8));
  CHECK_FALSE(AccessPattern::window(8) == AccessPattern::chunk(8));
  CHECK_FALSE(AccessPattern::none() == AccessPattern::encoder());
  const auto same = [](std::uint32_t n) { return n; };
  const AccessPattern one = custom(0, same);
  const AccessPattern copy = one;
  CHECK(one == copy);
  CHECK_FALSE(one == custom(0, same));
  CHECK(AccessPattern::custom({.tail_begin = same, .ahead = 1}).ahead() == 1);
}

TEST_CASE("patterns print as they are declared") {
  CHECK(AccessPattern::full().to_string() == "full");
  CHECK(AccessPattern::window(1024).to_string() == "window(1024)");
  CHECK(AccessPattern::window(1024, 4).to_string() == "window(1024, sinks=4)");
  CHECK(AccessPattern::chunk(8192).to_string() == "chunk(8192)");
  CHECK(AccessPattern::point().to_string() == "point");
  CHECK(AccessPattern::encoder().to_string() == "encoder");
  CHECK(AccessPattern::none().to_string() == "none");
}
