// Sums of demands that stop at 2^64 - 1 instead of wrapping: a demand that large fits nowhere.
#pragma once

#include <cstdint>

namespace kvleaf {

constexpr std::uint64_t saturating_add(std::uint64_t a, std::uint64_t b) noexcept {
  const std::uint64_t sum = a + b;
  return sum < a ? ~std::uint64_t{0} : sum;
}

}  // namespace kvleaf
