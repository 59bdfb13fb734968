// The records a pool keeps: one per block, its key apart, and one per huge block. The views of all
// leaves alias the same bytes, and so do their records: huge block h has `largest ratio` block
// records, of which the page class that owns it uses the first `ratio`.
#pragma once

#include <bit>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvleaf/pool/value.h"

namespace kvleaf {

/// One block: live while `references` is not 0; else cached if committed, else clean. All zeros is
/// clean, so a fresh array needs no writing.
struct alignas(16) Block {
  enum Flag : std::uint16_t {
    committed = 1,  // value and key mean something
    timed = 2,      // the value is the pool's own clock: a touch without a value renews it
  };

  Value value;  // while committed; while clean and once used: the next clean block
  std::uint32_t references;
  std::uint16_t leaf;  // while live or cached
  std::uint16_t flags;

  bool is(Flag flag) const noexcept { return (flags & flag) != 0; }
  bool live() const noexcept { return references != 0; }
  bool cached() const noexcept { return (references == 0) & is(committed); }  // no branch: searched
  bool clean() const noexcept { return references == 0 && !is(committed); }
  std::uint32_t next_clean() const noexcept { return static_cast<std::uint32_t>(value); }
  /// Live with one reference, of this leaf, and not committed: one comparison, for loops.
  bool is_only(std::uint16_t of_leaf) const noexcept {
    std::uint64_t state;
    std::memcpy(&state, reinterpret_cast<const char*>(this) + offsetof(Block, references),
                sizeof state);
    return state == drawn_for(of_leaf);
  }
  /// Becomes that, in one store.
  void draw(std::uint16_t for_leaf) noexcept {
    const std::uint64_t state = drawn_for(for_leaf);
    std::memcpy(reinterpret_cast<char*>(this) + offsetof(Block, references), &state, sizeof state);
  }

 private:
  /// references 1, leaf and flags 0 as one word: spelled out, since a compiler that is left to put
  /// them together does so in memory.
  static constexpr std::uint64_t drawn_for(std::uint16_t leaf) noexcept {
    return std::endian::native == std::endian::little ? 1 | std::uint64_t{leaf} << 32
                                                      : std::uint64_t{1} << 32 | leaf << 16;
  }
};
static_assert(sizeof(Block) == 16, "four to a cache line, and none across two");
static_assert(offsetof(Block, references) == 8 && offsetof(Block, flags) == 14);

/// Opaque to the pool: what the owner knows a committed block by. Kept beside the block records:
/// only commits and evictions read it.
struct PageKey {
  std::uint64_t high = 0;
  std::uint64_t low = 0;
  auto operator<=>(const PageKey&) const = default;
};

/// A list of unused numbers that needs no initial filling: `fresh` and a number means "this one and
/// all above it", whose own links were never written.
inline constexpr std::uint32_t fresh = 0x80000000u;

enum class HugeState : std::uint8_t { empty, claimed, idle };

/// One huge block. Its state follows from two counts; `live + cached ≤ ratio`, the rest is clean.
struct HugeBlock {
  static constexpr std::uint16_t nobody = 0xffff;  // empty
  static constexpr std::uint16_t absent = 0xfffe;  // taken out of service by resize

  std::uint32_t live;
  std::uint32_t cached;
  std::uint16_t owner;             // page class, nobody, or absent; means something while not empty
  std::uint16_t fate : 1;          // of the block that claimed it
  std::uint16_t worth_unsure : 1;  // the most valuable commit was lowered or dropped: recount
  std::uint16_t listed : 14;       // number of the FullestFirst list it is in; 0: in none

  HugeState state() const noexcept {
    if (live != 0) return HugeState::claimed;
    return cached != 0 ? HugeState::idle : HugeState::empty;
  }
};
static_assert(sizeof(HugeBlock) == 12);

}  // namespace kvleaf
