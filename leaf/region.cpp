#include "kvleaf/leaf/region.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <typeinfo>

#include "kvleaf/leaf/block_table.h"
#include "kvleaf/leaf/errors.h"

namespace kvleaf {

KVLeafRegion::KVLeafRegion(std::string leaf_id, KVCacheGroupId group, std::uint64_t bytes_per_page,
                           Options options)
    : leaf_id_(std::move(leaf_id)),
      group_(std::move(group)),
      bytes_per_page_(bytes_per_page),
      stride_alignment_(options.stride_alignment),
      tokens_per_page_(options.tokens_per_page) {
  if (leaf_id_.empty()) {
    throw InvalidArgument(fmt::format("a leaf of group '{}' has no id", group_.name));
  }
  if (bytes_per_page_ == 0) {
    throw InvalidArgument(fmt::format("leaf '{}': a page of 0 bytes", leaf_id_));
  }
  if (stride_alignment_ == 0U) {
    throw InvalidArgument(fmt::format(
        "leaf '{}': stride_alignment is 0; 1 means any padding, none means packed pages",
        leaf_id_));
  }
  if (tokens_per_page_ == 0U) {
    throw InvalidArgument(fmt::format("leaf '{}': tokens_per_page is 0", leaf_id_));
  }
}

bool KVLeafRegion::cacheable() const { return group_.writing != Writing::exclusive; }

std::uint32_t KVLeafRegion::slots_per_page(std::uint32_t tokens_per_page) const {
  return tokens_per_page;
}

std::uint32_t KVLeafRegion::blocks_to_reserve(std::uint32_t num_blocks,
                                              std::uint32_t tokens_per_page,
                                              ReserveOptions options) const {
  if (num_blocks == 0) return 0;
  switch (group_.writing) {
    case Writing::append:
      return group_.pattern.most_slots(tokens_per_page, num_blocks, options.step_tokens);
    case Writing::in_place: {
      const std::uint64_t checkpoint = options.enable_prefix_caching ? 1 : 0;
      return static_cast<std::uint32_t>(std::min<std::uint64_t>(
          std::uint64_t{1} + rollback() + checkpoint, std::numeric_limits<std::uint32_t>::max()));
    }
    case Writing::write_once: return num_blocks;
    case Writing::exclusive: return 1;
  }
  return num_blocks;
}

StagedInputs KVLeafRegion::staged_input_shapes(std::uint32_t batch,
                                               std::uint32_t num_blocks) const {
  return {StagedInput{"block_table", {batch, num_blocks}, DType::int32}};
}

void KVLeafRegion::write_staged_inputs(std::span<const std::span<const BlockId>> plans,
                                       StagedArrays into) const {
  DenseTable(leaf_id_, into).write(plans);
}

bool KVLeafRegion::can_write_delta() const {
  // A delta of a state names the blocks it reads and writes, and no slots: a table is written
  // whole.
  return typeid(*this) == typeid(KVLeafRegion) && group_.writing != Writing::in_place;
}

void KVLeafRegion::write_staged_delta(std::span<const RowDelta> rows, StagedArrays into) const {
  DenseTable(leaf_id_, into).update(rows);
}

std::vector<BoundRows> KVLeafRegion::bound_row_span(BlockId) const { return {}; }

std::vector<std::pair<BoundRows, BoundRows>> KVLeafRegion::bound_row_copies(BlockId,
                                                                            BlockId) const {
  return {};
}

}  // namespace kvleaf
