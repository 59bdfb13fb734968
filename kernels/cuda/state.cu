// A warp for each vector of a state that no other one sees, of each row of the batch.
#include "kvleaf/kernels/check.h"
#include "kvleaf/kernels/cuda.h"
#include "kvleaf/kernels/cuda/device.cuh"
#include "kvleaf/kernels/state_lanes.h"

namespace kvleaf::kernels::cuda {

namespace {

// The lists of a StateBatch: spans do not travel with a launch.
struct Lists {
  const std::int32_t* read_rows;
  const std::int32_t* write_rows;
  const std::int32_t* cu_seqlens_q;
  std::uint64_t rows;
};

Lists lists_of(const StateBatch& batch) {
  return {batch.read_rows.data(), batch.write_rows.data(), batch.cu_seqlens_q.data(),
          batch.read_rows.size()};
}

template <unsigned per_lane>
__global__ void delta_kernel(const __grid_constant__ GatedDeltaRule step,
                             const __grid_constant__ Lists lists) {
  const std::uint64_t vectors = std::uint64_t{step.value_heads} * step.value_dim;
  for (std::uint64_t i = this_warp(); i < lists.rows * vectors; i += all_warps()) {
    const std::uint64_t vector = i % vectors;
    delta_column<per_lane>(step, lists.read_rows, lists.write_rows, lists.cu_seqlens_q,
                           static_cast<std::int64_t>(i / vectors),
                           static_cast<std::uint32_t>(vector / step.value_dim),
                           static_cast<std::uint32_t>(vector % step.value_dim), WarpLanes{});
  }
}

template <unsigned per_lane>
__global__ void mamba2_kernel(const __grid_constant__ Mamba2 step,
                              const __grid_constant__ Lists lists) {
  const std::uint64_t vectors = std::uint64_t{step.heads} * step.head_dim;
  for (std::uint64_t i = this_warp(); i < lists.rows * vectors; i += all_warps()) {
    const std::uint64_t vector = i % vectors;
    mamba2_element<per_lane>(step, lists.read_rows, lists.write_rows, lists.cu_seqlens_q,
                             static_cast<std::int64_t>(i / vectors),
                             static_cast<std::uint32_t>(vector / step.head_dim),
                             static_cast<std::uint32_t>(vector % step.head_dim), WarpLanes{});
  }
}

}  // namespace

void gated_delta_rule(const GatedDeltaRule& step, Stream stream) {
  check_delta_shapes(step);
  const Lists lists = lists_of(step.batch);
  const std::uint64_t warps = lists.rows * step.value_heads * step.value_dim;
  if (warps == 0) return;
  const auto kernel = step.key_dim <= 4 * warp   ? delta_kernel<4>
                      : step.key_dim <= 8 * warp ? delta_kernel<8>
                                                 : delta_kernel<max_state_dim / warp>;
  kernel<<<grid_for(warps, block_warps), block_threads, 0, stream>>>(step, lists);
  check_launch();
}

void mamba2(const Mamba2& step, Stream stream) {
  check_mamba2_shapes(step);
  const Lists lists = lists_of(step.batch);
  const std::uint64_t warps = lists.rows * step.heads * step.head_dim;
  if (warps == 0) return;
  const auto kernel = step.state_dim <= 4 * warp   ? mamba2_kernel<4>
                      : step.state_dim <= 8 * warp ? mamba2_kernel<8>
                                                   : mamba2_kernel<max_state_dim / warp>;
  kernel<<<grid_for(warps, block_warps), block_threads, 0, stream>>>(step, lists);
  check_launch();
}

}  // namespace kvleaf::kernels::cuda
