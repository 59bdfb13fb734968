// Where things lie: the one header of index arithmetic, shared by host and device. Plain structs,
// 64-bit offsets throughout, no checks (the callers check), no errors.
//
// A leaf's block b begins at base + b · page_stride. Block 0 is the null block: readable zeros,
// never written. A slot mapping entry is block · slots + slot in the page; -1 is padding and is
// skipped.
//
// A page of attention holds, for each layer, its keys and then its values:
//
//   |<-------------------------------- page_stride --------------------------------->|
//   |<----------------------------- page_bytes ------------------------->|  padding   |
//   | layer 0 K [slots, kv_heads, key_dim] | layer 0 V [slots, kv_heads, value_dim] |
//   | layer 1 K                            | layer 1 V                              | …
//
// value_dim 0 stores no values: the values are the first elements of the key (latent attention).
// The scales of a quantised leaf lie in pages of their own with the same shape, its two widths
// divided by the values that share a scale.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvleaf/kernels/number.h"

namespace kvleaf::kernels {

/// An entry of a slot mapping or a state table that says: skip this one.
inline constexpr std::int64_t padding_entry = -1;

/// A slot mapping entry, taken apart.
struct SlotPosition {
  std::int64_t block;
  std::int64_t slot;
};
KVLEAF_HD SlotPosition split_entry(std::int64_t entry, std::uint32_t slots) noexcept {
  return {entry / slots, entry % slots};
}
KVLEAF_HD std::int64_t join_entry(std::int64_t block, std::int64_t slot,
                                  std::uint32_t slots) noexcept {
  return block * slots + slot;
}

/// Rows of equal size inside pages: row s of block b lies at base + b · page_stride + offset + s ·
/// row_bytes. Keys of one layer, values of one layer, or any bytes one appends by slot.
struct RowPages {
  std::byte* base = nullptr;      // of block 0
  std::uint64_t page_stride = 0;  // bytes from one block to the next
  std::uint64_t offset = 0;       // of the first row, in its page
  std::uint64_t row_bytes = 0;
  std::uint32_t slots = 0;   // rows of a page
  std::uint32_t blocks = 0;  // real ids are 1 … blocks

  /// Bytes from `base`.
  KVLEAF_HD std::uint64_t row_offset(std::int64_t block, std::int64_t slot) const noexcept {
    return static_cast<std::uint64_t>(block) * page_stride + offset +
           static_cast<std::uint64_t>(slot) * row_bytes;
  }
  KVLEAF_HD std::uint64_t row_offset(std::int64_t entry) const noexcept {
    const SlotPosition at = split_entry(entry, slots);
    return row_offset(at.block, at.slot);
  }
};

/// The inside of a page of attention.
struct KVLayout {
  std::uint32_t layers = 0;
  std::uint32_t slots = 0;  // entries of a page
  std::uint32_t kv_heads = 0;
  std::uint32_t key_dim = 0;    // elements of one head's key
  std::uint32_t value_dim = 0;  // of one head's value; 0: none are stored
  std::uint32_t element_bytes = 0;

  KVLEAF_HD std::uint64_t key_row_bytes() const noexcept {
    return std::uint64_t{kv_heads} * key_dim * element_bytes;
  }
  KVLEAF_HD std::uint64_t value_row_bytes() const noexcept {
    return std::uint64_t{kv_heads} * value_dim * element_bytes;
  }
  KVLEAF_HD std::uint64_t layer_bytes() const noexcept {
    return slots * (key_row_bytes() + value_row_bytes());
  }
  KVLEAF_HD std::uint64_t page_bytes() const noexcept { return layers * layer_bytes(); }

  bool operator==(const KVLayout&) const = default;

  /// Bytes from the start of the page.
  KVLEAF_HD std::uint64_t key_offset(std::uint32_t layer, std::uint32_t slot,
                                     std::uint32_t head = 0,
                                     std::uint32_t element = 0) const noexcept {
    return layer * layer_bytes() + slot * key_row_bytes() +
           (std::uint64_t{head} * key_dim + element) * element_bytes;
  }
  KVLEAF_HD std::uint64_t value_offset(std::uint32_t layer, std::uint32_t slot,
                                       std::uint32_t head = 0,
                                       std::uint32_t element = 0) const noexcept {
    return layer * layer_bytes() + slots * key_row_bytes() + slot * value_row_bytes() +
           (std::uint64_t{head} * value_dim + element) * element_bytes;
  }
};

/// The inside of a page of scales, `granularity` values of `values` to a scale.
KVLEAF_HD KVLayout scales_layout(KVLayout values, std::uint32_t granularity,
                                 std::uint32_t scale_bytes) noexcept {
  values.key_dim /= granularity;
  values.value_dim /= granularity;
  values.element_bytes = scale_bytes;
  return values;
}

/// All pages of one attention leaf.
struct KVPages {
  std::byte* base = nullptr;      // of block 0
  std::uint64_t page_stride = 0;  // at least layout.page_bytes()
  std::uint32_t blocks = 0;       // real ids are 1 … blocks
  KVLayout layout;
  Number number = Number::bfloat16;  // layout.element_bytes is its size

