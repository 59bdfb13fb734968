#include "kvleaf/kernels/attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>

#include "kvleaf/kernels/check.h"
#include "kvleaf/kernels/convert.h"

namespace kvleaf::kernels {

namespace {

using Head = std::array<float, max_head_dim>;

std::uint32_t value_width(const PagedAttention& attention) {
  return attention.pages.layout.value_dim != 0 ? attention.pages.layout.value_dim
                                               : attention.latent_width;
}

// One query row's place: its tokens and its entries.
struct Row {
  std::int64_t index;
  std::int64_t first_token;
  std::int64_t tokens;
  std::int64_t entries;
  // Of the row's i-th query token among the row's entries.
  std::int64_t position(std::int64_t i) const { return entries - tokens + i; }
};

Row row_of(const PagedAttention& attention, std::size_t r) {
  const std::int64_t first = attention.cu_seqlens_q[r];
  return {static_cast<std::int64_t>(r), first, attention.cu_seqlens_q[r + 1] - first,
          attention.seq_lens[r]};
}

// Calls use(entry) for every entry that a query at `position` sees, in order.
template <class Use>
void for_each_visible(const Reach& reach, std::int64_t position, std::int64_t entries, Use use) {
  const std::int64_t end = reach.end(position, entries);
  const std::int64_t tail = reach.tail_begin(position);
  for (std::int64_t i = 0; i < std::min<std::int64_t>({reach.sinks, tail, end}); ++i) use(i);
  for (std::int64_t i = tail; i < end; ++i) use(i);
}

void check_slot(const BlockTable& table, const KVPages& pages, const Row& row, std::int64_t slot) {
  const std::int64_t column = table.column(row.index, slot);
  const std::string place = "slot " + std::to_string(slot) + " of row " + std::to_string(row.index);
  if (column < 0 || column >= table.columns) {
    throw KernelError(place + " is in reach and not in a table of " +
                      std::to_string(table.columns) + " columns");
  }
  const std::int64_t block = table.block(row.index, slot);
  if (block < 0 || block > pages.blocks) {
    throw KernelError(place + " names block " + std::to_string(block) + " of " +
                      std::to_string(pages.blocks));
  }
}

void check_rows_of_batch(const PagedAttention& attention) {
  for (std::size_t r = 0; r < attention.seq_lens.size(); ++r) {
    const Row row = row_of(attention, r);
    const std::int64_t most = attention.reach.causal ? row.entries : row.tokens;
    if (row.first_token < 0 || row.tokens < 0 || row.entries < 0 || row.tokens > most) {
      throw KernelError("row " + std::to_string(r) + " has " + std::to_string(row.tokens) +
                        " query tokens from " + std::to_string(row.first_token) + " and " +
                        std::to_string(row.entries) + " entries");
    }
    const std::int64_t slots = attention.pages.layout.slots;
    std::int64_t checked = -1;
    for (std::int64_t i = 0; i < row.tokens; ++i) {
      for_each_visible(attention.reach, row.position(i), row.entries, [&](std::int64_t entry) {
        const std::int64_t slot = entry / slots;
        if (slot == checked) return;
        checked = slot;
        check_slot(attention.table, attention.pages, row, slot);
        if (attention.scales != nullptr) {
          check_slot(attention.scales->table, attention.scales->pages, row, slot);
        }
      });
    }
  }
}

// Reads the vectors of one layer's entries as float32.
class Entries {
 public:
  explicit Entries(const PagedAttention& attention)
      : attention_(attention), convert_(converter(attention.pages.number, Number::float32)) {}

  void key(const Row& row, std::int64_t entry, std::uint32_t head, float* into) const {
    const KVLayout& layout = attention_.pages.layout;
    read(
        row, entry, layout.key_offset(attention_.layer, slot(entry), head), layout.key_dim,
        [&](const KVLayout& scales) {
          return scales.key_offset(attention_.layer, slot(entry), head);
        },
        into);
  }
  void value(const Row& row, std::int64_t entry, std::uint32_t head, float* into) const {
    const KVLayout& layout = attention_.pages.layout;
    read(
        row, entry, layout.value_offset(attention_.layer, slot(entry), head), layout.value_dim,
        [&](const KVLayout& scales) {
          return scales.value_offset(attention_.layer, slot(entry), head);
        },
        into);
  }

 private:
  std::uint32_t slot(std::int64_t entry) const {
    return static_cast<std::uint32_t>(entry % attention_.pages.layout.slots);
  }
  const std::byte* page(const KVPages& pages, const BlockTable& table, const Row& row,
                        std::int64_t entry) const {
    const std::int64_t block = table.block(row.index, entry / pages.layout.slots);
    return pages.base + static_cast<std::uint64_t>(block) * pages.page_stride;
  }
  template <class ScaleOffset>
  void read(const Row& row, std::int64_t entry, std::uint64_t offset, std::uint32_t elements,
            ScaleOffset scale_offset, float* into) const {
    const std::byte* at = page(attention_.pages, attention_.table, row, entry) + offset;
    if (attention_.scales == nullptr) return convert_(at, into, elements, 1.0f);
    const ScaleTables& scales = *attention_.scales;
    const std::byte* scale =
        page(scales.pages, scales.table, row, entry) + scale_offset(scales.pages.layout);
    for (std::uint32_t done = 0; done < elements; done += scales.granularity) {
      convert_(at + done, into + done, scales.granularity, load_number(scales.pages.number, scale));
      scale += size_of(scales.pages.number);
    }
  }

