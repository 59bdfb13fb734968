// Products of sizes that callers give: 2^64 - 1 where they overflow, which no page can have.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>

namespace kvleaf {

inline constexpr std::uint64_t saturated = std::numeric_limits<std::uint64_t>::max();

constexpr std::uint64_t saturated_product(std::initializer_list<std::uint64_t> factors) noexcept {
  std::uint64_t product = 1;
  for (const std::uint64_t factor : factors) {
    if (factor == 0) return 0;
  }
  for (const std::uint64_t factor : factors) {
    if (product > saturated / factor) return saturated;
    product *= factor;
  }
  return product;
}

constexpr std::uint64_t saturated_sum(std::uint64_t a, std::uint64_t b) noexcept {
  return a > saturated - b ? saturated : a + b;
}

}  // namespace kvleaf
