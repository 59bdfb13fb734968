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
/// bounds, so rows keep their addresses as batches grow and shrink.
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

  /// Called by a leaf that knows what it wrote: bytes [begin, end) of `array` changed. A planner
  /// turns them into upload ranges. A leaf that reports nothing is taken to have rewritten all.
  void changed(const StagedArray& array, std::int64_t first_element, std::int64_t count) const {
    if (on_change_ != nullptr) on_change_(context_, array, first_element, count);
  }
  using OnChange = void (*)(void* context, const StagedArray&, std::int64_t first, std::int64_t count);
  void set_on_change(OnChange on_change, void* context) noexcept {
    on_change_ = on_change;
    context_ = context;
  }

 private:
  std::span<StagedArray> arrays_;
  OnChange on_change_ = nullptr;
  void* context_ = nullptr;
};

/// What became of one batch row since these arrays were last written.
struct RowDelta {
  bool new_owner = false;  // another request than before, or none was there: write the whole row
  bool padding = false;    // a dummy row: null everywhere, length 1, writes nowhere
  std::uint32_t first_changed_slot = 0;  // slots before it hold what they held
  std::span<const BlockId> blocks;       // slots first_changed_slot … end of the row; null where 0
  std::uint32_t computed = 0;            // tokens computed before this step
  std::uint32_t new_tokens = 0;          // tokens this step computes
  BlockId read_block = null_block;       // states: the block this step reads its state from
  BlockId write_block = null_block;      // states: the block it writes to; equal when in place
};

}  // namespace kvleaf
