// Ids are types: a block of one leaf cannot be passed where a huge block or a leaf is meant.
// Zero is a valid number in each of them; "unset" is std::optional<Id>.
#pragma once

#include <compare>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace kvleaf {

template <class Tag, class Value = std::uint32_t>
class Id {
 public:
  using value_type = Value;
  explicit constexpr Id(Value value) noexcept : value_(value) {}
  constexpr Value value() const noexcept { return value_; }
  constexpr auto operator<=>(const Id&) const = default;

 private:
  Value value_;
};

using BlockId = Id<struct BlockTag>;  // index of a page in one leaf's view; 0 is the null block
using LeafId = Id<struct LeafTag>;    // index of a leaf in its cache, in the order given
using HugeBlockId = Id<struct HugeBlockTag>;  // index of a huge block behind the null region
using PageClassId = Id<struct PageClassTag>;  // leaves with the same ratio
using RequestId = Id<struct RequestTag, std::uint64_t>;  // chosen by the caller
using StepId = Id<struct StepTag, std::uint64_t>;        // number of a forward, from 1

static_assert(!std::convertible_to<BlockId, HugeBlockId>);
static_assert(sizeof(BlockId) == 4, "rows of BlockId are copied into int32 tables");

/// Block 0 of every leaf: readable zeros, never allocated, never written by the library.
inline constexpr BlockId null_block{0};

/// A token's id. Only compared, so any 32-bit value is legal.
using Token = std::int32_t;

}  // namespace kvleaf

template <class Tag, class Value>
struct std::hash<kvleaf::Id<Tag, Value>> {
  std::size_t operator()(kvleaf::Id<Tag, Value> id) const noexcept {
    return std::hash<Value>{}(id.value());
  }
};
