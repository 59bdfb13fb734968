// The pool's costs that can be counted: no heap call after construction, and bytes of records.
#include <doctest/doctest.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <random>
#include <vector>

#include "kvleaf/pool/block_pool.h"
#include "pool/hand_made.h"

namespace {
std::atomic<std::uint64_t> heap_calls{0};
}

// Replaces the one of this whole executable; counting costs the other tests nothing. Not inlined,
// or gcc takes the pairs for mismatched.
[[gnu::noinline]] void* operator new(std::size_t size) {
  ++heap_calls;
  if (void* memory = std::malloc(size != 0 ? size : 1)) return memory;
  throw std::bad_alloc();
}
// The one that does not throw too, which the standard library's sorts use: what it gives comes back
// to the same delete.
[[gnu::noinline]] void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  ++heap_calls;
  return std::malloc(size != 0 ? size : 1);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace kvleaf {

TEST_CASE("P-22: a million draws and returns make no heap call, and the audit is clean") {
  BlockPool pool(testing::geometry_of(40, {64, 9, 1}));
  std::mt19937 random(7);
  std::vector<BlockId> held[3];
  std::uint64_t total = 0, evicted = 0;
  for (std::vector<BlockId>& blocks : held) blocks.reserve(40 * 64);
  pool.on_evict([&](LeafId, BlockId, PageKey) { ++evicted; });
  std::vector<BlockId> batch(32, null_block);
  const std::vector<std::uint64_t> asked = {5, 2, 1};
  std::uint64_t key = 0;

  const std::uint64_t before = heap_calls;
  for (int pair = 0; pair < 1000000; ++pair) {
    const std::uint32_t number = random() % 3;
    const LeafId leaf(number);
    std::vector<BlockId>& blocks = held[number];
    if (const auto block = pool.allocate(leaf, random() % 2 == 0 ? Fate::cache : Fate::request)) {
      blocks.push_back(*block);
    }
    if (blocks.empty()) continue;
    std::swap(blocks[random() % blocks.size()], blocks.back());
    const BlockId leaving = blocks.back();
    blocks.pop_back();
    if (random() % 2 == 0) pool.commit(leaf, leaving, {1, ++key});
    pool.free(leaf, leaving);
    ++total;
    if (pair % 16 == 0) {
      const std::vector<BlockPool::Demand>::size_type parts = 2;
      const BlockPool::Demand demand[parts] = {{.leaf = LeafId(0), .blocks = 30},
                                               {.leaf = LeafId(1), .blocks = 2}};
      if (pool.allocate_all(demand, batch)) {
        pool.touch_many(LeafId(0), std::span(batch).first(30));
        pool.free_many(LeafId(0), std::span(batch).first(30));
        pool.free_many(LeafId(0), std::span(batch).first(30));
        pool.free_many(LeafId(1), std::span(batch).last(2));
      }
      (void)pool.can_allocate(asked);
      (void)pool.find(leaf, {1, key});
    }
    // Some stay, so that the pool is nearly full most of the time.
    if (blocks.size() > 500) {
      pool.free_many(leaf, std::span(blocks).last(200));
      blocks.resize(blocks.size() - 200, null_block);
    }
  }
  CHECK(heap_calls == before);
  CHECK(total > 900000);
  CHECK(evicted > 10000);
  CHECK_NOTHROW(pool.audit());
}

TEST_CASE("records take at most 48 bytes per smallest page, whatever the ratios") {
  const std::vector<std::uint64_t> shapes[] = {{1},
                                               {2},
                                               {3},
                                               {4},
                                               {5},
                                               {2, 1},
                                               {3, 2, 1},
                                               {4, 3, 2, 1},
                                               {8, 7, 6, 5, 4, 3, 2, 1},
                                               {9, 1},
                                               {16},
                                               {26, 5},
                                               {64, 1},
                                               {65, 9, 1},
                                               {512, 9},
                                               {552, 512, 9},
                                               {1020, 288, 153, 36, 34, 16},
                                               {4096, 1}};
  for (const auto& ratios : shapes) {
    for (const std::uint64_t huge_blocks : {100, 1000, 5000}) {
      const BlockPool pool(testing::geometry_of(huge_blocks, ratios), {.index = KeyIndex::none});
      CAPTURE(ratios[0]);
      CAPTURE(ratios.size());
      CAPTURE(huge_blocks);
      const double pages = static_cast<double>(huge_blocks * ratios[0]);
      CHECK(static_cast<double>(pool.metadata_bytes()) / pages <= 48.0);
    }
  }
}

}  // namespace kvleaf
