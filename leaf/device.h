// Where bytes lie: in host memory, or in the memory of one CUDA device.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "kvleaf/leaf/errors.h"

namespace kvleaf {

struct Device {
  enum class Kind : std::uint8_t { cpu, cuda };
  Kind kind = Kind::cpu;
  std::int32_t index = 0;
  bool operator==(const Device&) const = default;
};

/// A device that is not there, or what its runtime reports.
class DeviceError : public KVError {
 public:
  using KVError::KVError;
};

/// "cpu", "cuda:0".
std::string to_string(Device device);
/// "cpu", "cuda" or "cuda:N"; throws InvalidArgument.
Device require_device(std::string_view name);

}  // namespace kvleaf
