// Numbers of pages: float, half, bfloat16, two kinds of 8-bit float and int8, and how they become
// one another. The same code runs on the host and on the device, and gives the same bits.
//
//   type       bits  exponent  largest    beyond the largest     NaN
//   float32      32         8  3.4e38     infinity               kept
//   bfloat16     16         8  3.4e38     infinity               kept
//   float16      16         5  65504      infinity               kept
//   E5M2          8         5  57344      57344 (saturates)      kept
//   E4M3          8         4  448        448 (saturates)        kept; there is no infinity
//   int8          8         –  127        127 (saturates)        becomes 0; -128 is never written
//
// Rounding is to the nearest, ties to even, subnormals included. No branch depends on the value in
// a way that keeps a compiler from turning a loop of these into vector code.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define KVLEAF_HD __host__ __device__ __forceinline__
#elif defined(__GNUC__)
// Always, because a loop compiled for AVX2 must not call a copy compiled for SSE2.
#define KVLEAF_HD inline __attribute__((always_inline))
#else
#define KVLEAF_HD inline
#endif

namespace kvleaf::kernels {

/// The type of an element, where it is only known at run time.
enum class Number : std::uint8_t { float32, float16, bfloat16, float8_e4m3, float8_e5m2, int8 };

KVLEAF_HD constexpr std::uint32_t size_of(Number number) noexcept {
  switch (number) {
    case Number::float32: return 4;
    case Number::float16:
    case Number::bfloat16: return 2;
    case Number::float8_e4m3:
    case Number::float8_e5m2:
    case Number::int8: return 1;
  }
  return 0;
}

struct F16 {
  std::uint16_t bits;
};
struct BF16 {
  std::uint16_t bits;
};
struct E4M3 {
  std::uint8_t bits;
};
struct E5M2 {
  std::uint8_t bits;
};
static_assert(sizeof(F16) == 2 && sizeof(BF16) == 2 && sizeof(E4M3) == 1 && sizeof(E5M2) == 1);

KVLEAF_HD std::uint32_t bits_of(float value) noexcept {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  std::uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}
KVLEAF_HD float float_of(std::uint32_t bits) noexcept {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

/// `yes` or `no` without a branch: with `?:` gcc moves float work into one arm, and then finds
/// control flow where it looks for a vector loop.
KVLEAF_HD std::uint32_t select(bool condition, std::uint32_t yes, std::uint32_t no) noexcept {
  const std::uint32_t mask = 0u - static_cast<std::uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

/// 2^exponent, for a normal result.
KVLEAF_HD float power_of_two(int exponent) noexcept {
  return float_of(static_cast<std::uint32_t>(exponent + 127) << 23);
}

/// The magnitude of a float, at most the type's largest (or the power of two behind it, for
/// infinity), as the code of a type of `exponent_bits` and `mantissa_bits`, both less than a
/// float's; rounded.
template <int exponent_bits, int mantissa_bits>
KVLEAF_HD std::uint32_t narrow_magnitude(std::uint32_t magnitude) noexcept {
  constexpr int bias = (1 << (exponent_bits - 1)) - 1;
  constexpr std::uint32_t first_normal = static_cast<std::uint32_t>(127 - bias + 1) << 23;
  // The code counts steps. A step is worth the last bit of a number of this exponent, or of the
  // least normal one; added to a number whose own last bit is worth as much, the addition itself
  // rounds.
  const std::uint32_t exponent = magnitude & 0x7f800000u;
  const std::uint32_t scale = exponent > first_normal ? exponent : first_normal;
  const std::uint32_t magic = scale + (static_cast<std::uint32_t>(23 - mantissa_bits) << 23);
  const std::uint32_t steps = bits_of(float_of(magnitude) + float_of(magic)) - magic;
  // Behind the codes of all lower exponents; a carry runs into the next one, where it belongs.
  return steps + ((scale - first_normal) >> (23 - mantissa_bits));
}

/// The reverse, exact, for codes that stand for finite numbers.
template <int exponent_bits, int mantissa_bits>
KVLEAF_HD float widen_magnitude(std::uint32_t code) noexcept {
  constexpr int bias = (1 << (exponent_bits - 1)) - 1;
  // As a float with the wrong bias, subnormals included; one exact product puts the bias right.
  return float_of(code << (23 - mantissa_bits)) * power_of_two(127 - bias);
}

KVLEAF_HD float to_float(float value) noexcept { return value; }
KVLEAF_HD float to_float(BF16 value) noexcept {
  return float_of(static_cast<std::uint32_t>(value.bits) << 16);
}
KVLEAF_HD float to_float(F16 value) noexcept {
  const std::uint32_t code = value.bits & 0x7fffu;
  const std::uint32_t finite = bits_of(widen_magnitude<5, 10>(code));
  // Infinity and NaN: the largest exponent of either format, mantissa in place.
  const std::uint32_t magnitude =
      select(code >= 0x7c00u, 0x7f800000u | ((code & 0x3ffu) << 13), finite);
  return float_of(magnitude | (static_cast<std::uint32_t>(value.bits & 0x8000u) << 16));
}
KVLEAF_HD float to_float(E5M2 value) noexcept {
  // The upper half of a float16.
  return to_float(F16{static_cast<std::uint16_t>(value.bits << 8)});
}
KVLEAF_HD float to_float(E4M3 value) noexcept {
  const std::uint32_t code = value.bits & 0x7fu;
  const std::uint32_t finite = bits_of(widen_magnitude<4, 3>(code));
  const std::uint32_t magnitude = select(code == 0x7fu, 0x7fc00000u, finite);
  return float_of(magnitude | (static_cast<std::uint32_t>(value.bits & 0x80u) << 24));
}
KVLEAF_HD float to_float(std::int8_t value) noexcept { return static_cast<float>(value); }

/// from_float<T>(value): the T nearest to `value`.
template <class T>
struct FromFloat;

template <>
struct FromFloat<float> {
  KVLEAF_HD static float convert(float value) noexcept { return value; }
};
template <>
struct FromFloat<BF16> {
  KVLEAF_HD static BF16 convert(float value) noexcept {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const std::uint32_t nan = (bits >> 16) | 0x40u;  // quiet, and never rounded up to infinity
    return BF16{
        static_cast<std::uint16_t>(select((bits & 0x7fffffffu) > 0x7f800000u, nan, rounded))};
  }
};
template <>
struct FromFloat<F16> {
  KVLEAF_HD static F16 convert(float value) noexcept {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    const std::uint32_t at_most = magnitude < bits_of(65536.0f) ? magnitude : bits_of(65536.0f);
    const std::uint32_t code = narrow_magnitude<5, 10>(at_most);  // of 2^16: infinity's
    const std::uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    return F16{static_cast<std::uint16_t>(select(magnitude > 0x7f800000u, nan, code) |
                                          ((bits >> 16) & 0x8000u))};
  }
};
/// Eight-bit floats: `largest` is the bits of the largest finite number, as a float.
template <int exponent_bits, int mantissa_bits, std::uint32_t largest, std::uint32_t nan>
KVLEAF_HD std::uint8_t narrow_to_8_bits(float value) noexcept {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t at_most = magnitude < largest ? magnitude : largest;
  const std::uint32_t code = narrow_magnitude<exponent_bits, mantissa_bits>(at_most);
  return static_cast<std::uint8_t>(select(magnitude > 0x7f800000u, nan, code) |
                                   ((bits >> 24) & 0x80u));
}
template <>
struct FromFloat<E4M3> {
  KVLEAF_HD static E4M3 convert(float value) noexcept {
    return E4M3{narrow_to_8_bits<4, 3, 0x43e00000, 0x7f>(value)};
  }
};
template <>
struct FromFloat<E5M2> {
  KVLEAF_HD static E5M2 convert(float value) noexcept {
    return E5M2{narrow_to_8_bits<5, 2, 0x47600000, 0x7e>(value)};
  }
};
template <>
struct FromFloat<std::int8_t> {
  KVLEAF_HD static std::int8_t convert(float value) noexcept {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    const std::uint32_t at_most = magnitude < bits_of(127.0f) ? magnitude : bits_of(127.0f);
    const std::uint32_t number = select(magnitude > 0x7f800000u, 0, at_most);
    const float bounded = float_of(number | (bits & 0x80000000u));
    // The last bit of 1.5 · 2^23 is worth 1: the addition rounds to an integer.
    return static_cast<std::int8_t>(bits_of(bounded + 12582912.0f) - bits_of(12582912.0f));
  }
};
template <class T>
KVLEAF_HD T from_float(float value) noexcept {
  return FromFloat<T>::convert(value);
}

/// The Number of a type, and the largest finite value that it stands for.
template <class T>
struct NumberTraits;
template <>
struct NumberTraits<float> {
  static constexpr Number number = Number::float32;
  static constexpr float largest = 3.4028234663852886e38f;
};
template <>
struct NumberTraits<F16> {
  static constexpr Number number = Number::float16;
  static constexpr float largest = 65504.0f;
};
template <>
struct NumberTraits<BF16> {
  static constexpr Number number = Number::bfloat16;
  static constexpr float largest = 3.3895313892515355e38f;
};
template <>
struct NumberTraits<E4M3> {
  static constexpr Number number = Number::float8_e4m3;
  static constexpr float largest = 448.0f;
};
template <>
struct NumberTraits<E5M2> {
  static constexpr Number number = Number::float8_e5m2;
  static constexpr float largest = 57344.0f;
};
template <>
struct NumberTraits<std::int8_t> {
  static constexpr Number number = Number::int8;
  static constexpr float largest = 127.0f;
};

/// The scale with which values of at most `largest` fill the range of a type whose largest is
/// `range`: rounded up, so that nothing finite saturates, and always finite and positive (1 for
/// zeros; the Scale's largest where even that does not reach). Scale: float, F16 or BF16.
template <class Scale>
KVLEAF_HD Scale scale_for(float largest, float range) noexcept {
  if (largest == 0) return from_float<Scale>(1.0f);
  float ideal = largest / range;
  if (ideal >= NumberTraits<Scale>::largest) return from_float<Scale>(NumberTraits<Scale>::largest);
  ideal = ideal > power_of_two(-126) ? ideal : power_of_two(-126);  // its reciprocal is finite
  if constexpr (sizeof(Scale) == sizeof(float)) {
    return ideal;
  } else {
    // Codes of positive numbers follow one another.
    Scale stored = from_float<Scale>(ideal);
    if (to_float(stored) < ideal) ++stored.bits;
    return stored;
  }
}

/// Stands for a type in a call of `with_number`.
template <class T>
struct NumberTag {
  using type = T;
};

/// Calls use(NumberTag<T>{}) with the type of `number`.
template <class Use>
decltype(auto) with_number(Number number, Use&& use) {
  switch (number) {
    case Number::float16: return use(NumberTag<F16>{});
    case Number::bfloat16: return use(NumberTag<BF16>{});
    case Number::float8_e4m3: return use(NumberTag<E4M3>{});
    case Number::float8_e5m2: return use(NumberTag<E5M2>{});
    case Number::int8: return use(NumberTag<std::int8_t>{});
    case Number::float32: break;
  }
  return use(NumberTag<float>{});
}

/// The largest finite value of `number`.
inline float largest_of(Number number) noexcept {
  return with_number(number,
                     [](auto tag) { return NumberTraits<typename decltype(tag)::type>::largest; });
}

constexpr const char* name_of(Number number) noexcept {
  switch (number) {
    case Number::float32: return "float32";
    case Number::float16: return "float16";
    case Number::bfloat16: return "bfloat16";
    case Number::float8_e4m3: return "float8_e4m3";
    case Number::float8_e5m2: return "float8_e5m2";
    case Number::int8: return "int8";
  }
  return "?";
}

}  // namespace kvleaf::kernels
