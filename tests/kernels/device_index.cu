// The index functions on the device, for V-02.
#include <cuda_runtime.h>

#include <stdexcept>
#include <vector>

#include "kernels/index_case.h"

namespace kvleaf::kernels::test {

namespace {

__global__ void index_kernel(const IndexCase* cases, IndexResult* results, std::size_t count) {
  const std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) results[i] = index_of(cases[i]);
}

}  // namespace

std::vector<IndexResult> index_on_device(std::span<const IndexCase> cases) {
  std::vector<IndexResult> results(cases.size());
  void* in = nullptr;
  void* out = nullptr;
  cudaMalloc(&in, cases.size_bytes());
  cudaMalloc(&out, cases.size() * sizeof(IndexResult));
  cudaMemcpy(in, cases.data(), cases.size_bytes(), cudaMemcpyHostToDevice);
  index_kernel<<<static_cast<unsigned>((cases.size() + 255) / 256), 256>>>(
      static_cast<const IndexCase*>(in), static_cast<IndexResult*>(out), cases.size());
  cudaMemcpy(results.data(), out, cases.size() * sizeof(IndexResult), cudaMemcpyDeviceToHost);
  cudaFree(in);
  cudaFree(out);
  if (cudaGetLastError() != cudaSuccess) throw std::runtime_error("the index kernel failed");
  return results;
}

}  // namespace kvleaf::kernels::test