  const PagedAttention& attention_;
  ConvertRow convert_;
};

// In eight partial sums, which a compiler may hold in one register; the order is fixed.
float dot(const float* a, const float* b, std::uint32_t count) {
  float sums[8] = {};
  std::uint32_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (std::uint32_t lane = 0; lane < 8; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  for (; i < count; ++i) sums[0] += a[i] * b[i];
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

}  // namespace

void check_attention_shapes(const PagedAttention& attention) {
  const KVLayout& layout = attention.pages.layout;
  check_pages(attention.pages);
  check_layer(attention.pages, attention.layer);
  if (attention.scales == nullptr) {
    check_numbers(attention.number, attention.pages.number, false);
  } else {
    check_scales(attention.pages, attention.scales->pages, attention.scales->granularity);
    check_numbers(attention.number, attention.pages.number, true);
  }
  if (size_of(attention.number) == 1) {
    throw KernelError(std::string("queries of ") + name_of(attention.number) +
                      ": float32, float16 and bfloat16 are allowed");
  }
  if (layout.slots == 0) throw KernelError("a page has no slots");
  if (layout.kv_heads == 0 || attention.query_heads % layout.kv_heads != 0) {
    throw KernelError(std::to_string(attention.query_heads) + " query heads over " +
                      std::to_string(layout.kv_heads) + " KV heads");
  }
  if (layout.key_dim > max_head_dim || layout.value_dim > max_head_dim) {
    throw KernelError("heads of " + std::to_string(layout.key_dim) + " and " +
                      std::to_string(layout.value_dim) + " elements: at most " +
                      std::to_string(max_head_dim) + " are allowed");
  }
  if (layout.value_dim == 0 &&
      (attention.latent_width == 0 || attention.latent_width > layout.key_dim)) {
    throw KernelError("values of " + std::to_string(attention.latent_width) +
                      " elements out of keys of " + std::to_string(layout.key_dim));
  }
  if (attention.cu_seqlens_q.size() != attention.seq_lens.size() + 1) {
    throw KernelError(std::to_string(attention.cu_seqlens_q.size()) + " cumulative lengths for " +
                      std::to_string(attention.seq_lens.size()) + " rows");
  }
}

void paged_attention(const PagedAttention& attention) {
  check_attention_shapes(attention);
  check_rows_of_batch(attention);

  const KVLayout& layout = attention.pages.layout;
  const std::uint32_t width = value_width(attention);
  const std::uint32_t group = attention.query_heads / layout.kv_heads;
  const bool latent = layout.value_dim == 0;
  const Entries entries(attention);
  const ConvertRow load = converter(attention.number, Number::float32);
  const ConvertRow store = converter(Number::float32, attention.number);
  Head query, key, value, sum;

  for (std::size_t r = 0; r < attention.seq_lens.size(); ++r) {
    const Row row = row_of(attention, r);
    for (std::int64_t i = 0; i < row.tokens; ++i) {
      for (std::uint32_t head = 0; head < attention.query_heads; ++head) {
        const std::uint64_t vector =
            static_cast<std::uint64_t>(row.first_token + i) * attention.query_heads + head;
        load(static_cast<const std::byte*>(attention.queries) +
                 vector * layout.key_dim * size_of(attention.number),
             query.data(), layout.key_dim, 1.0f);

        // One pass: the sums are relative to the largest product so far, and are scaled when it
        // grows.
        float largest = -std::numeric_limits<float>::infinity();
        float weights = 0;
        std::fill_n(sum.begin(), width, 0.0f);
        for_each_visible(attention.reach, row.position(i), row.entries, [&](std::int64_t entry) {
          entries.key(row, entry, head / group, key.data());
          const float product = dot(query.data(), key.data(), layout.key_dim) * attention.scale;
          if (product > largest) {
            const float shrink = std::exp(largest - product);  // 0 for the first
            weights *= shrink;
            for (std::uint32_t d = 0; d < width; ++d) sum[d] *= shrink;
            largest = product;
          }
          const float weight = std::exp(product - largest);
          weights += weight;
          if (!latent) entries.value(row, entry, head / group, value.data());
          const float* from = latent ? key.data() : value.data();
          for (std::uint32_t d = 0; d < width; ++d) sum[d] += weight * from[d];
        });
        store(
            sum.data(),
            static_cast<std::byte*>(attention.output) + vector * width * size_of(attention.number),
            width, weights == 0 ? 1.0f : 1.0f / weights);
      }
    }
  }
}

}  // namespace kvleaf::kernels
