#include "kvleaf/kernels/quantise.h"

#include <cstdint>
#include <type_traits>

#include "kvleaf/kernels/instructions.h"

#if KVLEAF_HAS_AVX2
#if !defined(__clang__)
// Headers of gcc 12 leave lanes undefined on purpose, and gcc warns of it where they are inlined.
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#endif

namespace kvleaf::kernels {

namespace {

// A group's bounded numbers, by far the most, take a short way: finite, and after scaling no larger
// than the type's largest but for rounding. Two steps of it are written for each set of
// instructions:
//   largest   the largest magnitude as an integer of the number's own bits; beyond infinity's: NaN
//   narrow    from[i] · factor, rounded; what is bounded needs no care for infinities and NaN
// The rest is one piece of plain code.

template <class T>
using Bits = std::conditional_t<sizeof(T) == 2, std::uint16_t, std::uint32_t>;
template <class T>
constexpr Bits<T> magnitude_mask = static_cast<Bits<T>>(~Bits<T>{0}) >> 1;

/// As narrow_magnitude of number.h, of a bounded number.
template <class To>
struct Narrow {
  static constexpr int exponent_bits = std::is_same_v<To, E4M3> ? 4 : 5;
  static constexpr int mantissa_bits = 7 - exponent_bits;
  static constexpr int bias = (1 << (exponent_bits - 1)) - 1;
  static constexpr std::uint32_t least_exponent = 127 - bias + 1;  // of normal numbers, a float's
  static constexpr int shift = 23 - mantissa_bits;

  /// What is added to a magnitude of this exponent, so that the sum's last bits are its code: the
  /// addition rounds, and the codes of all lower exponents are in the last bits already.
  static constexpr std::uint32_t magic(std::uint32_t exponent) {
    return ((exponent + static_cast<std::uint32_t>(shift)) << 23) +
           ((exponent - least_exponent) << mantissa_bits);
  }
};
template <>
struct Narrow<std::int8_t> {
  static constexpr float magic = 12582912.0f;  // 1.5 · 2^23: the last bit is worth 1
};

struct Plain {
  template <class From>
  static Bits<From> largest(const From* from, std::size_t count) noexcept {
    Bits<From> largest = 0;
    for (std::size_t i = 0; i < count; ++i) {
      Bits<From> bits;
      __builtin_memcpy(&bits, from + i, sizeof bits);
      bits &= magnitude_mask<From>;
      largest = bits > largest ? bits : largest;
    }
    return largest;
  }
  template <class From, class To>
  static void narrow(const From* from, To* to, std::size_t count, float factor) noexcept {
    for (std::size_t i = 0; i < count; ++i) to[i] = from_float<To>(to_float(from[i]) * factor);
  }
};

#if KVLEAF_HAS_AVX2

// Keeps the compiler from making one operation, rounded once, of the product before and the sum
// behind. A macro, since the registers of a function depend on what it is compiled for.
#define KVLEAF_ROUNDED(product) __asm__("" : "+x"(product))

// Everything that is inlined into a function for AVX2 must be for AVX2 itself.
#define KVLEAF_INLINE_AVX2 KVLEAF_AVX2 __attribute__((always_inline)) static inline

struct Avx2 {
  template <class From>
  KVLEAF_AVX2 static Bits<From> largest(const From* from, std::size_t count) noexcept {
    constexpr std::size_t lanes = 32 / sizeof(From);
    __m256i most = _mm256_setzero_si256();
    std::size_t i = 0;
    for (; i + lanes <= count; i += lanes) {
      const __m256i bits = load(from + i);
      if constexpr (sizeof(From) == 2) {
        most = _mm256_max_epu16(most, _mm256_and_si256(bits, _mm256_set1_epi16(0x7fff)));
      } else {
        most = _mm256_max_epu32(most, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
      }
    }
    const Bits<From> rest = Plain::largest(from + i, count - i);
    const Bits<From> all =
        largest_lane<From>(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    return all > rest ? all : rest;
  }

  template <class From, class To>
  KVLEAF_AVX2 static void narrow(const From* from, To* to, std::size_t count,
                                 float factor) noexcept {
    const __m256 by = _mm256_set1_ps(factor);
    std::size_t i = 0;
    for (; i + 32 <= count; i += 32) {
      const __m256i a = code<To>(_mm256_mul_ps(floats(from + i), by));
      const __m256i b = code<To>(_mm256_mul_ps(floats(from + i + 8), by));
      const __m256i c = code<To>(_mm256_mul_ps(floats(from + i + 16), by));
      const __m256i d = code<To>(_mm256_mul_ps(floats(from + i + 24), by));
      // Packed within halves of 128 bits, and then put in order.
      const __m256i bytes =
          _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
      const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i),
                          _mm256_permutevar8x32_epi32(bytes, order));
    }
    Plain::narrow(from + i, to + i, count - i, factor);
  }

