#include "kvleaf/kernels/device_memory.h"

#include <cstring>
#include <string>

#if defined(KVLEAF_HAVE_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace kvleaf::kernels {

namespace {

[[noreturn]] void refuse(std::uint64_t bytes, const std::string& kind, const char* why) {
  throw DeviceError(std::to_string(bytes) + " B of " + kind + " are not to be had: " + why);
}

std::string name_of_device(int device) { return "memory of CUDA device " + std::to_string(device); }
constexpr const char* pinned_name = "pinned host memory";

#if defined(KVLEAF_HAVE_CUDA)
void require(cudaError_t error, std::uint64_t bytes, const std::string& kind) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // else the next launch would report it as its own
  refuse(bytes, kind, cudaGetErrorString(error));
}

/// Makes a device this thread's, and the one of before again.
class OnDevice {
 public:
  OnDevice(int device, std::uint64_t bytes) {
    require(cudaGetDevice(&before_), bytes, name_of_device(device));
    require(cudaSetDevice(device), bytes, name_of_device(device));
  }
  ~OnDevice() { (void)cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};
#endif

}  // namespace

#if defined(KVLEAF_HAVE_CUDA)

std::shared_ptr<std::byte> device_memory(std::uint64_t bytes, int device) {
  const OnDevice here(device, bytes);
  void* data = nullptr;
  require(cudaMalloc(&data, bytes > 0 ? bytes : 1), bytes, name_of_device(device));
  std::shared_ptr<std::byte> memory(static_cast<std::byte*>(data),
                                    [](std::byte* begin) { (void)cudaFree(begin); });
  require(cudaMemset(data, 0, bytes), bytes, name_of_device(device));
  // Streams do not wait for the clearing by themselves.
  require(cudaDeviceSynchronize(), bytes, name_of_device(device));
  return memory;
}

std::shared_ptr<std::byte> pinned_memory(std::uint64_t bytes) {
  void* data = nullptr;
  require(cudaHostAlloc(&data, bytes > 0 ? bytes : 1, cudaHostAllocPortable), bytes, pinned_name);
  std::memset(data, 0, bytes);
  return std::shared_ptr<std::byte>(static_cast<std::byte*>(data),
                                    [](std::byte* begin) { (void)cudaFreeHost(begin); });
}

#else

namespace {
constexpr const char* without = "this library was built without CUDA";
}

std::shared_ptr<std::byte> device_memory(std::uint64_t bytes, int device) {
  refuse(bytes, name_of_device(device), without);
}
std::shared_ptr<std::byte> pinned_memory(std::uint64_t bytes) {
  refuse(bytes, pinned_name, without);
}

#endif

}  // namespace kvleaf::kernels
