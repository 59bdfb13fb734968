#include "kvleaf/leaf/index_array.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace kvleaf {
namespace {

std::int32_t entry_of(BlockId block) noexcept { return static_cast<std::int32_t>(block.value()); }

}  // namespace

IndexArray::IndexArray(const std::string& leaf, const StagedArrays& into, std::string_view key,
                       std::size_t rank)
    : leaf_(leaf), into_(into), array_(into.find(key)), data_(nullptr) {
  if (array_ == nullptr) {
    throw PlanShapeError(
        fmt::format("leaf '{}' writes an array '{}', which is not there", leaf, key));
  }
  const StagedArray& array = *array_;
  if (array.dtype != DType::int32) {
    throw PlanShapeError(
        fmt::format("leaf '{}': array '{}' is {}, not int32", leaf, key, name_of(array.dtype)));
  }
  if (array.shape.size() != rank || array.strides.size() != rank) {
    throw PlanShapeError(fmt::format("leaf '{}': array '{}' has {} dimensions, not {}", leaf, key,
                                     array.shape.size(), rank));
  }
  if (array.strides[rank - 1] != 1) {
    throw PlanShapeError(fmt::format("leaf '{}': array '{}' has an innermost stride of {}, not 1",
                                     leaf, key, array.strides[rank - 1]));
  }
  data_ = reinterpret_cast<std::int32_t*>(array.data);
}

void IndexArray::require_extent(std::size_t dimension, std::int64_t wanted) const {
  if (extent(dimension) != wanted) {
    throw PlanShapeError(fmt::format("leaf '{}': array '{}' has {} entries in dimension {}, not {}",
                                     leaf_, array_->key, extent(dimension), dimension, wanted));
  }
}

void IndexArray::fill(std::int64_t position, std::span<const BlockId> blocks) noexcept {
  static_assert(sizeof(BlockId) == sizeof(std::int32_t));
  if (!blocks.empty()) std::memcpy(data_ + position, blocks.data(), blocks.size_bytes());
}

void IndexArray::fill(std::int64_t position, std::int64_t count, std::int32_t value) noexcept {
  std::fill_n(data_ + position, count, value);
}

void IndexArray::put(std::int64_t position, std::span<const BlockId> blocks) {
  fill(position, blocks);
  report(position, static_cast<std::int64_t>(blocks.size()));
}

void IndexArray::put_changes(std::int64_t position, std::span<const BlockId> blocks) {
  // A window that slid changes a slot at its front and one at its end, and none between.
  constexpr std::int64_t stretch = 32;
  std::int32_t* const entries = data_ + position;
  const auto count = static_cast<std::int64_t>(blocks.size());
  for (std::int64_t i = 0; i < count; ++i) {
    while (i + stretch <= count &&
           std::memcmp(entries + i, blocks.data() + i, stretch * sizeof(BlockId)) == 0) {
      i += stretch;
    }
    const std::int64_t begin = i;
    for (; i < count && entries[i] != entry_of(blocks[i]); ++i) entries[i] = entry_of(blocks[i]);
    report(position + begin, i - begin);
  }
}

void IndexArray::put_change(std::int64_t position, std::int32_t value) {
  if (data_[position] == value) return;
  data_[position] = value;
  report(position, 1);
}

void IndexArray::clear(std::int64_t begin, std::int64_t end) {
  while (begin < end && data_[begin] == 0) ++begin;
  while (begin < end && data_[end - 1] == 0) --end;
  if (begin >= end) return;
  fill(begin, end - begin, 0);
  report(begin, end - begin);
}

void IndexArray::move(std::int64_t from, std::int64_t to, std::int64_t count) noexcept {
  std::memmove(data_ + to, data_ + from, static_cast<std::size_t>(count) * sizeof(std::int32_t));
}

}  // namespace kvleaf
