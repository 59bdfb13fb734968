#include "kvleaf/group/step_plan.h"

#include <fmt/format.h>

#include "kvleaf/group/host_set.h"

namespace kvleaf {

StepId StepPlan::step() const noexcept { return data_->step; }
std::span<const Refusal> StepPlan::refused() const noexcept { return data_->served->refused; }
std::span<const RequestId> StepPlan::rows() const noexcept { return data_->rows; }
std::uint32_t StepPlan::batch() const noexcept { return data_->batch; }
std::uint32_t StepPlan::num_tokens() const noexcept { return data_->tokens; }
std::span<const StagedArray> StepPlan::arrays(LeafId leaf) const {
  return data_->at(leaf).arrays.arrays();
}
const StagedArray& StepPlan::array(LeafId leaf, std::string_view key) const {
  const LeafArrays& arrays = data_->at(leaf).arrays;
  return arrays.arrays()[arrays.index_of(key)];
}
std::span<const std::int64_t> StepPlan::slot_mapping(LeafId leaf) const {
  const auto& mapping = data_->at(leaf).slot_mapping;
  return mapping.empty() ? std::span<const std::int64_t>()
                         : std::span(mapping).first(data_->tokens);
}
std::span<const std::int32_t> StepPlan::seq_lens() const noexcept {
  return std::span(data_->seq_lens).first(data_->batch);
}
std::span<const std::int32_t> StepPlan::cu_seqlens_q() const noexcept {
  return std::span(data_->cu_seqlens).first(data_->batch + std::size_t{1});
}
std::span<const BlockCopy> StepPlan::copies() const noexcept { return data_->served->copies; }
std::span<const ZeroFill> StepPlan::zero_fills() const noexcept {
  return data_->served->zero_fills;
}
std::span<const ByteRange> StepPlan::dirty(LeafId leaf, std::string_view key) const {
  const LeafArrays& arrays = data_->at(leaf).arrays;
  return arrays.dirty(arrays.index_of(key));
}

TableChanges StepPlan::changes(LeafId leaf, std::string_view key) const {
  const StagedArray& array = this->array(leaf, key);
  if (array.dtype != DType::int32 || array.shape.empty() || array.shape.size() > 2) {
    throw PlanShapeError(
        fmt::format("'{}' is {} of rank {}; lists are made of int32 of rank 1 or 2", key,
                    name_of(array.dtype), array.shape.size()));
  }
  TableChanges changes;
  const std::int64_t width = array.shape.size() == 2 ? array.strides[0] : 1;
  const auto* data = reinterpret_cast<const std::int32_t*>(array.data);
  for (const ByteRange& range : dirty(leaf, key)) {
    for (std::uint64_t at = range.begin / sizeof(std::int32_t);
         at < range.end / sizeof(std::int32_t); ++at) {
      const auto element = static_cast<std::int64_t>(at);
      changes.rows.push_back(static_cast<std::int32_t>(element / width));
      changes.columns.push_back(static_cast<std::int32_t>(element % width));
      changes.values.push_back(data[element]);
    }
  }
  return changes;
}

}  // namespace kvleaf
