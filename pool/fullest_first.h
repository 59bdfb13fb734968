// FullestFirst: the huge blocks of one page class and one kind that have clean blocks, and which of
// them is the fullest: a list for each number of clean blocks, and the set of lists with members.
//
// Nothing moves when a listed huge block gains a clean block: the number of its list is a lower
// bound that is corrected when the search meets it. And two stay outside the lists: the one last
// drawn from, as `current`, until it is used up or a fuller one appears; and one that just got its
// first clean block, as `spare`, since nothing is fuller. So most draws and returns touch no list.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "kvleaf/pool/first_set.h"
#include "kvleaf/pool/huge_block.h"

namespace kvleaf {

/// Of a huge block whose class has a ratio above 1.
struct CleanLink {
  std::uint32_t first_clean;  // block of this huge block to be drawn next; see `fresh`
  std::uint32_t previous;     // in its list, while listed and not its first
  std::uint32_t next;
};

class FullestFirst {
 public:
  static constexpr std::uint32_t none = FirstSet::none;
  /// Huge blocks with more clean blocks than this are all as good: fit for HugeBlock::listed.
  static constexpr std::uint32_t most_listed = (1u << 14) - 1;

  FullestFirst() = default;
  /// A huge block has 1 … ratio-1 clean blocks while it is in here. The records are the pool's.
  FullestFirst(std::uint32_t ratio, HugeBlock* huge, CleanLink* links)
      : ratio_(ratio),
        huge_(huge),
        links_(links),
        front_(std::min(ratio, most_listed + 1), none),
        occupied_(std::min(ratio, most_listed + 1)) {}

  /// Its counts are up to date, and it has a clean block.
  void insert(std::uint32_t huge) noexcept { push(huge, list_of(huge)); }
  /// Takes it out if it is in here.
  void remove(std::uint32_t huge) noexcept {
    if (huge == current_) current_ = none;
    if (huge == spare_) spare_ = none;
    if (huge_[huge].listed != 0) unlink(huge);
  }
  /// It had no clean block, and has one now.
  void insert_first(std::uint32_t huge) noexcept {
    if (spare_ == none) {
      spare_ = huge;
    } else {
      push(huge, 1);
    }
  }
  bool empty() const noexcept { return current_ == none && spare_ == none && occupied_.empty(); }
  /// The one with the fewest clean blocks, or none.
  std::uint32_t fullest() noexcept {
    if (spare_ != none) {
      if (clean(spare_) == 1) return spare_;
      insert(std::exchange(spare_, none));
    }
    return fullest_but_spare();
  }
  /// Clean blocks were drawn from the fullest, or from a huge block that is new in here. What is
  /// left of it is the next to be drawn from.
  void drew_from(std::uint32_t huge) noexcept {
    if (clean(huge) == 0) return used_up(huge);
    if (huge == spare_ || huge == current_) return;
    if (huge_[huge].listed != 0) unlink(huge);
    if (current_ != none) insert(current_);
    current_ = huge;
  }
  /// The same, and nothing is left of it.
  void used_up(std::uint32_t huge) noexcept {
    if (huge_[huge].listed != 0) return unlink(huge);
    if (huge == current_) current_ = none;
    if (huge == spare_) spare_ = none;
  }
  /// Clean blocks were drawn from any in here.
  void drew_from_hinted(std::uint32_t huge) noexcept {
    if (huge == current_ || clean(huge) == 0) return drew_from(huge);
    if (list_of(huge) >= huge_[huge].listed) return;
    unlink(huge);
    insert(huge);
  }

  // For those who look at all of them: the current and the spare one, and the members of lists 1 …
  // lists()-1.
  std::uint32_t current() const noexcept { return current_; }
  std::uint32_t spare() const noexcept { return spare_; }
  std::uint32_t lists() const noexcept { return static_cast<std::uint32_t>(front_.size()); }
  std::uint32_t front(std::uint32_t list) const noexcept { return front_[list]; }
  const FirstSet& occupied() const noexcept { return occupied_; }
  std::uint64_t bytes() const noexcept { return front_.size() * 4 + occupied_.bytes(); }

 private:
  std::uint32_t fullest_but_spare() noexcept {
    for (;;) {
      const std::uint32_t list = occupied_.first();
      if (current_ != none && list_of(current_) <= list) return current_;
      if (list == none) return none;
      const std::uint32_t huge = front_[list];
      if (list_of(huge) == list) return huge;
      unlink(huge);
      insert(huge);
    }
  }
  std::uint32_t clean(std::uint32_t huge) const noexcept {
    return ratio_ - huge_[huge].live - huge_[huge].cached;
  }
  std::uint32_t list_of(std::uint32_t huge) const noexcept {
    return std::min(clean(huge), most_listed);
  }
  void push(std::uint32_t huge, std::uint32_t list) noexcept {
    const std::uint32_t next = front_[list];
    links_[huge].next = next;
    huge_[huge].listed = static_cast<std::uint16_t>(list) & most_listed;
    front_[list] = huge;
    if (next != none) {
      links_[next].previous = huge;
    } else {
      occupied_.insert(list);
    }
  }
  void unlink(std::uint32_t huge) noexcept {
    const std::uint32_t next = links_[huge].next;
    const std::uint32_t list = huge_[huge].listed;
    huge_[huge].listed = 0;
    if (front_[list] != huge) {
      links_[links_[huge].previous].next = next;
      if (next != none) links_[next].previous = links_[huge].previous;
      return;
    }
    front_[list] = next;
    if (next == none) occupied_.erase(list);
  }

  std::uint32_t current_ = none;  // has clean blocks, and is in no list
  std::uint32_t spare_ = none;    // the same, and is another one
  std::uint32_t ratio_ = 1;
  HugeBlock* huge_ = nullptr;
  CleanLink* links_ = nullptr;
  std::vector<std::uint32_t> front_;  // [list], none where it has no members
  FirstSet occupied_;                 // a number is in it exactly when that list has members
};

}  // namespace kvleaf
