#include "kvleaf/group/leaf_arrays.h"

#include <fmt/format.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

namespace kvleaf {
namespace {

// Tables of long requests spread the entries that a step writes over as many memory pages as there
// are rows: huge pages keep them within reach of the processor's address translation.
constexpr std::size_t huge_page = std::size_t{2} << 20;

std::size_t bytes_of(const StagedArray& array) {
  std::size_t count = size_of(array.dtype);
  for (const std::int64_t extent : array.shape) count *= static_cast<std::size_t>(extent);
  return count;
}

}  // namespace

void LeafArrays::Free::operator()(std::byte* memory) const noexcept {
  ::operator delete[](memory, std::align_val_t{alignment});
}

LeafArrays::Memory LeafArrays::zeroed(std::size_t bytes) {
  const Free free{bytes >= huge_page ? huge_page : std::size_t{64}};
  auto* memory = static_cast<std::byte*>(
      ::operator new[](std::max<std::size_t>(bytes, 1), std::align_val_t{free.alignment}));
#if defined(__linux__)
  if (bytes >= huge_page) madvise(memory, bytes / huge_page * huge_page, MADV_HUGEPAGE);
#endif
  std::memset(memory, 0, bytes);
  return Memory(memory, free);
}

LeafArrays::LeafArrays(const KVLeafRegion& leaf, std::uint32_t max_batch, std::uint32_t columns)
    : leaf_(&leaf) {
  for (const StagedInput& input : leaf.staged_input_shapes(max_batch, columns)) {
    StagedArray array;
    array.key = input.key;
    array.dtype = input.dtype;
    array.shape = input.shape;
    array.strides.resize(input.shape.size(), 1);
    for (std::size_t d = input.shape.size(); d-- > 1;)
      array.strides[d - 1] = array.strides[d] * input.shape[d];
    memory_.push_back(zeroed(bytes_of(array)));
    array.data = memory_.back().get();
    widest_.push_back(array);
    narrowed_.push_back(array);
    dirty_.emplace_back().reserve(std::size_t{max_batch} * 4 + 16);
  }
}

std::size_t LeafArrays::index_of(std::string_view key) const {
  for (std::size_t i = 0; i < size(); ++i) {
    if (narrowed_[i].key == key) return i;
  }
  std::string keys;
  for (const StagedArray& array : narrowed_)
    keys += fmt::format("{}'{}'", keys.empty() ? "" : ", ", array.key);
  throw PlanShapeError(
      fmt::format("leaf '{}' stages no '{}'; it stages {}", leaf_->leaf_id(), key, keys));
}

void LeafArrays::narrow(std::uint32_t batch, std::uint32_t num_blocks) {
  if (batch_ == batch && num_blocks_ == num_blocks) return;
  batch_ = 0;  // where a leaf refuses its shape
  const StagedInputs inputs = leaf_->staged_input_shapes(batch, num_blocks);
  if (inputs.size() != size()) {
    throw PlanShapeError(
        fmt::format("leaf '{}' stages {} arrays for this batch and {} at the widest",
                    leaf_->leaf_id(), inputs.size(), size()));
  }
  for (std::size_t a = 0; a < size(); ++a) {
    const StagedArray& widest = widest_[a];
    if (inputs[a].key != widest.key || inputs[a].shape.size() != widest.shape.size()) {
      throw PlanShapeError(
          fmt::format("leaf '{}': array {} is '{}' for this batch and '{}' at the widest",
                      leaf_->leaf_id(), a, inputs[a].key, widest.key));
    }
    for (std::size_t d = 0; d < widest.shape.size(); ++d) {
      if (inputs[a].shape[d] > widest.shape[d]) {
        throw PlanShapeError(
            fmt::format("leaf '{}': '{}' grows to {} in dimension {}, past its widest {}",
                        leaf_->leaf_id(), widest.key, inputs[a].shape[d], d, widest.shape[d]));
      }
      narrowed_[a].shape[d] = inputs[a].shape[d];
    }
  }
  batch_ = batch;
  num_blocks_ = num_blocks;
}

StagedArrays LeafArrays::open_whole() {
  for (auto& ranges : dirty_) ranges.clear();
  reported_ = false;
  return StagedArrays({narrowed_.data(), size()});
}

StagedArrays LeafArrays::open_delta() {
  StagedArrays into = open_whole();
  into.set_on_change(&on_change, this);
  return into;
}

void LeafArrays::on_change(void* context, const StagedArray& array, std::int64_t first,
                           std::int64_t count) {
  auto& self = *static_cast<LeafArrays*>(context);
  self.reported_ = true;
  if (count == 0) return;
  const std::uint64_t size = size_of(array.dtype);
  const ByteRange range{static_cast<std::uint64_t>(first) * size,
                        static_cast<std::uint64_t>(first + count) * size};
  auto& ranges = self.dirty_[static_cast<std::size_t>(&array - self.narrowed_.data())];
  if (!ranges.empty() && ranges.back().end == range.begin) {
    ranges.back().end = range.end;
  } else {
    ranges.push_back(range);
  }
}

void LeafArrays::close() {
  if (reported_) return;
  for (std::size_t a = 0; a < size(); ++a) {  // row by row of the outermost dimension
    const StagedArray& array = narrowed_[a];
    if (array.shape.empty()) continue;
    const std::uint64_t size = size_of(array.dtype);
    const auto row_elements =
        static_cast<std::uint64_t>(array.shape.size() > 1 ? array.shape[1] * array.strides[1] : 1);
    for (std::int64_t i = 0; i < array.shape[0]; ++i) {
      const std::uint64_t begin = static_cast<std::uint64_t>(i * array.strides[0]) * size;
      dirty_[a].push_back({begin, begin + row_elements * size});
    }
  }
}

void LeafArrays::copy_changes(const LeafArrays& from) {
  for (std::size_t a = 0; a < size(); ++a) {
    const std::byte* source = from.widest_[a].data;
    std::byte* target = widest_[a].data;
    for (const ByteRange& range : from.dirty_[a])
      std::memcpy(target + range.begin, source + range.begin, range.end - range.begin);
  }
}

void LeafArrays::zero() {
  for (const StagedArray& array : widest_) std::memset(array.data, 0, bytes_of(array));
}

}  // namespace kvleaf
