// Where blocks are placed: hints keep a request together, fates keep what dies with a request apart
// from what is meant to stay, and neither spends more than the slack.
#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "kvleaf/pool/block_pool.h"
#include "pool/hand_made.h"

namespace kvleaf {
namespace {

using testing::draw;
using testing::geometry_of;

constexpr LeafId first{0};
constexpr LeafId second{1};

HugeBlockId huge_of(const BlockPool& pool, LeafId leaf, BlockId block) {
  return pool.geometry().huge_block_of(leaf, block);
}

}  // namespace

TEST_CASE("a hint keeps a request's blocks in one huge block while another draws in between") {
  BlockPool pool(geometry_of(8, {4}));
  std::optional<HugeBlockId> last[2];
  std::set<HugeBlockId> used[2];
  // Each request starts in a huge block of its own, then they alternate.
  const std::vector<BlockId> start = draw(pool, 0, 8);
  for (std::size_t request = 0; request < 2; ++request) {
    last[request] = huge_of(pool, first, start[4 * request]);
    pool.free_many(first, std::span(start).subspan(4 * request + 1, 3));
  }
  for (int round = 0; round < 3; ++round) {
    for (int request = 0; request < 2; ++request) {
      const BlockId block = pool.allocate(first, Fate::cache, last[request]).value();
      last[request] = huge_of(pool, first, block);
      used[request].insert(*last[request]);
      pool.audit();
    }
  }
  CHECK(used[0].size() == 1);
  CHECK(used[1].size() == 1);
  CHECK(used[0] != used[1]);
  // Used up, the hint is useless, and so is one of another fate, of another class, or out of range.
  CHECK(huge_of(pool, first, pool.allocate(first, Fate::cache, last[0]).value()) != *last[0]);
  CHECK(pool.allocate(first, Fate::request, last[1]));
  CHECK(pool.allocate(first, Fate::cache, HugeBlockId(1000)));
  pool.audit();
}

TEST_CASE("without a hint the fullest claimed huge block is drawn from") {
  BlockPool pool(geometry_of(4, {8}));
  const std::vector<BlockId> blocks = draw(pool, 0, 32);
  // Leaves 3, 1, 2 and 0 clean blocks in the four huge blocks.
  pool.free_many(first, std::vector<BlockId>{blocks[0], blocks[1], blocks[2], blocks[8], blocks[16],
                                             blocks[17]});
  std::vector<std::uint32_t> order;
  for (int i = 0; i < 6; ++i) {
    order.push_back(huge_of(pool, first, pool.allocate(first).value()).value());
    pool.audit();
  }
  CHECK(order == std::vector<std::uint32_t>{1, 2, 2, 0, 0, 0});
}

TEST_CASE("blocks of one fate do not share a huge block with the other while there is slack") {
  BlockPool pool(geometry_of(6, {4, 1}));
  for (int i = 0; i < 3; ++i) {
    REQUIRE(pool.allocate(first, Fate::request));
    REQUIRE(pool.allocate(first, Fate::cache));
    pool.audit();
  }
  CHECK(pool.stats().claimed == 2);
  // The other leaf is promised all that is empty: now they share rather than take from it.
  pool.set_promised(second, 4);
  REQUIRE(draw(pool, 0, 2, Fate::request).size() == 2);
  CHECK(pool.stats().claimed == 2);
  CHECK(pool.stats().empty == 4);
  CHECK_FALSE(pool.allocate(first, Fate::cache));
  pool.set_promised(second, 0);
  CHECK(pool.allocate(first, Fate::cache));
  pool.audit();
}

TEST_CASE("cached checkpoints are never stuck beside live states: their huge blocks fall idle") {
  // States of 77 MB, one live per request and one checkpoint, four to a huge block, beside
  // attention.
  BlockPool pool(geometry_of(40, {4, 64}));
  std::mt19937 random(3);
  struct Request {
    BlockId live;
    std::vector<BlockId> checkpoints;
  };
  std::vector<Request> running;
  std::uint64_t key = 0;
  for (int step = 0; step < 2000; ++step) {
    if (running.size() < 12) {
      running.push_back({pool.allocate(first, Fate::request).value(), {}});
    }
    Request& request = running[random() % running.size()];
    if (const auto checkpoint = pool.allocate(first, Fate::cache)) {
      pool.commit(first, *checkpoint, {1, ++key});
      pool.free(first, *checkpoint);
    }
    if (random() % 4 == 0) {
      pool.free(first, request.live);
      request = running.back();
      running.pop_back();
    }
    // At most one huge block per fate more than the live states need; all the rest could be
    // attention's.
    const std::uint64_t could_serve_attention = pool.stats().empty + pool.stats().idle;
    CHECK(could_serve_attention + (running.size() + 3) / 4 + 3 >= 40);
  }
  pool.audit();
  CHECK(pool.cached(first) > 100);
}

TEST_CASE("nor are they where memory is short: live states fill up what they claim") {
  // The same in a pool that is full all the time: checkpoints of every value fill it, requests
  // come and stay, and attention takes every huge block that is empty or idle.
  for (std::uint32_t seed = 1; seed <= 20; ++seed) {
    CAPTURE(seed);
    BlockPool pool(geometry_of(30, {4, 64}));
    std::mt19937 random(seed);
    std::vector<BlockId> live, pages;
    std::uint64_t key = 0;
    for (int step = 0; step < 600; ++step) {
      if (live.size() < 40 && random() % 3 != 0) {
        if (const auto state = pool.allocate(first, Fate::request)) live.push_back(*state);
      }
      if (const auto checkpoint = pool.allocate(first, Fate::cache)) {
        pool.commit(first, *checkpoint, {1, ++key}, random() % 1000);
        pool.free(first, *checkpoint);
      }
      if (random() % 40 == 0) {  // a page of attention, the first of a huge block of its own
        for (int i = 0; i < 64; ++i) {
          if (const auto page = pool.allocate(second)) pages.push_back(*page);
        }
      }
      pool.audit();
    }
    // A checkpoint is settled: none is live. One huge block at most holds states and has room.
    const std::uint64_t of_pages = (pages.size() + 63) / 64;
    const std::uint64_t of_states = pool.stats().claimed - of_pages;
    CHECK(of_states == (live.size() + 3) / 4);
    // So attention can have all the rest.
    CHECK(pool.can_allocate(std::vector<std::uint64_t>{0, (30 - of_pages - of_states) * 64}));
  }
}

TEST_CASE("a batch is contiguous where it can be, and comes back in the order it was returned") {
  BlockPool pool(geometry_of(8, {16, 1}));
  const std::vector<BlockId> blocks = draw(pool, 0, 32);
  for (std::size_t i = 0; i < blocks.size(); ++i) CHECK(blocks[i].value() == i + 1);
  pool.free_many(first, std::span(blocks).subspan(3, 8));
  const std::vector<BlockId> again = draw(pool, 0, 8);
  CHECK(std::equal(again.begin(), again.end(), blocks.begin() + 3));
  const std::vector<BlockId> singles = draw(pool, 1, 3);
  pool.free_many(second, singles);
  CHECK(draw(pool, 1, 3) == singles);
  pool.audit();
}

}  // namespace kvleaf
