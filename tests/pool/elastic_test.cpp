// Compaction and resizing: a pool that gives huge blocks back.
#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "kvleaf/leaf/errors.h"
#include "kvleaf/pool/arena.h"
#include "kvleaf/pool/block_pool.h"
#include "pool/hand_made.h"

namespace kvleaf {
namespace {

using testing::draw;
using testing::fits;
using testing::geometry_of;
using Blocks = std::vector<BlockId>;

constexpr LeafId first{0};
constexpr LeafId second{1};

PageKey key_of(std::uint64_t number) { return {3, number}; }

/// Bytes of this process that are in memory.
std::uint64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::uint64_t size = 0, resident = 0;
  statm >> size >> resident;
  return resident * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace

TEST_CASE("a compaction empties the huge block that takes the fewest moves, and all follows") {
  BlockPool pool(geometry_of(3, {4, 1}));
  const Blocks blocks = draw(pool, 0, 12);
  // Live: 2 of the first, 1 cached and 1 live of the second, 3 of the third.
  pool.free_many(first, Blocks{blocks[0], blocks[1], blocks[4], blocks[5], blocks[8]});
  pool.touch(first, blocks[6]);
  pool.commit(first, blocks[7], key_of(7), 70);
  pool.free(first, blocks[7]);
  pool.free(first, blocks[2]);
  pool.audit();
  // Clean: 3, 2 and 1.
  CHECK_FALSE(fits(pool, {0, 1}));
  const std::uint64_t bytes = pool.geometry().leaf(first).bytes_per_page;
  CHECK(pool.plan_compaction(first, bytes - 1).empty());
  CHECK(pool.plan_compaction(second, 100 * bytes).empty());
  const std::vector<BlockMove> moves = pool.plan_compaction(first, bytes);
  REQUIRE(moves.size() == 1);
  CHECK(moves[0].leaf == first);
  CHECK(moves[0].src == blocks[3]);
  CHECK(moves[0].dst == blocks[8]);  // into the fullest
  pool.move(moves[0].leaf, moves[0].src, moves[0].dst);
  pool.audit();
  CHECK(pool.stats().empty == 1);
  CHECK(pool.references(first, blocks[8]) == 1);
  CHECK_THROWS_AS(pool.free(first, blocks[3]), BlockError);
  CHECK(fits(pool, {0, 1}));

  // References, key and value move along; a cached block stays cached.
  const std::uint64_t evicted = pool.stats().leaves[0].evicted;
  CHECK(pool.plan_compaction(first, 100 * bytes).empty());  // six blocks and eight places: no
  pool.free(first, blocks[10]);
  pool.free(first, blocks[11]);
  const std::vector<BlockMove> more = pool.plan_compaction(first, 100 * bytes);
  REQUIRE(more.size() == 2);
  for (const BlockMove& move : more) {
    pool.move(move.leaf, move.src, move.dst);
    pool.audit();
  }
  CHECK(pool.stats().empty == 2);
  const auto found = pool.find(first, key_of(7));
  REQUIRE(found);
  CHECK(pool.value(first, *found) == 70);
  CHECK(pool.references(first, *found) == 0);
  CHECK(pool.cached(first) == 1);
  CHECK(pool.live(first) == 3);
  CHECK(pool.stats().leaves[0].evicted == evicted);
}

TEST_CASE(
    "a move takes what is live or cached to what is clean in a claimed huge block of the class") {
  BlockPool pool(geometry_of(3, {2, 1}));
  const BlockId a = pool.allocate(first).value();                         // 1; 2 is clean
  const BlockId other = pool.allocate(second).value();                    // 2
  CHECK_THROWS_AS(pool.move(first, BlockId(2), BlockId(1)), BlockError);  // clean to live
  CHECK_THROWS_AS(pool.move(first, a, null_block), BlockError);
  CHECK_THROWS_AS(pool.move(first, a, BlockId(99)), BlockError);
  CHECK_THROWS_AS(pool.move(first, a, BlockId(5)), BlockError);  // an empty huge block
  CHECK_THROWS_AS(pool.move(first, a, BlockId(4)), BlockError);  // another class's
  CHECK_THROWS_AS(pool.move(second, other, BlockId(1)), BlockError);
  pool.audit();
  pool.move(first, a, BlockId(2));
  CHECK(pool.references(first, BlockId(2)) == 1);
  CHECK(pool.allocate(first) == a);
  pool.audit();
}

TEST_CASE(
    "shrinking takes empty huge blocks, then the least valuable idle ones, wherever they are") {
  BlockPool pool(geometry_of(6, {2, 1}), {.max_huge_blocks = 8});
  CHECK(pool.geometry().huge_blocks() == 8);
  CHECK(pool.huge_blocks() == 6);
  const std::uint64_t null_bytes = pool.geometry().null_bytes();
  const std::uint64_t size = pool.geometry().huge_bytes();
  const Blocks blocks = draw(pool, 0, 8);  // huge blocks 0 … 3
  const Value values[] = {30, 31, 10, 11, 40, 12};
  for (std::size_t i = 0; i < 6; ++i) pool.commit(first, blocks[i], key_of(i), values[i]);
  pool.free_many(first, std::span(blocks).first(6));  // worth 31, 11 and 40; 3 is claimed
  std::vector<std::uint64_t> gone;
  pool.on_evict([&](LeafId, BlockId, PageKey key) { gone.push_back(key.low); });

  CHECK(pool.resize(6).empty());
  CHECK(pool.resize(4) == std::vector<ByteRange>{{null_bytes + 4 * size, null_bytes + 6 * size}});
  CHECK(gone.empty());
  pool.audit();
  CHECK(pool.resize(3) == std::vector<ByteRange>{{null_bytes + size, null_bytes + 2 * size}});
  CHECK(gone == std::vector<std::uint64_t>{2, 3});
  CHECK(pool.stats().huge_blocks == 3);
  CHECK(pool.stats().empty == 0);
  CHECK_FALSE(fits(pool, {5, 0}));
  CHECK(fits(pool, {4, 0}));
  pool.audit();

  // What is claimed, or promised, stays; nothing changes.
  pool.set_promised(second, 1);
  bool refused = false;
  try {
    pool.resize(1);
  } catch (const PoolExhausted& error) {
    refused = std::string(error.what()).find("at least 2 must stay") != std::string::npos;
  }
  CHECK(refused);
  CHECK(pool.huge_blocks() == 3);
  pool.set_promised(second, 0);
  CHECK_THROWS_AS(pool.resize(9), InvalidArgument);

  // Growing: the lowest first; the ids are what they always were.
  CHECK(pool.resize(5) == std::vector<ByteRange>{{null_bytes + size, null_bytes + 2 * size},
                                                 {null_bytes + 4 * size, null_bytes + 5 * size}});
  CHECK(pool.allocate(first) == BlockId(3));
  pool.resize(8);
  CHECK(pool.find(first, key_of(4)) == blocks[4]);
  CHECK(draw(pool, 0, 9).size() == 9);
  pool.audit();
  CHECK_THROWS_AS(BlockPool(geometry_of(6, {2, 1}), {.max_huge_blocks = 5}), InvalidArgument);
}

TEST_CASE("what shrinking unmaps goes back to the system, and what growing maps is as new") {
  constexpr std::uint64_t MiB = 1 << 20;
  const std::vector<PageSpec> pages = {{.name = "page", .bytes_per_page = 2 * MiB},
                                       {.name = "state", .bytes_per_page = 8 * MiB}};
  BlockPool pool(
      Geometry::by_hand(pages, {.huge_bytes = 8 * MiB, .huge_blocks = 16, .ratios = {4, 1}}));
  const Arena arena = Arena::host(pool.geometry());
  const Blocks blocks = draw(pool, 0, 64);  // all of it
  for (const BlockId block : blocks) {
    std::ranges::fill(arena.page(first, block), static_cast<std::byte>(block.value()));
  }
  const std::uint64_t full = resident_bytes();
  pool.free_many(first, std::span(blocks).subspan(16));  // four huge blocks stay

  const auto gone = pool.resize(4);
  CHECK(arena.unmap(gone) == 12 * 8 * MiB);
  CHECK(resident_bytes() <= full - 12 * 8 * MiB + MiB);
  CHECK(pool.stats().huge_blocks == 4);
  CHECK_FALSE(pool.allocate(second));
  for (const BlockId block : std::span(blocks).first(16)) {  // nobody else's bytes went
    CHECK(arena.page(first, block).front() == static_cast<std::byte>(block.value()));
    CHECK(arena.page(first, block).back() == static_cast<std::byte>(block.value()));
  }

  const auto back = pool.resize(10);
  CHECK(arena.map(back) == 6 * 8 * MiB);
  const Blocks states = draw(pool, 1, 6);
  for (const BlockId state : states) {
    CHECK(std::ranges::all_of(arena.page(second, state),
                              [](std::byte b) { return b == std::byte{0}; }));
    std::ranges::fill(arena.page(second, state), std::byte{7});
  }
  CHECK_FALSE(pool.allocate(second));
  pool.audit();

  CHECK_THROWS_AS(arena.unmap(std::vector<ByteRange>{{0, arena.bytes().size() + 1}}),
                  InvalidArgument);
  CHECK_THROWS_AS(arena.map(std::vector<ByteRange>{{2, 1}}), InvalidArgument);
  std::vector<std::byte> memory(pool.geometry().arena_bytes());
  CHECK_THROWS_AS(Arena::borrowed(pool.geometry(), memory).unmap(gone), InvalidArgument);
}

}  // namespace kvleaf
