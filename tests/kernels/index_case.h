// What the index functions are asked and what they answer, on the host and on the device.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvleaf/kernels/layout.h"

namespace kvleaf::kernels::test {

/// An entry of a page, and where the index functions say it lies.
struct IndexCase {
  KVPages pages;
  std::int64_t entry = 0;  // of a slot mapping
  std::uint32_t layer = 0;
  std::uint32_t head = 0;
  std::uint32_t element = 0;
};
struct IndexResult {
  std::uint64_t key = 0;
  std::uint64_t value = 0;
  std::uint64_t key_row = 0;
  std::uint64_t value_row = 0;
};
KVLEAF_HD IndexResult index_of(const IndexCase& one) noexcept {
  const SlotPosition at = split_entry(one.entry, one.pages.layout.slots);
  const auto slot = static_cast<std::uint32_t>(at.slot);
  return {one.pages.key_offset(at.block, one.layer, slot, one.head, one.element),
          one.pages.value_offset(at.block, one.layer, slot, one.head, one.element),
          one.pages.keys(one.layer).row_offset(one.entry),
          one.pages.values(one.layer).row_offset(one.entry)};
}

/// Of each case, computed on the device (device_index.cu).
std::vector<IndexResult> index_on_device(std::span<const IndexCase> cases);

}  // namespace kvleaf::kernels::test
