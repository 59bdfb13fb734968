// StepPlanner: one call per forward. Reserves for a whole batch and writes what the forward reads:
// block tables in each leaf's own format, slot mappings, lengths, state rows, and the copies and
// clears that must run first.
//
// It owns one host set of arrays per step in flight, sized once, at fixed addresses, used in turn.
// A row that still belongs to the same request is extended, not rewritten, so a decode step costs
// what changed, whatever the length. plan() allocates nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "kvleaf/group/block_manager.h"

namespace kvleaf {

struct PlannerOptions {
  std::uint32_t max_batch = 0;           // rows, dummy rows included
  std::uint32_t max_step_tokens = 0;     // tokens of all rows together
  std::uint32_t max_encoder_tokens = 0;  // of one row; 0: max_len or 8,192, whichever is more
  /// Columns of tables are rounded up to a multiple of it: kernels that read several at a time find
  /// null blocks behind the last slot.
  std::uint32_t column_multiple = 1;
};

/// Entries of one staged array that changed since the previous plan, for scatter_table.
struct TableChanges {
  std::vector<std::int32_t> rows;
  std::vector<std::int32_t> columns;
  std::vector<std::int32_t> values;
};

/// One forward's inputs. Views on the planner's memory: valid until the planner comes round to the
/// same host set, max_steps_in_flight plans later.
class StepPlan {
 public:
  StepId step() const noexcept;
  std::span<const Refusal> refused() const noexcept;  // these left the batch
  std::span<const RequestId> rows() const noexcept;   // served requests in row order
  std::uint32_t batch() const noexcept;               // rows, dummy rows included
  std::uint32_t num_tokens() const noexcept;          // of all rows, one per dummy row

  /// Arrays of one leaf, narrowed to this batch.
  std::span<const StagedArray> arrays(LeafId leaf) const;
  const StagedArray& array(LeafId leaf, std::string_view key) const;  // throws PlanShapeError
  /// [num_tokens] int64: block · slots_per_page + slot in the page; -1 is padding. Empty for leaves
  /// that are not written token by token (states, encoder, scratch).
  std::span<const std::int64_t> slot_mapping(LeafId leaf) const;
  std::span<const std::int32_t> seq_lens() const noexcept;      // [batch]
  std::span<const std::int32_t> cu_seqlens_q() const noexcept;  // [batch + 1]
  std::span<const BlockCopy> copies() const noexcept;
  std::span<const ZeroFill> zero_fills() const noexcept;
  /// Bytes [begin, end) of the array, counted from its first element, that differ from the previous
  /// plan.
  std::span<const ByteRange> dirty(LeafId leaf, std::string_view key) const;
  /// The same entry by entry. For int32 arrays of at most two dimensions.
  TableChanges changes(LeafId leaf, std::string_view key) const;

 private:
  friend class StepPlanner;
  struct Data;
  std::shared_ptr<Data> data_;
};

class StepPlanner {
 public:
  /// Throws PlanShapeError for zero bounds.
  StepPlanner(BlockManager& manager, PlannerOptions options);
  ~StepPlanner();
  StepPlanner(const StepPlanner&) = delete;
  StepPlanner& operator=(const StepPlanner&) = delete;

  /// begin_step, plus the arrays. pad_to: rows to fill the batch to with dummy rows (one query
  /// token, length 1, slot -1, null blocks). Throws what begin_step throws, and PlanShapeError for
  /// a batch or tokens beyond the bounds; nothing has changed then.
  const StepPlan& plan(std::span<const StepRequest> batch,
                       std::optional<std::uint32_t> pad_to = {});
  void settle(StepId step, std::span<const Kept> kept = {});
  std::vector<std::pair<RequestId, std::uint32_t>> abandon(StepId step);
  /// Takes back the step planned last, of which nothing ran on the device: as if it had not been
  /// planned, but for what it evicted. Throws StepError for any other step.
  void withdraw(StepId step);

  BlockManager& manager() noexcept;
  const PlannerOptions& options() const noexcept;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvleaf
