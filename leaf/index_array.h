// IndexArray: one staged int32 array of a leaf while a forward's indices are written into it. It
// checks the array once, writes only what differs where asked to, and reports what it wrote. For
// the leaf kinds of this folder; positions are elements of the array's memory, from data.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "kvleaf/leaf/ids.h"
#include "kvleaf/leaf/staged.h"

namespace kvleaf {

class IndexArray {
 public:
  /// Throws PlanShapeError, naming the leaf and the key, for an array that is absent, is not int32,
  /// has another rank, or is strided innermost.
  IndexArray(const std::string& leaf, const StagedArrays& into, std::string_view key,
             std::size_t rank);

  std::int64_t extent(std::size_t dimension) const { return array_->shape[dimension]; }
  std::int64_t stride(std::size_t dimension) const { return array_->strides[dimension]; }
  /// Throws PlanShapeError unless the dimension is `wanted` long.
  void require_extent(std::size_t dimension, std::int64_t wanted) const;

  std::int32_t get(std::int64_t position) const noexcept { return data_[position]; }

  /// Writes without comparing or reporting.
  void fill(std::int64_t position, std::span<const BlockId> blocks) noexcept;
  void fill(std::int64_t position, std::int64_t count, std::int32_t value) noexcept;

  /// Writes and reports all of `blocks`.
  void put(std::int64_t position, std::span<const BlockId> blocks);
  /// Writes and reports the entries that differ, run by run.
  void put_changes(std::int64_t position, std::span<const BlockId> blocks);
  void put_change(std::int64_t position, std::int32_t value);
  /// Zeroes [begin, end), and reports from the first to the last entry that was not.
  void clear(std::int64_t begin, std::int64_t end);
  /// Moves entries that may overlap, without reporting.
  void move(std::int64_t from, std::int64_t to, std::int64_t count) noexcept;
  void report(std::int64_t position, std::int64_t count) const {
    if (count > 0) into_.changed(*array_, position, count);
  }

 private:
  const std::string& leaf_;
  StagedArrays into_;
  StagedArray* array_;
  std::int32_t* data_;
};

}  // namespace kvleaf
