#include "kvleaf/cache/index_tensors.h"

#include <fmt/format.h>

namespace kvleaf {

void read_ids(const Tensor& tensor, const char* name, std::vector<std::int32_t>& out) {
  const auto refuse = [&](const char* wanted) {
    throw PlanShapeError(fmt::format("{} is {}; expected {}", name, tensor.to_string(), wanted));
  };
  if (!tensor.defined() || tensor.rank() != 1) refuse("one dimension");
  if (tensor.device().kind != Device::Kind::cpu) refuse("a tensor on the host");
  const std::int64_t count = tensor.shape()[0];
  const std::int64_t stride = tensor.strides()[0];
  out.resize(static_cast<std::size_t>(count));
  if (tensor.dtype() == DType::int32) {
    const auto* ids = tensor.data_as<std::int32_t>();
    for (std::int64_t i = 0; i < count; ++i) out[static_cast<std::size_t>(i)] = ids[i * stride];
  } else if (tensor.dtype() == DType::int64) {
    const auto* ids = tensor.data_as<std::int64_t>();
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t id = ids[i * stride];
      if (id != static_cast<std::int32_t>(id))
        throw InvalidArgument(
            fmt::format("{}: entry {} is {}; expected a number of 32 bits", name, i, id));
      out[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(id);
    }
  } else {
    refuse("int32 or int64");
  }
}

}  // namespace kvleaf
