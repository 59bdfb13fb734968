#include "kvleaf/kernels/copy.h"

#include <algorithm>
#include <functional>
#include <string>

#include "kvleaf/kernels/stream.h"

namespace kvleaf::kernels {

namespace {

// One entry of a list, whatever it was listed as. Padding has no bytes.
struct ByteCopy {
  const std::byte* src = nullptr;
  std::byte* dst = nullptr;
  std::uint64_t bytes = 0;
};

// Addresses of unrelated arrays may be compared as numbers, not as pointers.
std::uintptr_t address(const std::byte* byte) { return reinterpret_cast<std::uintptr_t>(byte); }

// Sorts `copies` by destination and refuses a list whose order would matter. `bytes_of(copy)` gives
// the ByteCopy of an entry and has checked it; `describe(copy)` names it.
template <class Copy, class BytesOf, class Describe>
void check_independent(std::span<Copy> copies, BytesOf bytes_of, Describe describe) {
  const auto destination = [&](const Copy& copy) { return address(bytes_of(copy).dst); };
  std::ranges::sort(copies, std::less{}, destination);
  for (std::size_t i = 1; i < copies.size(); ++i) {
    const ByteCopy before = bytes_of(copies[i - 1]);
    if (address(before.dst) + before.bytes <= destination(copies[i])) continue;
    throw KernelError("two copies write the same bytes: " + describe(copies[i - 1]) + " and " +
                      describe(copies[i]));
  }
  for (const Copy& copy : copies) {
    const ByteCopy reader = bytes_of(copy);
    if (reader.bytes == 0) continue;
    // Destinations are disjoint by now, so of those that begin before the source's end the last one
    // reaches furthest.
    const auto after = std::ranges::lower_bound(copies, address(reader.src) + reader.bytes,
                                                std::less{}, destination);
    if (after == copies.begin()) continue;
    const ByteCopy writer = bytes_of(*std::prev(after));
    if (address(writer.dst) + writer.bytes <= address(reader.src)) continue;
    throw KernelError("one copy writes what another reads, so their order would matter: " +
                      describe(*std::prev(after)) + " and " + describe(copy));
  }
}

template <class Copy, class BytesOf>
void run(std::span<Copy> copies, BytesOf bytes_of) noexcept {
  std::uint64_t total = 0;
  for (const Copy& copy : copies) total += bytes_of(copy).bytes;
  const Store store = store_for_copies(total);
  for (const Copy& copy : copies) {
    const ByteCopy run = bytes_of(copy);
    if (run.bytes != 0) copy_bytes(run.dst, run.src, run.bytes, store);
  }
  end_stream(store);
}

void require_block(std::span<const Pages> leaves, std::uint32_t leaf, std::int64_t block,
                   std::int64_t least, const char* what) {
  if (leaf >= leaves.size()) {
    throw KernelError(std::string(what) + " names leaf " + std::to_string(leaf) + " of " +
                      std::to_string(leaves.size()));
  }
  if (block < least || block > leaves[leaf].blocks) {
    throw KernelError(std::string(what) + " names block " + std::to_string(block) + " of leaf " +
                      std::to_string(leaf) + ": " + std::to_string(least) + " to " +
                      std::to_string(leaves[leaf].blocks) + " are allowed");
  }
}

auto bytes_of_blocks(std::span<const Pages> leaves) {
  return [leaves](const BlockCopy& copy) -> ByteCopy {
    if (copy.dst == padding_entry) return {};
    const Pages& leaf = leaves[copy.leaf];
    return {leaf.page(copy.src), leaf.page(copy.dst), leaf.page_bytes};
  };
}

auto bytes_of_rows(const Rows& rows) {
  return [&rows](const RowCopy& copy) -> ByteCopy {
    if (copy.count == 0) return {};
    return {rows.base + copy.src * rows.row_bytes, rows.base + copy.dst * rows.row_bytes,
            copy.count * rows.row_bytes};
  };
}

}  // namespace

void check_copies(std::span<const Pages> leaves, std::span<BlockCopy> copies) {
  for (const BlockCopy& copy : copies) {
    if (copy.dst == padding_entry) continue;
    require_block(leaves, copy.leaf, copy.src, 0, "the source of a copy");
    require_block(leaves, copy.leaf, copy.dst, 1, "the destination of a copy");
  }
  check_independent(copies, bytes_of_blocks(leaves), [](const BlockCopy& copy) {
    return "leaf " + std::to_string(copy.leaf) + " block " + std::to_string(copy.src) + " to " +
           std::to_string(copy.dst);
  });
}

void copy_pages(std::span<const Pages> leaves, std::span<BlockCopy> copies) {
  check_copies(leaves, copies);
  run(copies, bytes_of_blocks(leaves));
}

void check_clears(std::span<const Pages> leaves, std::span<const BlockClear> clears) {
  for (const BlockClear& clear : clears) {
    if (clear.block == padding_entry) continue;
    require_block(leaves, clear.leaf, clear.block, 1, "a clear");
  }
}

void zero_pages(std::span<const Pages> leaves, std::span<const BlockClear> clears) {
  check_clears(leaves, clears);
  std::uint64_t total = 0;
  for (const BlockClear& clear : clears) {
    if (clear.block != padding_entry) total += leaves[clear.leaf].page_bytes;
  }
  const Store store = store_for_clears(total);
  for (const BlockClear& clear : clears) {
    if (clear.block == padding_entry) continue;
    const Pages& leaf = leaves[clear.leaf];
    clear_bytes(leaf.page(clear.block), leaf.page_bytes, store);
  }
  end_stream(store);
}

void copy_rows(const Rows& rows, std::span<RowCopy> copies) {
  const auto inside = [&](std::uint64_t first, std::uint64_t count) {
    return count <= rows.rows && first <= rows.rows - count;
  };
  const auto describe = [](const RowCopy& copy) {
    return std::to_string(copy.count) + " rows from " + std::to_string(copy.src) + " to " +
           std::to_string(copy.dst);
  };
  for (const RowCopy& copy : copies) {
    if (copy.count == 0) continue;
    if (!inside(copy.src, copy.count) || !inside(copy.dst, copy.count)) {
      throw KernelError("a copy of " + describe(copy) + " leaves the " + std::to_string(rows.rows) +
                        " rows there are");
    }
    if (copy.dst < rows.null_rows) {
      throw KernelError("a copy of " + describe(copy) + " writes the null block, rows 0 to " +
                        std::to_string(rows.null_rows - 1));
    }
  }
  check_independent(copies, bytes_of_rows(rows), describe);
  run(copies, bytes_of_rows(rows));
}

}  // namespace kvleaf::kernels
