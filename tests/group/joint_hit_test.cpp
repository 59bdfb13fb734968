// The joint hit against brute force, and by case.
#include "kvleaf/group/joint_hit.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "device.h"

namespace kvleaf {
namespace {
using kvleaf::testing::Random;

/// A leaf that holds the slots where `held` says so.
LeafResidency leaf(const AccessPattern& pattern, std::uint32_t page, const std::vector<bool>& held,
                   std::uint32_t group = 0) {
  LeafResidency residency;
  residency.pattern = &pattern;
  residency.tokens_per_page = page;
  residency.group = group;
  residency.slots = static_cast<std::uint32_t>(held.size());
  for (std::uint32_t slot = 0; slot < held.size(); ++slot) {
    if (!held[slot]) residency.lacks(slot);
  }
  return residency;
}
std::vector<bool> bits(const std::string& text) {
  std::vector<bool> held;
  for (const char c : text) held.push_back(c == '1');
  return held;
}
std::vector<bool> only(std::uint32_t slots, const std::vector<std::uint32_t>& these) {
  std::vector<bool> held(slots, false);
  for (const std::uint32_t slot : these) held[slot] = true;
  return held;
}
std::vector<bool> all_but(std::uint32_t slots, const std::vector<std::uint32_t>& these) {
  std::vector<bool> held(slots, true);
  for (const std::uint32_t slot : these) held[slot] = false;
  return held;
}

TEST_CASE("H-01 full leaves, windows, and both") {
  const AccessPattern full = AccessPattern::full();
  const AccessPattern w3 = AccessPattern::window(3);
  const AccessPattern w4 = AccessPattern::window(4);
  const auto hit = [](std::vector<LeafResidency> leaves, std::uint32_t tokens) {
    return joint_hit(leaves, tokens - 1, 1, {});
  };
  CHECK(hit({leaf(full, 1, bits("11101"))}, 6) == 3);
  CHECK(hit({leaf(w3, 1, bits("0011011"))}, 8) == 7);
  CHECK(hit({leaf(w4, 1, bits("1100"))}, 5) == 2);
  CHECK(hit({leaf(full, 1, bits("1111110")), leaf(w3, 1, bits("0011011"))}, 8) == 4);
  CHECK(hit({leaf(full, 1, bits("1111110")), leaf(w3, 1, bits("0000011"))}, 8) == 0);
}

TEST_CASE("H-02 a window of 4 over islands") {
  const AccessPattern w4 = AccessPattern::window(4);
  const auto hit = [&](const std::vector<std::uint32_t>& held) {
    const std::vector<LeafResidency> leaves{leaf(w4, 1, only(14, held))};
    return joint_hit(leaves, 14, 1, {});
  };
  CHECK(hit({2, 3, 4, 5, 11, 12, 13}) == 14);
  CHECK(hit({2, 3, 4, 5}) == 6);
  CHECK(hit({0, 1}) == 2);
  CHECK(hit({0, 2, 3}) == 1);
  CHECK(hit({5, 6}) == 0);
  CHECK(hit({12, 13}) == 0);
}

TEST_CASE("H-03 H-12 losses of a window, and of a full leaf and a state together") {
  const AccessPattern full = AccessPattern::full();
  const AccessPattern w100 = AccessPattern::window(100);
  const AccessPattern w500 = AccessPattern::window(500);
  const AccessPattern point = AccessPattern::point();
  const auto with_window = [&](const AccessPattern& window, std::uint32_t page,
                               const std::vector<std::uint32_t>& lost) {
    const std::uint32_t slots = 1000 / page;
    const std::vector<LeafResidency> leaves{leaf(full, page, std::vector<bool>(slots, true)),
                                            leaf(window, page, all_but(slots, lost))};
    return joint_hit(leaves, 999, page, {});
  };
  const auto from = [](std::uint32_t first) {
    std::vector<std::uint32_t> slots(100 - first);
    std::iota(slots.begin(), slots.end(), first);
    return slots;
  };
  CHECK(with_window(w100, 10, {}) == 990);
  CHECK(with_window(w100, 10, {93}) == 930);
  CHECK(with_window(w100, 10, from(5)) == 50);
  CHECK(with_window(w100, 10, from(1)) == 10);
  CHECK(with_window(w500, 128, {}) == 896);
  CHECK(with_window(w500, 128, {5}) == 640);
  CHECK(with_window(w500, 128, {2, 5}) == 256);

  const std::vector<LeafResidency> leaves{leaf(full, 16, all_but(4, {2, 3}), 0),
                                          leaf(point, 16, all_but(4, {1, 2}), 1)};
  CHECK(joint_hit(leaves, 64, 16, {}) == 16);
  CHECK(leaves[0].deepest(64, 16) == 32);
  CHECK(leaves[1].deepest(64, 16) == 64);
}

TEST_CASE("H-04 a plain minimum over leaves is wrong") {
  const AccessPattern full = AccessPattern::full();
  const AccessPattern w3 = AccessPattern::window(3);
  const AccessPattern w4 = AccessPattern::window(4);
  std::vector<std::uint32_t> first_eleven(11);
  std::iota(first_eleven.begin(), first_eleven.end(), 0u);
  const std::vector<LeafResidency> leaves{leaf(full, 1, only(12, first_eleven)),
                                          leaf(w3, 1, all_but(12, {6, 9})),
                                          leaf(w4, 1, all_but(12, {1, 5, 6}))};
  CHECK(joint_hit(leaves, 12, 1, {}) == 5);
}

TEST_CASE("boundaries lie outside whole items, whatever the unit") {
  const std::vector<Uncut> items{{5, 9}, {12, 30}};
  CHECK(boundary_outside(4, 4, items) == 4);
  CHECK(boundary_outside(8, 4, items) == 4);
  CHECK(boundary_outside(12, 4, items) == 12);
  CHECK(boundary_outside(28, 4, items) == 12);
  CHECK(boundary_outside(30, 10, items) == 30);
  CHECK(boundary_outside(20, 10, items) == 10);
}

TEST_CASE(
    "H-05 random residency and patterns, custom ones too: equal to brute force in any order") {
  Random random(5);
  constexpr std::uint32_t most_tokens = 96;
  for (int round = 0; round < 20'000; ++round) {
    // A custom tail that never decreases, as a table.
    auto table = std::make_shared<std::vector<std::uint32_t>>();
    for (std::uint32_t n = 0; n <= most_tokens; ++n) {
      const std::uint32_t before = table->empty() ? 0 : table->back();
      table->push_back(random.one_in(3) ? random.between(before, std::min(n, before + 9)) : before);
    }
    const std::vector<AccessPattern> patterns{
        AccessPattern::full(),
        AccessPattern::window(12),
        AccessPattern::window(random.between(1, 20)),
        AccessPattern::window(8, 4),
        AccessPattern::chunk(16),
        AccessPattern::chunk(random.between(1, 20)),
        AccessPattern::point(),
        AccessPattern::custom({.head = random.below(9),
                               .tail_begin = [table](std::uint32_t n) { return (*table)[n]; }})};
    const std::uint32_t count = random.between(1, 5);
    std::vector<LeafResidency> leaves;
    std::vector<std::vector<bool>> held;
    std::uint32_t unit = 4;
    for (std::uint32_t i = 0; i < count; ++i) {
      const AccessPattern& pattern = patterns[random.below(patterns.size())];
      const std::uint32_t page = random.one_in(3) ? 8 : 4;
      unit = std::max(unit, page);
      std::vector<bool> slots(random.between(0, most_tokens / page));
      const std::uint32_t rarely = random.between(1, 30);
      for (std::size_t s = 0; s < slots.size(); ++s) slots[s] = !random.one_in(rarely);
      leaves.push_back(leaf(pattern, page, slots, i));
      held.push_back(std::move(slots));
    }
    const std::uint32_t limit = random.between(0, most_tokens);
    std::vector<Uncut> items;
    for (std::uint32_t at = 0; random.one_in(2) && at < 80;) {
      const std::uint32_t begin = random.between(at, 80);
      items.push_back({begin, begin + random.between(1, 20)});
      at = items.back().end;
    }
    const std::uint32_t without = random.below(count + 3);

    std::uint32_t expected = 0;
    for (std::uint32_t n = unit; n <= limit; n += unit) {
      bool good = std::none_of(items.begin(), items.end(),
                               [&](const Uncut& item) { return n > item.begin && n < item.end; });
      for (std::uint32_t i = 0; i < count && good; ++i) {
        if (i == without) continue;
        for (const std::uint32_t slot : leaves[i].pattern->reach(n, leaves[i].tokens_per_page)) {
          good = good && slot < held[i].size() && held[i][slot];
        }
        good = good && n <= held[i].size() * leaves[i].tokens_per_page;
      }
      if (good) expected = n;
    }
    std::vector<std::uint32_t> order(count);
    std::iota(order.begin(), order.end(), 0u);
    do {
      std::vector<LeafResidency> permuted;
      for (const std::uint32_t i : order) permuted.push_back(leaves[i]);
      REQUIRE(joint_hit(permuted, limit, unit, items, without) == expected);
    } while (count <= 4 && std::next_permutation(order.begin(), order.end()));
  }
}

}  // namespace
}  // namespace kvleaf
