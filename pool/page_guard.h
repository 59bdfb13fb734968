// PageGuard: finds writers to pages that were returned. It fills what becomes clean with a pattern,
// and what is drawn must still hold it. For debugging, on a host's arena: each page costs its bytes
// once when it is returned and once when it is drawn.
//
// The pattern is a finite number in every format (bf16, f16, f32, fp8): a kernel that multiplies
// what it masks by zero still gets zero.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kvleaf/pool/geometry.h"

namespace kvleaf {

class PageGuard {
 public:
  static constexpr std::byte pattern{0xa5};

  PageGuard() = default;  // guards nothing
  /// Fills all but the null region. Throws InvalidArgument for fewer bytes than the geometry's
  /// arena.
  PageGuard(const Geometry& geometry, std::span<std::byte> arena);

  bool on() const noexcept { return !arena_.empty(); }
  /// Block `index` of a huge block that holds `ratio` of them became clean.
  void fill(std::uint32_t huge, std::uint32_t index, std::uint32_t ratio) noexcept;
  /// The huge block's bytes are the owner's to map: nothing is known of them until it is filled as
  /// a whole.
  void lose(std::uint32_t huge) noexcept { known_[huge] = false; }
  void fill(std::uint32_t huge) noexcept;
  /// The first byte of a drawn page that is not the pattern.
  std::optional<std::uint64_t> written(std::uint32_t huge, std::uint32_t index,
                                       std::uint32_t ratio) const noexcept;
  std::byte at(std::uint32_t huge, std::uint32_t index, std::uint32_t ratio,
               std::uint64_t byte) const noexcept {
    return page(huge, index, ratio)[byte];
  }

 private:
  std::span<std::byte> page(std::uint32_t huge, std::uint32_t index,
                            std::uint32_t ratio) const noexcept {
    const std::uint64_t stride = huge_bytes_ / ratio;
    return arena_.subspan(null_bytes_ + huge * huge_bytes_ + index * stride, stride);
  }

  std::span<std::byte> arena_;
  std::uint64_t null_bytes_ = 0;
  std::uint64_t huge_bytes_ = 0;
  std::vector<bool> known_;  // [huge block]: what is clean in it holds the pattern
};

}  // namespace kvleaf
