// Tensor: a view on memory of a cache or of a caller: pointer, shape, strides in elements, element
// type, device. It computes nothing. Copies are views on the same bytes, and a view on a cache's
// memory keeps that memory alive; once the cache was reset, such a view is stale and hands out no
// pointer any more.
//
// Frameworks take and give tensors through DLPack, without a copy: to_dlpack, from_dlpack.
// A Tensor may be read from any thread; the bytes are as safe as whoever writes them.
#pragma once

#include <atomic>
#include <boost/container/static_vector.hpp>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "kvleaf/cache/dlpack.h"
#include "kvleaf/leaf/device.h"
#include "kvleaf/leaf/dtype.h"
#include "kvleaf/leaf/errors.h"

namespace kvleaf {

inline constexpr std::size_t max_tensor_rank = 8;
using Extents = boost::container::static_vector<std::int64_t, max_tensor_rank>;

/// What a view keeps alive. Derive from it to own the bytes.
class TensorOwner {
 public:
  TensorOwner() = default;
  TensorOwner(const TensorOwner&) = delete;
  TensorOwner& operator=(const TensorOwner&) = delete;
  virtual ~TensorOwner() = default;

  /// From now on views on it are stale. May be called while other threads read views.
  void make_stale() noexcept { stale_.store(true, std::memory_order_relaxed); }
  bool stale() const noexcept { return stale_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> stale_{false};
};

class Tensor {
 public:
  /// Undefined: no memory, no shape.
  Tensor() = default;
  /// A view of `shape` at `data`. strides: elements; empty: contiguous, last dimension innermost.
  /// owner: kept alive; none: the caller sees to it that the bytes outlive all views.
  /// Throws InvalidArgument for a negative extent, more than 8 dimensions, or strides of another
  /// rank.
  Tensor(std::byte* data, std::span<const std::int64_t> shape,
         std::span<const std::int64_t> strides, DType dtype, Device device = {},
         std::shared_ptr<TensorOwner> owner = {});
  Tensor(std::byte* data, std::initializer_list<std::int64_t> shape, DType dtype)
      : Tensor(data, std::span(shape.begin(), shape.size()), {}, dtype) {}
  /// A view of a caller's array, [size]. Never written through.
  static Tensor of(std::span<const std::int32_t> values);
  static Tensor of(std::span<const std::int64_t> values);

  bool defined() const noexcept { return defined_; }
  /// Its cache was reset since it was handed out.
  bool stale() const noexcept { return owner_ != nullptr && owner_->stale(); }

  /// First element. Throws InvalidArgument of an undefined tensor, StepError of a stale one.
  std::byte* data() const;
  /// The same, typed. Throws InvalidArgument where T is not as wide as the elements.
  template <class T>
  T* data_as() const {
    check_element(sizeof(T));
    return reinterpret_cast<T*>(data());
  }
  std::span<const std::int64_t> shape() const noexcept { return {shape_.data(), shape_.size()}; }
  /// In elements.
  std::span<const std::int64_t> strides() const noexcept {
    return {strides_.data(), strides_.size()};
  }
  std::size_t rank() const noexcept { return shape_.size(); }
  std::int64_t size() const noexcept;  // elements
  DType dtype() const noexcept { return dtype_; }
  Device device() const noexcept { return device_; }
  bool contiguous() const noexcept;
  const std::shared_ptr<TensorOwner>& owner() const noexcept { return owner_; }

  /// Element [index…] of the leading dimensions: a view of one dimension less for each. Throws
  /// InvalidArgument outside the shape.
  Tensor at(std::initializer_list<std::int64_t> index) const;
  /// The dimensions in another order, as kernels want them: keys of [pages, slots, heads, dim] as
  /// [pages, heads, slots, dim] are permuted({0, 2, 1, 3}). Throws InvalidArgument for what is no
  /// permutation.
  Tensor permuted(std::span<const std::size_t> order) const;
  Tensor permuted(std::initializer_list<std::size_t> order) const {
    return permuted(std::span(order.begin(), order.size()));
  }

  /// "bfloat16 [4, 64, 8, 128] on cpu", "undefined".
  std::string to_string() const;

 private:
  void check_element(std::size_t bytes) const;

  std::byte* data_ = nullptr;
  Extents shape_;
  Extents strides_;
  DType dtype_ = DType::uint8;
  Device device_;
  std::shared_ptr<TensorOwner> owner_;
  bool defined_ = false;
};

/// For a consumer, who calls its deleter. The view lives as long as that. Throws as data().
DLManagedTensor* to_dlpack(const Tensor& tensor);
/// The same with the newer structure (DLPack 1.0), which says that the bytes may be written.
DLManagedTensorVersioned* to_dlpack_versioned(const Tensor& tensor);
DLDevice dlpack_device(Device device) noexcept;

/// Takes over what a producer gave: its deleter runs with the last view. Throws InvalidArgument,
/// taking nothing, for an element type or device that kvleaf has no name for, vector lanes, or more
/// than 8 dimensions.
Tensor from_dlpack(DLManagedTensor* given);
Tensor from_dlpack(DLManagedTensorVersioned* given);

}  // namespace kvleaf
