// FullestFirst: the huge blocks of one page class and one kind that have clean blocks, the fullest
// in front: an intrusive list per number of clean blocks, and the set of numbers whose list has
// members.
#pragma once

#include <cstdint>
#include <vector>

#include "kvleaf/pool/first_set.h"

namespace kvleaf {

/// Of a huge block whose class has a ratio above 1.
struct CleanLink {
  std::uint32_t first_clean;  // block of this huge block to be drawn next; see `fresh`
  std::uint32_t previous;     // huge block with as many clean blocks, while it has any and is owned
  std::uint32_t next;
};

class FullestFirst {
 public:
  static constexpr std::uint32_t none = FirstSet::none;

  FullestFirst() = default;
  explicit FullestFirst(std::uint32_t ratio) : front_(ratio, none), occupied_(ratio) {}

  void insert(CleanLink* links, std::uint32_t huge, std::uint32_t clean) noexcept {
    const std::uint32_t next = front_[clean];
    links[huge].previous = none;
    links[huge].next = next;
    front_[clean] = huge;
    if (next == none) {
      occupied_.insert(clean);
    } else {
      links[next].previous = huge;
    }
  }
  void erase(CleanLink* links, std::uint32_t huge, std::uint32_t clean) noexcept {
    const std::uint32_t previous = links[huge].previous;
    const std::uint32_t next = links[huge].next;
    if (next != none) links[next].previous = previous;
    if (previous != none) {
      links[previous].next = next;
    } else {
      front_[clean] = next;
      if (next == none) occupied_.erase(clean);
    }
  }
  /// The huge block with the fewest clean blocks, or none.
  std::uint32_t fullest() const noexcept {
    const std::uint32_t clean = occupied_.first();
    return clean == none ? none : front_[clean];
  }

  // For those who look at more than the fullest, by number of clean blocks 1 … ratio-1:
  const FirstSet& occupied() const noexcept { return occupied_; }
  std::uint32_t front(std::uint32_t clean) const noexcept { return front_[clean]; }
  std::uint64_t bytes() const noexcept { return front_.size() * 4 + occupied_.bytes(); }

 private:
  std::vector<std::uint32_t> front_;  // [clean], none where no huge block has so many
  FirstSet occupied_;                 // clean is in it exactly when front_[clean] is a huge block
};

}  // namespace kvleaf
