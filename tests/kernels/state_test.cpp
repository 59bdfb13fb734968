#include "kvleaf/kernels/state.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "kernels/machine.h"
#include "kvleaf/kernels/convert.h"

namespace kvleaf::kernels::test {
namespace {

using Doubles = std::vector<double>;

std::vector<float> normals(Random& random, std::size_t count, float deviation = 1.0f) {
  std::normal_distribution<float> normal(0, deviation);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

// Rows of states with a gap between them, one batch over them, and what a model in double expects.
struct StateBench {
  StateBench(Random& random, std::uint64_t elements_, Number number,
             std::vector<std::int32_t> reads, std::vector<std::int32_t> writes,
             std::vector<std::int32_t> tokens)
      : elements(elements_), read_rows(std::move(reads)), write_rows(std::move(writes)) {
    const std::uint64_t stride = elements * size_of(number) + 32;
    memory = random_bytes(random, rows * stride);
    states = {memory.data(), stride, 1, rows, number};
    for (std::uint64_t row = 0; row < rows; ++row) {
      std::vector<float> values = normals(random, elements, 0.5f);
      if (row == 0) std::fill(values.begin(), values.end(), 0.0f);
      converter(Number::float32, number)(values.data(), memory.data() + row * stride, elements,
                                         1.0f);
    }
    cu_seqlens.push_back(0);
    for (const std::int32_t count : tokens) cu_seqlens.push_back(cu_seqlens.back() + count);
  }

  Doubles state(const Bytes& from, std::int64_t row) const {
    std::vector<float> values(elements);
    converter(states.number, Number::float32)(from.data() + states.row_offset(row), values.data(),
                                              elements, 1.0f);
    return {values.begin(), values.end()};
  }
  StateBatch batch() const { return {states, read_rows, write_rows, cu_seqlens}; }

  // After the step: written rows hold `expected`, everything else what it held.
  void check(const Bytes& before, const std::vector<Doubles>& expected, double tolerance) const {
    Bytes rest = memory;
    for (std::size_t r = 0; r < write_rows.size(); ++r) {
      if (write_rows[r] == -1) continue;
      const Doubles after = state(memory, write_rows[r]);
      for (std::uint64_t i = 0; i < elements; ++i) {
        REQUIRE(std::fabs(after[i] - expected[r][i]) <=
                tolerance * std::max(1.0, std::fabs(expected[r][i])));
      }
      const auto at = static_cast<std::ptrdiff_t>(states.row_offset(write_rows[r]));
      std::copy_n(before.begin() + at, elements * size_of(states.number), rest.begin() + at);
    }
    REQUIRE(rest == before);
  }

  static constexpr std::uint64_t rows = 9;
  std::uint64_t elements;
  Bytes memory;
  StateRows states;
  std::vector<std::int32_t> read_rows, write_rows, cu_seqlens;
};

// In place, from one row to another, from the null block, padding, several tokens, two from one
// source.
struct Shape {
  std::vector<std::int32_t> reads, writes, tokens;
};
const Shape shapes[] = {
    {{1, 2, 3}, {1, 2, 3}, {1, 1, 1}},
    {{1, 2, 2, 0, -1}, {4, 5, 6, 7, -1}, {1, 3, 1, 5, 2}},
    {{-1, 8}, {-1, 8}, {1, 7}},
    {{3}, {4}, {0}},
};

TEST_CASE_TEMPLATE("a gated delta rule step equals the rule written out with matrices", Machine,
                   KVLEAF_LANE_MACHINES) {
  if (skipped<Machine>()) return;
  Random random(61);
  constexpr std::uint32_t key_heads = 2, value_heads = 4, key_dim = 12, value_dim = 21;
  for (const Number number : {Number::float32, Number::bfloat16, Number::float16}) {
    for (const Shape& shape : shapes) {
      CAPTURE(name_of(number));
      StateBench bench(random, value_heads * key_dim * value_dim, number, shape.reads, shape.writes,
                       shape.tokens);
      const std::size_t tokens = bench.cu_seqlens.back();
      const auto queries = normals(random, tokens * key_heads * key_dim, 0.3f);
      const auto keys = normals(random, tokens * key_heads * key_dim, 0.3f);
      const auto values = normals(random, tokens * value_heads * value_dim);
      std::vector<float> decay(tokens * value_heads), beta(tokens * value_heads);
      for (float& one : decay) one = -0.01f * static_cast<float>(draw(random, 0, 200));
      for (float& one : beta) one = 0.01f * static_cast<float>(draw(random, 0, 100));
      std::vector<float> out(tokens * value_heads * value_dim, NAN);
      const Bytes before = bench.memory;
      Machine::step(
          GatedDeltaRule{bench.batch(), key_heads, value_heads, key_dim, value_dim, queries.data(),
                         keys.data(), values.data(), decay.data(), beta.data(), 0.25f, out.data()},
          StateMemory{bench.memory,
                      out,
                      {{queries.data(), queries.size()},
                       {keys.data(), keys.size()},
                       {values.data(), values.size()},
                       {decay.data(), decay.size()},
                       {beta.data(), beta.size()}}});

      // S ← α S (I - β k kᵀ) + β v kᵀ, the paper's form (S here is the transpose of the rows').
      std::vector<Doubles> expected;
      for (std::size_t r = 0; r < shape.reads.size(); ++r) {
        Doubles state =
            shape.reads[r] < 0 ? Doubles(bench.elements) : bench.state(before, shape.reads[r]);
        for (std::int32_t t = bench.cu_seqlens[r]; t < bench.cu_seqlens[r + 1]; ++t) {
          for (std::uint32_t h = 0; h < value_heads; ++h) {
            const float* k = &keys[(t * key_heads + h / 2) * key_dim];
            const float* q = &queries[(t * key_heads + h / 2) * key_dim];
            const float* v = &values[(t * value_heads + h) * value_dim];
            const double alpha = std::exp(double{decay[t * value_heads + h]});
            const double b = beta[t * value_heads + h];
            double* head = &state[std::size_t{h} * key_dim * value_dim];
            Doubles next(std::size_t{key_dim} * value_dim);
            for (std::uint32_t i = 0; i < key_dim; ++i) {
              for (std::uint32_t j = 0; j < value_dim; ++j) {
                double sum = 0;
                for (std::uint32_t m = 0; m < key_dim; ++m) {
                  sum += ((i == m ? 1.0 : 0.0) - b * k[i] * k[m]) * head[m * value_dim + j];
                }
                next[i * value_dim + j] = alpha * sum + b * k[i] * v[j];
              }
            }
            std::copy(next.begin(), next.end(), head);
            for (std::uint32_t j = 0; j < value_dim; ++j) {
              double sum = 0;
              for (std::uint32_t i = 0; i < key_dim; ++i) sum += q[i] * head[i * value_dim + j];
              const double got = out[(t * value_heads + h) * value_dim + j];
              REQUIRE(std::fabs(got - (shape.reads[r] < 0 ? 0 : 0.25 * sum)) < 1e-5);
            }
          }
        }
        expected.push_back(state);
      }
      bench.check(before, expected, number == Number::float32 ? 1e-5 : 5e-3);
    }
  }
}

TEST_CASE_TEMPLATE("a Mamba-2 step equals the recurrence written out in double", Machine,
                   KVLEAF_LANE_MACHINES) {
  if (skipped<Machine>()) return;
  Random random(62);
  constexpr std::uint32_t heads = 4, groups = 2, head_dim = 5, state_dim = 19;
  for (const Number number : {Number::float32, Number::bfloat16, Number::float16}) {
    for (const Shape& shape : shapes) {
      for (const bool with_d : {false, true}) {
        CAPTURE(name_of(number));
        StateBench bench(random, heads * head_dim * state_dim, number, shape.reads, shape.writes,
                         shape.tokens);
        const std::size_t tokens = bench.cu_seqlens.back();
        const auto x = normals(random, tokens * heads * head_dim);
        const auto b = normals(random, tokens * groups * state_dim, 0.3f);
        const auto c = normals(random, tokens * groups * state_dim, 0.3f);
        const auto d = normals(random, heads);
        std::vector<float> dt(tokens * heads), a(heads);
        for (float& one : dt) one = 0.001f * static_cast<float>(draw(random, 1, 500));
        for (float& one : a) one = -0.1f * static_cast<float>(draw(random, 1, 100));
        std::vector<float> out(tokens * heads * head_dim, NAN);
        const Bytes before = bench.memory;
        Machine::step(Mamba2{bench.batch(), heads, groups, head_dim, state_dim, x.data(), dt.data(),
                             a.data(), b.data(), c.data(), with_d ? d.data() : nullptr, out.data()},
                      StateMemory{bench.memory,
                                  out,
                                  {{x.data(), x.size()},
                                   {dt.data(), dt.size()},
                                   {a.data(), a.size()},
                                   {b.data(), b.size()},
                                   {c.data(), c.size()},
                                   {with_d ? d.data() : nullptr, d.size()}}});

        std::vector<Doubles> expected;
        for (std::size_t r = 0; r < shape.reads.size(); ++r) {
          Doubles state =
              shape.reads[r] < 0 ? Doubles(bench.elements) : bench.state(before, shape.reads[r]);
          for (std::int32_t t = bench.cu_seqlens[r]; t < bench.cu_seqlens[r + 1]; ++t) {
            for (std::uint32_t h = 0; h < heads; ++h) {
              for (std::uint32_t p = 0; p < head_dim; ++p) {
                const double input = x[(t * heads + h) * head_dim + p];
                double sum = 0;
                for (std::uint32_t n = 0; n < state_dim; ++n) {
                  double& s = state[(h * head_dim + p) * state_dim + n];
                  const std::size_t vector = (t * groups + h / 2) * state_dim + n;
                  s = std::exp(double{dt[t * heads + h]} * a[h]) * s +
                      dt[t * heads + h] * input * b[vector];
                  sum += s * c[vector];
                }
                if (with_d) sum += d[h] * input;
                const double got = out[(t * heads + h) * head_dim + p];
                REQUIRE(std::fabs(got - (shape.reads[r] < 0 ? 0 : sum)) < 1e-5);
              }
            }
          }
          expected.push_back(state);
        }
        bench.check(before, expected, number == Number::float32 ? 1e-5 : 5e-3);
      }
    }
  }
}

TEST_CASE(
    "a chunk of tokens in one step equals the tokens one step at a time, in float32 bit for bit") {
  Random random(63);
  constexpr std::uint32_t heads = 2, head_dim = 8, state_dim = 16, tokens = 6;
  StateBench chunk(random, heads * head_dim * state_dim, Number::float32, {2}, {3}, {tokens});
  StateBench steps = chunk;
  steps.states.base = steps.memory.data();
  const auto x = normals(random, tokens * heads * head_dim),
             b = normals(random, tokens * state_dim), c = normals(random, tokens * state_dim),
             a = normals(random, heads);
  const std::vector<float> dt(tokens * heads, 0.1f);
  std::vector<float> at_once(tokens * heads * head_dim), one_by_one(at_once.size());
  mamba2({chunk.batch(), heads, 1, head_dim, state_dim, x.data(), dt.data(), a.data(), b.data(),
          c.data(), nullptr, at_once.data()});
  for (std::uint32_t t = 0; t < tokens; ++t) {
    if (t > 0) steps.read_rows = {3};
    steps.cu_seqlens = {0, 1};
    mamba2({steps.batch(), heads, 1, head_dim, state_dim, &x[t * heads * head_dim], &dt[t * heads],
            a.data(), &b[t * state_dim], &c[t * state_dim], nullptr,
            &one_by_one[t * heads * head_dim]});
  }
  CHECK(at_once == one_by_one);
  CHECK(chunk.memory == steps.memory);
}

TEST_CASE("a state step over rows that it may not use is refused, and nothing is written") {
  Random random(64);
  const auto refused = [&](std::vector<std::int32_t> reads, std::vector<std::int32_t> writes,
                           std::vector<std::int32_t> tokens, const char* message) {
    StateBench bench(random, 4, Number::float32, reads, writes, tokens);
    const Bytes before = bench.memory;
    const std::vector<float> in(64, 1.0f);
    std::vector<float> out(64, 5.0f);
    CHECK_THROWS_WITH_AS(mamba2({bench.batch(), 1, 1, 2, 2, in.data(), in.data(), in.data(),
                                 in.data(), in.data(), nullptr, out.data()}),
                         message, KernelError);
    CHECK(bench.memory == before);
    CHECK(out == std::vector<float>(64, 5.0f));
  };
  refused({1, 2}, {1, 0}, {1, 1},
          "batch row 1 reads state 2 and writes 0 of 9; those before 1 are the null block's");
  refused({1}, {9}, {1},
          "batch row 0 reads state 1 and writes 9 of 9; those before 1 are the null block's");
  refused({9}, {1}, {1},
          "batch row 0 reads state 9 and writes 1 of 9; those before 1 are the null block's");
  refused({-1}, {1}, {1},
          "batch row 0 reads state -1 and writes 1 of 9; those before 1 are the null block's");
  refused({1, 2}, {3, 3}, {1, 1}, "batch row 0 writes state 3, which row 1 uses too");
  refused({1, 3}, {3, 4}, {1, 1}, "batch row 0 writes state 3, which row 1 uses too");
  refused({1, 2}, {1, 2}, {1, -1}, "batch row 1 has tokens 1 to 0");
}

}  // namespace
}  // namespace kvleaf::kernels::test
