// Append: new entries into pages, by slot mapping. Keys and values are stored as they are,
// converted, or quantised with scales that lie in the scales leaf's own pages (gather.h is the way
// back).
//
// Padding entries (-1) are skipped. An entry in the null block, beyond the last block, or of the
// wrong count throws KernelError before anything is written. Nothing allocates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvleaf/kernels/errors.h"
#include "kvleaf/kernels/layout.h"

namespace kvleaf::kernels {

/// Bytes as they are: row i of `rows` goes to slots[i].
///   rows   row i at rows + i · source_stride, pages.row_bytes long
///   slots  [tokens]  block · pages.slots + slot in the page; -1 is padding
/// Two rows of one slot: the later one stays.
void append_rows(const std::byte* rows, std::uint64_t source_stride,
                 std::span<const std::int64_t> slots, const RowPages& pages);

/// Keys and values of new tokens, as a forward computed them.
struct NewEntries {
  const void* keys = nullptr;        // [tokens, kv_heads, key_dim]
  const void* values = nullptr;      // [tokens, kv_heads, value_dim]; not read where value_dim is 0
  Number number = Number::bfloat16;  // float32, float16 or bfloat16, or that of the pages
  std::uint64_t key_stride = 0;      // bytes from one token to the next; 0: packed
  std::uint64_t value_stride = 0;
};

/// Where the scales of a quantised leaf lie. `slots` is the scales leaf's own slot mapping: its
/// blocks are not those of the values, but it is padded where theirs is.
struct ScalePages {
  KVPages pages;  // layout: scales_layout(values, granularity, …); float32, 16 or b16
  std::uint32_t granularity = 0;  // values that share one scale
  std::span<const std::int64_t> slots;
};

/// Writes one layer's entries of the new tokens.
///   slots   [tokens]
///   scales  null: none. The numbers are rounded to the type of the pages (float8 saturates); int8
///           needs scales
/// With scales, each `granularity` values get the scale that makes their largest fill the type's
/// range, and are multiplied by its reciprocal.
void append_kv(const NewEntries& entries, std::span<const std::int64_t> slots, const KVPages& pages,
               std::uint32_t layer, const ScalePages* scales = nullptr);

}  // namespace kvleaf::kernels
