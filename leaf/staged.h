// Staged inputs: the arrays that a leaf fills before each forward. Plain views; nothing here owns
// memory, and nothing allocates, so that a planner may call a leaf in every step.
#pragma once

#include <array>
#include <boost/container/static_vector.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "kvleaf/leaf/dtype.h"
#include "kvleaf/leaf/errors.h"
#include "kvleaf/leaf/ids.h"

namespace kvleaf {

inline constexpr std::size_t max_staged_rank = 4;
inline constexpr std::size_t max_staged_inputs = 8;  // arrays of one leaf

/// Name, shape and type of one staged input. `key` must outlive every use: a literal, or interned.
struct StagedInput {
  std::string_view key;
  boost::container::static_vector<std::int64_t, max_staged_rank> shape;
  DType dtype = DType::int32;
};
using StagedInputs = boost::container::static_vector<StagedInput, max_staged_inputs>;

/// One array on the host, narrowed to this batch. Strides are in elements and those of the widest
/// bounds, so rows keep their addresses as batches grow and shrink; the innermost is 1. A leaf
/// writes inside the narrowed shape only. Its memory is zeroed once, before the first write.
struct StagedArray {
  std::string_view key;
  DType dtype = DType::int32;
  std::byte* data = nullptr;
  boost::container::static_vector<std::int64_t, max_staged_rank> shape;
  boost::container::static_vector<std::int64_t, max_staged_rank> strides;

  /// First element of row `index` of the outermost dimension. Throws PlanShapeError if T is not the
  /// array's element size.
  template <class T>
  T* row(std::int64_t index) const {
    check_element(sizeof(T));
    return reinterpret_cast<T*>(data) + index * strides[0];
  }
  void check_element(std::size_t bytes) const;
};

/// The arrays of one leaf in one forward.
class StagedArrays {
 public:
  explicit StagedArrays(std::span<StagedArray> arrays) noexcept : arrays_(arrays) {}
  /// Throws PlanShapeError that names the key and the keys there are.
  StagedArray& at(std::string_view key) const;
  StagedArray* find(std::string_view key) const noexcept;  // nullptr when absent
  std::span<StagedArray> all() const noexcept { return arrays_; }

  /// A delta that reports says so first, then each change: `count` elements of the array's memory
  /// from data + first changed. What it does not report has not changed. A leaf that never reports
  /// is taken to have rewritten all.
  void reports_changes() const {
    if (on_change_ != nullptr && !arrays_.empty()) on_change_(context_, arrays_.front(), 0, 0);
  }
  void changed(const StagedArray& array, std::int64_t first, std::int64_t count) const {
    if (on_change_ != nullptr) on_change_(context_, array, first, count);
  }
  /// Who fills the arrays listens: a planner turns reports into upload ranges. A count of 0 is
  /// reports_changes().
  using OnChange = void (*)(void* context, const StagedArray&, std::int64_t first,
                            std::int64_t count);
  void set_on_change(OnChange on_change, void* context) noexcept {
    on_change_ = on_change;
    context_ = context;
  }

 private:
  std::span<StagedArray> arrays_;
  OnChange on_change_ = nullptr;
  void* context_ = nullptr;
};

/// What became of one batch row since these arrays were last written. A row's end is
/// first_changed_slot + blocks.size(); a row that got shorter has an earlier one.
struct RowDelta {
  /// The row held another request in the last write, or was not part of it: all of it is in
  /// `blocks`, so first_changed_slot is 0.
  bool new_owner = false;
  bool padding = false;  // a dummy row: null everywhere, length 1, writes nowhere; rest is ignored
  std::uint32_t first_changed_slot = 0;  // slots before it hold what they held
  std::span<const BlockId> blocks = {};  // slots first_changed_slot … end of the row; null where 0
  std::uint32_t computed = 0;    // tokens computed before this step; an encoder's leaf: its tokens
  std::uint32_t new_tokens = 0;  // tokens this step computes; an encoder's leaf: 0
  BlockId read_block = null_block;   // states: the block this step reads its state from
  BlockId write_block = null_block;  // states: the block it writes to; equal when in place
  /// States emitted inside a step: the blocks that receive the state at each page boundary that the
  /// step reaches before its end, in order; null where none is wanted. May be cut short.
  std::span<const BlockId> boundary_blocks = {};
  /// What the leaf remembers of this row of these arrays from write to write: columns that may be
  /// nonzero, counted over the widest row. Who calls keeps one word per leaf and row, 0 when the
  /// arrays are zeroed, all ones after write_staged_inputs, and never looks at it. Without one, a
  /// leaf clears whatever is visible behind the row's end: right as well, but not O(changed).
  ///   After a write, entries behind a row's end are 0 as far as the array is visible; what a wider
  ///   write left beyond that stays until it is visible again, and this word says how far it goes.
  std::uint32_t* filled_columns = nullptr;
};

}  // namespace kvleaf