  /// Bytes from `base`.
  KVLEAF_HD std::uint64_t key_offset(std::int64_t block, std::uint32_t layer, std::uint32_t slot,
                                     std::uint32_t head = 0,
                                     std::uint32_t element = 0) const noexcept {
    return static_cast<std::uint64_t>(block) * page_stride +
           layout.key_offset(layer, slot, head, element);
  }
  KVLEAF_HD std::uint64_t value_offset(std::int64_t block, std::uint32_t layer, std::uint32_t slot,
                                       std::uint32_t head = 0,
                                       std::uint32_t element = 0) const noexcept {
    return static_cast<std::uint64_t>(block) * page_stride +
           layout.value_offset(layer, slot, head, element);
  }
  KVLEAF_HD RowPages keys(std::uint32_t layer) const noexcept {
    return {base,         page_stride, layout.key_offset(layer, 0), layout.key_row_bytes(),
            layout.slots, blocks};
  }
  KVLEAF_HD RowPages values(std::uint32_t layer) const noexcept {
    return {base,         page_stride, layout.value_offset(layer, 0), layout.value_row_bytes(),
            layout.slots, blocks};
  }
};

/// Block tables, row-major: [rows, columns] block ids, 0 where nothing is reached. A compact table
/// holds the slots of the sinks and then the live span, which begins at slot first_slot[row].
struct BlockTable {
  const std::int32_t* blocks = nullptr;
  std::int64_t columns = 0;
  std::int64_t row_stride = 0;               // elements
  const std::int32_t* first_slot = nullptr;  // [rows]; null: the table is not compact
  std::uint32_t sink_slots = 0;              // columns of a compact table that hold the sinks

  /// The column of a slot; it is outside [0, columns) where the table does not hold the slot.
  KVLEAF_HD std::int64_t column(std::int64_t row, std::int64_t slot) const noexcept {
    if (first_slot == nullptr || slot < sink_slots) return slot;
    return slot < first_slot[row] ? -1 : sink_slots + (slot - first_slot[row]);
  }
  /// The block of a slot; 0, the null block, where the table does not hold it.
  KVLEAF_HD std::int32_t block(std::int64_t row, std::int64_t slot) const noexcept {
    const std::int64_t at = column(row, slot);
    return at < 0 || at >= columns ? 0 : blocks[row * row_stride + at];
  }
};

/// Which keys a query sees. With the query at position p (itself counted), the keys
///   [0, head) ∪ [tail_begin(p), p],  or all of them where it is not causal (cross attention).
struct Reach {
  std::uint32_t window = 0;  // 0: no window
  std::uint32_t sinks = 0;   // first keys that every query sees
  std::uint32_t chunk = 0;   // 0: no chunks
  bool causal = true;

  KVLEAF_HD std::int64_t tail_begin(std::int64_t position) const noexcept {
    if (!causal) return 0;
    std::int64_t begin = 0;
    if (window != 0 && position + 1 > window) begin = position + 1 - window;
    if (chunk != 0 && position / chunk * chunk > begin) begin = position / chunk * chunk;
    return begin;
  }
  /// One past the last key, of `keys` there are.
  KVLEAF_HD std::int64_t end(std::int64_t position, std::int64_t keys) const noexcept {
    return causal && position + 1 < keys ? position + 1 : keys;
  }
};

/// Rows of states: row r lies at base + r · row_stride. Addressed by row, the stride is a row's
/// bytes and the null block's rows come first; addressed by block, it is the page stride, `base`
/// includes the slab's offset and the layer's, and row 0 is the null block.
struct StateRows {
  std::byte* base = nullptr;
  std::uint64_t row_stride = 0;  // bytes
  std::uint32_t null_rows = 1;   // rows of the null block: readable zeros, never written
  std::uint64_t rows = 0;        // all of them, the null block's included
  Number number = Number::float32;

  KVLEAF_HD std::uint64_t row_offset(std::int64_t row) const noexcept {
    return static_cast<std::uint64_t>(row) * row_stride;
  }
};

}  // namespace kvleaf::kernels
