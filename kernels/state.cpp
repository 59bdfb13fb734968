#include "kvleaf/kernels/state.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "kvleaf/kernels/check.h"
#include "kvleaf/kernels/convert.h"

namespace kvleaf::kernels {

namespace {

constexpr std::uint32_t tile_columns = 16;  // value elements that are worked on at a time

void check_batch_shapes(const StateBatch& batch, std::uint64_t state_elements) {
  const StateRows& states = batch.states;
  const std::size_t rows = batch.read_rows.size();
  if (batch.write_rows.size() != rows || batch.cu_seqlens_q.size() != rows + 1) {
    throw KernelError(std::to_string(rows) + " rows to read, " +
                      std::to_string(batch.write_rows.size()) + " to write and " +
                      std::to_string(batch.cu_seqlens_q.size()) + " cumulative lengths");
  }
  if (size_of(states.number) == 1) {
    throw KernelError(std::string("states of ") + name_of(states.number) +
                      ": float32, float16 and bfloat16 are allowed");
  }
  if (state_elements * size_of(states.number) > states.row_stride) {
    throw KernelError("a state of " + std::to_string(state_elements * size_of(states.number)) +
                      " bytes in rows " + std::to_string(states.row_stride) + " bytes apart");
  }
}

void check_batch(const StateBatch& batch) {
  const StateRows& states = batch.states;
  const std::size_t rows = batch.read_rows.size();
  const auto inside = [&](std::int64_t row, std::uint64_t first) {
    return row >= static_cast<std::int64_t>(first) && row < static_cast<std::int64_t>(states.rows);
  };
  for (std::size_t r = 0; r < rows; ++r) {
    const std::int32_t read = batch.read_rows[r];
    const std::int32_t write = batch.write_rows[r];
    const std::string place = "batch row " + std::to_string(r);
    if (batch.cu_seqlens_q[r] < 0 || batch.cu_seqlens_q[r] > batch.cu_seqlens_q[r + 1]) {
      throw KernelError(place + " has tokens " + std::to_string(batch.cu_seqlens_q[r]) + " to " +
                        std::to_string(batch.cu_seqlens_q[r + 1]));
    }
    if (read == padding_entry && write == padding_entry) continue;
    if (!inside(read, 0) || !inside(write, states.null_rows)) {
      throw KernelError(place + " reads state " + std::to_string(read) + " and writes " +
                        std::to_string(write) + " of " + std::to_string(states.rows) +
                        "; those before " + std::to_string(states.null_rows) +
                        " are the null block's");
    }
    // Quadratic, and nothing beside the states themselves.
    for (std::size_t other = 0; other < rows; ++other) {
      if (other == r || batch.write_rows[other] == padding_entry) continue;
      if (write != batch.read_rows[other] && write != batch.write_rows[other]) continue;
      throw KernelError(place + " writes state " + std::to_string(write) + ", which row " +
                        std::to_string(other) + " uses too");
    }
  }
}

// Reads and writes rows of a state as float32.
class StateRow {
 public:
  explicit StateRow(const StateRows& states)
      : states_(states),
        load_(converter(states.number, Number::float32)),
        store_(converter(Number::float32, states.number)) {}

  void load(std::int64_t row, std::uint64_t element, float* into, std::uint32_t count) const {
    load_(at(row, element), into, count, 1.0f);
  }
  void store(std::int64_t row, std::uint64_t element, const float* from,
             std::uint32_t count) const {
    store_(from, at(row, element), count, 1.0f);
  }

 private:
  std::byte* at(std::int64_t row, std::uint64_t element) const {
    return states_.base + states_.row_offset(row) + element * size_of(states_.number);
  }

