// Checks that append, gather and attention share. Not part of what kernels.h offers.
#pragma once

#include <cstdint>
#include <span>

#include "kvleaf/kernels/append.h"
#include "kvleaf/kernels/attention.h"
#include "kvleaf/kernels/layout.h"
#include "kvleaf/kernels/state.h"

namespace kvleaf::kernels {

/// The first block an entry may name: a reader may name the null block, a writer may not.
enum class Access : std::uint8_t { read, write };

/// Every entry is padding or lies in a block that exists.
void check_slots(std::span<const std::int64_t> slots, std::uint32_t slots_per_page,
                 std::uint32_t blocks, Access access);
/// The rows of a page lie inside its stride.
void check_rows(const RowPages& pages);
/// A page fits its stride, the type fits the layout.
void check_pages(const KVPages& pages);
void check_layer(const KVPages& pages, std::uint32_t layer);
/// The scales' pages have the shape that the values' pages imply.
void check_scales(const KVPages& pages, const KVPages& scales, std::uint32_t granularity);
/// Both mappings have the same length and the same padding.
void check_paired(std::span<const std::int64_t> slots, std::span<const std::int64_t> scale_slots);
/// `outside` is a type of entries that pages of `inside` can take or give.
void check_numbers(Number outside, Number inside, bool scaled);

/// What can be told without reading tables, lengths and rows.
void check_attention_shapes(const PagedAttention& attention);
void check_delta_shapes(const GatedDeltaRule& step);
void check_mamba2_shapes(const Mamba2& step);

}  // namespace kvleaf::kernels
