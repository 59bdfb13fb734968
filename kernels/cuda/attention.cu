// A warp for each query token and head.
#include "kvleaf/kernels/attention_lanes.h"
#include "kvleaf/kernels/check.h"
#include "kvleaf/kernels/cuda.h"
#include "kvleaf/kernels/cuda/device.cuh"

namespace kvleaf::kernels::cuda {

namespace {

template <unsigned per_lane>
__global__ void attention_kernel(const __grid_constant__ AttentionWork work) {
  const std::uint64_t count = static_cast<std::uint64_t>(work.tokens) * work.query_heads;
  for (std::uint64_t i = this_warp(); i < count; i += all_warps()) {
    attend<per_lane>(work, static_cast<std::int64_t>(i / work.query_heads),
                     static_cast<std::uint32_t>(i % work.query_heads), WarpLanes{});
  }
}

}  // namespace

void paged_attention(const PagedAttention& attention, std::int64_t tokens, Stream stream) {
  check_attention_shapes(attention);
  const AttentionWork work = work_of(attention, tokens);
  const std::uint64_t warps = static_cast<std::uint64_t>(tokens) * attention.query_heads;
  if (tokens <= 0 || warps == 0) return;
  const std::uint32_t key = attention.pages.layout.key_dim;
  const std::uint32_t widest = key > work.value_width ? key : work.value_width;
  const auto kernel = widest <= 4 * warp   ? attention_kernel<4>
                      : widest <= 8 * warp ? attention_kernel<8>
                                           : attention_kernel<max_head_dim / warp>;
  kernel<<<grid_for(warps, block_warps), block_threads, 0, stream>>>(work);
  check_launch();
}

}  // namespace kvleaf::kernels::cuda
