// Whole numbers on the host as tensors: views handed out, ids taken in. Internal to KVCache.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <vector>

#include "kvleaf/cache/tensor.h"

namespace kvleaf {

/// int32, contiguous.
inline Tensor view(const std::shared_ptr<TensorOwner>& owner, const std::int32_t* data,
                   std::initializer_list<std::int64_t> shape) {
  return Tensor(reinterpret_cast<std::byte*>(const_cast<std::int32_t*>(data)),
                std::span(shape.begin(), shape.size()), {}, DType::int32, {}, owner);
}
/// int64 [size].
inline Tensor view(const std::shared_ptr<TensorOwner>& owner,
                   std::span<const std::int64_t> values) {
  const std::int64_t shape[] = {static_cast<std::int64_t>(values.size())};
  return Tensor(reinterpret_cast<std::byte*>(const_cast<std::int64_t*>(values.data())), shape, {},
                DType::int64, {}, owner);
}

/// The numbers of a 1-D host tensor, int32 or int64 of 32 bits. Throws PlanShapeError,
/// InvalidArgument for a number that is larger; `name` is what they call it.
void read_ids(const Tensor& tensor, const char* name, std::vector<std::int32_t>& out);

}  // namespace kvleaf
