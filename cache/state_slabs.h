// StateSlabs: recurrent states of a paged cache. A slot's live state is its part of the slabs, at
// the same place in every step; checkpoints of it lie in the pool's pages. The manager knows only
// blocks: of a live state the one whose bytes the slot's slabs stand for. So what it asks to be
// copied, cleared or filed is done here, where both are known. Internal to KVCache.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kvleaf/cache/cache_memory.h"
#include "kvleaf/cache/slot.h"
#include "kvleaf/group/block_manager.h"
#include "kvleaf/group/step_planner.h"

namespace kvleaf {

class StateSlabs {
 public:
  /// slots: of the cache, as they are from call to call. Throws InvalidArgument for more than 64
  /// kinds of state.
  StateSlabs(const CacheLayout& layout, CacheMemory& memory, const BlockManager& manager,
             std::span<const Slot> slots);

  /// No layer has a state.
  bool empty() const noexcept { return leaves_.empty(); }

  /// The sequence in the slot is to go on from what its blocks hold, not its slabs: it was
  /// admitted, or went back.
  void moved(std::size_t slot) { moved_[slot] = true; }
  /// Runs the copies and clears of a plan, those of other leaves' pages too, for the slots of its
  /// batch.
  void run(const StepPlan& plan, std::span<const std::int32_t> batch);
  /// A slot's step has settled at `length` tokens: a state that was filed as the checkpoint there
  /// is saved.
  void settled(std::size_t slot, std::uint32_t length);
  /// A slot's sequence is about to end at `length` tokens: the same, for what will be filed.
  void ending(std::size_t slot, std::uint32_t length);

 private:
  struct Leaf {
    LeafId id{0};
    std::uint32_t tokens_per_page = 0;
    std::vector<const SlabPlace*> slabs;
  };
  void save(const Leaf& leaf, std::size_t slot, BlockId block) const;
  void restore(const Leaf& leaf, std::size_t slot, BlockId block) const;
  std::optional<std::size_t> slot_of(LeafId leaf, BlockId block);
  const Leaf* find(LeafId leaf) const noexcept;
  void note_restored(std::size_t slot, const Leaf& leaf) noexcept;
  void copy(const BlockCopy& copy);
  void clear(const ZeroFill& fill);

  CacheMemory& memory_;
  const BlockManager& manager_;
  std::span<const Slot> slots_;
  std::vector<Leaf> leaves_;
  std::vector<std::uint32_t> index_;  // per leaf of the manager: in leaves_, or none
  std::vector<bool> moved_;           // per slot
  std::vector<std::uint64_t>
      restored_;  // per slot: leaves that this plan has brought back, a bit each
  // Live states of one leaf, sorted: block and slot. Of the plan being run.
  std::optional<LeafId> looked_up_;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> live_;
};

}  // namespace kvleaf
