// Attention over pages, as plain as it can be: what the tables and mappings of a step are tested
// against, and what an engine can compare its own kernels with. Not fast.
//
// Every kind of attention leaf: full, window with sinks, chunks (the reach); latent (one KV head,
// values are the first elements of the key); cross (not causal). Grouped heads: query head h reads
// KV head h / (query_heads / kv_heads). Sums in float32, whatever the pages hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvleaf/kernels/errors.h"
#include "kvleaf/kernels/layout.h"

namespace kvleaf::kernels {

/// Most elements of a head's key or value.
inline constexpr std::uint32_t max_head_dim = 1024;

/// The scales of quantised pages, with the scales leaf's own tables.
struct ScaleTables {
  KVPages pages;
  std::uint32_t granularity = 0;  // values that share one scale
  BlockTable table;
};

struct PagedAttention {
  const void* queries = nullptr;    // [tokens, query_heads, key_dim]
  void* output = nullptr;           // [tokens, query_heads, value width]
  Number number = Number::float32;  // of queries and output: float32, float16 or bfloat16
  std::uint32_t query_heads = 0;    // a multiple of the pages' kv_heads
  float scale = 1.0f;               // of the products of query and key

  /// Query tokens of row r are cu_seqlens_q[r] … cu_seqlens_q[r + 1]; they are the last of its
  /// seq_lens[r] entries where the reach is causal. Entries, not tokens, where a page stores fewer.
  std::span<const std::int32_t> cu_seqlens_q;  // [rows + 1]
  std::span<const std::int32_t> seq_lens;      // [rows]
  BlockTable table;                            // [rows, columns]

  KVPages pages;
  std::uint32_t layer = 0;
  std::uint32_t latent_width =
      0;  // where pages store no values: elements of the key that are the value
  const ScaleTables* scales = nullptr;
  Reach reach;
};

/// output = softmax(queries · keysᵀ · scale) · values, over the keys in reach; zeros where there
/// are none. Throws KernelError, writing nothing, for shapes that do not fit each other, lengths
/// that decrease, more queries than entries, and slots in reach that the table does not hold or
/// that name no block. (The null block is read as the zeros that it is: dummy rows have nothing
/// else.)
void paged_attention(const PagedAttention& attention);

}  // namespace kvleaf::kernels
