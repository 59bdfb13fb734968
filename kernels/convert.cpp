#include "kvleaf/kernels/convert.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define KVLEAF_HAS_AVX2 1
#define KVLEAF_AVX2 __attribute__((target("avx2")))
#else
#define KVLEAF_HAS_AVX2 0
#endif
// clang has another word for the width, and is content with AVX2.
#if KVLEAF_HAS_AVX2 && !defined(__clang__)
#define KVLEAF_HAS_AVX512 1
#define KVLEAF_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#else
#define KVLEAF_HAS_AVX512 0
#endif

namespace kvleaf::kernels {

namespace {

// The bodies are inlined into a plain function and into those compiled for AVX2 and AVX-512; the
// loops are such that compilers make vector code of them. No product meets a sum, so that no
// contraction makes them differ.

template <class From, class To>
KVLEAF_HD void quantise_body(const void* from, void* to, std::size_t count, float scale) noexcept {
  const auto* __restrict in = static_cast<const From*>(from);
  auto* __restrict out = static_cast<To*>(to);
  for (std::size_t i = 0; i < count; ++i) out[i] = from_float<To>(to_float(in[i]) / scale);
}

template <class From, class To>
KVLEAF_HD void dequantise_body(const void* from, void* to, std::size_t count,
                               float scale) noexcept {
  const auto* __restrict in = static_cast<const From*>(from);
  auto* __restrict out = static_cast<To*>(to);
  for (std::size_t i = 0; i < count; ++i) out[i] = from_float<To>(to_float(in[i]) * scale);
}

template <class From>
KVLEAF_HD float largest_body(const void* from, std::size_t count) noexcept {
  const auto* __restrict in = static_cast<const From*>(from);
  // Magnitudes are ordered as their bits are.
  std::int32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto bits = static_cast<std::int32_t>(bits_of(to_float(in[i])) & 0x7fffffffu);
    const std::int32_t finite = bits < 0x7f800000 ? bits : 0;
    largest = finite > largest ? finite : largest;
  }
  return float_of(static_cast<std::uint32_t>(largest));
}

template <class From, class To>
void quantise_plain(const void* from, void* to, std::size_t count, float scale) noexcept {
  quantise_body<From, To>(from, to, count, scale);
}
template <class From, class To>
void dequantise_plain(const void* from, void* to, std::size_t count, float scale) noexcept {
  dequantise_body<From, To>(from, to, count, scale);
}
template <class From>
float largest_plain(const void* from, std::size_t count) noexcept {
  return largest_body<From>(from, count);
}

#if KVLEAF_HAS_AVX2
template <class From, class To>
KVLEAF_AVX2 void quantise_avx2(const void* from, void* to, std::size_t count,
                               float scale) noexcept {
  quantise_body<From, To>(from, to, count, scale);
}
template <class From, class To>
KVLEAF_AVX2 void dequantise_avx2(const void* from, void* to, std::size_t count,
                                 float scale) noexcept {
  dequantise_body<From, To>(from, to, count, scale);
}
template <class From>
KVLEAF_AVX2 float largest_avx2(const void* from, std::size_t count) noexcept {
  return largest_body<From>(from, count);
}
#endif

#if KVLEAF_HAS_AVX512
template <class From, class To>
KVLEAF_AVX512 void quantise_avx512(const void* from, void* to, std::size_t count,
                                   float scale) noexcept {
  quantise_body<From, To>(from, to, count, scale);
}
template <class From, class To>
KVLEAF_AVX512 void dequantise_avx512(const void* from, void* to, std::size_t count,
                                     float scale) noexcept {
  dequantise_body<From, To>(from, to, count, scale);
}
template <class From>
KVLEAF_AVX512 float largest_avx512(const void* from, std::size_t count) noexcept {
  return largest_body<From>(from, count);
}
#endif

}  // namespace

Instructions best_instructions() noexcept {
#if KVLEAF_HAS_AVX512
  static const bool has_avx512 =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512) return Instructions::avx512;
#endif
#if KVLEAF_HAS_AVX2
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx2) return Instructions::avx2;
#endif
  return Instructions::plain;
}

ConvertRow quantiser(Number from, Number to, Instructions instructions) noexcept {
  return with_number(from, [&](auto from_tag) {
    return with_number(to, [&](auto to_tag) -> ConvertRow {
      using From = typename decltype(from_tag)::type;
      using To = typename decltype(to_tag)::type;
#if KVLEAF_HAS_AVX512
      if (instructions == Instructions::avx512) return quantise_avx512<From, To>;
#endif
#if KVLEAF_HAS_AVX2
      if (instructions >= Instructions::avx2) return quantise_avx2<From, To>;
#endif
      return quantise_plain<From, To>;
    });
  });
}

ConvertRow dequantiser(Number from, Number to, Instructions instructions) noexcept {
  return with_number(from, [&](auto from_tag) {
    return with_number(to, [&](auto to_tag) -> ConvertRow {
      using From = typename decltype(from_tag)::type;
      using To = typename decltype(to_tag)::type;
#if KVLEAF_HAS_AVX512
      if (instructions == Instructions::avx512) return dequantise_avx512<From, To>;
#endif
#if KVLEAF_HAS_AVX2
      if (instructions >= Instructions::avx2) return dequantise_avx2<From, To>;
#endif
      return dequantise_plain<From, To>;
    });
  });
}

LargestOfRow largest_of_row(Number from, Instructions instructions) noexcept {
  return with_number(from, [&](auto from_tag) -> LargestOfRow {
    using From = typename decltype(from_tag)::type;
#if KVLEAF_HAS_AVX512
    if (instructions == Instructions::avx512) return largest_avx512<From>;
#endif
#if KVLEAF_HAS_AVX2
    if (instructions >= Instructions::avx2) return largest_avx2<From>;
#endif
    return largest_plain<From>;
  });
}

float scale_for(float largest, Number to, Number scale_number) noexcept {
  const float range = largest_of(to);
  switch (scale_number) {
    case Number::float16: return to_float(scale_for<F16>(largest, range));
    case Number::bfloat16: return to_float(scale_for<BF16>(largest, range));
    default: return scale_for<float>(largest, range);
  }
}

float load_number(Number number, const void* at) noexcept {
  return with_number(number, [&](auto tag) {
    return to_float(*static_cast<const typename decltype(tag)::type*>(at));
  });
}

void store_number(Number number, void* at, float value) noexcept {
  with_number(number, [&](auto tag) {
    using T = typename decltype(tag)::type;
    *static_cast<T*>(at) = from_float<T>(value);
  });
}

}  // namespace kvleaf::kernels