  const StateRows& states_;
  ConvertRow load_;
  ConvertRow store_;
};

void require_groups(std::uint32_t heads, std::uint32_t groups, const char* what) {
  if (groups != 0 && heads % groups == 0) return;
  throw KernelError(std::to_string(heads) + " heads over " + std::to_string(groups) + " " + what);
}

void require_dim(std::uint32_t dim) {
  if (dim <= max_state_dim) return;
  throw KernelError("heads of " + std::to_string(dim) + " elements: at most " +
                    std::to_string(max_state_dim) + " are allowed");
}

}  // namespace

void check_delta_shapes(const GatedDeltaRule& step) {
  require_groups(step.value_heads, step.key_heads, "key heads");
  require_dim(step.key_dim);
  check_batch_shapes(step.batch, std::uint64_t{step.value_heads} * step.key_dim * step.value_dim);
}

void check_mamba2_shapes(const Mamba2& step) {
  require_groups(step.heads, step.groups, "groups");
  require_dim(step.state_dim);
  check_batch_shapes(step.batch, std::uint64_t{step.heads} * step.head_dim * step.state_dim);
}

void gated_delta_rule(const GatedDeltaRule& step) {
  check_delta_shapes(step);
  check_batch(step.batch);

  const StateRow states(step.batch.states);
  const std::uint32_t group = step.value_heads / step.key_heads;
  // Columns of the state do not see each other: a few at a time, all keys of them.
  std::array<std::array<float, tile_columns>, max_state_dim> tile;

  for (std::size_t r = 0; r < step.batch.read_rows.size(); ++r) {
    const std::int64_t first = step.batch.cu_seqlens_q[r];
    const std::int64_t end = step.batch.cu_seqlens_q[r + 1];
    if (step.batch.write_rows[r] == padding_entry) {
      const std::uint64_t width = std::uint64_t{step.value_heads} * step.value_dim;
      std::fill_n(step.output + first * width, (end - first) * width, 0.0f);
      continue;
    }
    for (std::uint32_t head = 0; head < step.value_heads; ++head) {
      for (std::uint32_t column = 0; column < step.value_dim; column += tile_columns) {
        const std::uint32_t columns = std::min(tile_columns, step.value_dim - column);
        const auto element = [&](std::uint32_t key) {
          return (std::uint64_t{head} * step.key_dim + key) * step.value_dim + column;
        };
        for (std::uint32_t key = 0; key < step.key_dim; ++key) {
          states.load(step.batch.read_rows[r], element(key), tile[key].data(), columns);
        }
        for (std::int64_t token = first; token < end; ++token) {
          const std::uint64_t keys = (token * step.key_heads + head / group) * step.key_dim;
          const std::uint64_t scalar = token * step.value_heads + head;
          const float* query = step.queries + keys;
          const float* key = step.keys + keys;
          const float* value = step.values + scalar * step.value_dim + column;
          float* output = step.output + scalar * step.value_dim + column;
          const float decay = std::exp(step.log_decay[scalar]);

          float recalled[tile_columns] = {};
          for (std::uint32_t k = 0; k < step.key_dim; ++k) {
            for (std::uint32_t c = 0; c < columns; ++c) {
              tile[k][c] *= decay;
              recalled[c] += key[k] * tile[k][c];
            }
          }
          float change[tile_columns] = {};
          for (std::uint32_t c = 0; c < columns; ++c) {
            change[c] = step.beta[scalar] * (value[c] - recalled[c]);
          }
          float sums[tile_columns] = {};
          for (std::uint32_t k = 0; k < step.key_dim; ++k) {
            for (std::uint32_t c = 0; c < columns; ++c) {
              tile[k][c] += key[k] * change[c];
              sums[c] += query[k] * tile[k][c];
            }
          }
          for (std::uint32_t c = 0; c < columns; ++c) output[c] = step.scale * sums[c];
        }
        for (std::uint32_t key = 0; key < step.key_dim; ++key) {
          states.store(step.batch.write_rows[r], element(key), tile[key].data(), columns);
        }
      }
    }
  }
}

void mamba2(const Mamba2& step) {
  check_mamba2_shapes(step);
  check_batch(step.batch);

  const StateRow states(step.batch.states);
  const std::uint32_t group = step.heads / step.groups;
  std::array<float, max_state_dim>
      state;  // one element of a head at a time: they do not see each other

  for (std::size_t r = 0; r < step.batch.read_rows.size(); ++r) {
    const std::int64_t first = step.batch.cu_seqlens_q[r];
    const std::int64_t end = step.batch.cu_seqlens_q[r + 1];
    if (step.batch.write_rows[r] == padding_entry) {
      const std::uint64_t width = std::uint64_t{step.heads} * step.head_dim;
      std::fill_n(step.output + first * width, (end - first) * width, 0.0f);
      continue;
    }
    for (std::uint32_t head = 0; head < step.heads; ++head) {
      for (std::uint32_t p = 0; p < step.head_dim; ++p) {
        const std::uint64_t element = (std::uint64_t{head} * step.head_dim + p) * step.state_dim;
        states.load(step.batch.read_rows[r], element, state.data(), step.state_dim);
        for (std::int64_t token = first; token < end; ++token) {
          const std::uint64_t scalar = token * step.heads + head;
          const std::uint64_t vector = (token * step.groups + head / group) * step.state_dim;
          const float x = step.x[scalar * step.head_dim + p];
          const float decay = std::exp(step.dt[scalar] * step.a[head]);
          const float input = step.dt[scalar] * x;
          float sum = 0;
          for (std::uint32_t n = 0; n < step.state_dim; ++n) {
            state[n] = decay * state[n] + input * step.b[vector + n];
            sum += state[n] * step.c[vector + n];
          }
          step.output[scalar * step.head_dim + p] =
              sum + (step.d != nullptr ? step.d[head] * x : 0.0f);
        }
        states.store(step.batch.write_rows[r], element, state.data(), step.state_dim);
      }
    }
  }
}

}  // namespace kvleaf::kernels
