// SlotTables: the block tables of a paged cache by slot, kept up to date in place. The planner's
// own go by row of the batch; a step brings over what has changed. Internal to KVCache.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvleaf/cache/cache_memory.h"
#include "kvleaf/group/block_manager.h"
#include "kvleaf/group/step_planner.h"

namespace kvleaf {

class SlotTables {
 public:
  /// The tables themselves are CacheMemory::tables, made here.
  SlotTables(const CacheLayout& layout, CacheMemory& memory, const BlockManager& manager);

  /// The slot's rows become what the manager has.
  void rewrite(std::size_t slot, RequestId request);
  /// The slot got shorter, and its rows were left as they are.
  void shorten(std::size_t slot) noexcept { quiet_until_[slot] = 0; }
  void clear(std::size_t slot);
  /// A step was planned: slots and their lengths with it, row by row; before: slots of the rows of
  /// the plan before, none where it is not known what the planner's arrays held.
  void update(const StepPlan& plan, std::span<const std::int32_t> slots,
              std::span<const std::int32_t> ends, std::span<const std::int32_t> before);

 private:
  struct Table {
    LeafId leaf{0};
    std::uint32_t tokens_per_page = 0;
    std::uint32_t columns = 0;
    bool encoder = false;               // its pages stay what they were at admission
    std::vector<std::uint32_t> filled;  // per slot: columns that may be nonzero
  };
  /// A row of the batch whose slot takes pages, got shorter, or was another row's.
  struct Loud {
    std::uint32_t row = 0;
    std::uint32_t slot = 0;
    bool stays = false;  // its tables hold what the planner's arrays held for it before
  };
  void find_loud(std::span<const std::int32_t> slots, std::span<const std::int32_t> ends,
                 std::span<const std::int32_t> before);
  void copy_changes(const Table& table, std::span<const ByteRange> ranges,
                    const StagedArray& staged, std::span<const std::int32_t> slots);
  std::int32_t* row(const Table& table, std::size_t slot) const noexcept {
    return memory_.tables[table.leaf.value()].data() + slot * std::size_t{table.columns};
  }

  CacheMemory& memory_;
  const BlockManager& manager_;
  std::vector<Table> tables_;
  /// Per slot: a step up to this length changes of its rows only what the plan reports. 0: nothing
  /// is known.
  std::vector<std::uint32_t> quiet_until_;
  std::vector<std::uint8_t> rewritten_;  // per slot: since its last step
  std::vector<Loud> loud_;               // scratch of update
};

}  // namespace kvleaf
