#include "kvleaf/kernels/gather.h"

#include <cstring>

#include "kvleaf/kernels/check.h"
#include "kvleaf/kernels/convert.h"
#include "kvleaf/kernels/runs.h"
#include "kvleaf/kernels/stream.h"

namespace kvleaf::kernels {

namespace {

void read_rows(const RowPages& pages, std::span<const std::int64_t> slots, std::byte* rows,
               std::uint64_t row_stride) noexcept {
  const Store store = store_for_copies(slots.size() * pages.row_bytes);
  for_each_run(slots, pages, [&](std::size_t first, std::size_t count, const std::byte* from) {
    const bool packed = row_stride == pages.row_bytes;
    const std::uint64_t bytes = packed ? count * pages.row_bytes : pages.row_bytes;
    for (std::size_t i = 0; i < (packed ? 1 : count); ++i) {
      std::byte* to = rows + (first + i) * row_stride;
      if (from == nullptr) {
        clear_bytes(to, bytes, store);
      } else {
        copy_bytes(to, from + i * pages.row_bytes, bytes, store);
      }
    }
  });
  end_stream(store);
}

}  // namespace

void gather_rows(const RowPages& pages, std::span<const std::int64_t> slots, std::byte* rows,
                 std::uint64_t row_stride) {
  check_rows(pages);
  check_slots(slots, pages.slots, pages.blocks, Access::read);
  read_rows(pages, slots, rows, row_stride);
}

void gather_kv(const KVPages& pages, std::uint32_t layer, std::span<const std::int64_t> slots,
               const GatheredEntries& into, const ScalePages* scales) {
  check_pages(pages);
  check_layer(pages, layer);
  check_numbers(into.number, pages.number, scales != nullptr);
  check_slots(slots, pages.layout.slots, pages.blocks, Access::read);
  if (scales != nullptr) {
    check_scales(pages, scales->pages, scales->granularity);
    check_slots(scales->slots, scales->pages.layout.slots, scales->pages.blocks, Access::read);
    check_paired(slots, scales->slots);
  }

  const auto read = [&](void* data, std::uint64_t stride, const RowPages& rows,
                        const RowPages& scale_rows) {
    if (rows.row_bytes == 0) return;
    auto* out = static_cast<std::byte*>(data);
    const std::uint64_t elements = rows.row_bytes / size_of(pages.number);
    const std::uint64_t out_bytes = elements * size_of(into.number);
    if (stride == 0) stride = out_bytes;
    if (scales == nullptr && into.number == pages.number) {
      return read_rows(rows, slots, out, stride);
    }
    const ConvertRow convert = converter(pages.number, into.number);
    const std::uint64_t group = scales == nullptr ? elements : scales->granularity;
    for (std::size_t i = 0; i < slots.size(); ++i) {
      std::byte* to = out + i * stride;
      if (slots[i] == padding_entry) {
        std::memset(to, 0, out_bytes);
        continue;
      }
      const std::byte* from = rows.base + rows.row_offset(slots[i]);
      const std::byte* scale_at =
          scales == nullptr ? nullptr : scale_rows.base + scale_rows.row_offset(scales->slots[i]);
      for (std::uint64_t done = 0; done < elements; done += group) {
        float scale = 1.0f;
        if (scale_at != nullptr) {
          scale = load_number(scales->pages.number, scale_at);
          scale_at += size_of(scales->pages.number);
        }
        convert(from, to, group, scale);
        from += group * size_of(pages.number);
        to += group * size_of(into.number);
      }
    }
  };
  read(into.keys, into.key_stride, pages.keys(layer),
       scales != nullptr ? scales->pages.keys(layer) : RowPages{});
  read(into.values, into.value_stride, pages.values(layer),
       scales != nullptr ? scales->pages.values(layer) : RowPages{});
}

}  // namespace kvleaf::kernels
