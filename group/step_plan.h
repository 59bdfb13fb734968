// StepPlan: one forward's inputs, as views on the planner's memory.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "kvleaf/group/request_options.h"
#include "kvleaf/leaf/staged.h"
#include "kvleaf/pool/geometry.h"

namespace kvleaf {

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

}  // namespace kvleaf
