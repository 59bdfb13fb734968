#include "kvleaf/kernels/convert.h"

#include "kvleaf/kernels/instructions.h"

namespace kvleaf::kernels {

namespace {

// The bodies are inlined into a plain function and into those compiled for AVX2 and AVX-512; the
// loops are such that compilers make vector code of them. No product meets a sum, so that no
// contraction makes them differ.

template <class From, class To>
KVLEAF_HD void convert_body(const void* from, void* to, std::size_t count, float factor) noexcept {
  const auto* __restrict in = static_cast<const From*>(from);
  auto* __restrict out = static_cast<To*>(to);
  for (std::size_t i = 0; i < count; ++i) out[i] = from_float<To>(to_float(in[i]) * factor);
}

template <class From, class To>
void convert_plain(const void* from, void* to, std::size_t count, float factor) noexcept {
  convert_body<From, To>(from, to, count, factor);
}
#if KVLEAF_HAS_AVX2
template <class From, class To>
KVLEAF_AVX2 void convert_avx2(const void* from, void* to, std::size_t count,
                              float factor) noexcept {
  convert_body<From, To>(from, to, count, factor);
}
#endif
#if KVLEAF_HAS_AVX512
template <class From, class To>
KVLEAF_AVX512 void convert_avx512(const void* from, void* to, std::size_t count,
                                  float factor) noexcept {
  convert_body<From, To>(from, to, count, factor);
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

ConvertRow converter(Number from, Number to, Instructions instructions) noexcept {
  return with_number(from, [&](auto from_tag) {
    return with_number(to, [&](auto to_tag) -> ConvertRow {
      using From = typename decltype(from_tag)::type;
      using To = typename decltype(to_tag)::type;
#if KVLEAF_HAS_AVX512
      if (instructions == Instructions::avx512) return convert_avx512<From, To>;
#endif
#if KVLEAF_HAS_AVX2
      if (instructions >= Instructions::avx2) return convert_avx2<From, To>;
#endif
      return convert_plain<From, To>;
    });
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
