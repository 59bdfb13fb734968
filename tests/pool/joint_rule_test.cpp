// The joint rule against an exhaustive search over placements, and a refusal against every byte the
// pool keeps.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kvleaf/pool/block_pool.h"
#include "pool/hand_made.h"
#include "pool/test_access.h"

namespace kvleaf {

namespace {

using u64 = std::uint64_t;

/// Places one block after another in every possible way: in a claimed huge block of its class with
/// a block that is not live, or in a huge block that nobody holds, which is its class's from then
/// on.
class Search {
 public:
  Search(const BlockPool& pool, std::vector<u64> ratios) : ratios_(std::move(ratios)) {
    const u64 huge_blocks = pool.geometry().huge_blocks();
    for (u64 huge = 0; huge < huge_blocks; ++huge) {
      u64 live = 0;
      u64 ratio = 0;
      for (std::uint32_t leaf = 0; leaf < ratios_.size(); ++leaf) {
        for (u64 block = huge * ratios_[leaf] + 1; block <= (huge + 1) * ratios_[leaf]; ++block) {
          if (pool.references(LeafId(leaf), BlockId(static_cast<std::uint32_t>(block))) == 0)
            continue;
          ++live;
          ratio = ratios_[leaf];
        }
      }
      if (live == 0) {
        ++start_.unclaimed;
      } else if (live < ratio) {
        start_.free.push_back({ratio, ratio - live});
      }
    }
  }
  bool fits(std::vector<u64> demand) {
    State state = start_;
    state.demand = std::move(demand);
    tried_.clear();
    return place(state);
  }

 private:
  struct State {
    std::vector<u64> demand;
    std::vector<std::pair<u64, u64>> free;  // ratio and blocks not live, per claimed huge block
    u64 unclaimed = 0;
    auto operator<=>(const State&) const = default;
  };
  bool place(State state) {
    const auto wanted = std::find_if(state.demand.begin(), state.demand.end(),
                                     [](u64 blocks) { return blocks > 0; });
    if (wanted == state.demand.end()) return true;
    std::sort(state.free.begin(), state.free.end());
    if (!tried_.insert(state).second) return false;
    const u64 ratio = ratios_[static_cast<std::size_t>(wanted - state.demand.begin())];
    --*wanted;
    for (std::size_t index = 0; index < state.free.size(); ++index) {
      if (state.free[index].first != ratio || state.free[index].second == 0) continue;
      State next = state;
      --next.free[index].second;
      if (place(next)) return true;
    }
    if (state.unclaimed == 0) return false;
    --state.unclaimed;
    state.free.push_back({ratio, ratio - 1});
    return place(state);
  }

  std::vector<u64> ratios_;
  State start_;
  std::set<State> tried_;
};

}  // namespace

TEST_CASE("P-09: an accepted demand is served, a refused one changes nothing, and both are exact") {
  std::mt19937 random(20240917);
  const auto below = [&](u64 n) { return std::uniform_int_distribution<u64>(0, n - 1)(random); };
  int accepted = 0, refused = 0, searched = 0;
  for (int trace = 0; trace < 3000; ++trace) {
    const std::vector<u64> ratios = {1 + below(4), 1 + below(4), 1 + below(3)};
    BlockPool pool(testing::geometry_of(4 + below(7), ratios));
    std::vector<std::pair<LeafId, BlockId>> held;
    std::uint64_t keys = 0;
    for (int operation = 0; operation < 12; ++operation) {
      if (!held.empty() && below(2) == 0) {
        for (u64 count = below(held.size()) + 1; count > 0; --count) {
          const std::size_t index = below(held.size());
          const auto [leaf, block] = held[index];
          if (below(2) == 0 && !pool.committed(leaf, block)) pool.commit(leaf, block, {1, ++keys});
          pool.free(leaf, block);
          held[index] = held.back();
          held.pop_back();
        }
        continue;
      }
      std::vector<u64> demand(3);
      for (std::size_t leaf = 0; leaf < 3; ++leaf)
        demand[leaf] = below(2) * below(3 * ratios[leaf]);
      const bool fits = pool.can_allocate(demand);
      if (below(4) == 0) {
        ++searched;
        CHECK(fits == Search(pool, ratios).fits(demand));
      }
      std::vector<BlockPool::Demand> parts;
      u64 total = 0;
      for (std::uint32_t leaf = 0; leaf < 3; ++leaf) {
        parts.push_back({.leaf = LeafId(leaf),
                         .blocks = demand[leaf],
                         .fate = below(2) == 0 ? Fate::cache : Fate::request});
        total += demand[leaf];
      }
      std::vector<BlockId> drawn(total, null_block);
      const std::string before = BlockPoolTestAccess::bytes(pool);
      REQUIRE(pool.allocate_all(parts, drawn) == fits);
      if (!fits) {
        ++refused;
        CHECK(before == BlockPoolTestAccess::bytes(pool));
        continue;
      }
      ++accepted;
      std::size_t next = 0;
      for (const BlockPool::Demand& part : parts) {
        for (u64 block = 0; block < part.blocks; ++block)
          held.emplace_back(part.leaf, drawn[next++]);
      }
      auto distinct = held;
      std::sort(distinct.begin(), distinct.end());
      CHECK(std::adjacent_find(distinct.begin(), distinct.end()) == distinct.end());
    }
    CHECK_NOTHROW(pool.audit());
  }
  CHECK(accepted > 3000);
  CHECK(refused > 3000);
  CHECK(searched > 3000);
}

}  // namespace kvleaf
