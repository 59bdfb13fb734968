// LeafArrays: the staged arrays of one leaf on the host, at fixed addresses, as wide as they can
// get and narrowed to each batch; and which of their bytes the plan that lies in them has changed.
// Internal to the step planner.
#pragma once

#include <boost/container/static_vector.hpp>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "kvleaf/leaf/leaf.h"
#include "kvleaf/pool/geometry.h"

namespace kvleaf {

class LeafArrays {
 public:
  /// Zeros, for batches of at most max_batch rows of at most `columns` blocks.
  LeafArrays(const KVLeafRegion& leaf, std::uint32_t max_batch, std::uint32_t columns);
  LeafArrays(LeafArrays&&) = default;
  LeafArrays(const LeafArrays&) = delete;
  LeafArrays& operator=(const LeafArrays&) = delete;

  std::span<const StagedArray> arrays() const noexcept { return {narrowed_.data(), size()}; }
  /// Of the array `key`. Throws PlanShapeError that names the keys there are.
  std::size_t index_of(std::string_view key) const;
  /// Bytes that the last write changed.
  std::span<const ByteRange> dirty(std::size_t index) const noexcept { return dirty_[index]; }

  /// For a batch whose longest row has num_blocks. Throws PlanShapeError where the leaf declares
  /// other arrays than at the widest, or wider ones.
  void narrow(std::uint32_t batch, std::uint32_t num_blocks);
  /// What a leaf is to write into, whole or, where it tells what it changes, in part.
  StagedArrays open_whole();
  StagedArrays open_delta();
  /// It has written. All has changed if it told nothing.
  void close();
  /// What the last write into `from` changed is brought over.
  void copy_changes(const LeafArrays& from);
  void zero();

 private:
  struct Free {
    std::size_t alignment = 64;
    void operator()(std::byte* memory) const noexcept;
  };
  using Memory = std::unique_ptr<std::byte[], Free>;
  using Arrays = boost::container::static_vector<StagedArray, max_staged_inputs>;
  static Memory zeroed(std::size_t bytes);
  static void on_change(void* self, const StagedArray& array, std::int64_t first,
                        std::int64_t count);
  std::size_t size() const noexcept { return narrowed_.size(); }

  const KVLeafRegion* leaf_;
  std::vector<Memory> memory_;
  Arrays widest_, narrowed_;
  std::vector<std::vector<ByteRange>> dirty_;  // per array
  bool reported_ = false;
  std::uint32_t batch_ = 0;  // what narrowed_ was narrowed to; 0: nothing yet
  std::uint32_t num_blocks_ = 0;
};

}  // namespace kvleaf
