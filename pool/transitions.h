// How blocks and huge blocks change state: the part of the pool that all of its own files share,
// inline because every draw and return goes through it. For the pool's .cpp files only.
#pragma once

#include <algorithm>
#include <optional>
#include <span>

#include "kvleaf/pool/block_pool.h"

namespace kvleaf {

// ---- huge blocks -------------------------------------------------------------------------------

inline std::uint32_t BlockPool::pop_empty() noexcept {
  const std::uint32_t front = first_empty_;
  if (front & fresh) {
    first_empty_ = front + 1;
    return front & ~fresh;
  }
  first_empty_ = static_cast<std::uint32_t>(blocks_of(front)[0].key_low);
  return front;
}

inline void BlockPool::push_empty(std::uint32_t huge) noexcept {
  huge_[huge].owner = HugeBlock::nobody;
  blocks_of(huge)[0].key_low = first_empty_;
  first_empty_ = huge;
}

/// The one place where counts of a huge block change: adds `live` and `cached` (modulo 2^32) and
/// moves it to where its new counts put it. Block records, and the order inside the huge block, are
/// up to date when it is called.
inline void BlockPool::change(PageClass& page_class, std::uint32_t huge, std::uint32_t live,
                              std::uint32_t cached) noexcept {
  HugeBlock& record = huge_[huge];
  const HugeBlock before = record;
  record.live += live;
  record.cached += cached;
  page_class.live.add(static_cast<std::uint64_t>(static_cast<std::int32_t>(live)));
  page_class.cached.add(static_cast<std::uint64_t>(static_cast<std::int32_t>(cached)));

  const HugeState old_state = before.state();
  const HugeState new_state = record.state();
  if (page_class.ratio > 1) {
    const std::uint32_t old_clean =
        old_state == HugeState::empty ? 0 : clean_in(page_class, before);
    const std::uint32_t new_clean =
        new_state == HugeState::empty ? 0 : clean_in(page_class, record);
    const std::uint32_t old_kind = old_state == HugeState::idle ? idle_kind : record.fate;
    const std::uint32_t new_kind = new_state == HugeState::idle ? idle_kind : record.fate;
    if (old_clean != new_clean || old_kind != new_kind) {
      if (old_clean != 0) page_class.clean[old_kind].erase(links_.data(), huge, old_clean);
      if (new_clean != 0) page_class.clean[new_kind].insert(links_.data(), huge, new_clean);
    }
  }
  if (old_state != new_state) {
    change_state(page_class, huge, old_state, new_state);
  } else if (record.cached > before.cached) {
    file_huge(page_class, huge);
  } else if (record.cached < before.cached && new_state == HugeState::idle) {
    file_worth(page_class, huge);
  }
}

inline void BlockPool::change_state(PageClass& page_class, std::uint32_t huge, HugeState before,
                                    HugeState after) noexcept {
  switch (before) {
    case HugeState::empty: --empty_; break;
    case HugeState::claimed: --claimed_, --page_class.claimed; break;
    case HugeState::idle: --idle_, --page_class.idle; break;
  }
  switch (after) {
    case HugeState::empty:
      ++empty_;
      push_empty(huge);
      return;
    case HugeState::claimed: ++claimed_, ++page_class.claimed; break;
    case HugeState::idle: ++idle_, ++page_class.idle; break;
  }
  if (huge_[huge].cached != 0) file_huge(page_class, huge);
}

// ---- orders of eviction ------------------------------------------------------------------------
// Bounds fall at once and rise when the search for a victim meets them: see lower_bound_tree.h.

/// At most the rank of the huge block's least valuable cached block.
inline Rank BlockPool::bound_of(std::uint32_t huge) const noexcept {
  if (!bounds_.empty()) return bounds_[huge];
  Rank least;
  const Block* blocks = blocks_of(huge);
  for (std::uint32_t index = 0; index < max_ratio_; ++index) {
    if (blocks[index].cached()) least = std::min(least, Rank::of(blocks[index].value));
  }
  return least;
}

/// The block became cached, or is and its value fell.
inline void BlockPool::file_block(Place place, Value value) noexcept {
  if (!bounds_.empty()) block_order(place.huge).lower(place.index, Rank::of(value));
}

/// The huge block has something cached, and its state is new, or the bound of its blocks fell, or
/// one was added.
inline void BlockPool::file_huge(PageClass& page_class, std::uint32_t huge) noexcept {
  const Rank bound = bound_of(huge);
  if (huge_[huge].live != 0) {
    LowerBoundTree<Rank>(huge_shape_, page_class.claimed_order).lower(huge, bound);
    return;
  }
  LowerBoundTree<Rank>(huge_shape_, page_class.idle_order).lower(huge, bound);
  file_worth(page_class, huge);
}

/// The huge block is idle, and newly so, or its worth fell. A worth in doubt is filed under a bound
/// of it: no block is worth less than the least.
inline void BlockPool::file_worth(PageClass& page_class, std::uint32_t huge) noexcept {
  if (!page_class.worth_order.used) return;
  const HugeBlock& record = huge_[huge];
  const bool sure = !worths_.empty() && !record.worth_unsure;
  const Worth worth = sure ? Worth{worths_[huge], record.cached} : Worth{bound_of(huge), 0};
  LowerBoundTree<Worth>(huge_shape_, page_class.worth_order).lower(huge, worth);
}

/// A committed block of `huge` has this value now.
inline void BlockPool::raise_worth(std::uint32_t huge, Value value) noexcept {
  if (worths_.empty()) return;
  const Rank rank = Rank::of(value);
  if (rank < worths_[huge]) return;
  worths_[huge] = rank;
  huge_[huge].worth_unsure = false;  // nothing was worth more than the bound
}

/// A committed block of `huge` had the value `lost` and has it no longer.
inline void BlockPool::doubt_worth(std::uint32_t huge, Value lost) noexcept {
  if (!worths_.empty() && !(Rank::of(lost) < worths_[huge])) huge_[huge].worth_unsure = true;
}

// ---- blocks ------------------------------------------------------------------------------------

inline void BlockPool::become_clean(PageClass& page_class, Place place) noexcept {
  if (page_class.ratio == 1) return;
  CleanLink& link = links_[place.huge];
  block_at(place).key_low = link.first_clean;
  link.first_clean = place.index;
}

/// A block whose last reference was just returned.
inline void BlockPool::release(LeafState& leaf, Place place) noexcept {
  PageClass& page_class = classes_[leaf.page_class];
  Block& block = block_at(place);
  --leaf.live;
  if (block.is(Block::committed)) {
    ++leaf.cached;
    file_block(place, block.value);
    change(page_class, place.huge, -1u, 1);
  } else {
    become_clean(page_class, place);
    change(page_class, place.huge, -1u, 0);
  }
}

/// Makes a committed block unfindable; live or cached, it is to be counted by the caller.
inline void BlockPool::forget(Place place) noexcept {
  Block& record = block_at(place);
  if (indexed_) index_.erase(blocks_.data(), record_at(place));
  record.flags = 0;
  doubt_worth(place.huge, record.value);
}

/// Makes a committed block unfindable; a cached one becomes clean.
inline void BlockPool::drop_commit(LeafState& leaf, Place place) noexcept {
  forget(place);
  if (block_at(place).live()) return;
  PageClass& page_class = classes_[leaf.page_class];
  --leaf.cached;
  become_clean(page_class, place);
  change(page_class, place.huge, 0, -1u);
}

/// An empty huge block for this class. It counts as empty until a block is taken from it.
inline std::uint32_t BlockPool::claim(PageClass& page_class, Fate fate) noexcept {
  const std::uint32_t huge = pop_empty();
  HugeBlock& record = huge_[huge];
  record.owner = static_cast<std::uint16_t>(&page_class - classes_.data());
  record.fate = static_cast<std::uint8_t>(fate);
  record.worth_unsure = false;
  if (!worths_.empty()) worths_[huge] = Rank{0};
  if (page_class.ratio > 1) links_[huge].first_clean = fresh;
  return huge;
}

/// As many clean blocks of `huge` as it has and `out` takes; at least one.
inline std::uint32_t BlockPool::take_clean(LeafId leaf, std::uint32_t huge,
                                           std::span<BlockId> out) noexcept {
  LeafState& state = leaves_[leaf.value()];
  PageClass& page_class = classes_[state.page_class];
  Block* blocks = blocks_of(huge);
  const auto take = [&](std::uint32_t index) {
    blocks[index].references = 1;
    blocks[index].leaf = static_cast<std::uint16_t>(leaf.value());
    return id_at(state, {huge, index});
  };
  std::uint32_t taken = 1;
  if (page_class.ratio == 1) {
    out[0] = take(0);
  } else {
    const std::uint32_t clean = clean_in(page_class, huge_[huge]);
    taken = out.size() < clean ? static_cast<std::uint32_t>(out.size()) : clean;
    std::uint32_t next = links_[huge].first_clean;
    for (std::uint32_t index = 0; index < taken; ++index) {
      const std::uint32_t block = next & ~fresh;
      next = (next & fresh) != 0 ? next + 1 : static_cast<std::uint32_t>(blocks[block].key_low);
      out[index] = take(block);
    }
    links_[huge].first_clean = next;
  }
  state.live.add(taken);
  change(page_class, huge, taken, 0);
  return taken;
}

}  // namespace kvleaf
