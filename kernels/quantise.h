// Rows quantised with scales of their own: each group of numbers gets the scale that makes its
// largest fill the range of the type. Written three times: for AVX-512 and for AVX2, picked where
// the processor has them, and plain. All give the same bits.
#pragma once

#include <cstddef>

#include "kvleaf/kernels/convert.h"

namespace kvleaf::kernels {

/// `groups` times `granularity` numbers, and the scale of each group as a `scale_number`:
///   scale   scale_for(the largest finite magnitude of the group)
///   to[i]   from[i] · (1 / scale), rounded to the nearest, saturating; of infinity the largest
/// What is read and what is written do not overlap.
using QuantiseRow = void (*)(const void* from, void* to, void* scales, std::size_t groups,
                             std::size_t granularity, Number scale_number) noexcept;

/// from: float32, float16 or bfloat16; to: float8_e4m3, float8_e5m2 or int8. Null for others.
QuantiseRow row_quantiser(Number from, Number to,
                          Instructions instructions = best_instructions()) noexcept;

}  // namespace kvleaf::kernels
