// Workload "draw": some blocks are held; again and again a pseudo-random one is freed and one
// drawn.
//
// Two pools: the only leaf of a model of full attention, whose huge blocks hold one page each, and
// a hybrid's leaf of 16 pages to a huge block, where a draw has to find the fullest huge block.
//
// The floor is the cheapest pool there could be: a stack of free blocks and a count of references
// for each, with the same blocks freed in the same order.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "bench/bench.h"
#include "kvleaf/pool/pool.h"

namespace {

using namespace kvleaf;

struct PoolKind {
  const char* name;
  BlockPool (*make)(std::uint64_t blocks);  // of the first leaf
};
constexpr PoolKind kinds[] = {
    {"llama-3.1-70b, its one leaf",
     [](std::uint64_t blocks) {
       constexpr std::uint64_t page = 16 * 80 * 2 * 8 * 128 * 2;  // tokens, layers, K and V, bf16
       const std::vector<PageSpec> pages = {{.name = "full", .bytes_per_page = page}};
       return BlockPool(plan_geometry((blocks + 1) * page, pages));
     }},
    {"two leaves, 16 and 1 pages to a huge block", [](std::uint64_t blocks) {
       const std::vector<PageSpec> pages = {{.name = "full", .bytes_per_page = 64 << 10},
                                            {.name = "state", .bytes_per_page = 1 << 20}};
       return BlockPool(Geometry::by_hand(
           pages, {.huge_bytes = 1 << 20, .huge_blocks = blocks / 16, .ratios = {16, 1}}));
     }}};

constexpr LeafId leaf{0};

std::vector<std::uint32_t> some_order(std::uint32_t held, std::size_t count) {
  std::mt19937 random(1);
  std::vector<std::uint32_t> order(count);
  for (std::uint32_t& index : order) index = random() % held;
  return order;
}

/// Indices of `calls` groups of 64, distinct inside each.
std::vector<std::uint32_t> some_batches(std::uint32_t held, std::size_t calls) {
  std::mt19937 random(1);
  std::vector<std::uint32_t> all(held), order;
  std::iota(all.begin(), all.end(), 0);
  for (std::size_t call = 0; call < calls; ++call) {
    for (std::size_t i = 0; i < 64; ++i) std::swap(all[i], all[i + random() % (held - i)]);
    order.insert(order.end(), all.begin(), all.begin() + 64);
  }
  return order;
}

/// The held blocks in random order, as after a long run.
template <class Draw>
std::vector<BlockId> draw_held(std::uint32_t held, Draw draw) {
  std::vector<BlockId> blocks(held, null_block);
  for (BlockId& block : blocks) block = draw();
  std::shuffle(blocks.begin(), blocks.end(), std::mt19937(2));
  return blocks;
}

class LeastPool {
 public:
  explicit LeastPool(std::uint32_t blocks) : references_(blocks + 1) {
    for (std::uint32_t block = blocks; block > 0; --block) free_.push_back(BlockId(block));
  }
  BlockId draw() {
    const BlockId block = free_.back();
    free_.pop_back();
    references_[block.value()] = 1;
    return block;
  }
  void free(BlockId block) {
    if (--references_[block.value()] == 0) free_.push_back(block);
  }

 private:
  std::vector<BlockId> free_;
  std::vector<std::uint32_t> references_;
};

void add_pairs(bench::Suite& suite, const PoolKind& kind, std::uint32_t held, std::int64_t pairs) {
  const std::uint32_t capacity = 2 * held / 16 * 16 + 1600;
  const auto order = std::make_shared<const std::vector<std::uint32_t>>(
      some_order(held, static_cast<std::size_t>(pairs)));
  suite.add(
      {.name = fmt::format("{}, {} held", kind.name, held),
       .metric = "pair_ns",
       .iterations = pairs},
      [=](benchmark::State& state) {
        BlockPool pool = kind.make(capacity);
        auto blocks = draw_held(held, [&] { return pool.allocate(leaf).value(); });
        auto index = order->begin();
        for (auto _ : state) {
          BlockId& block = blocks[*index++];
          pool.free(leaf, block);
          block = *pool.allocate(leaf);
        }
      },
      [=](benchmark::State& state) {
        LeastPool pool(capacity);
        auto blocks = draw_held(held, [&] { return pool.draw(); });
        auto index = order->begin();
        for (auto _ : state) {
          BlockId& block = blocks[*index++];
          pool.free(block);
          block = pool.draw();
        }
      });
}

void add_batches(bench::Suite& suite, const PoolKind& kind, std::uint32_t held,
                 std::int64_t calls) {
  const std::uint32_t capacity = 2 * held / 16 * 16 + 1600;
  const auto order = std::make_shared<const std::vector<std::uint32_t>>(
      some_batches(held, static_cast<std::size_t>(calls)));
  suite.add(
      {.name = fmt::format("{}, {} held, calls of 64", kind.name, held),
       .metric = "pair_ns_batch64",
       .iterations = calls,
       .items = 64},
      [=](benchmark::State& state) {
        BlockPool pool = kind.make(capacity);
        auto blocks = draw_held(held, [&] { return pool.allocate(leaf).value(); });
        std::vector<BlockId> batch(64, null_block);
        auto index = order->begin();
        for (auto _ : state) {
          for (std::size_t i = 0; i < 64; ++i) batch[i] = blocks[index[i]];
          pool.free_many(leaf, batch);
          if (!pool.allocate_many(leaf, batch)) throw std::logic_error("the pool is full");
          for (std::size_t i = 0; i < 64; ++i) blocks[index[i]] = batch[i];
          index += 64;
        }
      },
      [=](benchmark::State& state) {
        LeastPool pool(capacity);
        auto blocks = draw_held(held, [&] { return pool.draw(); });
        auto index = order->begin();
        for (auto _ : state) {
          for (std::size_t i = 0; i < 64; ++i) pool.free(blocks[index[i]]);
          for (std::size_t i = 0; i < 64; ++i) blocks[index[i]] = pool.draw();
          index += 64;
        }
      });
}

}  // namespace

int main(int argc, char** argv) {
  bench::Suite suite("draw", argc, argv);
  for (const PoolKind& kind : kinds) {
    add_pairs(suite, kind, 1'000, 200'000);
    add_batches(suite, kind, 1'000, 200'000 / 64);
    add_pairs(suite, kind, 1'000'000, 1'000'000);
  }
  return suite.run();
}