  /// The largest of the lanes of two vectors.
  template <class From>
  KVLEAF_INLINE_AVX2 Bits<From> largest_lane(__m128i a, __m128i b) noexcept {
    if constexpr (sizeof(From) == 2) {
      // There is an instruction for the least.
      const __m128i less = _mm_xor_si128(_mm_max_epu16(a, b), _mm_set1_epi16(-1));
      return static_cast<std::uint16_t>(~_mm_cvtsi128_si32(_mm_minpos_epu16(less)));
    } else {
      __m128i most = _mm_max_epu32(a, b);
      most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4e));
      most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0xb1));
      return static_cast<std::uint32_t>(_mm_cvtsi128_si32(most));
    }
  }

 private:
  KVLEAF_INLINE_AVX2 __m256i load(const void* from) noexcept {
    return _mm256_loadu_si256(static_cast<const __m256i*>(from));
  }
  KVLEAF_INLINE_AVX2 __m256 floats(const float* from) noexcept { return _mm256_loadu_ps(from); }
  KVLEAF_INLINE_AVX2 __m256 floats(const BF16* from) noexcept {
    return _mm256_castsi256_ps(_mm256_slli_epi32(words(from), 16));
  }
  KVLEAF_INLINE_AVX2 __m256 floats(const F16* from) noexcept {
    // As a float with the wrong bias, which one exact product puts right: widen_magnitude.
    const __m256i bits = words(from);
    const __m256i magnitude =
        _mm256_slli_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x7fff)), 13);
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x8000)), 16);
    const __m256 value =
        _mm256_mul_ps(_mm256_castsi256_ps(magnitude), _mm256_set1_ps(power_of_two(127 - 15)));
    return _mm256_or_ps(value, _mm256_castsi256_ps(sign));
  }
  KVLEAF_INLINE_AVX2 __m256i words(const void* from) noexcept {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)));
  }

  /// In each lane the byte that stands for it.
  template <class To>
  KVLEAF_INLINE_AVX2 __m256i code(__m256 value) noexcept {
    if constexpr (std::is_same_v<To, std::int8_t>) {
      KVLEAF_ROUNDED(value);
      const __m256 sum = _mm256_add_ps(value, _mm256_set1_ps(Narrow<To>::magic));
      return _mm256_and_si256(_mm256_castps_si256(sum), _mm256_set1_epi32(0xff));
    } else {
      using N = Narrow<To>;
      const __m256i bits = _mm256_castps_si256(value);
      const __m256i exponent =
          _mm256_max_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x7f800000)),
                           _mm256_set1_epi32(N::least_exponent << 23));
      // magic(exponent), and the part in the last bits of it apart.
      const __m256 magic =
          _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(N::shift << 23)));
      const __m256i below =
          _mm256_sub_epi32(_mm256_srli_epi32(exponent, N::shift),
                           _mm256_set1_epi32(N::least_exponent << N::mantissa_bits));
      const __m256 magnitude =
          _mm256_and_ps(value, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)));
      const __m256i sum = _mm256_castps_si256(_mm256_add_ps(magnitude, magic));
      return _mm256_or_si256(
          _mm256_and_si256(_mm256_add_epi32(sum, below), _mm256_set1_epi32(0x7f)),
          _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80)));
    }
  }
};

#endif
#if KVLEAF_HAS_AVX512

#define KVLEAF_INLINE_AVX512 KVLEAF_AVX512 __attribute__((always_inline)) static inline

