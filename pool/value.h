// Values order eviction, least first; a huge block's worth is that of its most valuable cached
// block.
#pragma once

#include <cstdint>
#include <limits>

namespace kvleaf {

/// Order of eviction, least first. The owner packs into it whatever it values pages by.
using Value = std::uint64_t;

/// A value's place in the order of eviction. A default-constructed one is "nothing here", behind
/// all others; so the two greatest values share one place.
struct Rank {
  static constexpr Value nothing = std::numeric_limits<Value>::max();
  Value value = nothing;

  static constexpr Rank of(Value value) noexcept {
    return {value - static_cast<Value>(value == nothing)};
  }
  constexpr bool exists() const noexcept { return value != nothing; }
  // Written out, and without branches where two are chosen from: a search compares eight at a time,
  // and which is less is a surprise each time.
  friend constexpr bool operator==(Rank a, Rank b) noexcept { return a.value == b.value; }
  friend constexpr bool operator<(Rank a, Rank b) noexcept { return a.value < b.value; }
  friend constexpr bool operator<=(Rank a, Rank b) noexcept { return a.value <= b.value; }
  friend constexpr bool operator>=(Rank a, Rank b) noexcept { return a.value >= b.value; }
};

/// What an idle huge block is worth. Among equals the one with fewest cached blocks goes first.
struct Worth {
  Rank best;
  std::uint32_t cached = std::numeric_limits<std::uint32_t>::max();

  constexpr bool exists() const noexcept { return best.exists(); }
  friend constexpr bool operator==(const Worth&, const Worth&) = default;
  friend constexpr bool operator<(const Worth& a, const Worth& b) noexcept {
    return (int{a.best < b.best} | (int{a.best == b.best} & int{a.cached < b.cached})) != 0;
  }
};

}  // namespace kvleaf
