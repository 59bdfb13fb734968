// How blocks and huge blocks change state: the part of the pool that all of its own files share,
// inline because every draw and return goes through it. For the pool's .cpp files only.
#pragma once

#include <algorithm>
#include <span>

#include "kvleaf/pool/block_pool.h"

namespace kvleaf {

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
  const std::uint32_t kind = kind_of(huge_[huge]);
  LowerBoundTree<Rank>(huge_shape_, page_class.order[kind]).lower(huge, bound_of(huge));
  if (kind == idle_kind) file_worth(page_class, huge);
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

// ---- huge blocks -------------------------------------------------------------------------------

inline std::uint32_t BlockPool::pop_empty() noexcept {
  const std::uint32_t front = first_empty_;
  --empty_;
  if (front & fresh) {
    first_empty_ = front + 1;
    return front & ~fresh;
  }
  first_empty_ = blocks_of(front)[0].next_clean();
  return front;
}

inline void BlockPool::push_empty(std::uint32_t huge) noexcept {
  huge_[huge].owner = HugeBlock::nobody;
  blocks_of(huge)[0].value = first_empty_;
  first_empty_ = huge;
  ++empty_;
}

/// Its last live or cached block became clean.
inline void BlockPool::became_empty(std::uint32_t huge) noexcept {
  if (guard_.on()) [[unlikely]]
    guard_.fill(huge);
  push_empty(huge);
}

/// An empty huge block becomes this class's. It is claimed; blocks are to be drawn from it at once.
inline std::uint32_t BlockPool::claim(PageClass& page_class, Fate fate) noexcept {
  const std::uint32_t huge = pop_empty();
  HugeBlock& record = huge_[huge];
  record.owner = page_class.number;
  record.fate = static_cast<std::uint16_t>(fate) & 1;
  record.worth_unsure = 0;
  if (!worths_.empty()) worths_[huge] = Rank{0};
  if (page_class.ratio > 1) links_[huge].first_clean = fresh;
  ++page_class.claimed;
  return huge;
}

/// A claimed huge block lost its last live block; its counts are up to date.
inline void BlockPool::leave_claimed(PageClass& page_class, std::uint32_t huge) noexcept {
  HugeBlock& record = huge_[huge];
  --page_class.claimed;
  if (page_class.ratio > 1) page_class.clean[record.fate].remove(huge);
  if (record.cached == 0) return became_empty(huge);
  ++idle_;
  ++page_class.idle;
  if (clean_in(page_class, record) != 0) page_class.clean[idle_kind].insert(huge);
  file_huge(page_class, huge);
}

/// An idle huge block is to have live blocks. Then list_claimed, once its counts are up to date.
inline void BlockPool::leave_idle(PageClass& page_class, std::uint32_t huge) noexcept {
  --idle_;
  --page_class.idle;
  if (page_class.ratio > 1) page_class.clean[idle_kind].remove(huge);
}

/// A huge block that became claimed, its counts up to date.
inline void BlockPool::list_claimed(PageClass& page_class, std::uint32_t huge) noexcept {
  const HugeBlock& record = huge_[huge];
  ++page_class.claimed;
  if (clean_in(page_class, record) != 0) page_class.clean[record.fate].insert(huge);
  if (record.cached != 0) file_huge(page_class, huge);
}

// ---- blocks ------------------------------------------------------------------------------------

/// A block is nobody's any more: it is to be drawn next from its huge block.
inline void BlockPool::push_clean(PageClass& page_class, Place place) noexcept {
  if (page_class.ratio == 1) return;
  CleanLink& link = links_[place.huge];
  block_at(place).value = link.first_clean;
  link.first_clean = place.index;
}

/// A live block became clean; its record says so already.
inline void BlockPool::live_to_clean(PageClass& page_class, Place place) noexcept {
  HugeBlock& huge = huge_[place.huge];
  if (guard_.on()) [[unlikely]]
    guard_.fill(place.huge, place.index, page_class.ratio);
  if (page_class.ratio == 1) {  // it has no lists
    huge.live = 0;
    --page_class.claimed;
    return became_empty(place.huge);
  }
  push_clean(page_class, place);
  if (--huge.live == 0) return leave_claimed(page_class, place.huge);
  if (clean_in(page_class, huge) == 1) page_class.clean[huge.fate].insert_first(place.huge);
}

/// A cached block became clean; its record says so already.
inline void BlockPool::cached_to_clean(PageClass& page_class, Place place) noexcept {
  HugeBlock& huge = huge_[place.huge];
  if (guard_.on()) [[unlikely]]
    guard_.fill(place.huge, place.index, page_class.ratio);
  push_clean(page_class, place);
  --huge.cached;
  if (huge.live == 0 && huge.cached == 0) {
    leave_idle(page_class, place.huge);
    return became_empty(place.huge);
  }
  if (clean_in(page_class, huge) == 1) page_class.clean[kind_of(huge)].insert_first(place.huge);
  if (huge.live == 0) file_worth(page_class, place.huge);
}

/// A block whose last reference was just returned.
inline void BlockPool::release(LeafState& leaf, Place place) noexcept {
  PageClass& page_class = *leaf.page_class;
  const Block& block = block_at(place);
  --leaf.live;
  if (!block.is(Block::committed)) return live_to_clean(page_class, place);
  HugeBlock& huge = huge_[place.huge];
  ++leaf.cached;
  --huge.live;
  ++huge.cached;
  file_block(place, block.value);
  if (huge.live == 0) return leave_claimed(page_class, place.huge);
  file_huge(page_class, place.huge);
}

/// `count` cached blocks of one huge block became live; the leaf's counts are the caller's
/// business.
inline void BlockPool::cached_to_live(PageClass& page_class, std::uint32_t huge,
                                      std::uint32_t count) noexcept {
  HugeBlock& record = huge_[huge];
  const bool was_idle = record.live == 0;
  if (was_idle) leave_idle(page_class, huge);
  record.live += count;
  record.cached -= count;
  if (was_idle) list_claimed(page_class, huge);
}

/// Makes a committed block unfindable; live or cached, it is to be counted by the caller.
inline void BlockPool::forget(Place place) noexcept {
  Block& record = block_at(place);
  if (indexed_) index_.erase(blocks_.data(), keys_.data(), record_at(place));
  record.flags = 0;
  doubt_worth(place.huge, record.value);
}

/// Makes a committed block unfindable; a cached one becomes clean.
inline void BlockPool::drop_commit(LeafState& leaf, Place place) noexcept {
  forget(place);
  if (block_at(place).live()) return;
  --leaf.cached;
  cached_to_clean(*leaf.page_class, place);
}

/// The next `count` clean blocks of a huge block whose class has this ratio, above 1, become live.
/// Counting them is the caller's business.
inline void BlockPool::draw_clean(LeafId leaf, std::uint32_t huge, std::uint32_t ratio,
                                  std::uint32_t count, BlockId* out) noexcept {
  Block* const blocks = blocks_of(huge);
  const std::uint32_t first_id = huge * ratio + 1;
  std::uint32_t next = links_[huge].first_clean;
  for (; count != 0; --count) {
    const std::uint32_t index = next & ~fresh;
    Block& block = blocks[index];
    next = (next & fresh) != 0 ? next + 1 : block.next_clean();
    block.draw(static_cast<std::uint16_t>(leaf.value()));
    *out++ = BlockId(first_id + index);
  }
  links_[huge].first_clean = next;
}

/// As many clean blocks of a claimed huge block as it has and `out` takes; at least one. Its place
/// among those with clean blocks is the caller's business.
inline std::uint32_t BlockPool::take(LeafId leaf, std::uint32_t huge,
                                     std::span<BlockId> out) noexcept {
  LeafState& state = leaves_[leaf.value()];
  const PageClass& page_class = *state.page_class;
  HugeBlock& record = huge_[huge];
  std::uint32_t taken = 1;
  if (page_class.ratio == 1) {
    Block& block = blocks_of(huge)[0];
    block.draw(static_cast<std::uint16_t>(leaf.value()));
    out[0] = BlockId(huge + 1);
  } else {
    const std::uint32_t clean = clean_in(page_class, record);
    taken = out.size() < clean ? static_cast<std::uint32_t>(out.size()) : clean;
    draw_clean(leaf, huge, page_class.ratio, taken, out.data());
  }
  state.live.add(taken);
  record.live += taken;
  return taken;
}

/// The same for one block, where most draws come from.
inline BlockId BlockPool::take_one(LeafState& state, LeafId leaf, std::uint32_t huge) noexcept {
  const std::uint32_t ratio = state.divider.ratio();
  Block* const blocks = blocks_of(huge);
  std::uint32_t index = 0;
  if (ratio > 1) {
    std::uint32_t& next = links_[huge].first_clean;
    index = next & ~fresh;
    next = (next & fresh) != 0 ? next + 1 : blocks[index].next_clean();
  }
  blocks[index].draw(static_cast<std::uint16_t>(leaf.value()));
  ++state.live;
  ++huge_[huge].live;
  return BlockId(huge * ratio + index + 1);
}

}  // namespace kvleaf
