// Pools of a stated number of huge blocks and ratios, as the cases give them.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <vector>

#include "kvleaf/pool/block_pool.h"

namespace kvleaf::testing {

struct Limits {
  std::uint64_t floor = 0;
  std::optional<std::uint64_t> ceiling = {};
};

/// Leaf i is named "leaf i"; huge blocks are the least common multiple of the ratios long, so a
/// page of leaf i is that / ratio.
inline Geometry geometry_of(std::uint64_t huge_blocks, const std::vector<std::uint64_t>& ratios,
                            const std::vector<Limits>& limits = {}) {
  std::uint64_t huge_bytes = 1;
  for (const std::uint64_t ratio : ratios) huge_bytes = std::lcm(huge_bytes, ratio);
  std::vector<PageSpec> pages;
  for (std::size_t leaf = 0; leaf < ratios.size(); ++leaf) {
    PageSpec page;
    page.name = fmt::format("leaf {}", leaf);
    page.bytes_per_page = huge_bytes / ratios[leaf];
    if (leaf < limits.size()) {
      page.floor = limits[leaf].floor;
      page.ceiling = limits[leaf].ceiling;
    }
    pages.push_back(page);
  }
  return Geometry::by_hand(
      pages, {.huge_bytes = huge_bytes, .huge_blocks = huge_blocks, .ratios = ratios});
}

inline std::vector<BlockId> draw(BlockPool& pool, std::uint32_t leaf, std::size_t blocks,
                                 Fate fate = Fate::cache) {
  std::vector<BlockId> drawn(blocks, null_block);
  if (!pool.allocate_many(LeafId(leaf), drawn, fate)) drawn.clear();
  return drawn;
}

inline bool fits(const BlockPool& pool, const std::vector<std::uint64_t>& blocks) {
  return pool.can_allocate(blocks);
}

/// A transaction of one demand per leaf; empty if it was refused.
inline std::vector<BlockId> draw_all(BlockPool& pool, const std::vector<std::uint64_t>& blocks) {
  std::vector<BlockPool::Demand> demand;
  std::uint64_t total = 0;
  for (std::size_t leaf = 0; leaf < blocks.size(); ++leaf) {
    demand.push_back({.leaf = LeafId(static_cast<std::uint32_t>(leaf)), .blocks = blocks[leaf]});
    total += blocks[leaf];
  }
  std::vector<BlockId> drawn(total, null_block);
  if (!pool.allocate_all(demand, drawn)) drawn.clear();
  return drawn;
}

}  // namespace kvleaf::testing
