#include "kvleaf/cache/state_slabs.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>

namespace kvleaf {
namespace {

constexpr std::uint32_t none = std::numeric_limits<std::uint32_t>::max();

}  // namespace

StateSlabs::StateSlabs(const CacheLayout& layout, CacheMemory& memory, const BlockManager& manager,
                       std::span<const Slot> slots)
    : memory_(memory), manager_(manager), slots_(slots) {
  index_.assign(layout.leaves.size(), none);
  for (const SlabPlace& slab : layout.slabs) {
    std::uint32_t& index = index_[slab.leaf];
    if (index == none) {
      index = static_cast<std::uint32_t>(leaves_.size());
      const LeafId leaf{slab.leaf};
      leaves_.push_back({leaf, manager_.tokens_per_page(leaf), {}});
    }
    leaves_[index].slabs.push_back(&slab);
  }
  if (leaves_.size() > 64)
    throw InvalidArgument(
        fmt::format("{} kinds of recurrent state; expected at most 64", leaves_.size()));
  moved_.assign(slots_.size(), false);
  restored_.assign(slots_.size(), 0);
  live_.reserve(slots_.size());
}

const StateSlabs::Leaf* StateSlabs::find(LeafId leaf) const noexcept {
  const std::uint32_t index = index_[leaf.value()];
  return index == none ? nullptr : &leaves_[index];
}

void StateSlabs::save(const Leaf& leaf, std::size_t slot, BlockId block) const {
  std::byte* page = memory_.page(leaf.id, block);
  for (const SlabPlace* slab : leaf.slabs)
    std::memcpy(page + slab->page_offset, memory_.slab(*slab, slot), slab->bytes);
}

void StateSlabs::restore(const Leaf& leaf, std::size_t slot, BlockId block) const {
  const std::byte* page = memory_.page(leaf.id, block);
  for (const SlabPlace* slab : leaf.slabs)
    std::memcpy(memory_.slab(*slab, slot), page + slab->page_offset, slab->bytes);
}

// The slot whose live state the block is.
std::optional<std::size_t> StateSlabs::slot_of(LeafId leaf, BlockId block) {
  if (looked_up_ != leaf) {
    live_.clear();
    for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
      if (!slots_[slot].used) continue;
      if (const auto live = manager_.live_block(slots_[slot].request, leaf))
        live_.emplace_back(live->value(), static_cast<std::uint32_t>(slot));
    }
    std::sort(live_.begin(), live_.end());
    looked_up_ = leaf;
  }
  const auto at = std::lower_bound(live_.begin(), live_.end(), std::pair(block.value(), 0u));
  if (at == live_.end() || at->first != block.value()) return {};
  return at->second;
}

void StateSlabs::note_restored(std::size_t slot, const Leaf& leaf) noexcept {
  restored_[slot] |= std::uint64_t{1} << (&leaf - leaves_.data());
}

void StateSlabs::copy(const BlockCopy& copy) {
  const Leaf* leaf = find(copy.leaf);
  const auto to = leaf != nullptr ? slot_of(copy.leaf, copy.dst) : std::nullopt;
  const auto from = leaf != nullptr ? slot_of(copy.leaf, copy.src) : std::nullopt;
  if (to && from) {
    for (const SlabPlace* slab : leaf->slabs)
      std::memcpy(memory_.slab(*slab, *to), memory_.slab(*slab, *from), slab->bytes);
  } else if (to) {
    restore(*leaf, *to, copy.src);
  } else if (from) {
    save(*leaf, *from, copy.dst);
  } else {
    std::memcpy(memory_.page(copy.leaf, copy.dst), memory_.page(copy.leaf, copy.src),
                memory_.page_bytes(copy.leaf));
  }
  if (to) note_restored(*to, *leaf);
}

void StateSlabs::clear(const ZeroFill& fill) {
  const Leaf* leaf = find(fill.leaf);
  const auto to = leaf != nullptr ? slot_of(fill.leaf, fill.block) : std::nullopt;
  if (!to) {
    std::memset(memory_.page(fill.leaf, fill.block), 0, memory_.page_bytes(fill.leaf));
    return;
  }
  for (const SlabPlace* slab : leaf->slabs) std::memset(memory_.slab(*slab, *to), 0, slab->bytes);
  note_restored(*to, *leaf);
}

void StateSlabs::run(const StepPlan& plan, std::span<const std::int32_t> batch) {
  looked_up_.reset();
  if (!empty())
    for (const std::int32_t row : batch) restored_[static_cast<std::size_t>(row)] = 0;
  for (const BlockCopy& one : plan.copies()) copy(one);
  for (const ZeroFill& one : plan.zero_fills()) clear(one);
  if (empty()) return;
  for (const std::int32_t row : batch) {
    const auto slot = static_cast<std::size_t>(row);
    if (!moved_[slot]) continue;
    moved_[slot] = false;
    // A checkpoint that nobody shares may have become the live state itself: no copy is listed, and
    // its page holds the state.
    for (const Leaf& leaf : leaves_) {
      if ((restored_[slot] >> (&leaf - leaves_.data()) & 1) != 0) continue;
      restore(leaf, slot, *manager_.live_block(slots_[slot].request, leaf.id));
    }
  }
}

void StateSlabs::settled(std::size_t slot, std::uint32_t length) {
  // A live state may have been filed as the checkpoint of the boundary that it stands at: its block
  // must hold it from now on.
  for (const Leaf& leaf : leaves_) {
    if (length % leaf.tokens_per_page != 0) continue;
    const auto live = manager_.live_block(slots_[slot].request, leaf.id);
    if (live && *live != null_block && manager_.pool().committed(leaf.id, *live))
      save(leaf, slot, *live);
  }
}

void StateSlabs::ending(std::size_t slot, std::uint32_t length) {
  if (length == 0 || moved_[slot]) return;
  // At a boundary the live state's block becomes the checkpoint: it must hold the state.
  for (const Leaf& leaf : leaves_) {
    if (length % leaf.tokens_per_page != 0) continue;
    if (const auto live = manager_.live_block(slots_[slot].request, leaf.id))
      save(leaf, slot, *live);
  }
}

}  // namespace kvleaf
