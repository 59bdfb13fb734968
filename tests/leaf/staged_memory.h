// StagedMemory: the arrays of one leaf as a planner keeps them, at their widest and narrowed per
// batch, with everything around and between watched. What is reported is applied to a second copy,
// which must stay equal to the first: a change that went unreported shows there.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "kvleaf/leaf/region.h"

namespace kvleaf::test {

class StagedMemory {
 public:
  static constexpr std::int32_t guard = 0x5a5a5a5a;
  static constexpr std::size_t guards = 64;  // entries before and behind each array

  /// `fill`: what the arrays hold at first; 0 as a planner has them, else what nobody has cleared.
  StagedMemory(const KVLeafRegion& leaf, std::uint32_t batch, std::uint32_t columns,
               std::int32_t fill = 0)
      : leaf_(leaf), widest_(leaf.staged_input_shapes(batch, columns)) {
    for (const StagedInput& input : widest_) {
      std::int64_t count = 1;
      for (const std::int64_t extent : input.shape) count *= extent;
      std::vector<std::int32_t> memory(static_cast<std::size_t>(count) + 2 * guards, guard);
      std::fill_n(memory.begin() + guards, count, fill);
      memory_.push_back(memory);
      mirror_.push_back(std::move(memory));
    }
    narrow(batch, columns);
  }

  /// The arrays for this batch; strides stay those of the widest.
  StagedArrays narrow(std::uint32_t batch, std::uint32_t columns) {
    const StagedInputs shapes = leaf_.staged_input_shapes(batch, columns);
    arrays_.assign(shapes.size(), StagedArray{});
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      StagedArray& array = arrays_[i];
      array.key = shapes[i].key;
      array.dtype = shapes[i].dtype;
      array.data = reinterpret_cast<std::byte*>(memory_[i].data() + guards);
      array.shape = shapes[i].shape;
      array.strides.assign(array.shape.size(), 1);
      for (std::size_t d = array.shape.size() - 1; d > 0; --d) {
        array.strides[d - 1] = array.strides[d] * widest_[i].shape[d];
      }
    }
    before_ = memory_;
    reported_ = false;
    entries_reported_ = 0;
    StagedArrays into(arrays_);
    into.set_on_change(&StagedMemory::on_change, this);
    return into;
  }

  /// What is visible of one array, row-major.
  std::vector<std::int32_t> visible(std::string_view key) const {
    std::vector<std::int32_t> entries;
    const std::size_t index = index_of(key);
    for (std::size_t i : positions(index)) entries.push_back(memory_[index][guards + i]);
    return entries;
  }
  std::int64_t extent(std::string_view key, std::size_t dimension) const {
    return arrays_[index_of(key)].shape[dimension];
  }

  /// Empty, or which entry outside the narrowed arrays was written since narrow().
  std::string written_outside() const {
    for (std::size_t a = 0; a < arrays_.size(); ++a) {
      std::vector<char> inside(memory_[a].size(), 0);
      for (std::size_t i : positions(a)) inside[guards + i] = 1;
      for (std::size_t i = 0; i < memory_[a].size(); ++i) {
        if (inside[i] == 0 && memory_[a][i] != before_[a][i]) {
          return std::string(arrays_[a].key) + " at " +
                 std::to_string(static_cast<std::int64_t>(i) - static_cast<std::int64_t>(guards));
        }
      }
    }
    return "";
  }

  /// Whether the copy that was kept up by reports alone equals what is visible. Without any report
  /// all counts as written.
  bool reports_cover_changes() {
    if (!reported_) mirror_ = memory_;
    for (std::size_t a = 0; a < arrays_.size(); ++a) {
      for (std::size_t i : positions(a)) {
        if (mirror_[a][guards + i] != memory_[a][guards + i]) return false;
      }
    }
    return true;
  }

  bool unchanged() const { return memory_ == before_; }
  bool reported() const { return reported_; }
  std::int64_t entries_reported() const { return entries_reported_; }
  std::vector<StagedArray>& arrays() { return arrays_; }

 private:
  std::size_t index_of(std::string_view key) const {
    for (std::size_t i = 0; i < arrays_.size(); ++i) {
      if (arrays_[i].key == key) return i;
    }
    throw std::logic_error("no array " + std::string(key));
  }

  std::vector<std::size_t> positions(std::size_t index) const {
    const StagedArray& array = arrays_[index];
    std::vector<std::size_t> at = {0};
    for (std::size_t d = 0; d < array.shape.size(); ++d) {
      std::vector<std::size_t> next;
      for (const std::size_t base : at) {
        for (std::int64_t i = 0; i < array.shape[d]; ++i) {
          next.push_back(base + static_cast<std::size_t>(i * array.strides[d]));
        }
      }
      at = std::move(next);
    }
    return at;
  }

  static void on_change(void* context, const StagedArray& array, std::int64_t first,
                        std::int64_t count) {
    auto& self = *static_cast<StagedMemory*>(context);
    self.reported_ = true;
    self.entries_reported_ += count;
    const std::size_t index = self.index_of(array.key);
    for (std::int64_t i = first; i < first + count; ++i) {
      const std::size_t at = guards + static_cast<std::size_t>(i);
      self.mirror_[index].at(at) = self.memory_[index].at(at);
    }
  }

  const KVLeafRegion& leaf_;
  StagedInputs widest_;
  std::vector<std::vector<std::int32_t>> memory_;
  std::vector<std::vector<std::int32_t>> mirror_;
  std::vector<std::vector<std::int32_t>> before_;
  std::vector<StagedArray> arrays_;
  bool reported_ = false;
  std::int64_t entries_reported_ = 0;
};

inline std::vector<BlockId> blocks(std::initializer_list<std::uint32_t> ids) {
  std::vector<BlockId> list;
  for (const std::uint32_t id : ids) list.push_back(BlockId(id));
  return list;
}

}  // namespace kvleaf::test
