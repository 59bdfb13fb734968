// LeafRows: what one leaf is told of the rows of a plan: which of their slots have changed since it
// was told last, which blocks a state is read from and written to, and where new tokens go.
// Internal to the step planner.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvleaf/group/manager_impl.h"
#include "kvleaf/group/step_planner.h"
#include "kvleaf/leaf/block_table.h"

namespace kvleaf {

/// A row of a plan.
struct PlannedRow {
  Request* request = nullptr;
  std::uint32_t begin = 0;  // tokens before this step
  std::uint32_t count = 0;
  bool stays = false;    // the request had this row in the plan before
  bool goes_on = false;  // and has since taken, lost or changed no slot of any row
};
using PlannedRows = std::span<const PlannedRow>;

class LeafRows {
 public:
  /// observer: the planner's entry of Row::changed.
  LeafRows(const LeafInfo& info, const PlannerOptions& options, const ManagerOptions& manager,
           std::size_t observer);
  LeafRows(LeafRows&&) = default;  // a copy's deltas would point into the original
  LeafRows(const LeafRows&) = delete;
  LeafRows& operator=(const LeafRows&) = delete;

  const LeafInfo& info() const noexcept { return *info_; }
  /// At the widest, and of this plan.
  std::uint32_t columns() const noexcept { return columns_; }
  std::uint32_t columns_now(std::uint32_t batch) const noexcept;
  /// The leaf is told of changes; else of whole rows.
  bool by_changes() const noexcept { return by_changes_; }
  bool maps_slots() const noexcept { return info_->writing == Writing::append; }

  /// Lays out a plan's rows, and dummy rows behind them up to `batch`; rows_before: of the plan
  /// before, dummy rows left out. mapping: where maps_slots(), gets the entry of each new token; -1
  /// in dummy rows.
  void lay_out(PlannedRows rows, std::uint32_t rows_before, std::uint32_t batch, std::uint64_t step,
               std::int64_t* mapping);
  RowDeltas deltas(std::uint32_t batch) const noexcept { return std::span(deltas_).first(batch); }
  RowPlans whole(PlannedRows rows, std::uint32_t batch);
  /// The arrays were zeroed.
  void forget();

 private:
  void lay_out_text(PlannedRows rows, std::int64_t* mapping);
  void lay_out_encoder(PlannedRows rows);
  void lay_out_states(PlannedRows rows, std::uint64_t step);
  void lay_out_boundaries(PlannedRows rows, std::uint64_t step);
  void lay_out_scratch(PlannedRows rows);
  void tell_slots(std::size_t row, const PlannedRow& planned);
  std::int64_t* map_slots(std::size_t row, const PlannedRow& planned, std::int64_t* out);
  std::uint32_t round_up(std::uint32_t columns) const noexcept;

  const LeafInfo* info_;
  std::size_t observer_;
  std::uint32_t columns_ = 0;
  std::uint32_t column_multiple_ = 1;
  std::uint32_t entries_per_page_ = 0;
  std::uint32_t tokens_per_entry_ = 1;
  std::uint32_t head_slots_ = 0;
  bool by_changes_ = false;
  bool live_span_ = false;
  bool apart_ = false;     // a state is read from another block than it is written to
  bool in_chunk_ = false;  // states are emitted inside a step
  // Per row of the batch:
  std::vector<RowDelta> deltas_;            // as the leaf was told last
  std::vector<std::uint32_t> filled_;       // what the leaf remembers: RowDelta::filled_columns
  std::vector<std::uint32_t> depths_;       // columns that its table needs
  std::vector<std::int64_t> next_entries_;  // where the next token goes, in the page of the last
  // Scratch:
  std::vector<BlockId> boundaries_;             // what RowDelta::boundary_blocks points to
  std::vector<std::span<const BlockId>> full_;  // whole rows
  std::vector<BlockId> state_blocks_;           // what they point to for states
};

}  // namespace kvleaf