/// magic() of every exponent that a bounded number has, where the last bits of the exponent point.
template <class To>
struct Magics {
  using N = Narrow<To>;
  // Exponents from least_exponent on: fewer than the entries.
  static constexpr std::uint32_t entries = 1u << N::exponent_bits;
  alignas(64) std::uint32_t at[entries] = {};
  constexpr Magics() {
    for (std::uint32_t i = 0; i < entries; ++i) {
      const std::uint32_t exponent = N::least_exponent + i;
      at[exponent % entries] = N::magic(exponent);
    }
  }
};
template <class To>
constexpr Magics<To> magics;

struct Avx512 {
  template <class From>
  KVLEAF_AVX512 static Bits<From> largest(const From* from, std::size_t count) noexcept {
    constexpr std::size_t lanes = 64 / sizeof(From);
    __m512i most = _mm512_setzero_si512();
    std::size_t i = 0;
    for (; i + lanes <= count; i += lanes) {
      const __m512i bits = _mm512_loadu_si512(from + i);
      if constexpr (sizeof(From) == 2) {
        most = _mm512_max_epu16(most, _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff)));
      } else {
        most = _mm512_max_epu32(most, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
      }
    }
    const Bits<From> rest = Plain::largest(from + i, count - i);
    const __m256i a = _mm512_castsi512_si256(most), b = _mm512_extracti64x4_epi64(most, 1);
    const __m256i half = sizeof(From) == 2 ? _mm256_max_epu16(a, b) : _mm256_max_epu32(a, b);
    const Bits<From> all =
        Avx2::largest_lane<From>(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    return all > rest ? all : rest;
  }

  template <class From, class To>
  KVLEAF_AVX512 static void narrow(const From* from, To* to, std::size_t count,
                                   float factor) noexcept {
    const __m512 by = _mm512_set1_ps(factor);
    std::size_t i = 0;
    for (; i + 64 <= count; i += 64) {
      const __m512i a = code<To>(_mm512_mul_ps(floats(from + i), by));
      const __m512i b = code<To>(_mm512_mul_ps(floats(from + i + 16), by));
      const __m512i c = code<To>(_mm512_mul_ps(floats(from + i + 32), by));
      const __m512i d = code<To>(_mm512_mul_ps(floats(from + i + 48), by));
      // Packed within quarters of 128 bits, and then put in order.
      const __m512i bytes =
          _mm512_packus_epi16(_mm512_packus_epi32(a, b), _mm512_packus_epi32(c, d));
      const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
      _mm512_storeu_si512(to + i, _mm512_permutexvar_epi32(order, bytes));
    }
    Avx2::narrow(from + i, to + i, count - i, factor);
  }

 private:
  KVLEAF_INLINE_AVX512 __m512 floats(const float* from) noexcept { return _mm512_loadu_ps(from); }
  KVLEAF_INLINE_AVX512 __m512 floats(const BF16* from) noexcept {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words(from)), 16));
  }
  KVLEAF_INLINE_AVX512 __m512 floats(const F16* from) noexcept {
    return _mm512_cvtph_ps(words(from));
  }
  KVLEAF_INLINE_AVX512 __m256i words(const void* from) noexcept {
    return _mm256_loadu_si256(static_cast<const __m256i*>(from));
  }

  template <class To>
  KVLEAF_INLINE_AVX512 __m512i code(__m512 value) noexcept {
    if constexpr (std::is_same_v<To, std::int8_t>) {
      KVLEAF_ROUNDED(value);
      const __m512 sum = _mm512_add_ps(value, _mm512_set1_ps(Narrow<To>::magic));
      return _mm512_and_si512(_mm512_castps_si512(sum), _mm512_set1_epi32(0xff));
    } else {
      using N = Narrow<To>;
      const __m512i bits = _mm512_castps_si512(value);
      const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
      const __m512i exponent = _mm512_srli_epi32(
          _mm512_max_epi32(magnitude, _mm512_set1_epi32(N::least_exponent << 23)), 23);
      const __m512i low = _mm512_load_si512(magics<To>.at);
      __m512i magic;
      if constexpr (Magics<To>::entries == 16) {
        magic = _mm512_permutexvar_epi32(exponent, low);
      } else {
        magic = _mm512_permutex2var_epi32(low, exponent, _mm512_load_si512(magics<To>.at + 16));
      }
      const __m512 sum = _mm512_add_ps(_mm512_castsi512_ps(magnitude), _mm512_castsi512_ps(magic));
      // The code's 7 bits from the sum, the others from what has the sign in the eighth.
      constexpr int where_third_else_second = 0xe4;
      return _mm512_ternarylogic_epi32(_mm512_castps_si512(sum), _mm512_srli_epi32(bits, 24),
                                       _mm512_set1_epi32(0x7f), where_third_else_second);
    }
  }
};

