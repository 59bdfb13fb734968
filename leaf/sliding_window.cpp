#include "kvleaf/leaf/sliding_window.h"

#include <fmt/format.h>

#include "kvleaf/leaf/block_table.h"
#include "kvleaf/leaf/errors.h"

namespace kvleaf {
namespace {

KVCacheGroupId group_of(const std::string& leaf, const WindowOptions& window,
                        const AttentionOptions& options) {
  if (window.window == 0) {
    throw InvalidArgument(
        fmt::format("leaf '{}': window is 0; the query counts, so 1 is the least", leaf));
  }
  if (window.compact && options.table == TableFormat::csr) {
    throw InvalidArgument(fmt::format("leaf '{}': a table is compact or csr, not both", leaf));
  }
  return KVCacheGroupId::sliding_window(window.window, window.sinks);
}

}  // namespace

SlidingWindowLeaf::SlidingWindowLeaf(std::string leaf_id, WindowOptions window,
                                     AttentionOptions options)
    : AttentionLeaf(leaf_id, group_of(leaf_id, window, options), options), window_(window) {}

std::uint32_t SlidingWindowLeaf::sink_slots() const noexcept {
  const std::uint32_t page = options().tokens_per_page;
  return window_.sinks / page + (window_.sinks % page != 0);
}

StagedInputs SlidingWindowLeaf::staged_input_shapes(std::uint32_t batch,
                                                    std::uint32_t num_blocks) const {
  StagedInputs inputs = AttentionLeaf::staged_input_shapes(batch, num_blocks);
  if (window_.compact) inputs.push_back(StagedInput{"first_slot", {batch}, DType::int32});
  return inputs;
}

void SlidingWindowLeaf::write_staged_inputs(std::span<const std::span<const BlockId>> plans,
                                            StagedArrays into) const {
  if (!window_.compact) return AttentionLeaf::write_staged_inputs(plans, into);
  CompactTable(leaf_id(), sink_slots(), into).write(plans);
}

void SlidingWindowLeaf::write_staged_delta(std::span<const RowDelta> rows,
                                           StagedArrays into) const {
  if (!window_.compact) return AttentionLeaf::write_staged_delta(rows, into);
  CompactTable(leaf_id(), sink_slots(), into).update(rows);
}

}  // namespace kvleaf
