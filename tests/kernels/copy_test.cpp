#include "kvleaf/kernels/copy.h"

#include <algorithm>

#include "kernels/machine.h"
#include "kvleaf/kernels/stream.h"

namespace kvleaf::kernels::test {
namespace {

// Three leaves that share one arena of huge blocks, as a pool's do: strides of equal multiples,
// views that begin one stride before the first huge block.
struct Tiling {
  static constexpr std::uint64_t null_bytes = 4096;
  static constexpr std::uint64_t huge_bytes = 4096;
  static constexpr std::uint64_t huge_blocks = 12;
  static constexpr std::uint64_t arena_bytes = null_bytes + huge_blocks * huge_bytes;
  static constexpr std::uint64_t ratio[] = {1, 4, 16};
  static constexpr std::uint64_t page_bytes[] = {4000, 1024, 250};

  static std::vector<Pages> leaves(std::byte* arena) {
    std::vector<Pages> leaves;
    for (int i = 0; i < 3; ++i) {
      const std::uint64_t stride = huge_bytes / ratio[i];
      leaves.push_back({arena + null_bytes - stride, stride, page_bytes[i],
                        static_cast<std::uint32_t>(huge_blocks * ratio[i])});
    }
    return leaves;
  }

  // Bytes of a block in the arena.
  static std::size_t begin(std::uint32_t leaf, std::int32_t block) {
    const std::uint64_t stride = huge_bytes / ratio[leaf];
    return null_bytes - stride + static_cast<std::uint64_t>(block) * stride;
  }
};

// A list of copies between blocks of distinct huge blocks, with some padding in between.
std::vector<BlockCopy> random_copies(Random& random) {
  std::vector<BlockCopy> copies;
  std::vector<std::int32_t> huge(Tiling::huge_blocks);
  for (std::size_t i = 0; i < huge.size(); ++i) huge[i] = static_cast<std::int32_t>(i);
  std::shuffle(huge.begin(), huge.end(), random);
  const std::size_t pairs = draw(random, 0, huge.size() / 2);
  for (std::size_t pair = 0; pair < pairs; ++pair) {
    const auto leaf = static_cast<std::uint32_t>(draw(random, 0, 2));
    const auto ratio = static_cast<std::int32_t>(Tiling::ratio[leaf]);
    std::vector<std::int32_t> sources(ratio), targets(ratio);
    for (std::int32_t i = 0; i < ratio; ++i) {
      sources[i] = huge[2 * pair] * ratio + i + 1;
      targets[i] = huge[2 * pair + 1] * ratio + i + 1;
    }
    std::shuffle(targets.begin(), targets.end(), random);
    const std::size_t count = draw(random, 1, ratio);
    for (std::size_t i = 0; i < count; ++i) {
      // A source may serve several, and so may the null block.
      const std::int32_t src = draw(random, 0, 4) == 0 ? 0 : sources[draw(random, 0, ratio - 1)];
      copies.push_back({leaf, src, targets[i]});
      if (draw(random, 0, 5) == 0) copies.push_back({leaf, src, -1});
    }
  }
  std::shuffle(copies.begin(), copies.end(), random);
  return copies;
}

TEST_CASE_TEMPLATE("a list of page copies equals copying byte by byte, and touches nothing else",
                   Machine, KVLEAF_MACHINES) {
  if (skipped<Machine>()) return;
  Random random(1);
  for (int round = 0; round < 300; ++round) {
    Bytes arena = random_bytes(random, Tiling::arena_bytes);
    std::vector<BlockCopy> copies = random_copies(random);
    typename Machine::Buffer buffer(arena);

    Bytes expected = arena;
    for (const BlockCopy& copy : copies) {
      if (copy.dst == -1) continue;
      for (std::size_t i = 0; i < Tiling::page_bytes[copy.leaf]; ++i) {
        expected[Tiling::begin(copy.leaf, copy.dst) + i] =
            arena[Tiling::begin(copy.leaf, copy.src) + i];
      }
    }
    Machine::copy_pages(Tiling::leaves(buffer.data()), copies);
    REQUIRE(buffer.download() == expected);
  }
}

TEST_CASE_TEMPLATE("a list of clears zeroes the data of its pages and not their padding", Machine,
                   KVLEAF_MACHINES) {
  if (skipped<Machine>()) return;
  Random random(2);
  for (int round = 0; round < 200; ++round) {
    const Bytes arena = random_bytes(random, Tiling::arena_bytes);
    typename Machine::Buffer buffer(arena);
    std::vector<BlockClear> clears;
    Bytes expected = arena;
    for (std::size_t i = draw(random, 0, 20); i > 0; --i) {
      const auto leaf = static_cast<std::uint32_t>(draw(random, 0, 2));
      const auto block =
          static_cast<std::int32_t>(draw(random, 1, Tiling::huge_blocks * Tiling::ratio[leaf]));
      clears.push_back({leaf, block});
      if (i % 4 == 0) clears.push_back({leaf, -1});
      std::fill_n(expected.begin() + static_cast<std::ptrdiff_t>(Tiling::begin(leaf, block)),
                  Tiling::page_bytes[leaf], std::byte{0});
    }
    Machine::zero_pages(Tiling::leaves(buffer.data()), clears);
    REQUIRE(buffer.download() == expected);
  }
}

TEST_CASE_TEMPLATE("V-04 copies a to b and b to c in one batch are refused, and nothing is written",
                   Machine, KVLEAF_MACHINES) {
  if (skipped<Machine>()) return;
  Random random(3);
  const Bytes arena = random_bytes(random, Tiling::arena_bytes);
  typename Machine::Buffer buffer(arena);
  const std::vector<Pages> leaves = Tiling::leaves(buffer.data());
  const auto refused = [&](std::vector<BlockCopy> copies) {
    CHECK_THROWS_AS(Machine::copy_pages(leaves, copies), KernelError);
    CHECK(buffer.download() == arena);
  };
  refused({{1, 5, 9}, {1, 9, 13}});
  refused({{1, 9, 13}, {1, 5, 9}});
  refused({{1, 5, 9}, {1, 9, 5}});               // an exchange
  refused({{1, 5, 5}});                          // onto itself
  refused({{1, 5, 9}, {1, 6, 9}});               // two writers
  refused({{2, 1, 20}, {0, 2, 4}, {1, 2, 13}});  // leaf 1's block 13 lies in leaf 0's block 4
  refused({{0, 1, 4}, {2, 49, 3}});              // leaf 2's block 49 lies in leaf 0's block 4
}

TEST_CASE("copies that name what does not exist are refused, the numbers in the message") {
  Bytes arena(Tiling::arena_bytes);
  const std::vector<Pages> leaves = Tiling::leaves(arena.data());
  const auto message = [&](BlockCopy copy) -> std::string {
    try {
      copy_pages(leaves, {&copy, 1});
    } catch (const KernelError& error) {
      return error.what();
    }
    return "";
  };
  CHECK(message({3, 1, 2}) == "the source of a copy names leaf 3 of 3");
  CHECK(message({0, 13, 2}) ==
        "the source of a copy names block 13 of leaf 0: 0 to 12 are allowed");
  CHECK(message({0, -1, 2}) ==
        "the source of a copy names block -1 of leaf 0: 0 to 12 are allowed");
  CHECK(message({1, 1, 0}) ==
        "the destination of a copy names block 0 of leaf 1: 1 to 48 are allowed");
  CHECK(message({1, 1, 49}) ==
        "the destination of a copy names block 49 of leaf 1: 1 to 48 are allowed");
  CHECK(message({1, 1, 48}).empty());

  const BlockClear null_block{0, 0};
  CHECK_THROWS_AS(zero_pages(leaves, {&null_block, 1}), KernelError);
}

TEST_CASE("a refusal is found by brute force exactly when copy_pages finds it") {
  Random random(4);
  int refusals = 0;
  for (int round = 0; round < 3000; ++round) {
    Bytes arena(Tiling::arena_bytes);
    const std::vector<Pages> leaves = Tiling::leaves(arena.data());
    std::vector<BlockCopy> copies;
    for (std::size_t i = draw(random, 1, 6); i > 0; --i) {
      const auto leaf = static_cast<std::uint32_t>(draw(random, 0, 2));
      const std::uint64_t blocks = leaves[leaf].blocks;
      copies.push_back({leaf, static_cast<std::int32_t>(draw(random, 0, blocks)),
                        static_cast<std::int32_t>(draw(random, 1, blocks))});
    }
    // Bytes each copy writes and reads, marked one by one.
    std::vector<int> written(arena.size()), read(arena.size());
    for (const BlockCopy& copy : copies) {
      for (std::size_t i = 0; i < Tiling::page_bytes[copy.leaf]; ++i) {
        ++written[Tiling::begin(copy.leaf, copy.dst) + i];
        ++read[Tiling::begin(copy.leaf, copy.src) + i];
      }
    }
    bool depends = false;
    for (std::size_t i = 0; i < arena.size(); ++i) {
      depends |= written[i] > 1 || (written[i] > 0 && read[i] > 0);
    }
    bool refused = false;
    try {
      copy_pages(leaves, copies);
    } catch (const KernelError&) {
      refused = true;
    }
    REQUIRE(refused == depends);
    refusals += refused;
  }
  CHECK(refusals > 300);
  CHECK(refusals < 2900);
}

TEST_CASE("copies of rows equal moving the rows one by one") {
  Random random(5);
  constexpr std::uint64_t row_bytes = 48, rows = 64, null_rows = 6;
  for (int round = 0; round < 500; ++round) {
    Bytes memory = random_bytes(random, row_bytes * rows);
    std::vector<RowCopy> copies;
    std::vector<int> touched(rows, 0);
    for (std::size_t i = draw(random, 0, 6); i > 0; --i) {
      const RowCopy copy{draw(random, 0, rows - 6), draw(random, null_rows, rows - 6),
                         draw(random, 0, 6)};
      bool clash = false;
      for (std::uint64_t row = 0; row < copy.count; ++row) {
        clash |= touched[copy.src + row] != 0 || touched[copy.dst + row] != 0;
        clash |= copy.dst <= copy.src + row && copy.src + row < copy.dst + copy.count;
      }
      if (clash) continue;
      for (std::uint64_t row = 0; row < copy.count; ++row) {
        touched[copy.src + row] = touched[copy.dst + row] = 1;
      }
      copies.push_back(copy);
    }
    Bytes expected = memory;
    for (const RowCopy& copy : copies) {
      for (std::uint64_t i = 0; i < copy.count * row_bytes; ++i) {
        expected[copy.dst * row_bytes + i] = memory[copy.src * row_bytes + i];
      }
    }
    copy_rows({memory.data(), row_bytes, null_rows, rows}, copies);
    REQUIRE(memory == expected);
  }
}

TEST_CASE("copies of rows into the null block, past the end or across each other are refused") {
  Bytes memory(48 * 64);
  const Rows rows{memory.data(), 48, 6, 64};
  const auto refused = [&](std::vector<RowCopy> copies) {
    CHECK_THROWS_AS(copy_rows(rows, copies), KernelError);
  };
  refused({{10, 5, 1}});
  refused({{60, 10, 5}});
  refused({{10, 60, 5}});
  refused({{10, std::uint64_t{0} - 2, 4}});
  refused({{10, 12, 4}});
  refused({{10, 20, 4}, {30, 23, 2}});
  refused({{10, 20, 4}, {23, 40, 2}});
  std::vector<RowCopy> fine{{10, 20, 4}, {10, 24, 4}, {0, 28, 6}, {63, 40, 0}};
  CHECK_NOTHROW(copy_rows(rows, fine));
}

TEST_CASE(
    "streamed copies and clears write the bytes that memcpy and memset would, at any alignment") {
  Random random(6);
  for (int round = 0; round < 400; ++round) {
    const std::size_t bytes = draw(random, 0, round % 10 == 0 ? 70000 : 700);
    const std::size_t from = draw(random, 0, 70), to = draw(random, 0, 70);
    const Bytes source = random_bytes(random, bytes + from);
    Bytes target = random_bytes(random, bytes + to + 80);
    Bytes expected = target;
    std::copy_n(source.begin() + static_cast<std::ptrdiff_t>(from), bytes,
                expected.begin() + static_cast<std::ptrdiff_t>(to));
    copy_bytes(target.data() + to, source.data() + from, bytes, Store::streamed);
    end_stream(Store::streamed);
    REQUIRE(target == expected);
    std::fill_n(expected.begin() + static_cast<std::ptrdiff_t>(to), bytes, std::byte{0});
    clear_bytes(target.data() + to, bytes, Store::streamed);
    end_stream(Store::streamed);
    REQUIRE(target == expected);
  }
}

TEST_CASE("a list long enough to be streamed is copied and cleared like any other") {
  // Two leaves of one page class, 40 MiB copied in all.
  constexpr std::uint64_t page = std::uint64_t{1} << 20;
  constexpr std::uint32_t blocks = 80;
  REQUIRE(store_for_copies(40 * page) == Store::streamed);
  REQUIRE(store_for_clears(40 * page) == Store::streamed);
  Bytes arena((blocks + 1) * page);
  for (std::size_t i = page; i < arena.size(); i += 8) std::memcpy(&arena[i], &i, 8);
  const Pages leaf{arena.data(), page, page - 24, blocks};
  std::vector<BlockCopy> copies;
  for (std::int32_t i = 0; i < 40; ++i) copies.push_back({0, i + 1, 80 - i});
  copy_pages({&leaf, 1}, copies);
  for (std::int32_t i = 0; i < 40; ++i) {
    REQUIRE(std::memcmp(leaf.page(i + 1), leaf.page(80 - i), leaf.page_bytes) == 0);
    const std::uint64_t end = static_cast<std::uint64_t>(81 - i) * page - 24;
    REQUIRE(std::memcmp(leaf.page(80 - i) + leaf.page_bytes, &end, 8) == 0);
  }
  std::vector<BlockClear> clears;
  for (std::int32_t i = 1; i <= 40; ++i) clears.push_back({0, i});
  zero_pages({&leaf, 1}, clears);
  for (std::int32_t i = 1; i <= 40; ++i) {
    REQUIRE(std::all_of(leaf.page(i), leaf.page(i) + leaf.page_bytes,
                        [](std::byte byte) { return byte == std::byte{0}; }));
    const std::uint64_t end = static_cast<std::uint64_t>(i + 1) * page - 24;
    REQUIRE(std::memcmp(leaf.page(i) + leaf.page_bytes, &end, 8) == 0);
  }
}

}  // namespace
}  // namespace kvleaf::kernels::test
