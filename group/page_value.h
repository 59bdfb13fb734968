// PageValue: what a page is worth to eviction, most significant first: reachable, used by a kept
// boundary, priority, proven (its prefix was asked for at least twice), recency, and depth, deeper
// pages being worth less. Source: design document, "Eviction".
#pragma once

#include <algorithm>
#include <cstdint>

#include "kvleaf/group/request_options.h"
#include "kvleaf/pool/value.h"

namespace kvleaf {

/// What the pages of one request share of their value now; the rest is each page's own.
class PageValue {
 public:
  /// `clock`: recency, later is worth more. `priority`: -128 … 127; with EvictionOrder::lru only
  /// recency and depth count.
  PageValue(EvictionOrder order, std::uint64_t clock, std::int32_t priority) noexcept
      : shared_(reachable_bit | recent(clock)) {
    if (order == EvictionOrder::lru) return;
    shared_ |= Value{static_cast<std::uint32_t>(priority + 128)} << priority_shift;
    kept_ = kept_bit;
    proven_ = proven_bit;
  }
  Value at(std::uint32_t slot, bool kept, bool proven) const noexcept {
    const Value shallow = deepest - std::min<Value>(slot, deepest);
    return shared_ | (kept ? kept_ : 0) | (proven ? proven_ : 0) | shallow;
  }

  static bool kept(Value value) noexcept { return (value & kept_bit) != 0; }
  static bool proven(Value value) noexcept { return (value & proven_bit) != 0; }
  /// Proven no more, and as recent as `clock`.
  static Value unproven(Value value, std::uint64_t clock) noexcept {
    return (value & ~(proven_bit | recent(latest))) | recent(clock);
  }
  /// Worth less than all that can be reached; nothing else of it changes.
  static Value unreachable(Value value) noexcept { return value & ~reachable_bit; }

 private:
  static constexpr std::uint32_t depth_bits = 16;
  static constexpr std::uint32_t recency_bits = 37;
  static constexpr Value deepest = (Value{1} << depth_bits) - 1;
  static constexpr Value latest = (Value{1} << recency_bits) - 1;
  static constexpr Value proven_bit = Value{1} << (depth_bits + recency_bits);
  static constexpr std::uint32_t priority_shift = depth_bits + recency_bits + 1;
  static constexpr Value kept_bit = Value{1} << (priority_shift + 8);
  static constexpr Value reachable_bit = Value{1} << (priority_shift + 9);
  static_assert(priority_shift + 9 == 63, "the parts fill a value");

  static constexpr Value recent(std::uint64_t clock) noexcept {
    return std::min<Value>(clock, latest) << depth_bits;
  }

  Value shared_;
  Value kept_ = 0;
  Value proven_ = 0;
};

}  // namespace kvleaf
