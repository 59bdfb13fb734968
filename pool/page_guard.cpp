#include "kvleaf/pool/page_guard.h"

#include <fmt/format.h>

#include <algorithm>

#include "kvleaf/leaf/errors.h"

namespace kvleaf {

PageGuard::PageGuard(const Geometry& geometry, std::span<std::byte> arena)
    : arena_(arena),
      null_bytes_(geometry.null_bytes()),
      huge_bytes_(geometry.huge_bytes()),
      known_(geometry.huge_blocks(), true) {
  if (arena.size() < geometry.arena_bytes()) {
    throw InvalidArgument(fmt::format("a guard over {} bytes of an arena of {}", arena.size(),
                                      geometry.arena_bytes()));
  }
  std::ranges::fill(arena_.subspan(null_bytes_, huge_bytes_ * geometry.huge_blocks()), pattern);
}

void PageGuard::fill(std::uint32_t huge, std::uint32_t index, std::uint32_t ratio) noexcept {
  std::ranges::fill(page(huge, index, ratio), pattern);
}

void PageGuard::fill(std::uint32_t huge) noexcept {
  if (known_[huge]) return;
  fill(huge, 0, 1);
  known_[huge] = true;
}

std::optional<std::uint64_t> PageGuard::written(std::uint32_t huge, std::uint32_t index,
                                                std::uint32_t ratio) const noexcept {
  if (!known_[huge]) return {};
  const std::span<std::byte> bytes = page(huge, index, ratio);
  const auto other = std::ranges::find_if(bytes, [](std::byte byte) { return byte != pattern; });
  if (other == bytes.end()) return {};
  return static_cast<std::uint64_t>(other - bytes.begin());
}

}  // namespace kvleaf
