// Gather: entries out of pages, by slot mapping: the reverse of append.h. Padding entries (-1) and
// the null block give zeros. Throws KernelError, writing nothing, for an entry beyond the last
// block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvleaf/kernels/append.h"
#include "kvleaf/kernels/layout.h"

namespace kvleaf::kernels {

/// Bytes as they are: slots[i] goes to row i of `rows`, at rows + i · row_stride.
void gather_rows(const RowPages& pages, std::span<const std::int64_t> slots, std::byte* rows,
                 std::uint64_t row_stride);

struct GatheredEntries {
  void* keys = nullptr;    // [tokens, kv_heads, key_dim]
  void* values = nullptr;  // [tokens, kv_heads, value_dim]; not written where value_dim is 0
  Number number = Number::bfloat16;  // float32, float16 or bfloat16, or that of the pages
  std::uint64_t key_stride = 0;      // bytes from one token to the next; 0: packed
  std::uint64_t value_stride = 0;
};

/// Reads one layer's entries; quantised ones are multiplied by their scales.
void gather_kv(const KVPages& pages, std::uint32_t layer, std::span<const std::int64_t> slots,
               const GatheredEntries& into, const ScalePages* scales = nullptr);

}  // namespace kvleaf::kernels
