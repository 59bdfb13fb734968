#include "kvleaf/kernels/number.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kvleaf/kernels/convert.h"

namespace kvleaf::kernels::test {
namespace {

// What a type's codes stand for, from its definition and in double.
struct Model {
  int exponent_bits;
  int mantissa_bits;
  bool has_infinity;  // else the one code with all bits set is NaN and the others are numbers

  int codes() const { return 1 << (exponent_bits + mantissa_bits); }  // without the sign
  int exponent(int code) const { return code >> mantissa_bits; }
  int mantissa(int code) const { return code & ((1 << mantissa_bits) - 1); }
  bool all_ones(int code) const { return exponent(code) == (1 << exponent_bits) - 1; }
  bool is_infinity(int code) const { return has_infinity && all_ones(code) && mantissa(code) == 0; }
  bool is_nan(int code) const {
    return has_infinity ? all_ones(code) && mantissa(code) != 0 : code == codes() - 1;
  }
  double value(int code) const {
    if (is_infinity(code)) return INFINITY;
    if (is_nan(code)) return NAN;
    const int bias = (1 << (exponent_bits - 1)) - 1;
    if (exponent(code) == 0) return std::ldexp(mantissa(code), 1 - bias - mantissa_bits);
    return std::ldexp((1 << mantissa_bits) + mantissa(code), exponent(code) - bias - mantissa_bits);
  }
  int largest() const {
    int code = codes() - 1;
    while (is_nan(code) || is_infinity(code)) --code;
    return code;
  }
};

template <class T>
struct ModelOf;
template <>
struct ModelOf<F16> {
  static constexpr Model model{5, 10, true};
  static constexpr bool saturates = false;
};
template <>
struct ModelOf<BF16> {
  static constexpr Model model{8, 7, true};
  static constexpr bool saturates = false;
};
template <>
struct ModelOf<E4M3> {
  static constexpr Model model{4, 3, false};
  static constexpr bool saturates = true;
};
template <>
struct ModelOf<E5M2> {
  static constexpr Model model{5, 2, true};
  static constexpr bool saturates = true;
};

// The nearest code to a magnitude by search among all of them: ties to the even code; beyond the
// largest, as far as half a step would still round to it, and then infinity or the largest.
template <class T>
int nearest(const std::vector<double>& values, double magnitude) {
  const Model& model = ModelOf<T>::model;
  const int largest = model.largest();
  const double step = values[largest] - values[largest - 1];
  if (magnitude >= values[largest] + step / 2) return ModelOf<T>::saturates ? largest : largest + 1;
  if (magnitude >= values[largest]) return largest;
  const int above = static_cast<int>(
      std::upper_bound(values.begin(), values.begin() + largest + 1, magnitude) - values.begin());
  const int below = above - 1;
  const double to_below = magnitude - values[below], to_above = values[above] - magnitude;
  if (to_below != to_above) return to_below < to_above ? below : above;
  return below % 2 == 0 ? below : above;
}

TEST_CASE_TEMPLATE("every code of a small float stands for what its definition says", T, F16, BF16,
                   E4M3, E5M2) {
  const Model& model = ModelOf<T>::model;
  for (int code = 0; code < model.codes(); ++code) {
    using Bits = decltype(T::bits);
    const T positive{static_cast<Bits>(code)}, negative{static_cast<Bits>(code | model.codes())};
    if (model.is_nan(code)) {
      REQUIRE(std::isnan(to_float(positive)));
      REQUIRE(std::isnan(to_float(negative)));
      continue;
    }
    REQUIRE(to_float(positive) == model.value(code));
    REQUIRE(to_float(negative) == -model.value(code));
    REQUIRE(std::signbit(to_float(negative)));
    // And back; infinity stays where the type has one and does not saturate.
    if (model.is_infinity(code) && ModelOf<T>::saturates) continue;
    REQUIRE(from_float<T>(to_float(positive)).bits == positive.bits);
    REQUIRE(from_float<T>(to_float(negative)).bits == negative.bits);
  }
}

TEST_CASE_TEMPLATE("rounding agrees with a search for the nearest code", T, F16, BF16, E4M3, E5M2) {
  const Model& model = ModelOf<T>::model;
  std::vector<double> values;
  for (int code = 0; code < model.codes(); ++code) values.push_back(model.value(code));
  const int largest = model.largest();

  const auto check = [&](float magnitude) {
    if (std::isnan(magnitude) || magnitude < 0) return;
    const int code = nearest<T>(values, magnitude);
    REQUIRE(from_float<T>(magnitude).bits == code);
    REQUIRE(from_float<T>(-magnitude).bits == (code | model.codes()));
  };
  // Where the answer changes: at each code, halfway to the next one, and just beside either.
  for (int code = 0; code <= largest; ++code) {
    const double next =
        code < largest ? values[code + 1] : values[code] + values[code] - values[code - 1];
    for (const double edge : {values[code], (values[code] + next) / 2}) {
      const auto at = static_cast<float>(edge);
      check(at);
      check(std::nextafter(at, 0.0f));
      check(std::nextafter(at, INFINITY));
    }
  }
  // And over the whole range, in steps that share no factor with any power of two.
  for (std::uint32_t bits = 0; bits < 0x7f800000u; bits += 1009) check(float_of(bits));
  check(INFINITY);
  check(std::numeric_limits<float>::max());
  check(std::numeric_limits<float>::denorm_min());
  for (const std::uint32_t nan :
       {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0xff800001u, 0xffffffffu}) {
    REQUIRE(std::isnan(to_float(from_float<T>(float_of(nan)))));
  }
}

TEST_CASE("int8 rounds to even, saturates at 127 on either side and takes NaN for 0") {
  CHECK(from_float<std::int8_t>(0.5f) == 0);
  CHECK(from_float<std::int8_t>(1.5f) == 2);
  CHECK(from_float<std::int8_t>(-2.5f) == -2);
  CHECK(from_float<std::int8_t>(126.5f) == 126);
  CHECK(from_float<std::int8_t>(127.5f) == 127);
  CHECK(from_float<std::int8_t>(1e30f) == 127);
  CHECK(from_float<std::int8_t>(-1e30f) == -127);
  CHECK(from_float<std::int8_t>(-128.0f) == -127);
  CHECK(from_float<std::int8_t>(INFINITY) == 127);
  CHECK(from_float<std::int8_t>(-INFINITY) == -127);
  CHECK(from_float<std::int8_t>(NAN) == 0);
  CHECK(from_float<std::int8_t>(-0.0f) == 0);
  for (int i = -127 * 64; i <= 127 * 64; ++i) {
    const float value = static_cast<float>(i) / 64;
    REQUIRE(from_float<std::int8_t>(value) == static_cast<int>(std::nearbyint(value)));
  }
}

constexpr Number all_numbers[] = {Number::float32,     Number::float16,     Number::bfloat16,
                                  Number::float8_e4m3, Number::float8_e5m2, Number::int8};

// Bytes of `count` elements: random ones, with every special value among them.
std::vector<std::byte> random_row(std::mt19937_64& random, Number number, std::size_t count) {
  std::vector<std::byte> row(count * size_of(number));
  if (number == Number::float32) {
    for (std::size_t i = 0; i < count; ++i) {
      const float specials[] = {0.0f,   -0.0f,  INFINITY, -INFINITY, NAN,
                                448.0f, 464.0f, 1e-45f,   65520.0f};
      float value =
          i % 5 == 0 ? specials[i / 5 % 9] : float_of(static_cast<std::uint32_t>(random()));
      if (i % 5 == 1) value = static_cast<float>(random() % 100000) / 777.0f;
      std::memcpy(&row[4 * i], &value, 4);
    }
  } else {
    for (std::byte& byte : row) byte = static_cast<std::byte>(random());
  }
  return row;
}

TEST_CASE(
    "plain, AVX2 and AVX-512 code convert every pair of types to the same bits, at any length") {
  for (const Instructions fast_ones : {Instructions::avx2, Instructions::avx512}) {
    if (best_instructions() < fast_ones) {
      MESSAGE("skipped: no ", (fast_ones == Instructions::avx2 ? "AVX2" : "AVX-512"));
      continue;
    }
    std::mt19937_64 random(21);
    for (const Number from : all_numbers) {
      CHECK((largest_of_row(from, Instructions::plain) != largest_of_row(from, fast_ones)));
      for (const Number to : all_numbers) {
        CAPTURE(name_of(from));
        CAPTURE(name_of(to));
        for (const std::size_t count : {0, 1, 7, 8, 31, 64, 257, 1000}) {
          const auto row = random_row(random, from, count);
          for (const float scale : {1.0f, 0.037f, 3.0e-7f}) {
            std::vector<std::byte> plain(count * size_of(to) + 8, std::byte{0x5a}), fast = plain;
            quantiser(from, to, Instructions::plain)(row.data(), plain.data(), count, scale);
            quantiser(from, to, fast_ones)(row.data(), fast.data(), count, scale);
            REQUIRE(plain == fast);
            dequantiser(from, to, Instructions::plain)(row.data(), plain.data(), count, scale);
            dequantiser(from, to, fast_ones)(row.data(), fast.data(), count, scale);
            REQUIRE(plain == fast);
          }
          REQUIRE(largest_of_row(from, Instructions::plain)(row.data(), count) ==
                  largest_of_row(from, fast_ones)(row.data(), count));
        }
      }
    }
  }
}

TEST_CASE("rows are converted as their elements are, and the largest finite magnitude is found") {
  std::mt19937_64 random(22);
  for (const Number from : all_numbers) {
    const auto row = random_row(random, from, 300);
    float largest = 0;
    for (std::size_t i = 0; i < 300; ++i) {
      const float value = std::fabs(load_number(from, &row[i * size_of(from)]));
      if (std::isfinite(value)) largest = std::max(largest, value);
    }
    CHECK(largest_of_row(from)(row.data(), 300) == largest);
    for (const Number to : all_numbers) {
      std::vector<std::byte> out(300 * size_of(to)), one(size_of(to));
      quantiser(from, to)(row.data(), out.data(), 300, 0.37f);
      for (std::size_t i = 0; i < 300; ++i) {
        store_number(to, one.data(), load_number(from, &row[i * size_of(from)]) / 0.37f);
        REQUIRE(
            std::equal(one.begin(), one.end(), out.begin() + static_cast<long>(i * size_of(to))));
      }
    }
  }
}

TEST_CASE(
    "a scale is finite, positive, exactly storable, and lets nothing finite saturate by more than "
    "rounding") {
  std::mt19937_64 random(23);
  for (const Number to : {Number::float8_e4m3, Number::float8_e5m2, Number::int8}) {
    for (const Number scale_number : {Number::float32, Number::float16, Number::bfloat16}) {
      CAPTURE(name_of(to));
      CAPTURE(name_of(scale_number));
      CHECK(scale_for(0, to, scale_number) == 1.0f);
      for (int i = 0; i < 20000; ++i) {
        float largest = float_of(static_cast<std::uint32_t>(random()) & 0x7fffffffu);
        if (!std::isfinite(largest) || largest == 0) continue;
        if (i == 0) largest = std::numeric_limits<float>::max();
        if (i == 1) largest = std::numeric_limits<float>::denorm_min();
        const float scale = scale_for(largest, to, scale_number);
        REQUIRE(std::isfinite(scale));
        REQUIRE(scale > 0);
        std::uint32_t bits = 0;
        store_number(scale_number, &bits, scale);
        REQUIRE(load_number(scale_number, &bits) == scale);
        const float most = largest_of(scale_number);
        if (scale < most) REQUIRE(largest / scale <= largest_of(to) * 1.000001f);
        // Not wasteful: where the scale's type is precise there, the range is used to within a
        // step.
        if (scale < most && scale > 1e-4f) REQUIRE(largest / scale >= largest_of(to) * 0.99f);
      }
    }
  }
}

}  // namespace
}  // namespace kvleaf::kernels::test
