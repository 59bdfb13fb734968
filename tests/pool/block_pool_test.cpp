// The numbered cases of drawing, eviction and the joint transaction, and what a caller may not do.
#include <doctest/doctest.h>

#include <algorithm>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvleaf/leaf/errors.h"
#include "kvleaf/pool/block_pool.h"
#include "pool/hand_made.h"
#include "pool/test_access.h"

namespace kvleaf {

namespace {

using testing::draw;
using testing::draw_all;
using testing::fits;
using testing::geometry_of;
using Blocks = std::vector<BlockId>;

constexpr LeafId first{0};
constexpr LeafId second{1};
constexpr LeafId third{2};

PageKey key_of(std::uint64_t number) { return {7, number}; }

Blocks ids(std::uint32_t begin, std::uint32_t end) {
  Blocks blocks;
  for (std::uint32_t id = begin; id <= end; ++id) blocks.push_back(BlockId(id));
  return blocks;
}

void audit_all(const BlockPool& pool) { CHECK_NOTHROW(pool.audit()); }

/// Commits under key_of(number), number, … with the pool's own clock.
void commit(BlockPool& pool, LeafId leaf, const Blocks& blocks, std::uint64_t number) {
  for (const BlockId block : blocks) pool.commit(leaf, block, key_of(number++));
}

struct Eviction {
  LeafId leaf;
  BlockId block;
  PageKey key;
};
struct Evictions : std::vector<Eviction> {
  explicit Evictions(BlockPool& pool) {
    pool.on_evict([this](LeafId leaf, BlockId block, PageKey key) {
      push_back({leaf, block, key});
    });
  }
};

}  // namespace

TEST_CASE("P-01: fresh blocks ascend and the pool refuses when it is full") {
  BlockPool pool(geometry_of(2, {42, 43, 3}));
  for (std::uint32_t id = 1; id <= 6; ++id) {
    CHECK(pool.allocate(third) == BlockId(id));
    audit_all(pool);
  }
  CHECK_FALSE(pool.allocate(third));
  audit_all(pool);
}

TEST_CASE("P-02: returned blocks serve another leaf at once") {
  BlockPool pool(geometry_of(5, {4, 1}));
  const Blocks a = draw(pool, 0, 8);
  const Blocks b = draw(pool, 1, 2);
  CHECK(pool.stats().empty == 1);
  pool.free_many(first, a);
  pool.free_many(second, b);
  audit_all(pool);
  CHECK(pool.stats().empty == 5);
  CHECK(fits(pool, {20, 0}));
  CHECK(fits(pool, {0, 5}));
  CHECK_FALSE(fits(pool, {20, 1}));
}

TEST_CASE("P-03: a draw takes an empty huge block before it claims an idle one") {
  BlockPool pool(geometry_of(2, {2}));
  const Blocks a = draw(pool, 0, 2);
  commit(pool, first, a, 1);
  pool.free_many(first, a);
  const BlockId next = pool.allocate(first).value();
  CHECK(std::find(a.begin(), a.end(), next) == a.end());
  CHECK(pool.find(first, key_of(1)) == a[0]);
  CHECK(pool.find(first, key_of(2)) == a[1]);
  audit_all(pool);
}

TEST_CASE("P-04: eviction in an idle huge block of its own drops the oldest only") {
  BlockPool pool(geometry_of(1, {2}));
  const Blocks a = draw(pool, 0, 2);
  commit(pool, first, a, 1);
  pool.free_many(first, a);
  Evictions evicted(pool);
  CHECK(pool.allocate(first) == a[0]);
  CHECK(evicted.size() == 1);
  CHECK_FALSE(pool.find(first, key_of(1)));
  CHECK(pool.find(first, key_of(2)) == a[1]);
  audit_all(pool);
}

TEST_CASE("P-05: a huge block that changes owner loses its commits") {
  BlockPool pool(geometry_of(1, {2, 1}));
  const Blocks a = draw(pool, 0, 2);
  commit(pool, first, a, 1);
  pool.free_many(first, a);
  Evictions evicted(pool);
  CHECK(pool.allocate(second) == BlockId(1));
  CHECK(evicted.size() == 2);
  CHECK_FALSE(pool.find(first, key_of(1)));
  CHECK_FALSE(pool.find(first, key_of(2)));
  CHECK(pool.stats().retyped == 1);
  audit_all(pool);
}

TEST_CASE("P-06: a clean block is drawn before a cached one is evicted") {
  BlockPool pool(geometry_of(1, {2}));
  const Blocks a = draw(pool, 0, 2);
  pool.commit(first, a[0], key_of(1));
  pool.free(first, a[0]);
  pool.free(first, a[1]);
  CHECK(pool.allocate(first) == a[1]);
  CHECK(pool.find(first, key_of(1)) == a[0]);
  audit_all(pool);
}

TEST_CASE("P-07: the joint rule counts huge blocks per page class") {
  {
    BlockPool pool(geometry_of(4, {2, 4}));
    CHECK(fits(pool, {8, 0}));
    CHECK(fits(pool, {0, 16}));
    CHECK(fits(pool, {6, 4}));
    CHECK_FALSE(fits(pool, {8, 1}));
    REQUIRE(draw(pool, 0, 8).size() == 8);
    CHECK_FALSE(fits(pool, {6, 4}));
    CHECK_FALSE(fits(pool, {0, 1}));
    audit_all(pool);
  }
  BlockPool pool(geometry_of(2, {2, 4}));
  const BlockId a = pool.allocate(first).value();
  const BlockId b = pool.allocate(second).value();
  pool.free(first, a);
  pool.free(second, b);
  CHECK(pool.stats().empty == 2);
  CHECK(fits(pool, {2, 4}));
  CHECK_FALSE(fits(pool, {3, 4}));
  CHECK_FALSE(fits(pool, {4, 8}));
  audit_all(pool);
}

TEST_CASE("P-08: a draw evicts its own rather than take the huge block another leaf was promised") {
  for (const bool swapped : {false, true}) {
    CAPTURE(swapped);
    const std::uint32_t small = swapped ? 1 : 0;
    BlockPool pool(geometry_of(
        2, swapped ? std::vector<std::uint64_t>{1, 4} : std::vector<std::uint64_t>{4, 1}));
    const Blocks a = draw(pool, small, 4);
    commit(pool, LeafId(small), a, 1);
    pool.free_many(LeafId(small), std::span(a).subspan(1));
    Evictions evicted(pool);
    const Blocks both = draw_all(pool, {1, 1});
    REQUIRE(both.size() == 2);
    CHECK(both[small] == a[1]);
    REQUIRE(evicted.size() == 1);
    CHECK(evicted[0].key == key_of(2));
    CHECK(pool.stats().empty == 0);
    audit_all(pool);
  }
}

TEST_CASE("P-10: clean blocks in claimed huge blocks count for their own class") {
  BlockPool pool(geometry_of(2, {2, 3}));
  CHECK(fits(pool, {2, 2}));
  CHECK_FALSE(fits(pool, {3, 3}));
  CHECK(fits(pool, {4, 0}));
  CHECK_FALSE(fits(pool, {5, 0}));
  CHECK(fits(pool, {0, 6}));
  CHECK_FALSE(fits(pool, {0, 7}));

  BlockPool more(geometry_of(4, {2, 3}));
  REQUIRE(more.allocate(first));
  REQUIRE(more.allocate(second));
  CHECK(fits(more, {3, 3}));
  CHECK_FALSE(fits(more, {4, 4}));
  CHECK(fits(more, {5, 0}));
  CHECK_FALSE(fits(more, {6, 0}));
  CHECK(fits(more, {0, 8}));
  CHECK_FALSE(fits(more, {0, 9}));
}

TEST_CASE("P-11: a leaf whose huge block is full needs another") {
  BlockPool pool(geometry_of(3, {11, 1}));
  REQUIRE(pool.allocate(first));
  REQUIRE(pool.allocate(second));
  CHECK_FALSE(fits(pool, {4, 2}));
  CHECK(fits(pool, {10, 1}));
  CHECK_FALSE(fits(pool, {11, 1}));
  audit_all(pool);
}

TEST_CASE("P-12: blocks that a hit has pinned are not free as well") {
  {
    BlockPool pool(geometry_of(5, {1}));
    const Blocks cached = draw(pool, 0, 4);
    commit(pool, first, cached, 1);
    pool.free_many(first, cached);
    pool.touch_many(first, cached);
    CHECK_FALSE(fits(pool, {2}));
    CHECK(draw(pool, 0, 2).empty());
    pool.free_many(first, cached);
    CHECK(pool.cached(first) == 4);
    CHECK(pool.live(first) == 0);
    CHECK(pool.stats().empty == 1);
    for (const BlockId block : cached) CHECK(pool.references(first, block) == 0);
    audit_all(pool);
  }
  BlockPool pool(geometry_of(4, {1}));
  const Blocks cached = draw(pool, 0, 4);
  commit(pool, first, cached, 1);
  pool.free_many(first, cached);
  pool.touch_many(first, std::span(cached).first(2));
  CHECK_FALSE(fits(pool, {3}));
  CHECK(fits(pool, {2}));
  audit_all(pool);
}

TEST_CASE("P-13: pinned blocks are never evicted, however old") {
  BlockPool pool(geometry_of(16, {1, 1}));
  Blocks cached[2];
  for (std::uint32_t leaf = 0; leaf < 2; ++leaf) {
    cached[leaf] = draw(pool, leaf, 5);
    for (const BlockId block : cached[leaf]) {
      pool.commit(LeafId(leaf), block, key_of(block.value()), 0);  // first in line
    }
    pool.free_many(LeafId(leaf), cached[leaf]);
  }
  Evictions evicted(pool);
  for (int round = 0; round < 2; ++round) {
    pool.touch_many(first, cached[0]);
    pool.touch_many(second, cached[1]);
    const Blocks fresh_blocks = draw_all(pool, {3, 3});
    REQUIRE(fresh_blocks.size() == 6);
    std::set<BlockId> distinct(fresh_blocks.begin(), fresh_blocks.end());
    for (const Blocks& blocks : cached) distinct.insert(blocks.begin(), blocks.end());
    CHECK(distinct.size() == 16);
    CHECK(pool.live(first) == 8);
    CHECK(pool.live(second) == 8);
    CHECK(evicted.empty());
    audit_all(pool);
    pool.free_many(first, std::span(fresh_blocks).first(3));
    pool.free_many(second, std::span(fresh_blocks).last(3));
    pool.free_many(first, cached[0]);
    pool.free_many(second, cached[1]);
  }
}

TEST_CASE("P-14: a leaf that has clean blocks evicts nothing while another evicts its oldest") {
  BlockPool pool(geometry_of(2, {101, 51}));
  REQUIRE(pool.allocate(first));
  const Blocks b = draw(pool, 1, 51);
  commit(pool, second, b, 1);
  pool.free_many(second, std::span(b).subspan(1));
  Evictions evicted(pool);
  REQUIRE(draw_all(pool, {10, 10}).size() == 20);
  REQUIRE(evicted.size() == 10);
  for (std::size_t index = 0; index < evicted.size(); ++index) {
    CHECK(evicted[index].leaf == second);
    CHECK(evicted[index].key == key_of(index + 2));
  }
  audit_all(pool);
}

TEST_CASE("P-15: only as many huge blocks change owner as are wanted, however use is scattered") {
  BlockPool pool(geometry_of(16, {8, 1}));
  const Blocks a = draw(pool, 0, 128);
  for (std::size_t index = 0; index < a.size(); ++index) {
    pool.commit(first, a[index], key_of(index), index * 37 % 128);
  }
  pool.free_many(first, a);
  CHECK(pool.stats().idle == 16);
  Evictions evicted(pool);
  REQUIRE(draw(pool, 1, 2).size() == 2);
  CHECK(pool.stats().retyped == 2);
  CHECK(evicted.size() == 16);
  CHECK(pool.cached(first) == 112);
  audit_all(pool);
}

TEST_CASE("P-16: one old block of its own goes before many newer ones of another class") {
  BlockPool pool(geometry_of(2, {552, 9}));
  const Blocks attention = draw(pool, 0, 552);
  for (std::size_t index = 0; index < attention.size(); ++index) {
    pool.commit(first, attention[index], key_of(index), 20 + index % 11);
  }
  pool.free_many(first, attention);
  const Blocks states = draw(pool, 1, 9);
  pool.commit(second, states[4], key_of(1000), 10);
  pool.free(second, states[4]);
  Evictions evicted(pool);
  CHECK(pool.allocate(second) == states[4]);
  CHECK(evicted.size() == 1);
  CHECK(pool.cached(first) == 552);
  audit_all(pool);
}

TEST_CASE(
    "P-17 and P-18: blocks leave in the order of their values, and a lowered value acts at once") {
  BlockPool pool(geometry_of(4, {1}));
  const Blocks b = draw(pool, 0, 4);
  // d0-d2 at one time, deeper lower; X earlier, of higher priority.
  const Value values[] = {102, 101, 100, 5000};
  for (std::size_t index = 0; index < 4; ++index) {
    pool.commit(first, b[index], key_of(index), values[index]);
  }
  pool.free_many(first, b);
  {
    Evictions evicted(pool);
    REQUIRE(draw(pool, 0, 4).size() == 4);
    REQUIRE(evicted.size() == 4);
    CHECK(evicted[0].block == b[2]);
    CHECK(evicted[1].block == b[1]);
    CHECK(evicted[2].block == b[0]);
    CHECK(evicted[3].block == b[3]);
    audit_all(pool);
    pool.on_evict({});
  }
  // Chain d0-d3 and Y older; d1 is taken away, so d2 and d3 become unreachable: less than all
  // others.
  pool.free_many(first, b);
  BlockPool chain(geometry_of(5, {1}));
  const Blocks d = draw(chain, 0, 5);
  const Value chain_values[] = {204, 203, 202, 201, 100};
  for (std::size_t index = 0; index < 5; ++index) {
    chain.commit(first, d[index], key_of(index), chain_values[index]);
  }
  chain.free_many(first, d);
  chain.uncommit(first, d[1]);
  chain.revalue(first, d[2], 2);
  chain.revalue(first, d[3], 1);
  Evictions evicted(chain);
  REQUIRE(draw(chain, 0, 4).size() == 4);
  REQUIRE(evicted.size() == 3);
  CHECK(evicted[0].block == d[3]);
  CHECK(evicted[1].block == d[2]);
  CHECK(evicted[2].block == d[4]);
  audit_all(chain);
}

TEST_CASE("P-19: ids start at 1, and blocks that are not the caller's are refused") {
  BlockPool pool(geometry_of(4, {3, 3}));
  CHECK(draw(pool, 0, 12) == ids(1, 12));
  const PageKey key = key_of(1);
  CHECK_THROWS_AS(pool.free(first, null_block), BlockError);
  CHECK_THROWS_AS(pool.touch(first, null_block), BlockError);
  CHECK_THROWS_AS(pool.commit(first, null_block, key), BlockError);
  CHECK_THROWS_AS(pool.free(first, BlockId(13)), BlockError);
  CHECK_THROWS_AS(pool.free(first, BlockId(0xffffffff)), BlockError);
  CHECK_THROWS_AS(pool.free(second, BlockId(1)), BlockError);
  CHECK_THROWS_AS(pool.touch(second, BlockId(1)), BlockError);
  CHECK_THROWS_AS(pool.commit(second, BlockId(1), key), BlockError);
  pool.free(first, BlockId(1));
  CHECK_THROWS_AS(pool.free(first, BlockId(1)), BlockError);
  CHECK_THROWS_AS(pool.touch(first, BlockId(1)), BlockError);
  CHECK_THROWS_AS(pool.commit(first, BlockId(1), key), BlockError);
  CHECK_THROWS_AS(pool.uncommit(first, BlockId(2)), BlockError);
  CHECK_THROWS_AS(pool.revalue(first, BlockId(2), 1), BlockError);
  CHECK_THROWS_AS(pool.rekey(first, BlockId(2), key), BlockError);
  CHECK_THROWS_AS(pool.free(LeafId(2), BlockId(2)), InvalidArgument);
  BlockPool another(geometry_of(4, {3, 3}));
  CHECK_THROWS_AS(another.free(first, BlockId(2)), BlockError);
  pool.commit(first, BlockId(2), key);
  CHECK_THROWS_AS(pool.commit(first, BlockId(2), key_of(2)), BlockError);
  CHECK_THROWS_AS(pool.commit(first, BlockId(3), key), InvalidArgument);
  audit_all(pool);
  audit_all(another);
}

TEST_CASE("a batch that names one wrong block changes nothing") {
  BlockPool pool(geometry_of(4, {4}));
  const Blocks held = draw(pool, 0, 8);
  commit(pool, first, Blocks(held.begin(), held.begin() + 4), 1);
  pool.free_many(first, std::span(held).first(2));
  const Blocks wrong_free = {held[2], held[3], held[4], held[2]};
  CHECK_THROWS_AS(pool.free_many(first, wrong_free), BlockError);
  const Blocks wrong_touch = {held[0], held[5], BlockId(16)};
  CHECK_THROWS_AS(pool.touch_many(first, wrong_touch, 9), BlockError);
  const Blocks wrong_commit = {held[4], held[5], held[4]};
  const std::vector<PageKey> keys = {key_of(11), key_of(12), key_of(13)};
  CHECK_THROWS_AS(pool.commit_many(first, wrong_commit, keys), BlockError);
  const std::vector<PageKey> same = {key_of(11), key_of(12), key_of(11)};
  CHECK_THROWS_AS(pool.commit_many(first, std::span(held).subspan(4, 3), same), InvalidArgument);
  audit_all(pool);
  CHECK(pool.live(first) == 6);
  CHECK(pool.cached(first) == 2);
  for (std::size_t index = 0; index < held.size(); ++index) {
    CHECK(pool.references(first, held[index]) == (index < 2 ? 0 : 1));
    CHECK(pool.committed(first, held[index]) == (index < 4));
  }
  CHECK(pool.value(first, held[0]) == 1);
  CHECK_FALSE(pool.find(first, key_of(11)));
  // A block may be listed as often as it has references.
  pool.touch_many(first, Blocks{held[7], held[7]});
  CHECK(pool.references(first, held[7]) == 3);
  pool.free_many(first, Blocks{held[7], held[7], held[7]});
  CHECK(pool.live(first) == 5);
  audit_all(pool);
}

TEST_CASE("P-20, A-08: when the owner throws, nothing of the transaction is held") {
  BlockPool pool(geometry_of(4, {2, 1}));
  const Blocks a = draw(pool, 0, 8);
  commit(pool, first, a, 1);
  pool.free_many(first, a);
  int calls = 0;
  pool.on_evict([&](LeafId, BlockId, PageKey) {
    if (++calls == 6) throw std::runtime_error("fault");
  });
  // The second draw retypes two huge blocks, the first evicts in the others.
  std::vector<BlockId> out(5, null_block);
  const std::vector<BlockPool::Demand> demand = {{.leaf = second, .blocks = 2},
                                                 {.leaf = first, .blocks = 3}};
  CHECK_THROWS_AS(pool.allocate_all(demand, out), std::runtime_error);
  CHECK(calls == 6);
  CHECK(pool.live(first) == 0);
  CHECK(pool.live(second) == 0);
  CHECK(pool.cached(first) == 2);
  CHECK(pool.stats().claimed == 0);
  audit_all(pool);
  calls = 100;
  CHECK(pool.allocate_all(demand, out));
  audit_all(pool);
  // In a huge block that is being retyped, the commits not yet dropped stay.
  pool.free_many(second, std::span(out).first(2));
  pool.free_many(first, std::span(out).last(3));
  const Blocks again = draw(pool, 0, 8);
  commit(pool, first, again, 20);
  pool.free_many(first, again);
  calls = 5;
  CHECK_THROWS_AS((void)pool.allocate(second), std::runtime_error);
  CHECK(pool.cached(first) == 7);
  CHECK(pool.stats().idle == 4);
  audit_all(pool);
}

TEST_CASE("P-20: a broken invariant poisons the pool, which names the equation ever after") {
  BlockPool pool(geometry_of(4, {2, 1}));
  const BlockId block = pool.allocate(first).value();
  BlockPoolTestAccess::miscount_live(pool, 1);
  std::string said;
  try {
    pool.audit();
    FAIL("the audit passed");
  } catch (const InvariantError& error) {
    said = error.what();
  }
  CHECK(said.find("leaf 1: live blocks: 1 = 0 counted") != std::string::npos);
  const auto refuses = [&](auto&& call) {
    try {
      call();
      return false;
    } catch (const InvariantError& error) {
      return said == error.what();
    }
  };
  CHECK(refuses([&] { pool.free(first, block); }));
  CHECK(refuses([&] { (void)pool.allocate(first); }));
  CHECK(refuses([&] { pool.touch(first, block); }));
  CHECK(refuses([&] { pool.commit(first, block, key_of(1)); }));
  CHECK(refuses([&] { (void)fits(pool, {1, 0}); }));
  CHECK(refuses([&] { pool.audit(); }));
  CHECK(refuses([&] { pool.resize(3); }));

  BlockPool other(geometry_of(4, {2, 1}));
  REQUIRE(other.allocate(first));
  BlockPoolTestAccess::miscount_huge(other, 0);
  CHECK_THROWS_WITH_AS(
      other.audit(),
      "broken invariant of the pool: huge block 0: cached blocks: 1 recorded, 0 counted",
      InvariantError);
}

TEST_CASE("P-21: demands near the limits of their type are refused, and floors met add nothing") {
  BlockPool pool(geometry_of(4, {4, 4, 1}, {{}, {.floor = 5}, {}}));
  const std::uint64_t huge = ~std::uint64_t{0};
  for (const std::uint64_t demand :
       {std::uint64_t{1} << 32, (std::uint64_t{1} << 32) + 1, huge - 3, huge}) {
    CHECK_FALSE(fits(pool, {demand, 0, 0}));
    CHECK_FALSE(fits(pool, {demand, demand, demand}));
    CHECK_FALSE(fits(pool, {0, 0, demand}));
    CHECK(pool.judge(std::vector<std::uint64_t>{demand, demand, demand}).huge_needed > demand / 4);
    std::vector<BlockId> out;
    const std::vector<BlockPool::Demand> twice = {{.leaf = third, .blocks = demand},
                                                  {.leaf = third, .blocks = demand}};
    CHECK_FALSE(pool.allocate_all(twice, out));
  }
  pool.set_promised(first, huge);
  CHECK_FALSE(fits(pool, {1, 0, 0}));
  CHECK_FALSE(pool.allocate(third));
  pool.set_promised(first, 0);
  // Floor 5 with none live holds two huge blocks; with 7 live it adds nothing.
  CHECK(fits(pool, {0, 0, 2}));
  CHECK_FALSE(fits(pool, {0, 0, 3}));
  REQUIRE(draw(pool, 1, 7).size() == 7);
  CHECK(fits(pool, {1, 0, 2}));
  CHECK_FALSE(fits(pool, {2, 0, 2}));
  audit_all(pool);
}

TEST_CASE("floors, ceilings and promises are part of every decision") {
  BlockPool pool(geometry_of(4, {2, 1}, {{.floor = 3}, {.ceiling = 2}}));
  // Two huge blocks stay obtainable for the first leaf.
  const Blocks b = draw(pool, 1, 2);
  REQUIRE(b.size() == 2);
  CHECK_FALSE(pool.allocate(second));
  CHECK(pool.judge(std::vector<std::uint64_t>{0, 1}).over_ceiling == second);
  pool.free_many(second, b);
  REQUIRE(draw(pool, 0, 3).size() == 3);
  CHECK(fits(pool, {1, 2}));
  pool.set_promised(first, 2);
  CHECK(pool.promised(first) == 2);
  CHECK_FALSE(fits(pool, {0, 2}));
  CHECK(fits(pool, {0, 1}));
  const BlockPool::Verdict verdict = pool.judge(std::vector<std::uint64_t>{0, 2});
  CHECK(verdict.huge_needed == 3);
  CHECK(verdict.huge_left == 2);
  CHECK_FALSE(verdict.over_ceiling);
  // A promise is placed against, too: the clean block is taken, not the empty huge block.
  REQUIRE(pool.allocate(second));
  CHECK_FALSE(pool.allocate(second));
  pool.set_promised(first, 0);
  CHECK(pool.allocate(second));
  audit_all(pool);
}

TEST_CASE("P-23: leaves of one page class share its huge blocks") {
  {
    BlockPool pool(geometry_of(1, {4, 4}));
    std::set<BlockId> seen;
    const Blocks a = draw(pool, 0, 2);
    const Blocks b = draw(pool, 1, 2);
    seen.insert(a.begin(), a.end());
    seen.insert(b.begin(), b.end());
    CHECK(seen == std::set<BlockId>{BlockId(1), BlockId(2), BlockId(3), BlockId(4)});
    CHECK_FALSE(fits(pool, {1, 0}));
    CHECK_FALSE(fits(pool, {0, 1}));
    pool.free_many(first, a);
    CHECK(pool.stats().leaves[0].clean == 2);
    CHECK(pool.stats().leaves[1].clean == 2);
    CHECK(fits(pool, {2, 0}));
    CHECK(fits(pool, {1, 1}));
    CHECK(fits(pool, {0, 2}));
    CHECK_FALSE(fits(pool, {2, 1}));
    audit_all(pool);
  }
  BlockPool pool(geometry_of(2, {4, 4, 1}));
  REQUIRE(pool.allocate(first));
  REQUIRE(pool.allocate(second));
  CHECK(pool.stats().claimed == 1);
  CHECK(fits(pool, {1, 1, 1}));
  CHECK(fits(pool, {4, 2, 0}));
  CHECK_FALSE(fits(pool, {2, 1, 1}));
  CHECK_FALSE(fits(pool, {4, 3, 0}));
  audit_all(pool);
}

TEST_CASE("P-24: a leaf may take the oldest cached block of another leaf of its class") {
  {
    BlockPool pool(geometry_of(1, {3, 3}));
    REQUIRE(pool.allocate(first));
    const BlockId a = pool.allocate(first).value();
    const BlockId b = pool.allocate(second).value();
    pool.commit(first, a, key_of(1));
    pool.commit(second, b, key_of(2));
    pool.free(first, a);
    pool.free(second, b);
    Evictions evicted(pool);
    CHECK(pool.allocate(second) == a);
    REQUIRE(evicted.size() == 1);
    CHECK(evicted[0].leaf == first);
    CHECK(evicted[0].key == key_of(1));
    CHECK(pool.find(second, key_of(2)) == b);
    CHECK_FALSE(pool.find(first, key_of(2)));
    CHECK(pool.allocate(first) == b);
    CHECK_FALSE(pool.allocate(first));
    CHECK_FALSE(pool.allocate(second));
    audit_all(pool);
  }
  BlockPool pool(geometry_of(1, {2, 2}));
  const Blocks a = draw(pool, 0, 2);
  commit(pool, first, a, 1);
  pool.free_many(first, a);
  CHECK(pool.allocate(second) == a[0]);
  CHECK_FALSE(pool.find(first, key_of(1)));
  CHECK(pool.find(first, key_of(2)) == a[1]);
  audit_all(pool);
}

TEST_CASE("A-05: blocks that are held are not there, whoever holds them") {
  BlockPool pool(geometry_of(4, {1}));
  REQUIRE(draw(pool, 0, 3).size() == 3);
  CHECK(fits(pool, {1}));
  CHECK_FALSE(fits(pool, {2}));
}

}  // namespace kvleaf
