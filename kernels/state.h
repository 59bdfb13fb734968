// Steps of recurrent layers over rows of states, as plain as they can be: the reference for state
// leaves. A step reads each batch row's state from one row of the leaf, takes its new tokens in
// order, and writes the state to another row or to the same one. Sums in float32, whatever the
// states hold.
//
// A row of -1 is padding: no state is touched, and its tokens' outputs are zeros. The null block's
// rows may be read (a state that starts from zeros) and are never written.
#pragma once

#include <cstdint>
#include <span>

#include "kvleaf/kernels/errors.h"
#include "kvleaf/kernels/layout.h"

namespace kvleaf::kernels {

/// Which state each batch row reads and writes. In place: the same array twice.
struct StateBatch {
  StateRows states;                            // of float32, float16 or bfloat16
  std::span<const std::int32_t> read_rows;     // [rows]
  std::span<const std::int32_t> write_rows;    // [rows]
  std::span<const std::int32_t> cu_seqlens_q;  // [rows + 1]: tokens of row r
};

/// Most elements of a head's key or value, and of a Mamba-2 state.
inline constexpr std::uint32_t max_state_dim = 1024;

/// The gated delta rule (Gated DeltaNet, Qwen3-Next). State of one row: [value_heads, key_dim,
/// value_dim]. For each token, head by head, with S the state:
///   S ← exp(log_decay) · S
///   S ← S + key ⊗ (beta · (value - keyᵀ S))
///   output = scale · queryᵀ S
/// Value head h uses key head h / (value_heads / key_heads). Keys and queries come normalised.
struct GatedDeltaRule {
  StateBatch batch;
  std::uint32_t key_heads = 0;
  std::uint32_t value_heads = 0;  // a multiple of key_heads
  std::uint32_t key_dim = 0;
  std::uint32_t value_dim = 0;
  const float* queries = nullptr;    // [tokens, key_heads, key_dim]
  const float* keys = nullptr;       // [tokens, key_heads, key_dim]
  const float* values = nullptr;     // [tokens, value_heads, value_dim]
  const float* log_decay = nullptr;  // [tokens, value_heads]
  const float* beta = nullptr;       // [tokens, value_heads]
  float scale = 1.0f;
  float* output = nullptr;  // [tokens, value_heads, value_dim]
};
/// Throws KernelError, writing nothing: rows that do not exist, a written row of the null block, a
/// row that one batch row writes and another one reads or writes, shapes that do not fit each
/// other. Source: "Gated Delta Networks: Improving Mamba2 with Delta Rule", arXiv 2412.06464.
void gated_delta_rule(const GatedDeltaRule& step);

/// Mamba-2. State of one row: [heads, head_dim, state_dim]. For each token, head by head:
///   S ← exp(dt · a) · S + dt · x ⊗ b
///   output = S c + d · x
/// Head h uses group h / (heads / groups) of b and c. dt comes positive (after its softplus).
struct Mamba2 {
  StateBatch batch;
  std::uint32_t heads = 0;  // a multiple of groups
  std::uint32_t groups = 0;
  std::uint32_t head_dim = 0;
  std::uint32_t state_dim = 0;
  const float* x = nullptr;   // [tokens, heads, head_dim]
  const float* dt = nullptr;  // [tokens, heads]
  const float* a = nullptr;   // [heads]
  const float* b = nullptr;   // [tokens, groups, state_dim]
  const float* c = nullptr;   // [tokens, groups, state_dim]
  const float* d = nullptr;   // [heads]; null: zeros
  float* output = nullptr;    // [tokens, heads, head_dim]
};
/// Throws as gated_delta_rule does.
/// Source: "Transformers are SSMs", arXiv 2405.21060: the recurrent form.
void mamba2(const Mamba2& step);

}  // namespace kvleaf::kernels
