#include "kvleaf/pool/arena.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace kvleaf {
namespace {

using u64 = std::uint64_t;

Geometry small() {
  std::vector<PageSpec> pages(2);
  pages[0].name = "wide";
  pages[0].bytes_per_page = 20;
  pages[0].stride_alignment = 4;
  pages[1].name = "narrow";
  pages[1].bytes_per_page = 8;
  return Geometry::by_hand(
      pages, {.huge_bytes = 24, .huge_blocks = 50, .ratios = {1, 3}, .alignment = 32});
}

bool all_equal(std::span<const std::byte> bytes, std::byte value) {
  return std::all_of(bytes.begin(), bytes.end(), [&](std::byte b) { return b == value; });
}

TEST_CASE("host memory has the geometry's size, reads as zeros and starts at a huge page") {
  const Arena arena = Arena::host(small());
  CHECK(arena.bytes().size() == 32 + 50 * 24);
  CHECK(all_equal(arena.bytes(), std::byte{0}));
  CHECK(reinterpret_cast<std::uintptr_t>(arena.bytes().data()) % (std::size_t{2} << 20) == 0);
  CHECK(arena.geometry() == small());
}

TEST_CASE("G-11 the null region stays zero when every block of every leaf is written") {
  const Arena arena = Arena::host(small());
  const Geometry& geometry = arena.geometry();
  for (std::uint32_t leaf = 0; leaf < 2; ++leaf) {
    for (std::uint32_t b = 1; b <= geometry.leaf(LeafId(leaf)).blocks; ++b) {
      const std::span<std::byte> page = arena.page(LeafId(leaf), BlockId(b));
      REQUIRE(page.size() == geometry.leaf(LeafId(leaf)).bytes_per_page);
      std::fill(page.begin(), page.end(), std::byte{0xff});
    }
  }
  CHECK(all_equal(arena.bytes().first(geometry.null_bytes()), std::byte{0}));
  CHECK(all_equal(arena.bytes().subspan(geometry.null_bytes()), std::byte{0xff}));  // by "narrow"
  for (std::uint32_t leaf = 0; leaf < 2; ++leaf) {
    const std::span<std::byte> null = arena.page(LeafId(leaf), null_block);
    CHECK(null.size() == geometry.leaf(LeafId(leaf)).bytes_per_page);
    CHECK(all_equal(null, std::byte{0}));
  }
}

TEST_CASE("block b of a leaf lies b strides into its view") {
  const Arena arena = Arena::host(small());
  for (std::uint32_t leaf = 0; leaf < 2; ++leaf) {
    const LeafGeometry& of = arena.geometry().leaf(LeafId(leaf));
    for (std::uint32_t b = 0; b <= of.blocks; ++b) {
      CHECK(arena.page(LeafId(leaf), BlockId(b)).data() ==
            arena.view(LeafId(leaf)) + b * of.page_stride);
    }
    const BlockId past(static_cast<std::uint32_t>(of.blocks + 1));
    CHECK_THROWS_AS(arena.page(LeafId(leaf), past), BlockError);
  }
  CHECK(arena.view(LeafId(0)) == arena.bytes().data() + 8);
  CHECK(arena.view(LeafId(1)) == arena.bytes().data() + 24);
  CHECK_THROWS_AS(arena.view(LeafId(2)), InvalidArgument);
}

TEST_CASE("borrowed memory is used in place and never written by the arena") {
  std::vector<std::byte> memory(32 + 50 * 24 + 100, std::byte{7});
  const Arena arena = Arena::borrowed(small(), memory);
  CHECK(arena.bytes().data() == memory.data());
  CHECK(arena.bytes().size() == 32 + 50 * 24);
  CHECK(all_equal(memory, std::byte{7}));
  try {
    Arena::borrowed(small(), std::span(memory).first(32 + 50 * 24 - 1));
    FAIL("one byte too few was taken");
  } catch (const InvalidArgument& error) {
    CHECK(std::string(error.what()).find("1231 B") != std::string::npos);
    CHECK(std::string(error.what()).find("1232 B") != std::string::npos);
  }
}

TEST_CASE("copies share the bytes, which live as long as the last of them") {
  std::optional<Arena> first = Arena::host(small());
  const Arena second = *first;
  first->page(LeafId(1), BlockId(5))[0] = std::byte{42};
  first.reset();
  CHECK(second.page(LeafId(1), BlockId(5))[0] == std::byte{42});
}

TEST_CASE("an arena far larger than the memory used costs what is touched") {
  std::vector<PageSpec> pages(1);
  pages[0].name = "state";
  pages[0].bytes_per_page = u64{1} << 20;
  // 8 GiB, of which two pages are touched: one of them at an offset above 2^32.
  const Arena arena = Arena::host(Geometry::by_hand(
      pages, {.huge_bytes = u64{1} << 20, .huge_blocks = u64{8} << 10, .ratios = {1}}));
  const std::span<std::byte> last = arena.page(LeafId(0), BlockId(8 << 10));
  last[last.size() - 1] = std::byte{1};
  CHECK(arena.bytes()[arena.bytes().size() - 1] == std::byte{1});
  CHECK(arena.page(LeafId(0), BlockId(1))[0] == std::byte{0});
}

TEST_CASE("memory that the system does not give is refused with the bytes wanted") {
  std::vector<PageSpec> pages(1);
  pages[0].name = "state";
  pages[0].bytes_per_page = u64{1} << 40;
  for (const u64 huge_blocks : {u64{1} << 18, (u64{1} << 24) - 2}) {
    const Geometry geometry = Geometry::by_hand(
        pages, {.huge_bytes = u64{1} << 40, .huge_blocks = huge_blocks, .ratios = {1}});
    try {
      Arena::host(geometry);
      FAIL("mapped " << geometry.arena_bytes() << " B");
    } catch (const KVError& error) {
      CHECK(std::string(error.what()).find(std::to_string(geometry.arena_bytes())) !=
            std::string::npos);
    }
  }
}

}  // namespace
}  // namespace kvleaf
