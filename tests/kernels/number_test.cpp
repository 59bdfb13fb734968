#include "kvleaf/kernels/number.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kvleaf/kernels/convert.h"
#include "kvleaf/kernels/quantise.h"

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
      for (const Number to : all_numbers) {
        CAPTURE(std::string(name_of(from)));
        CAPTURE(std::string(name_of(to)));
        CHECK((converter(from, to, Instructions::plain) != converter(from, to, fast_ones)));
        for (const std::size_t count : {0, 1, 7, 8, 31, 64, 257, 1000}) {
          const auto row = random_row(random, from, count);
          for (const float scale : {1.0f, 0.037f, 3.0e-7f}) {
            std::vector<std::byte> plain(count * size_of(to) + 8, std::byte{0x5a}), fast = plain;
            converter(from, to, Instructions::plain)(row.data(), plain.data(), count, scale);
            converter(from, to, fast_ones)(row.data(), fast.data(), count, scale);
            REQUIRE(plain == fast);
          }
        }
      }
    }
  }
}

TEST_CASE("rows are converted as their elements are") {
  std::mt19937_64 random(22);
  for (const Number from : all_numbers) {
    const auto row = random_row(random, from, 300);
    for (const Number to : all_numbers) {
      std::vector<std::byte> out(300 * size_of(to)), one(size_of(to));
      converter(from, to)(row.data(), out.data(), 300, 0.37f);
      for (std::size_t i = 0; i < 300; ++i) {
        store_number(to, one.data(), load_number(from, &row[i * size_of(from)]) * 0.37f);
        REQUIRE(
            std::equal(one.begin(), one.end(), out.begin() + static_cast<long>(i * size_of(to))));
      }
    }
  }
}

// ---- quantised rows

constexpr Number wide_numbers[] = {Number::float32, Number::float16, Number::bfloat16};
constexpr Number quantised_numbers[] = {Number::float8_e4m3, Number::float8_e5m2, Number::int8};

/// What a row becomes, number by number, from the definition.
struct QuantisedRow {
  std::vector<std::byte> numbers, scales;
  bool operator==(const QuantisedRow&) const = default;

  QuantisedRow(Number to, Number scale_number, std::size_t groups, std::size_t granularity)
      : numbers(groups * granularity + 1, std::byte{0x5a}),  // one more, which nobody may write
        scales(groups * size_of(scale_number) + 1, std::byte{0x5a}) {}

  static QuantisedRow of(const std::vector<std::byte>& row, Number from, Number to,
                         Number scale_number, std::size_t granularity) {
    const std::size_t groups = row.size() / size_of(from) / granularity;
    QuantisedRow made(to, scale_number, groups, granularity);
    for (std::size_t group = 0; group < groups; ++group) {
      const auto number = [&](std::size_t i) {
        return load_number(from, &row[(group * granularity + i) * size_of(from)]);
      };
      float largest = 0;
      for (std::size_t i = 0; i < granularity; ++i)
        if (std::isfinite(number(i))) largest = std::max(largest, std::fabs(number(i)));
      const float scale = scale_for(largest, to, scale_number);
      store_number(scale_number, &made.scales[group * size_of(scale_number)], scale);
      for (std::size_t i = 0; i < granularity; ++i)
        store_number(to, &made.numbers[group * granularity + i], number(i) * (1.0f / scale));
    }
    return made;
  }

  static QuantisedRow by(Instructions instructions, const std::vector<std::byte>& row, Number from,
                         Number to, Number scale_number, std::size_t granularity) {
    const std::size_t groups = row.size() / size_of(from) / granularity;
    QuantisedRow made(to, scale_number, groups, granularity);
    row_quantiser(from, to, instructions)(row.data(), made.numbers.data(), made.scales.data(),
                                          groups, granularity, scale_number);
    return made;
  }
};

template <class Use>
void with_each_instructions(Use use) {
  for (const Instructions one : {Instructions::plain, Instructions::avx2, Instructions::avx512}) {
    if (one > best_instructions()) {
      MESSAGE("skipped: no ", (one == Instructions::avx2 ? "AVX2" : "AVX-512"));
      continue;
    }
    CAPTURE(static_cast<int>(one));
    use(one);
  }
}

