#include "kvleaf/kernels/check.h"

#include <string>

namespace kvleaf::kernels {

void check_slots(std::span<const std::int64_t> slots, std::uint32_t slots_per_page,
                 std::uint32_t blocks, Access access) {
  if (slots_per_page == 0) throw KernelError("a page has no slots");
  const std::int64_t first = access == Access::read ? 0 : slots_per_page;
  const std::int64_t end = (std::int64_t{blocks} + 1) * slots_per_page;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const std::int64_t entry = slots[i];
    if (entry == padding_entry || (entry >= first && entry < end)) continue;
    throw KernelError("slot mapping entry " + std::to_string(i) + " is " + std::to_string(entry) +
                      ": -1 and " + std::to_string(first) + " to " + std::to_string(end - 1) +
                      " are allowed");
  }
}

void check_rows(const RowPages& pages) {
  if (pages.slots == 0) throw KernelError("a page has no slots");
  if (pages.offset + pages.slots * pages.row_bytes <= pages.page_stride) return;
  throw KernelError(std::to_string(pages.slots) + " rows of " + std::to_string(pages.row_bytes) +
                    " bytes from byte " + std::to_string(pages.offset) +
                    " do not fit a page stride of " + std::to_string(pages.page_stride));
}

void check_pages(const KVPages& pages) {
  if (pages.layout.element_bytes != size_of(pages.number)) {
    throw KernelError("elements of " + std::to_string(pages.layout.element_bytes) +
                      " bytes are no " + name_of(pages.number));
  }
  if (pages.layout.page_bytes() > pages.page_stride) {
    throw KernelError("a page of " + std::to_string(pages.layout.page_bytes()) +
                      " bytes does not fit a page stride of " + std::to_string(pages.page_stride));
  }
}

void check_layer(const KVPages& pages, std::uint32_t layer) {
  if (layer < pages.layout.layers) return;
  throw KernelError("layer " + std::to_string(layer) + " of pages with " +
                    std::to_string(pages.layout.layers) + " layers");
}

void check_scales(const KVPages& pages, const KVPages& scales, std::uint32_t granularity) {
  const KVLayout& values = pages.layout;
  if (granularity == 0 || values.key_dim % granularity != 0 ||
      values.value_dim % granularity != 0) {
    throw KernelError("a granularity of " + std::to_string(granularity) +
                      " does not divide heads of " + std::to_string(values.key_dim) + " and " +
                      std::to_string(values.value_dim));
  }
  if (scales.number != Number::float32 && scales.number != Number::float16 &&
      scales.number != Number::bfloat16) {
    throw KernelError(std::string("scales of ") + name_of(scales.number) +
                      ": float32, float16 and bfloat16 are allowed");
  }
  check_pages(scales);
  const KVLayout expected = scales_layout(values, granularity, scales.layout.element_bytes);
  if (scales.layout != expected) {
    throw KernelError(
        "pages of scales hold " + std::to_string(scales.layout.layers) + " layers of " +
        std::to_string(scales.layout.slots) + " slots, " + std::to_string(scales.layout.kv_heads) +
        " heads of " + std::to_string(scales.layout.key_dim) + " and " +
        std::to_string(scales.layout.value_dim) + "; the values imply " +
        std::to_string(expected.layers) + ", " + std::to_string(expected.slots) + ", " +
        std::to_string(expected.kv_heads) + ", " + std::to_string(expected.key_dim) + " and " +
        std::to_string(expected.value_dim));
  }
}

void check_paired(std::span<const std::int64_t> slots, std::span<const std::int64_t> scale_slots) {
  if (slots.size() != scale_slots.size()) {
    throw KernelError("slot mappings of " + std::to_string(slots.size()) + " values and " +
                      std::to_string(scale_slots.size()) + " scales");
  }
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if ((slots[i] == padding_entry) == (scale_slots[i] == padding_entry)) continue;
    throw KernelError("entry " + std::to_string(i) + " of the values' slot mapping is " +
                      std::to_string(slots[i]) + " and of the scales' " +
                      std::to_string(scale_slots[i]) + ": only one of them is padding");
  }
}

void check_numbers(Number outside, Number inside, bool scaled) {
  const bool wide =
      outside == Number::float32 || outside == Number::float16 || outside == Number::bfloat16;
  if (scaled) {
    const bool quantised =
        inside == Number::float8_e4m3 || inside == Number::float8_e5m2 || inside == Number::int8;
    if (wide && quantised) return;
    throw KernelError(std::string("scales between ") + name_of(outside) + " and pages of " +
                      name_of(inside) + ": wide numbers and 8-bit pages have them");
  }
  if (outside == inside) return;
  if (inside == Number::int8) throw KernelError("pages of int8 need scales");
  if (wide) return;
  throw KernelError(std::string("entries of ") + name_of(outside) + " with pages of " +
                    name_of(inside));
}

}  // namespace kvleaf::kernels
