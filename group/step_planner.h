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
#include <utility>
#include <vector>

#include "kvleaf/group/block_manager.h"
#include "kvleaf/group/step_plan.h"

namespace kvleaf {

struct PlannerOptions {
  std::uint32_t max_batch = 0;           // rows, dummy rows included
  std::uint32_t max_step_tokens = 0;     // tokens of all rows together
  std::uint32_t max_encoder_tokens = 0;  // of one row; 0: max_len or 8,192, whichever is more
  /// Columns of tables are rounded up to a multiple of it: kernels that read several at a time find
  /// null blocks behind the last slot.
  std::uint32_t column_multiple = 1;
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
