// RatioDivider: n / ratio by one multiplication, for n < 2^31 (block ids). The quotient is exact:
// with k = 31 + ⌈log2 ratio⌉ and m = ⌈2^k / ratio⌉, m · ratio exceeds 2^k by less than ratio ≤
// 2^(k-31), which is the bound under which ⌊n·m / 2^k⌋ = ⌊n / ratio⌋; m ≤ 2^32, so n·m fits 64
// bits. Source: Granlund and Montgomery, "Division by Invariant Integers using Multiplication",
// 1994.
#pragma once

#include <bit>
#include <cstdint>

namespace kvleaf {

class RatioDivider {
 public:
  RatioDivider() = default;
  /// 1 ≤ ratio < 2^31.
  explicit constexpr RatioDivider(std::uint32_t ratio) noexcept
      : ratio_(ratio), shift_(31 + static_cast<std::uint32_t>(std::bit_width(ratio - 1u))) {
    const std::uint64_t power = std::uint64_t{1} << shift_;
    multiplier_ = power / ratio + (power % ratio != 0 ? 1 : 0);
  }

  constexpr std::uint32_t ratio() const noexcept { return ratio_; }
  constexpr std::uint32_t quotient(std::uint32_t n) const noexcept {
    return static_cast<std::uint32_t>(n * multiplier_ >> shift_);
  }
  /// ⌈n / ratio⌉ for any n.
  constexpr std::uint64_t round_up(std::uint64_t n) const noexcept {
    if (n - 1 < std::uint64_t{1} << 31) return quotient(static_cast<std::uint32_t>(n - 1)) + 1u;
    return n == 0 ? 0 : (n - 1) / ratio_ + 1;
  }

 private:
  std::uint64_t multiplier_ = std::uint64_t{1} << 31;
  std::uint32_t ratio_ = 1;
  std::uint32_t shift_ = 31;
};

}  // namespace kvleaf
