// The search behind plan_geometry: which huge block tiles these pages most cheaply, and the least
// budget in which any does. Both are exact: every huge block of the domain is looked at, or shown
// by a lower bound to be no better. Pure functions; may be called from any thread.
//
// A huge block H admits a page of b bytes, aligned to a, with ratio r if the stride H / r is whole,
// a multiple of a and at least b (packed: exactly b); the ratio used is the largest. r = 1 always
// works where a divides H and H >= b, so the domain is all multiples of one unit from the largest
// page up.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace kvleaf {

/// Leaves with the same page size and alignment: every huge block gives them the same ratio.
struct PageShape {
  std::uint64_t bytes = 0;
  std::uint64_t alignment = 0;  // of the stride
  bool packed = false;          // the stride is `bytes`
  std::uint64_t leaves = 0;
  double weight = 0;  // of all these leaves together, of a sum of 1 over the shapes
};

struct TilingProblem {
  std::vector<PageShape> shapes;
  std::uint64_t unit = 0;            // huge blocks are its multiples
  std::uint64_t cap = 0;             // largest huge block
  std::uint64_t null_alignment = 1;  // the null region is a multiple of it

  std::uint64_t largest_page() const noexcept;
  /// The least huge block of the domain; nothing where none is below 2^63 (cap is not asked).
  std::optional<std::uint64_t> least_huge() const noexcept;
};

struct Tiling {
  std::uint64_t huge_bytes = 0;
  std::uint64_t huge_blocks = 0;
  std::uint64_t null_bytes = 0;
  std::vector<std::uint64_t> ratios;  // one per shape
};

/// The least common multiple of what the shapes need their strides to be a multiple of: of packed
/// pages their size, of others their alignment. Nothing from 2^63 on.
std::optional<std::uint64_t> forced_unit(const std::vector<PageShape>& shapes) noexcept;

/// What a search did, in steps of a few nanoseconds each: strides and ratios tried, huge blocks
/// marked with a ratio, read and offered. Does not depend on the machine.
struct SearchWork {
  std::uint64_t steps = 0;
};

/// The cheapest tiling of `budget` bytes that gives every leaf a block; costs that differ by no
/// more than rounding (1e-14, relative above 1) are equal, and the smaller huge block is taken.
std::optional<Tiling> cheapest_tiling(const TilingProblem& problem, std::uint64_t budget,
                                      SearchWork* work = nullptr);

/// The tiling that gives every leaf a block in the fewest bytes: null_bytes + huge_blocks ·
/// huge_bytes is the least budget. Nothing if the domain up to the cap is empty or that passes
/// 2^64.
std::optional<Tiling> smallest_tiling(const TilingProblem& problem, SearchWork* work = nullptr);

}  // namespace kvleaf
