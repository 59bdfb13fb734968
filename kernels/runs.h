// Runs of a slot mapping: tokens that lie one behind another in one page, so that a prompt is moved
// page by page and not row by row. Not part of what kernels.h offers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvleaf/kernels/layout.h"

namespace kvleaf::kernels {

/// Calls use(first token, tokens, first row's place) for each run, in order; the place of padding
/// is null. The mapping has been checked.
template <class Use>
void for_each_run(std::span<const std::int64_t> slots, const RowPages& pages, Use use) {
  for (std::size_t i = 0, run = 1; i < slots.size(); i += run, run = 1) {
    if (slots[i] == padding_entry) {
      while (i + run < slots.size() && slots[i + run] == padding_entry) ++run;
      use(i, run, static_cast<std::byte*>(nullptr));
      continue;
    }
    const SlotPosition at = split_entry(slots[i], pages.slots);
    const auto room = static_cast<std::size_t>(pages.slots - at.slot);
    while (run < room && i + run < slots.size() &&
           slots[i + run] == slots[i] + static_cast<std::int64_t>(run)) {
      ++run;
    }
    use(i, run, pages.base + pages.row_offset(at.block, at.slot));
  }
}

}  // namespace kvleaf::kernels
