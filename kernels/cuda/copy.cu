#include <string>

#include "kvleaf/kernels/cuda.h"
#include "kvleaf/kernels/cuda/device.cuh"

namespace kvleaf::kernels::cuda {

namespace {

constexpr std::uint64_t piece_bytes = std::uint64_t{block_threads} * 4 * 16;

struct Leaves {
  Pages pages[max_leaves];
  std::uint32_t count;
};

Leaves leaves_of(std::span<const Pages> leaves) {
  if (leaves.size() > max_leaves) {
    throw KernelError(std::to_string(leaves.size()) + " leaves in one launch: at most " +
                      std::to_string(max_leaves) + " are allowed");
  }
  Leaves list{};
  for (const Pages& leaf : leaves) list.pages[list.count++] = leaf;
  return list;
}

// Pieces of the largest page: the list is on the device, so every entry is given as many.
std::uint64_t pieces_of(std::span<const Pages> leaves) {
  std::uint64_t largest = 0;
  for (const Pages& leaf : leaves) largest = leaf.page_bytes > largest ? leaf.page_bytes : largest;
  return (largest + piece_bytes - 1) / piece_bytes;
}

__device__ __forceinline__ bool exists(const Leaves& leaves, std::uint32_t leaf, std::int64_t block,
                                       std::int64_t least) {
  return leaf < leaves.count && block >= least && block <= leaves.pages[leaf].blocks;
}

__global__ void copy_kernel(const __grid_constant__ Leaves leaves, const BlockCopy* copies,
                            std::uint64_t count, std::uint64_t pieces) {
  for (std::uint64_t work = blockIdx.x; work < count * pieces; work += gridDim.x) {
    const BlockCopy copy = copies[work / pieces];
    if (!exists(leaves, copy.leaf, copy.dst, 1) || !exists(leaves, copy.leaf, copy.src, 0))
      continue;
    const Pages& leaf = leaves.pages[copy.leaf];
    const std::uint64_t begin = work % pieces * piece_bytes;
    if (begin >= leaf.page_bytes) continue;
    const std::uint64_t left = leaf.page_bytes - begin;
    copy_bytes(leaf.page(copy.dst) + begin, leaf.page(copy.src) + begin,
               left < piece_bytes ? left : piece_bytes, threadIdx.x, blockDim.x);
  }
}

__global__ void clear_kernel(const __grid_constant__ Leaves leaves, const BlockClear* clears,
                             std::uint64_t count, std::uint64_t pieces) {
  for (std::uint64_t work = blockIdx.x; work < count * pieces; work += gridDim.x) {
    const BlockClear clear = clears[work / pieces];
    if (!exists(leaves, clear.leaf, clear.block, 1)) continue;
    const Pages& leaf = leaves.pages[clear.leaf];
    const std::uint64_t begin = work % pieces * piece_bytes;
    if (begin >= leaf.page_bytes) continue;
    const std::uint64_t left = leaf.page_bytes - begin;
    clear_bytes(leaf.page(clear.block) + begin, left < piece_bytes ? left : piece_bytes,
                threadIdx.x, blockDim.x);
  }
}

}  // namespace

bool available() noexcept {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
}

void copy_pages(std::span<const Pages> leaves, std::span<const BlockCopy> copies, Stream stream) {
  const std::uint64_t pieces = pieces_of(leaves);
  if (copies.empty() || pieces == 0) return;
  copy_kernel<<<grid_for(copies.size() * pieces, 1), block_threads, 0, stream>>>(
      leaves_of(leaves), copies.data(), copies.size(), pieces);
  check_launch();
}

void zero_pages(std::span<const Pages> leaves, std::span<const BlockClear> clears, Stream stream) {
  const std::uint64_t pieces = pieces_of(leaves);
  if (clears.empty() || pieces == 0) return;
  clear_kernel<<<grid_for(clears.size() * pieces, 1), block_threads, 0, stream>>>(
      leaves_of(leaves), clears.data(), clears.size(), pieces);
  check_launch();
}

}  // namespace kvleaf::kernels::cuda
