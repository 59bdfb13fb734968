// Memory of a CUDA device, and host memory that it reads fast (pinned: what uploads of staged
// arrays and offloaded pages go through). Always there: where the library was built without CUDA,
// or no device is found, both say so. Not for a step: taking memory may wait for the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kvleaf/kernels/errors.h"

namespace kvleaf::kernels {

/// Zeroed, of device number `device`, aligned to 256; given back with the last copy of the pointer.
/// Throws DeviceError with the bytes wanted and what the runtime says.
std::shared_ptr<std::byte> device_memory(std::uint64_t bytes, int device = 0);
/// The same of the host: zeroed, page-locked, and readable by every device at the same address.
std::shared_ptr<std::byte> pinned_memory(std::uint64_t bytes);

}  // namespace kvleaf::kernels