TEST_CASE("every half and bfloat16 is quantised to the same bits by all code, beside any largest") {
  with_each_instructions([&](Instructions instructions) {
    for (const Number from : {Number::float16, Number::bfloat16}) {
      for (const Number to : quantised_numbers) {
        CAPTURE(std::string(name_of(from)));
        CAPTURE(std::string(name_of(to)));
        // 64 codes at a time, and one number that decides on the scale: from where all of them
        // are rounded to 0 to where they saturate, if they can.
        for (const float largest : {1e-7f, 3e-5f, 0.37f, 448.0f, 1000.0f, 60000.0f, 3e38f}) {
          std::vector<std::byte> row(65536 / 64 * 65 * 2);
          for (std::uint32_t code = 0, at = 0; code < 65536; ++code, ++at) {
            if (code % 64 == 0) store_number(from, &row[2 * at++], largest);
            const auto bits = static_cast<std::uint16_t>(code);
            std::memcpy(&row[2 * at], &bits, 2);
          }
          REQUIRE(QuantisedRow::by(instructions, row, from, to, Number::float32, 65) ==
                  QuantisedRow::of(row, from, to, Number::float32, 65));
        }
      }
    }
  });
}

TEST_CASE("rounding edges of quantised floats are the same bits in all code") {
  with_each_instructions([&](Instructions instructions) {
    for (const Number to : quantised_numbers) {
      CAPTURE(std::string(name_of(to)));
      // At each number of the type and halfway between two, and just beside either; the first of
      // each group makes the scale 1.
      std::vector<float> edges;
      const float range = largest_of(to);
      for (int code = 0; code < 127; ++code) {
        const auto byte = static_cast<std::byte>(code), next = static_cast<std::byte>(code + 1);
        const float value = load_number(to, &byte), above = load_number(to, &next);
        if (!(value < range) || !std::isfinite(above)) continue;
        for (const float at : {value, (value + above) / 2})
          for (const float near : {at, std::nextafter(at, 0.0f), std::nextafter(at, range)})
            for (const float sign : {1.0f, -1.0f}) edges.push_back(sign * near);
      }
      std::vector<std::byte> row;
      for (std::size_t i = 0; i < edges.size(); i += 95) {
        std::vector<float> group(edges.begin() + static_cast<long>(i),
                                 edges.begin() + static_cast<long>(std::min(i + 95, edges.size())));
        group.insert(group.begin(), range);
        group.resize(96);
        const auto* bytes = reinterpret_cast<const std::byte*>(group.data());
        row.insert(row.end(), bytes, bytes + 96 * sizeof(float));
      }
      const auto made =
          QuantisedRow::by(instructions, row, Number::float32, to, Number::float32, 96);
      REQUIRE(made == QuantisedRow::of(row, Number::float32, to, Number::float32, 96));
      REQUIRE(load_number(Number::float32, made.scales.data()) == 1.0f);
    }
  });
}

TEST_CASE("random rows of all types, lengths and scales are quantised as their numbers are") {
  std::mt19937_64 random(24);
  with_each_instructions([&](Instructions instructions) {
    for (const Number from : wide_numbers) {
      for (const Number to : quantised_numbers) {
        CAPTURE(std::string(name_of(from)));
        CAPTURE(std::string(name_of(to)));
        for (const std::size_t granularity : {1, 8, 16, 31, 32, 64, 96, 127, 128, 200}) {
          for (int round = 0; round < 12; ++round) {
            const Number scale_number = wide_numbers[random() % 3];
            auto row = random_row(random, from, 5 * granularity);
            if (round % 3 != 0) {  // moderate ones, with an outlier
              for (std::size_t i = 0; i < 5 * granularity; ++i) {
                const float value = static_cast<float>(static_cast<int>(random() % 20001) - 10000);
                store_number(from, &row[i * size_of(from)],
                             random() % 100 == 0 ? 1e4f * value : 0.01f * value);
              }
            }
            const auto want = QuantisedRow::of(row, from, to, scale_number, granularity);
            REQUIRE(QuantisedRow::by(instructions, row, from, to, scale_number, granularity) ==
                    want);
          }
        }
      }
      CHECK((row_quantiser(from, Number::bfloat16) == nullptr));
      CHECK((row_quantiser(Number::int8, Number::int8) == nullptr));
    }
  });
}

TEST_CASE(
    "a scale is finite, positive, exactly storable, and lets nothing finite saturate by more than "
    "rounding") {
  std::mt19937_64 random(23);
  for (const Number to : {Number::float8_e4m3, Number::float8_e5m2, Number::int8}) {
    for (const Number scale_number : {Number::float32, Number::float16, Number::bfloat16}) {
      CAPTURE(std::string(name_of(to)));
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
