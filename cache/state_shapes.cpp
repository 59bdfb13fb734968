#include "kvleaf/cache/state_shapes.h"

#include <fmt/format.h>

#include <limits>
#include <string_view>
#include <utility>

#include "kvleaf/leaf/errors.h"

namespace kvleaf {
namespace {

constexpr std::uint64_t max_dim = std::numeric_limits<std::int32_t>::max();

std::uint32_t dim(std::uint64_t value, std::string_view what) {
  if (value == 0 || value > max_dim)
    throw InvalidArgument(fmt::format("state: {} is {}; expected 1 to {}", what, value, max_dim));
  return static_cast<std::uint32_t>(value);
}

Slab conv(std::uint64_t width, std::uint32_t kernel, DType dtype) {
  if (kernel < 2)
    throw InvalidArgument(
        fmt::format("state: convolution kernel is {}; expected 2 or more", kernel));
  return {.name = "conv", .shape = {dim(width, "convolution width"), kernel - 1}, .dtype = dtype};
}

Slab recurrent(std::vector<std::uint32_t> shape, DType dtype) {
  for (const std::uint32_t extent : shape) dim(extent, "recurrent dimension");
  return {.name = "recurrent", .shape = std::move(shape), .dtype = dtype};
}

std::uint64_t product(std::uint32_t a, std::uint32_t b) { return std::uint64_t{a} * b; }

}  // namespace

StateCache mamba1_state(Mamba1Shape s, StateDTypes dtypes) {
  return {
      {conv(s.inner, s.kernel, dtypes.conv), recurrent({s.inner, s.d_state}, dtypes.recurrent)}};
}

StateCache mamba2_state(Mamba2Shape s, StateDTypes dtypes) {
  const std::uint64_t width = product(s.heads, s.head_dim) + 2 * product(s.groups, s.d_state);
  return {{conv(width, s.kernel, dtypes.conv),
           recurrent({s.heads, s.head_dim, s.d_state}, dtypes.recurrent)}};
}

StateCache delta_net_state(DeltaNetShape s, StateDTypes dtypes) {
  const std::uint64_t width = 2 * product(s.k_heads, s.k_dim) + product(s.v_heads, s.v_dim);
  return {{conv(width, s.kernel, dtypes.conv),
           recurrent({s.v_heads, s.v_dim, s.k_dim}, dtypes.recurrent)}};
}

StateCache kda_state(LinearShape s, StateDTypes dtypes) {
  return {{conv(3 * product(s.heads, s.head_dim), s.kernel, dtypes.conv),
           recurrent({s.heads, s.head_dim, s.head_dim}, dtypes.recurrent)}};
}

StateCache lightning_state(LinearShape s, StateDTypes dtypes) {
  return {{recurrent({s.heads, s.head_dim, s.head_dim}, dtypes.recurrent)}};
}

StateCache rg_lru_state(ConvShape s, StateDTypes dtypes) {
  return {{conv(s.width, s.kernel, dtypes.conv), recurrent({s.width}, dtypes.recurrent)}};
}

StateCache short_conv_state(ConvShape s, StateDTypes dtypes) {
  return {{conv(s.width, s.kernel, dtypes.conv)}};
}

}  // namespace kvleaf
