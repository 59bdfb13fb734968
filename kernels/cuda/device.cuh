// What the device code shares: the lanes of a warp moving bytes, and launches.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kvleaf/kernels/errors.h"
#include "kvleaf/kernels/layout.h"

namespace kvleaf::kernels::cuda {

inline constexpr unsigned warp = 32;
inline constexpr unsigned block_threads = 256;
inline constexpr unsigned block_warps = block_threads / warp;

__device__ __forceinline__ std::uint64_t this_warp() {
  return std::uint64_t{blockIdx.x} * block_warps + threadIdx.x / warp;
}
__device__ __forceinline__ std::uint64_t all_warps() {
  return std::uint64_t{gridDim.x} * block_warps;
}

/// The lanes of this warp, which all come here together: see lanes.h.
struct WarpLanes {
  static constexpr unsigned count = warp;
  __device__ __forceinline__ unsigned lane() const { return threadIdx.x % warp; }
  __device__ __forceinline__ float sum(float value) const {
    for (unsigned distance = warp / 2; distance > 0; distance /= 2) {
      value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    return value;
  }
};

/// `threads` threads, this one the `thread`-th, copy T by T; four loads are in flight before a
/// store.
template <class T>
__device__ __forceinline__ void move(std::byte* dst, const std::byte* src, std::uint64_t bytes,
                                     unsigned thread, unsigned threads) {
  auto* to = reinterpret_cast<T*>(dst);
  const auto* from = reinterpret_cast<const T*>(src);
  const std::uint64_t count = bytes / sizeof(T);
  std::uint64_t i = thread;
  for (; i + 3ull * threads < count; i += 4ull * threads) {
    const T a = from[i], b = from[i + threads], c = from[i + 2ull * threads],
            d = from[i + 3ull * threads];
    to[i] = a;
    to[i + threads] = b;
    to[i + 2ull * threads] = c;
    to[i + 3ull * threads] = d;
  }
  for (; i < count; i += threads) to[i] = from[i];
  for (i = count * sizeof(T) + thread; i < bytes; i += threads) dst[i] = src[i];
}

__device__ __forceinline__ bool aligned(const void* at, const void* as_well, unsigned bytes) {
  return (reinterpret_cast<std::uintptr_t>(at) | reinterpret_cast<std::uintptr_t>(as_well)) %
             bytes ==
         0;
}

/// By 16 bytes where both addresses allow it, else by 4, else by 1.
__device__ __forceinline__ void copy_bytes(std::byte* dst, const std::byte* src,
                                           std::uint64_t bytes, unsigned thread, unsigned threads) {
  if (aligned(dst, src, 16)) return move<uint4>(dst, src, bytes, thread, threads);
  if (aligned(dst, src, 4)) return move<unsigned>(dst, src, bytes, thread, threads);
  move<std::byte>(dst, src, bytes, thread, threads);
}

__device__ __forceinline__ void clear_bytes(std::byte* dst, std::uint64_t bytes, unsigned thread,
                                            unsigned threads) {
  std::uint64_t done = 0;
  if (aligned(dst, dst, 16)) {
    for (std::uint64_t i = thread; i < bytes / 16; i += threads) {
      reinterpret_cast<uint4*>(dst)[i] = uint4{0, 0, 0, 0};
    }
    done = bytes / 16 * 16;
  }
  for (std::uint64_t i = done + thread; i < bytes; i += threads) dst[i] = std::byte{0};
}

/// Whether an entry names a slot that may be written: not padding, not null, not beyond the last
/// block.
KVLEAF_HD bool writable(std::int64_t entry, std::uint32_t slots, std::uint32_t blocks) {
  return entry >= slots && entry < (std::int64_t{blocks} + 1) * slots;
}
/// The same for reading, which may be of the null block.
KVLEAF_HD bool readable(std::int64_t entry, std::uint32_t slots, std::uint32_t blocks) {
  return entry >= 0 && entry < (std::int64_t{blocks} + 1) * slots;
}

/// Blocks for `items`, `per_block` of them in each; kernels stride over what is left.
inline unsigned grid_for(std::uint64_t items, std::uint64_t per_block) {
  const std::uint64_t blocks = (items + per_block - 1) / per_block;
  constexpr std::uint64_t most = 1u << 20;
  return static_cast<unsigned>(blocks < most ? blocks : most);
}

/// Throws what the launch before it reported.
inline void check_launch() {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw DeviceError(cudaGetErrorString(error));
}

}  // namespace kvleaf::kernels::cuda
