// A KVCache's insides, shared by its source files: kv_cache.cpp (making it, tensors), slots.cpp (a
// slot's life), steps.cpp (beginning and ending steps), encoder_fill.cpp (cross attention).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kvleaf/cache/cache_layout.h"
#include "kvleaf/cache/cache_memory.h"
#include "kvleaf/cache/encoder_lengths.h"
#include "kvleaf/cache/kv_cache.h"
#include "kvleaf/cache/slot.h"
#include "kvleaf/cache/slot_tables.h"
#include "kvleaf/cache/state_slabs.h"
#include "kvleaf/cache/step_data.h"
#include "kvleaf/group/step_planner.h"

namespace kvleaf {

class KVCache::Impl {
 public:
  Impl(std::shared_ptr<const CacheLayout> layout, const Tensor& memory);
  void reset();

  // ---- slots.cpp
  std::uint32_t admit(std::int32_t slot, const Tensor& ids, std::int32_t addressable,
                      const AdmitExtras& extras);
  void retire(std::int32_t slot, const Tensor& ids, std::int32_t addressable);
  void evict(std::int32_t slot);
  void update_position(std::int32_t slot, std::int32_t position);
  std::optional<std::uint32_t> next_stop(std::int32_t slot) const;
  /// Throws InvalidArgument where there is no such slot.
  std::size_t slot_of(std::int64_t slot) const;
  /// The same; of a paged cache also RequestError where nobody is in it.
  std::size_t running(std::int64_t slot) const;
  void require_paged(const char* what) const;

  // ---- steps.cpp
  using Data = StepIndices::Data;
  const std::shared_ptr<Data>& begin(std::span<const std::int32_t> cu_seqlens,
                                     std::span<const std::int32_t> past,
                                     std::span<const std::int32_t> slots);
  void abandon_step();

  // ---- encoder_fill.cpp
  void fill(std::int32_t layer, std::int32_t slot, const Tensor& k, const Tensor& v);

  std::shared_ptr<const CacheLayout> layout_;
  std::shared_ptr<CacheMemory> memory_;
  std::unique_ptr<BlockManager> manager_;    // paged
  std::vector<Sequence> sequences_;          // per slot
  std::shared_ptr<Data> current_;            // the step prepared last
  bool reserved_ = false;                    // it was begun by reserve, and not described yet
  std::vector<std::int32_t> ids_;            // scratch: of a tensor
  std::vector<std::int32_t> counts_, past_;  // scratch: of reserve

 private:
  void build();

  // ---- slots.cpp
  void free_slot(std::size_t slot);
  /// How far steps may bring a slot whose sequence runs.
  std::uint32_t most_tokens(const Sequence& sequence) const noexcept;

  // ---- steps.cpp
  /// Checks a batch and lays it out in draft_ and batch_. Nothing else has changed.
  void describe(std::span<const std::int32_t> cu_seqlens, std::span<const std::int32_t> past,
                std::span<const std::int32_t> slots);
  [[noreturn]] void refuse_row(std::size_t row, std::span<const std::int32_t> cu_seqlens,
                               std::span<const std::int32_t> past,
                               std::span<const std::int32_t> slots) const;
  /// Ends the step under way: its forward has run.
  void settle();
  /// The draft becomes the current step, and the one before last ends.
  void rotate();
  /// The slot's row in the step under way.
  std::optional<std::size_t> row_of(std::size_t slot) const;

  Tensor given_;
  std::unique_ptr<StepPlanner> planner_;  // paged, as all below
  std::unique_ptr<SlotTables> tables_;
  std::unique_ptr<StateSlabs> states_;
  std::unique_ptr<EncoderLengths> encoders_;
  std::vector<std::uint32_t> cross_layers_;
  std::vector<Slot> slots_;
  std::uint64_t serials_ = 0;
  std::uint64_t batches_ = 0;

  std::optional<StepId> step_;   // under way; current_ describes it
  std::vector<Kept> rejecting_;  // its rows of which not all tokens stand
  bool rows_known_ = false;      // the planner's arrays have the rows of current_
  std::shared_ptr<Data> previous_, draft_;
  std::vector<StepRequest> batch_;
};

}  // namespace kvleaf
