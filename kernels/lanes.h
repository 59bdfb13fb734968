// Work of a warp as plain code: lanes that share a vector, each with every count-th element, and
// add up what they have. A device runs it with the 32 lanes of a warp; a host with one lane that
// has all of it, so that tests can run the very code that the device runs. Not part of what
// kernels.h offers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvleaf/kernels/layout.h"
#include "kvleaf/kernels/number.h"

namespace kvleaf::kernels {

/// All lanes in one. On a device see cuda/device.cuh.
struct OneLane {
  static constexpr unsigned count = 1;
  KVLEAF_HD unsigned lane() const noexcept { return 0; }
  /// Of all lanes, in every lane.
  KVLEAF_HD float sum(float value) const noexcept { return value; }
};

/// The i-th number at `at`, of a type that is the same for a whole launch.
KVLEAF_HD float load_number_at(Number number, const std::byte* at, std::uint64_t i) noexcept {
  switch (number) {
    case Number::float16: return to_float(reinterpret_cast<const F16*>(at)[i]);
    case Number::bfloat16: return to_float(reinterpret_cast<const BF16*>(at)[i]);
    case Number::float8_e4m3: return to_float(reinterpret_cast<const E4M3*>(at)[i]);
    case Number::float8_e5m2: return to_float(reinterpret_cast<const E5M2*>(at)[i]);
    case Number::int8: return to_float(reinterpret_cast<const std::int8_t*>(at)[i]);
    case Number::float32: break;
  }
  return reinterpret_cast<const float*>(at)[i];
}
/// Wide numbers only.
KVLEAF_HD void store_number_at(Number number, std::byte* at, std::uint64_t i,
                               float value) noexcept {
  if (number == Number::float16) {
    reinterpret_cast<F16*>(at)[i] = from_float<F16>(value);
  } else if (number == Number::bfloat16) {
    reinterpret_cast<BF16*>(at)[i] = from_float<BF16>(value);
  } else {
    reinterpret_cast<float*>(at)[i] = value;
  }
}

}  // namespace kvleaf::kernels
