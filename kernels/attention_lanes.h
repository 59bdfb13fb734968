// Attention of one query head over pages, by a group of lanes: what a device runs for each token
// and head. Plain, as its reference is; nothing is checked, but nothing outside of tables and pages
// is read either: a slot that the table does not hold, or that names no block, is passed over. Not
// part of what kernels.h offers.
#pragma once

#include <cmath>

#include "kvleaf/kernels/attention.h"
#include "kvleaf/kernels/lanes.h"

namespace kvleaf::kernels {

/// A PagedAttention whose lists are where the kernel reads them.
struct AttentionWork {
  const std::byte* queries = nullptr;
  std::byte* output = nullptr;
  Number number = Number::float32;
  std::uint32_t query_heads = 0;
  float scale = 1.0f;
  const std::int32_t* cu_seqlens_q = nullptr;  // [rows + 1]
  const std::int32_t* seq_lens = nullptr;      // [rows]
  std::int64_t rows = 0;
  std::int64_t tokens = 0;  // of queries and output; those behind the last row's give zeros
  BlockTable table;
  KVPages pages;
  std::uint32_t layer = 0;
  std::uint32_t value_width = 0;
  bool latent = false;  // values are the first elements of keys
  Reach reach;
  std::uint32_t granularity = 0;  // 0: no scales
  KVPages scales;
  BlockTable scale_table;
};

inline AttentionWork work_of(const PagedAttention& attention, std::int64_t tokens) noexcept {
  AttentionWork work;
  work.queries = static_cast<const std::byte*>(attention.queries);
  work.output = static_cast<std::byte*>(attention.output);
  work.number = attention.number;
  work.query_heads = attention.query_heads;
  work.scale = attention.scale;
  work.cu_seqlens_q = attention.cu_seqlens_q.data();
  work.seq_lens = attention.seq_lens.data();
  work.rows = static_cast<std::int64_t>(attention.seq_lens.size());
  work.tokens = tokens;
  work.table = attention.table;
  work.pages = attention.pages;
  work.layer = attention.layer;
  work.latent = attention.pages.layout.value_dim == 0;
  work.value_width = work.latent ? attention.latent_width : attention.pages.layout.value_dim;
  work.reach = attention.reach;
  if (attention.scales != nullptr) {
    work.granularity = attention.scales->granularity;
    work.scales = attention.scales->pages;
    work.scale_table = attention.scales->table;
  }
  return work;
}

/// The row of a query token; -1 behind the last.
KVLEAF_HD std::int64_t row_of_token(const AttentionWork& work, std::int64_t token) noexcept {
  if (work.rows == 0 || token >= work.cu_seqlens_q[work.rows]) return -1;
  std::int64_t low = 0;
  std::int64_t high = work.rows - 1;  // the first row that ends behind the token
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (work.cu_seqlens_q[middle + 1] > token) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

/// The page of a slot; null where there is none to read.
KVLEAF_HD const std::byte* page_of_slot(const KVPages& pages, const BlockTable& table,
                                        std::int64_t row, std::int64_t slot) noexcept {
  const std::int64_t column = table.column(row, slot);
  if (column < 0 || column >= table.columns) return nullptr;
  const std::int64_t block = table.blocks[row * table.row_stride + column];
  if (block < 0 || block > pages.blocks) return nullptr;
  return pages.base + static_cast<std::uint64_t>(block) * pages.page_stride;
}

/// per_lane · Lanes::count is at least the widths of key and value.
template <unsigned per_lane, class Lanes>
KVLEAF_HD void attend(const AttentionWork& work, std::int64_t token, std::uint32_t head,
                      Lanes lanes) noexcept {
  const KVLayout& layout = work.pages.layout;
  const std::uint32_t kv_head = head / (work.query_heads / layout.kv_heads);
  const std::uint64_t vector = static_cast<std::uint64_t>(token) * work.query_heads + head;
  float query[per_lane];
  float sums[per_lane];
  for (unsigned i = 0; i < per_lane; ++i) {
    const unsigned d = lanes.lane() + i * Lanes::count;
    query[i] = d < layout.key_dim
                   ? load_number_at(work.number, work.queries, vector * layout.key_dim + d)
                   : 0.0f;
    sums[i] = 0;
  }
  float largest = -INFINITY;
  float weights = 0;

  const std::int64_t row = row_of_token(work, token);
  if (row >= 0) {
    const std::int64_t first = work.cu_seqlens_q[row];
    const std::int64_t entries = work.seq_lens[row];
    const std::int64_t position = entries - (work.cu_seqlens_q[row + 1] - first) + (token - first);
    const auto see = [&](std::int64_t entry) {
      const std::int64_t slot = entry / layout.slots;
      const auto in_page = static_cast<std::uint32_t>(entry % layout.slots);
      const std::byte* page = page_of_slot(work.pages, work.table, row, slot);
      if (page == nullptr) return;
      const std::byte* scale_page = nullptr;
      if (work.granularity != 0) {
        scale_page = page_of_slot(work.scales, work.scale_table, row, slot);
        if (scale_page == nullptr) return;
      }
      const auto number = [&](std::uint64_t offset, std::uint64_t scale_offset, unsigned d) {
        const float value = load_number_at(work.pages.number, page + offset, d);
        if (work.granularity == 0) return value;
        return value *
               load_number_at(work.scales.number, scale_page + scale_offset, d / work.granularity);
      };
      const std::uint64_t key = layout.key_offset(work.layer, in_page, kv_head);
      const std::uint64_t key_scale = work.scales.layout.key_offset(work.layer, in_page, kv_head);
      float product = 0;
      for (unsigned i = 0; i < per_lane; ++i) {
        const unsigned d = lanes.lane() + i * Lanes::count;
        if (d < layout.key_dim) product += query[i] * number(key, key_scale, d);
      }
      product = lanes.sum(product) * work.scale;
      if (product > largest) {
        const float shrink = expf(largest - product);  // 0 for the first
        weights *= shrink;
        for (unsigned i = 0; i < per_lane; ++i) sums[i] *= shrink;
        largest = product;
      }
      const float weight = expf(product - largest);
      weights += weight;
      const std::uint64_t value =
          work.latent ? key : layout.value_offset(work.layer, in_page, kv_head);
      const std::uint64_t value_scale =
          work.latent ? key_scale : work.scales.layout.value_offset(work.layer, in_page, kv_head);
      for (unsigned i = 0; i < per_lane; ++i) {
        const unsigned d = lanes.lane() + i * Lanes::count;
        if (d < work.value_width) sums[i] += weight * number(value, value_scale, d);
      }
    };
    const std::int64_t end = work.reach.end(position, entries);
    const std::int64_t tail = work.reach.tail_begin(position);
    for (std::int64_t i = 0; i < work.reach.sinks && i < tail && i < end; ++i) see(i);
    for (std::int64_t i = tail; i < end; ++i) see(i);
  }
  for (unsigned i = 0; i < per_lane; ++i) {
    const unsigned d = lanes.lane() + i * Lanes::count;
    if (d >= work.value_width) continue;
    store_number_at(work.number, work.output, vector * work.value_width + d,
                    weights == 0 ? 0.0f : sums[i] / weights);
  }
}

}  // namespace kvleaf::kernels
