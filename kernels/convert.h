// Rows of numbers from one type into another, times a factor: what pages of another type are
// written and quantised pages are read with (quantise.h writes those). One source, compiled three
// times: for AVX-512 and for AVX2, picked where the processor has them, and plain. All give the
// same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvleaf/kernels/number.h"

namespace kvleaf::kernels {

enum class Instructions : std::uint8_t { plain, avx2, avx512 };

/// The fastest that this processor has.
Instructions best_instructions() noexcept;

/// to[i] = from[i] · factor, rounded to the nearest, saturating where the type saturates; `count`
/// elements. `from` and `to` do not overlap.
using ConvertRow = void (*)(const void* from, void* to, std::size_t count, float factor) noexcept;
ConvertRow converter(Number from, Number to,
                     Instructions instructions = best_instructions()) noexcept;

/// scale_for of number.h, for types known at run time: the scale as it is stored in `scale_number`.
float scale_for(float largest, Number to, Number scale_number) noexcept;

float load_number(Number number, const void* at) noexcept;
void store_number(Number number, void* at, float value) noexcept;

}  // namespace kvleaf::kernels
