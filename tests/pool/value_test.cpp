// Values: who is evicted first, whatever happened to the values before.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "kvleaf/leaf/errors.h"
#include "kvleaf/pool/block_pool.h"
#include "pool/hand_made.h"

namespace kvleaf {
namespace {

using testing::draw;
using testing::geometry_of;

constexpr LeafId first{0};
constexpr LeafId second{1};

PageKey key_of(std::uint64_t number) { return {5, number}; }

}  // namespace

TEST_CASE("without values the least recently committed or touched goes first") {
  BlockPool pool(geometry_of(4, {1}));
  const std::vector<BlockId> blocks = draw(pool, 0, 4);
  for (std::size_t i = 0; i < 4; ++i) pool.commit(first, blocks[i], key_of(i));
  pool.free_many(first, blocks);
  pool.touch(first, blocks[0]);
  pool.free(first, blocks[0]);
  CHECK(pool.allocate(first) == blocks[1]);
  CHECK(pool.allocate(first) == blocks[2]);
  CHECK(pool.allocate(first) == blocks[3]);
  CHECK(pool.allocate(first) == blocks[0]);
  pool.audit();
}

TEST_CASE("a value that the owner gave stays until the owner gives another") {
  BlockPool pool(geometry_of(4, {2}));
  const std::vector<BlockId> blocks = draw(pool, 0, 2);
  pool.commit(first, blocks[0], key_of(0), 1000);
  pool.commit(first, blocks[1], key_of(1));
  CHECK(pool.value(first, blocks[1]) == 1);
  pool.touch_many(first, blocks);
  CHECK(pool.value(first, blocks[0]) == 1000);
  CHECK(pool.value(first, blocks[1]) == 2);
  pool.touch(first, blocks[1], 7);
  pool.touch(first, blocks[1]);
  CHECK(pool.value(first, blocks[1]) == 7);
  pool.revalue(first, blocks[0], ~Value{0});
  CHECK(pool.value(first, blocks[0]) == ~Value{0});
  CHECK_THROWS_AS(pool.value(first, BlockId(3)), BlockError);
  pool.audit();
}

TEST_CASE("a run of evictions follows the values exactly, over many huge blocks and classes") {
  // Ratios past every level of the orders inside and over huge blocks.
  for (const std::vector<std::uint64_t>& ratios :
       std::vector<std::vector<std::uint64_t>>{{1}, {3}, {8, 8}, {9, 9}, {64}, {65}, {600}}) {
    CAPTURE(ratios[0]);
    const std::uint64_t pages = 1200 / ratios[0] * ratios[0];
    BlockPool pool(geometry_of(pages / ratios[0], ratios));
    std::mt19937_64 random(ratios[0]);
    std::map<std::pair<Value, std::uint64_t>, bool> order;  // value, block
    std::map<std::uint64_t, Value> values;
    const std::vector<BlockId> blocks = draw(pool, 0, pages);
    REQUIRE(blocks.size() == pages);
    for (const BlockId block : blocks) {
      values[block.value()] = random();
      pool.commit(first, block, key_of(block.value()), values[block.value()]);
    }
    pool.free_many(first, blocks);
    for (int change = 0; change < 2000; ++change) {
      const BlockId block = blocks[random() % pages];
      // Mostly up, often down, sometimes while it is live.
      const Value value = random() >> random() % 8;
      if (random() % 2 == 0) {
        pool.revalue(first, block, value);
      } else {
        pool.touch(first, block, value);
        pool.free(first, block);
      }
      values[block.value()] = value;
    }
    pool.audit();
    for (const auto& [block, value] : values) order[{value, block}] = true;
    std::vector<std::uint64_t> told;
    pool.on_evict([&](LeafId, BlockId block, PageKey) { told.push_back(block.value()); });
    REQUIRE(draw(pool, 0, pages).size() == pages);
    std::vector<std::uint64_t> expected;
    for (const auto& [place, unused] : order) expected.push_back(place.second);
    CHECK(told == expected);
    pool.audit();
  }
}

TEST_CASE("an idle huge block is worth its most valuable page, then its number of pages") {
  BlockPool pool(geometry_of(4, {4, 1}));
  const std::vector<BlockId> blocks = draw(pool, 0, 16);
  // Best values 50, 40, 40 and 60; the second has three pages, the third two.
  const Value values[16] = {1, 2, 3, 50, 40, 4, 5, 0, 6, 40, 0, 0, 60, 60, 60, 60};
  std::vector<BlockId> uncommitted;
  for (std::size_t i = 0; i < 16; ++i) {
    if (values[i] != 0) pool.commit(first, blocks[i], key_of(i), values[i]);
  }
  pool.free_many(first, blocks);
  std::vector<std::uint32_t> order;
  for (int i = 0; i < 4; ++i) {
    order.push_back(pool.allocate(second).value().value() - 1);
    pool.audit();
  }
  CHECK(order == std::vector<std::uint32_t>{2, 1, 0, 3});
  pool.free_many(second, std::vector<BlockId>{BlockId(1), BlockId(2), BlockId(3), BlockId(4)});

  // The worth falls when the best page is lowered or dropped.
  const std::vector<BlockId> again = draw(pool, 0, 16);
  for (std::size_t i = 0; i < 16; ++i) pool.commit(first, again[i], key_of(i), 100 + i);
  pool.free_many(first, again);
  for (std::size_t i = 12; i < 16; ++i) pool.revalue(first, again[i], 1);
  CHECK(pool.allocate(second).value().value() - 1 ==
        pool.geometry().huge_block_of(first, again[12]).value());
  pool.uncommit(first, again[7]);
  pool.uncommit(first, again[6]);
  pool.uncommit(first, again[5]);
  pool.uncommit(first, again[4]);  // empty now
  pool.uncommit(first, again[11]);
  pool.revalue(first, again[10], 50);
  pool.revalue(first, again[9], 50);
  pool.revalue(first, again[8], 50);
  pool.audit();
  CHECK(pool.allocate(second).value().value() - 1 ==
        pool.geometry().huge_block_of(first, again[4]).value());
  CHECK(pool.allocate(second).value().value() - 1 ==
        pool.geometry().huge_block_of(first, again[8]).value());
  pool.audit();
}

TEST_CASE("stats may be read from another thread") {
  BlockPool pool(geometry_of(64, {8, 1}));
  std::atomic<bool> done{false};
  std::uint64_t reads = 0;
  std::thread reader([&] {
    while (!done || reads == 0) {
      const PoolStats stats = pool.stats();
      if (stats.empty > 64 || stats.leaves[0].live > 512) break;
      ++reads;
    }
  });
  std::uint64_t key = 0;
  for (int round = 0; round < 2000; ++round) {
    const std::vector<BlockId> blocks = draw(pool, 0, 100);
    if (blocks.empty()) continue;
    for (std::size_t i = 0; i < 10; ++i) pool.commit(first, blocks[i], key_of(++key));
    pool.free_many(first, blocks);
  }
  done = true;
  reader.join();
  CHECK(reads > 0);
  pool.audit();
}

}  // namespace kvleaf
