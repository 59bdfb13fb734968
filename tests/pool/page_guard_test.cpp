// Guarded pages: a writer to a page that was returned is found when the page is drawn again.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "kvleaf/pool/pool.h"

namespace {

using namespace kvleaf;

constexpr LeafId small{0};
constexpr LeafId large{1};

/// Huge blocks of 64 bytes: four pages of `small`, or one of `large`.
Geometry geometry_of(std::uint64_t huge_blocks) {
  const std::vector<PageSpec> pages = {
      {.name = "small", .bytes_per_page = 14, .stride_alignment = 1},
      {.name = "large", .bytes_per_page = 64}};
  return Geometry::by_hand(pages, {.huge_bytes = 64, .huge_blocks = huge_blocks, .ratios = {4, 1}});
}

struct Guarded {
  explicit Guarded(std::uint64_t huge_blocks, std::uint64_t max_huge_blocks = 0)
      : bytes(geometry_of(std::max(huge_blocks, max_huge_blocks)).arena_bytes()),
        pool(geometry_of(huge_blocks),
             {.max_huge_blocks = max_huge_blocks, .guarded = std::span(bytes)}) {}
  std::span<std::byte> page(LeafId leaf, BlockId block) {
    const ByteRange range = pool.geometry().byte_range(leaf, block);
    return std::span(bytes).subspan(range.begin, range.end - range.begin);
  }
  void write(LeafId leaf, BlockId block, std::byte value = std::byte{7}) {
    std::ranges::fill(page(leaf, block), value);
  }
  std::vector<std::byte> bytes;
  BlockPool pool;
};

std::string refusal(BlockPool& pool, LeafId leaf) {
  try {
    (void)pool.allocate(leaf);
  } catch (const InvariantError& error) {
    return error.what();
  }
  return {};
}

}  // namespace

TEST_CASE("a page that is written after it was returned is refused when it is drawn") {
  Guarded guarded(2);
  const BlockId block = guarded.pool.allocate(small).value();
  guarded.write(small, block);
  guarded.pool.free(small, block);
  CHECK(guarded.page(small, block)[0] == PageGuard::pattern);
  guarded.page(small, block)[5] = std::byte{0x11};  // too late
  const std::string why = refusal(guarded.pool, small);
  CHECK(why.find("byte 5 of block 1 of leaf 0 (small) is 0x11, not 0xa5") != std::string::npos);
  CHECK(refusal(guarded.pool, small) == why);  // it refuses all work from then on
}

TEST_CASE("the writer is found whichever leaf and call draws the bytes next") {
  const auto late_write = [](auto draw) {
    Guarded guarded(2);
    std::vector<BlockId> blocks(8, null_block);
    REQUIRE(guarded.pool.allocate_many(small, blocks));
    guarded.pool.free_many(small, blocks);
    guarded.write(small, BlockId(3));
    CHECK_THROWS_AS(draw(guarded.pool), InvariantError);
  };
  late_write([](BlockPool& pool) {
    std::vector<BlockId> out(8, null_block);
    return pool.allocate_many(small, out);
  });
  late_write([](BlockPool& pool) {
    std::vector<BlockId> out(2, null_block);
    return pool.allocate_many(large, out);
  });
  late_write([](BlockPool& pool) {
    std::vector<BlockId> out(2, null_block);
    const BlockPool::Demand demand{large, 2};
    return pool.allocate_all({&demand, 1}, out);
  });
  late_write([](BlockPool& pool) {
    (void)pool.allocate(large);
    return pool.allocate(large);
  });
}

TEST_CASE(
    "what is live or cached keeps its bytes; what is evicted or refused does not lose others") {
  Guarded guarded(1);
  std::vector<BlockId> blocks(4, null_block);
  REQUIRE(guarded.pool.allocate_many(small, blocks));
  for (const BlockId block : blocks) {
    guarded.write(small, block, static_cast<std::byte>(block.value()));
  }
  guarded.pool.commit(small, blocks[1], {0, 1}, 10);
  guarded.pool.commit(small, blocks[2], {0, 2}, 20);
  guarded.pool.free(small, blocks[1]);
  guarded.pool.free(small, blocks[2]);
  CHECK(guarded.page(small, blocks[1])[0] == std::byte{2});  // cached
  const std::vector<BlockId> bad = {blocks[0], blocks[3], blocks[3]};
  CHECK_THROWS_AS(guarded.pool.free_many(small, bad), BlockError);
  CHECK(guarded.page(small, blocks[0])[0] == std::byte{1});  // a refused call changes nothing
  CHECK(guarded.page(small, blocks[3])[0] == std::byte{4});
  CHECK(guarded.pool.allocate(small) == blocks[1]);  // the least valuable
  CHECK(guarded.page(small, blocks[1])[0] == PageGuard::pattern);
  CHECK(guarded.page(small, blocks[2])[0] == std::byte{3});
}

TEST_CASE("huge blocks that come back into service are guarded from their second use on") {
  Guarded guarded(1, 2);
  for (const ByteRange& range : guarded.pool.resize(2)) {  // mapped anew: zeros
    std::fill(guarded.bytes.begin() + static_cast<std::ptrdiff_t>(range.begin),
              guarded.bytes.begin() + static_cast<std::ptrdiff_t>(range.end), std::byte{0});
  }
  std::vector<BlockId> blocks(2, null_block);
  REQUIRE(guarded.pool.allocate_many(large, blocks));
  for (const BlockId block : blocks) guarded.write(large, block);
  guarded.pool.free_many(large, blocks);
  guarded.write(large, blocks[1]);
  CHECK_THROWS_AS((void)guarded.pool.allocate_many(large, blocks), InvariantError);
}

TEST_CASE("a guard needs the whole arena") {
  std::vector<std::byte> bytes(geometry_of(2).arena_bytes() - 1);
  CHECK_THROWS_AS(BlockPool(geometry_of(2), {.guarded = std::span(bytes)}), InvalidArgument);
}

TEST_CASE(
    "a pool whose pages are guarded gives the same blocks to an owner who writes only what is "
    "his") {
  for (std::uint32_t seed = 1; seed <= 20; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    Guarded guarded(6);
    struct Held {
      LeafId leaf;
      BlockId block;
    };
    std::vector<Held> held;
    for (int turn = 0; turn < 400; ++turn) {
      if (random() % 2 == 0) {
        const LeafId leaf{static_cast<std::uint32_t>(random() % 2)};
        if (const auto block = guarded.pool.allocate(leaf, static_cast<Fate>(random() % 2))) {
          guarded.write(leaf, *block, static_cast<std::byte>(random()));
          held.push_back({leaf, *block});
        }
      } else if (!held.empty()) {
        std::swap(held[random() % held.size()], held.back());
        const auto [leaf, block] = held.back();
        held.pop_back();
        if (random() % 2 == 0) guarded.pool.commit(leaf, block, {seed, std::uint64_t(turn)});
        guarded.pool.free(leaf, block);
      }
      guarded.pool.audit();
    }
  }
}
