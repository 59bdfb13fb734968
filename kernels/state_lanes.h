// Steps of recurrent layers by a group of lanes: what a device runs for each row of the batch and
// each vector of a state that no other vector sees. A row whose state does not exist is passed over
// as padding is: its tokens give zeros. Not part of what kernels.h offers.
#pragma once

#include <cmath>

#include "kvleaf/kernels/lanes.h"
#include "kvleaf/kernels/state.h"

namespace kvleaf::kernels {

/// One batch row: its tokens, and the states it reads and writes; `there` is false for padding.
struct StateRowWork {
  std::int64_t first = 0;
  std::int64_t end = 0;
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  bool there = false;
};

/// The lists are where the kernel reads them.
KVLEAF_HD StateRowWork state_row(const StateRows& states, const std::int32_t* read_rows,
                                 const std::int32_t* write_rows, const std::int32_t* cu_seqlens_q,
                                 std::int64_t row) noexcept {
  StateRowWork work;
  work.first = cu_seqlens_q[row];
  work.end = cu_seqlens_q[row + 1];
  const std::int64_t read = read_rows[row];
  const std::int64_t write = write_rows[row];
  const auto rows = static_cast<std::int64_t>(states.rows);
  work.there = read >= 0 && read < rows && write >= states.null_rows && write < rows;
  if (!work.there) return work;
  work.from = states.base + states.row_offset(read);
  work.to = states.base + states.row_offset(write);
  return work;
}

/// Column `column` of a head's state of the gated delta rule. per_lane · Lanes::count is at least
/// key_dim.
template <unsigned per_lane, class Lanes>
KVLEAF_HD void delta_column(const GatedDeltaRule& step, const std::int32_t* read_rows,
                            const std::int32_t* write_rows, const std::int32_t* cu_seqlens_q,
                            std::int64_t row, std::uint32_t head, std::uint32_t column,
                            Lanes lanes) noexcept {
  const StateRows& states = step.batch.states;
  const StateRowWork work = state_row(states, read_rows, write_rows, cu_seqlens_q, row);
  const auto element = [&](unsigned key) {
    return (std::uint64_t{head} * step.key_dim + key) * step.value_dim + column;
  };
  float state[per_lane];
  for (unsigned i = 0; i < per_lane; ++i) {
    const unsigned k = lanes.lane() + i * Lanes::count;
    state[i] = work.there && k < step.key_dim ? load_number_at(states.number, work.from, element(k))
                                              : 0.0f;
  }
  const std::uint32_t key_head = head / (step.value_heads / step.key_heads);
  for (std::int64_t token = work.first; token < work.end; ++token) {
    const std::uint64_t keys =
        (static_cast<std::uint64_t>(token) * step.key_heads + key_head) * step.key_dim;
    const std::uint64_t scalar = static_cast<std::uint64_t>(token) * step.value_heads + head;
    float* const output = step.output + scalar * step.value_dim + column;
    if (!work.there) {
      if (lanes.lane() == 0) *output = 0.0f;
      continue;
    }
    const float decay = expf(step.log_decay[scalar]);
    float recalled = 0;
    for (unsigned i = 0; i < per_lane; ++i) {
      const unsigned k = lanes.lane() + i * Lanes::count;
      if (k >= step.key_dim) continue;
      state[i] *= decay;
      recalled += step.keys[keys + k] * state[i];
    }
    recalled = lanes.sum(recalled);
    const float change =
        step.beta[scalar] * (step.values[scalar * step.value_dim + column] - recalled);
    float sum = 0;
    for (unsigned i = 0; i < per_lane; ++i) {
      const unsigned k = lanes.lane() + i * Lanes::count;
      if (k >= step.key_dim) continue;
      state[i] += step.keys[keys + k] * change;
      sum += step.queries[keys + k] * state[i];
    }
    sum = lanes.sum(sum);
    if (lanes.lane() == 0) *output = step.scale * sum;
  }
  if (!work.there) return;
  for (unsigned i = 0; i < per_lane; ++i) {
    const unsigned k = lanes.lane() + i * Lanes::count;
    if (k < step.key_dim) store_number_at(states.number, work.to, element(k), state[i]);
  }
}

/// Element `p` of a head of Mamba-2: a vector of state_dim, at most per_lane · Lanes::count.
template <unsigned per_lane, class Lanes>
KVLEAF_HD void mamba2_element(const Mamba2& step, const std::int32_t* read_rows,
                              const std::int32_t* write_rows, const std::int32_t* cu_seqlens_q,
                              std::int64_t row, std::uint32_t head, std::uint32_t p,
                              Lanes lanes) noexcept {
  const StateRows& states = step.batch.states;
  const StateRowWork work = state_row(states, read_rows, write_rows, cu_seqlens_q, row);
  const std::uint64_t element = (std::uint64_t{head} * step.head_dim + p) * step.state_dim;
  float state[per_lane];
  for (unsigned i = 0; i < per_lane; ++i) {
    const unsigned n = lanes.lane() + i * Lanes::count;
    state[i] = work.there && n < step.state_dim
                   ? load_number_at(states.number, work.from, element + n)
                   : 0.0f;
  }
  const std::uint32_t group = head / (step.heads / step.groups);
  for (std::int64_t token = work.first; token < work.end; ++token) {
    const std::uint64_t scalar = static_cast<std::uint64_t>(token) * step.heads + head;
    float* const output = step.output + scalar * step.head_dim + p;
    if (!work.there) {
      if (lanes.lane() == 0) *output = 0.0f;
      continue;
    }
    const std::uint64_t vector =
        (static_cast<std::uint64_t>(token) * step.groups + group) * step.state_dim;
    const float x = step.x[scalar * step.head_dim + p];
    const float decay = expf(step.dt[scalar] * step.a[head]);
    const float input = step.dt[scalar] * x;
    float sum = 0;
    for (unsigned i = 0; i < per_lane; ++i) {
      const unsigned n = lanes.lane() + i * Lanes::count;
      if (n >= step.state_dim) continue;
      state[i] = decay * state[i] + input * step.b[vector + n];
      sum += state[i] * step.c[vector + n];
    }
    sum = lanes.sum(sum);
    if (lanes.lane() == 0) *output = sum + (step.d != nullptr ? step.d[head] * x : 0.0f);
  }
  if (!work.there) return;
  for (unsigned i = 0; i < per_lane; ++i) {
    const unsigned n = lanes.lane() + i * Lanes::count;
    if (n < step.state_dim) store_number_at(states.number, work.to, element + n, state[i]);
  }
}

}  // namespace kvleaf::kernels