#endif

template <class From>
float float_of_bits(Bits<From> bits) noexcept {
  From number;
  __builtin_memcpy(&number, &bits, sizeof number);
  return to_float(number);
}

template <class From>
float largest_finite(const From* from, std::size_t count) noexcept {
  float largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const float magnitude = float_of(bits_of(to_float(from[i])) & 0x7fffffffu);
    if (magnitude <= NumberTraits<float>::largest && magnitude > largest) largest = magnitude;
  }
  return largest;
}

template <class Scale>
float put_scale(float largest, float range, std::byte* at) noexcept {
  const Scale scale = scale_for<Scale>(largest, range);
  __builtin_memcpy(at, &scale, sizeof scale);
  return to_float(scale);
}
float put_scale(float largest, float range, Number scale_number, std::byte* at) noexcept {
  switch (scale_number) {
    case Number::float16: return put_scale<F16>(largest, range, at);
    case Number::bfloat16: return put_scale<BF16>(largest, range, at);
    default: return put_scale<float>(largest, range, at);
  }
}

template <class Lanes, class From, class To>
void quantise(const void* from, void* to, void* scales, std::size_t groups, std::size_t granularity,
              Number scale_number) noexcept {
  const auto* in = static_cast<const From*>(from);
  auto* out = static_cast<To*>(to);
  auto* scale_out = static_cast<std::byte*>(scales);
  // Some groups at a time, so that the long way from one's numbers to its factor is gone while the
  // others' numbers are looked at.
  constexpr std::size_t most_at_once = 16;
  struct Group {
    float factor;
    bool bounded;
  };
  Group some[most_at_once];
  while (groups > 0) {
    const std::size_t count = groups < most_at_once ? groups : most_at_once;
    for (std::size_t group = 0; group < count; ++group) {
      const From* numbers = in + group * granularity;
      const float most = float_of_bits<From>(Lanes::largest(numbers, granularity));
      const bool finite = most <= NumberTraits<float>::largest;
      const float largest = finite ? most : largest_finite(numbers, granularity);
      const float scale = put_scale(largest, NumberTraits<To>::largest, scale_number, scale_out);
      scale_out += size_of(scale_number);
      // Half a step beyond the largest would round to what is not there; a scale that is rounded,
      // and a product of rounded numbers, stay far from it. A scale that its type bounds does not.
      constexpr float bound = NumberTraits<To>::largest * 1.001f;
      const float factor = 1.0f / scale;
      some[group] = {factor, finite && most * factor <= bound};
    }
    for (std::size_t group = 0; group < count; ++group) {
      if (some[group].bounded) {
        Lanes::narrow(in, out, granularity, some[group].factor);
      } else {
        Plain::narrow(in, out, granularity, some[group].factor);
      }
      in += granularity;
      out += granularity;
    }
    groups -= count;
  }
}

}  // namespace

QuantiseRow row_quantiser(Number from, Number to, Instructions instructions) noexcept {
  return with_number(from, [&](auto from_tag) {
    return with_number(to, [&](auto to_tag) -> QuantiseRow {
      using From = typename decltype(from_tag)::type;
      using To = typename decltype(to_tag)::type;
      if constexpr (sizeof(From) == 1 || sizeof(To) != 1) {
        return nullptr;
      } else {
#if KVLEAF_HAS_AVX512
        if (instructions == Instructions::avx512) return quantise<Avx512, From, To>;
#endif
#if KVLEAF_HAS_AVX2
        if (instructions >= Instructions::avx2) return quantise<Avx2, From, To>;
#endif
        return quantise<Plain, From, To>;
      }
    });
  });
}

}  // namespace kvleaf::kernels
