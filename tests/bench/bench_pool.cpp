// Workload "pool": what the pool does besides drawing and returning single blocks. The joint rule,
// an eviction, pinning the blocks of a hit, and draws from a million held in random order beside
// the cost of one dependent cache miss.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "bench/bench.h"
#include "kvleaf/pool/pool.h"

namespace {

using namespace kvleaf;

constexpr LeafId leaf{0};

BlockPool make_pool(std::uint64_t huge_blocks, std::vector<std::uint64_t> ratios) {
  std::uint64_t huge_bytes = 1;
  for (const std::uint64_t ratio : ratios) huge_bytes = std::lcm(huge_bytes, ratio);
  std::vector<PageSpec> pages;
  for (std::size_t i = 0; i < ratios.size(); ++i) {
    pages.push_back({.name = fmt::format("leaf {}", i), .bytes_per_page = huge_bytes / ratios[i]});
  }
  return BlockPool(
      Geometry::by_hand(pages,
                        {.huge_bytes = huge_bytes, .huge_blocks = huge_blocks, .ratios = ratios}),
      {.index = KeyIndex::none});
}

/// All blocks of the first leaf, committed with rising values in the order of their ids, and
/// cached.
std::vector<BlockId> fill_with_cached(BlockPool& pool) {
  std::vector<BlockId> blocks(pool.geometry().leaf(leaf).blocks, null_block);
  pool.allocate_many(leaf, blocks);
  for (std::size_t i = 0; i < blocks.size(); ++i) pool.commit(leaf, blocks[i], {0, i});
  pool.free_many(leaf, blocks);
  return blocks;
}

void add_joint_rule(bench::Suite& suite) {
  for (const std::uint64_t huge_blocks : {1'000, 100'000}) {
    suite.add({.name = fmt::format("8 leaves, {} huge blocks", huge_blocks),
               .metric = "can_allocate_ns",
               .iterations = 200'000},
              [=](benchmark::State& state) {
                BlockPool pool = make_pool(huge_blocks, {512, 256, 128, 64, 32, 16, 8, 4});
                std::vector<std::uint64_t> wanted = {100, 200, 300, 50, 40, 30, 20, 10};
                for (std::uint32_t i = 0; i < 8; ++i) (void)pool.allocate(LeafId(i));
                std::size_t turn = 0;
                for (auto _ : state) {
                  wanted[turn++ % 8] ^= 1;
                  benchmark::DoNotOptimize(pool.can_allocate(wanted));
                }
              });
  }
}

/// Evicts in the order of values, which is that of ids; what is drawn is committed again, as
/// newest.
void add_eviction(bench::Suite& suite, const std::vector<std::uint64_t>& ratios,
                  std::uint64_t pages) {
  suite.add({.name = fmt::format("ratios {}, {} cached, an owner that is told", ratios[0], pages),
             .metric = "evict_ns",
             .iterations = 5'000},
            [=](benchmark::State& state) {
              BlockPool pool = make_pool(pages / ratios[0], ratios);
              fill_with_cached(pool);
              std::uint64_t told = 0;
              pool.on_evict([&](LeafId, BlockId, PageKey) { ++told; });
              for (auto _ : state) benchmark::DoNotOptimize(pool.allocate(leaf));
            });
}

/// The blocks of a hit of 8,192 pages: cached ones become live with a new value, and are returned.
void add_pins(bench::Suite& suite, bool scattered) {
  constexpr std::size_t pages = 8192;
  suite.add({.name = fmt::format("touch and return 8192 cached blocks, {}",
                                 scattered ? "scattered" : "contiguous"),
             .metric = "pin_ns",
             .iterations = 40,
             .items = pages},
            [=](benchmark::State& state) {
              BlockPool pool = make_pool(4'000, {64, 9});
              std::vector<BlockId> blocks = fill_with_cached(pool);
              if (scattered) std::shuffle(blocks.begin(), blocks.end(), std::mt19937(4));
              std::size_t begin = 0;
              Value value = blocks.size();
              for (auto _ : state) {
                const auto hit = std::span<const BlockId>(blocks).subspan(begin, pages);
                pool.touch_many(leaf, hit, ++value);
                pool.free_many(leaf, hit);
                begin = (begin + pages) % (blocks.size() - pages);
              }
            });
}

/// One free and one draw with a million held, and as floor one load that depends on the last, over
/// as many bytes as the pool's block records take.
void add_million(bench::Suite& suite, std::uint64_t ratio) {
  constexpr std::size_t held = 1'000'000;
  constexpr std::int64_t pairs = 500'000;
  suite.add(
      {.name = fmt::format("ratio {}, a million held; floor: one dependent miss", ratio),
       .metric = "pair_ns",
       .iterations = pairs},
      [=](benchmark::State& state) {
        BlockPool pool = make_pool(held / ratio + 100, {ratio});
        std::vector<BlockId> blocks(held, null_block);
        pool.allocate_many(leaf, blocks);
        std::shuffle(blocks.begin(), blocks.end(), std::mt19937(2));
        std::size_t next = 0;
        for (auto _ : state) {
          BlockId& block = blocks[next++];
          pool.free(leaf, block);
          block = *pool.allocate(leaf);
        }
      },
      [=](benchmark::State& state) {
        struct alignas(64) Line {
          std::uint64_t next;
        };
        std::vector<Line> lines(held / 2);  // records of 32 bytes, two to a line
        std::vector<std::uint64_t> order(lines.size());
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), std::mt19937(3));
        for (std::size_t i = 0; i < order.size(); ++i) {
          lines[order[i]].next = order[(i + 1) % order.size()];
        }
        std::uint64_t at = 0;
        for (auto _ : state) benchmark::DoNotOptimize(at = lines[at].next);
      });
}

/// What compaction gains: requests of random lengths come and go in a pool of two classes; a
/// newcomer draws pages of attention (64 to a huge block) and a state (a huge block of its own).
/// Where the state is refused, though attention's huge blocks are partly clean, moves of at most
/// `budget` may make room. Counted over newcomers that are refused or not: the pool is kept nearly
/// full.
void add_compaction(bench::Suite& suite, std::uint64_t budget_pages) {
  suite.add([=](bool quick) {
    BlockPool pool = make_pool(400, {64, 1});
    const std::uint64_t page_bytes = pool.geometry().leaf(leaf).bytes_per_page;
    constexpr LeafId state_leaf{1};
    struct Request {
      std::vector<BlockId> pages;
      BlockId state;
    };
    std::vector<Request> live;
    std::mt19937 random(6);
    std::uint64_t asked = 0, refused = 0, rescued = 0, moved = 0;
    const auto leave = [&] {
      const std::size_t index = random() % live.size();
      pool.free_many(leaf, live[index].pages);
      pool.free(state_leaf, live[index].state);
      live[index] = std::move(live.back());
      live.pop_back();
    };
    const auto make_room = [&] {
      const auto moves = pool.plan_compaction(leaf, budget_pages * page_bytes);
      if (moves.empty()) return false;
      for (const BlockMove& move : moves) {
        pool.move(move.leaf, move.src, move.dst);
        for (Request& request : live) {
          std::replace(request.pages.begin(), request.pages.end(), move.src, move.dst);
        }
      }
      moved += moves.size();
      return true;
    };
    for (int turn = 0; turn < (quick ? 500 : 20'000); ++turn) {
      // Mostly short, some long: lengths of chats.
      const std::size_t pages = random() % 4 != 0 ? 4 + random() % 60 : 100 + random() % 300;
      Request request{std::vector<BlockId>(pages, null_block), null_block};
      const std::vector<std::uint64_t> wanted = {pages, 1};
      ++asked;
      bool fits = pool.can_allocate(wanted);
      if (!fits && pool.can_allocate(std::vector<std::uint64_t>{pages, 0})) {
        ++refused;  // memory is there, but in pieces
        if (budget_pages != 0 && make_room() && pool.can_allocate(wanted)) {
          ++rescued;
          fits = true;
        }
      }
      if (!fits) {
        leave();
        continue;
      }
      pool.allocate_many(leaf, request.pages, Fate::request);
      request.state = pool.allocate(state_leaf, Fate::request).value();
      live.push_back(std::move(request));
      if (random() % 3 == 0) leave();
    }
    pool.audit();
    const std::string where =
        budget_pages == 0
            ? "mixed lengths, ratios 64 and 1, without compaction"
            : fmt::format("mixed lengths, ratios 64 and 1, at most {} pages moved a call",
                          budget_pages);
    const auto of = [](std::uint64_t part, std::uint64_t all) {
      return all == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(all);
    };
    return std::vector<bench::Figure>{
        {where, "refused_for_fragments_pct", "%", 100 * of(refused - rescued, asked), 0.0},
        {where, "rescued_pct_of_those", "%", 100 * of(rescued, refused)},
        {where, "pages_moved_per_rescue", "pages", of(moved, rescued)}};
  });
}

}  // namespace

int main(int argc, char** argv) {
  bench::Suite suite("pool", argc, argv);
  add_joint_rule(suite);
  for (const std::uint64_t pages : {10'000, 1'000'000}) {
    add_eviction(suite, {1}, pages);
    add_eviction(suite, {64, 9}, pages);
  }
  add_pins(suite, false);
  add_pins(suite, true);
  add_million(suite, 1);
  add_million(suite, 16);
  for (const std::uint64_t budget_pages : {0, 8, 32, 64}) add_compaction(suite, budget_pages);
  return suite.run();
}
