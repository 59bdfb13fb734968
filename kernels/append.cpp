#include "kvleaf/kernels/append.h"

#include "kvleaf/kernels/check.h"
#include "kvleaf/kernels/convert.h"
#include "kvleaf/kernels/quantise.h"
#include "kvleaf/kernels/runs.h"
#include "kvleaf/kernels/stream.h"

namespace kvleaf::kernels {

namespace {

void write_rows(const std::byte* rows, std::uint64_t source_stride,
                std::span<const std::int64_t> slots, const RowPages& pages) noexcept {
  const Store store = store_for_copies(slots.size() * pages.row_bytes);
  for_each_run(slots, pages, [&](std::size_t first, std::size_t count, std::byte* to) {
    if (to == nullptr) return;
    const std::byte* from = rows + first * source_stride;
    if (source_stride == pages.row_bytes) {
      copy_bytes(to, from, count * pages.row_bytes, store);
      return;
    }
    for (std::size_t i = 0; i < count; ++i) {
      copy_bytes(to + i * pages.row_bytes, from + i * source_stride, pages.row_bytes, store);
    }
  });
  end_stream(store);
}

void convert_rows(const std::byte* rows, std::uint64_t source_stride, Number number,
                  std::span<const std::int64_t> slots, const RowPages& pages,
                  Number stored) noexcept {
  const ConvertRow convert = converter(number, stored);
  const std::uint64_t elements = pages.row_bytes / size_of(stored);
  for_each_run(slots, pages, [&](std::size_t first, std::size_t count, std::byte* to) {
    if (to == nullptr) return;
    for (std::size_t i = 0; i < count; ++i) {
      convert(rows + (first + i) * source_stride, to + i * pages.row_bytes, elements, 1.0f);
    }
  });
}

void quantise_rows(const std::byte* rows, std::uint64_t source_stride, Number number,
                   std::span<const std::int64_t> slots, const RowPages& pages, Number stored,
                   const ScalePages& scales, const RowPages& scale_pages) noexcept {
  const Number scale_number = scales.pages.number;
  const QuantiseRow quantise = row_quantiser(number, stored);
  const std::uint64_t groups = scale_pages.row_bytes / size_of(scale_number);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] == padding_entry) continue;
    quantise(rows + i * source_stride, pages.base + pages.row_offset(slots[i]),
             scale_pages.base + scale_pages.row_offset(scales.slots[i]), groups, scales.granularity,
             scale_number);
  }
}

}  // namespace

void append_rows(const std::byte* rows, std::uint64_t source_stride,
                 std::span<const std::int64_t> slots, const RowPages& pages) {
  check_rows(pages);
  check_slots(slots, pages.slots, pages.blocks, Access::write);
  write_rows(rows, source_stride, slots, pages);
}

void append_kv(const NewEntries& entries, std::span<const std::int64_t> slots, const KVPages& pages,
               std::uint32_t layer, const ScalePages* scales) {
  check_pages(pages);
  check_layer(pages, layer);
  check_numbers(entries.number, pages.number, scales != nullptr);
  check_slots(slots, pages.layout.slots, pages.blocks, Access::write);
  if (scales != nullptr) {
    check_scales(pages, scales->pages, scales->granularity);
    check_slots(scales->slots, scales->pages.layout.slots, scales->pages.blocks, Access::write);
    check_paired(slots, scales->slots);
  }

  const auto write = [&](const void* data, std::uint64_t stride, const RowPages& rows,
                         const RowPages& scale_rows) {
    if (rows.row_bytes == 0) return;
    const auto* from = static_cast<const std::byte*>(data);
    if (stride == 0) stride = rows.row_bytes / size_of(pages.number) * size_of(entries.number);
    if (scales != nullptr) {
      quantise_rows(from, stride, entries.number, slots, rows, pages.number, *scales, scale_rows);
    } else if (entries.number == pages.number) {
      write_rows(from, stride, slots, rows);
    } else {
      convert_rows(from, stride, entries.number, slots, rows, pages.number);
    }
  };
  write(entries.keys, entries.key_stride, pages.keys(layer),
        scales != nullptr ? scales->pages.keys(layer) : RowPages{});
  write(entries.values, entries.value_stride, pages.values(layer),
        scales != nullptr ? scales->pages.values(layer) : RowPages{});
}

}  // namespace kvleaf::kernels
