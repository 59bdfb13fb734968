// Copies and clears of pages and rows: one call for a whole list, over many leaves. The lists may
// be run in any order: no entry writes what another one reads or writes, and a list for which that
// is not so (a → b and b → c in one list) is refused before a byte is written.
//
// To find that out without allocating, a list of copies is sorted in place, by destination.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvleaf/kernels/errors.h"
#include "kvleaf/kernels/layout.h"

namespace kvleaf::kernels {

/// All pages of one leaf, of any kind.
struct Pages {
  std::byte* base = nullptr;      // of block 0
  std::uint64_t page_stride = 0;  // bytes from one block to the next
  std::uint64_t page_bytes = 0;   // data of a page: what is copied or cleared
  std::uint32_t blocks = 0;       // real ids are 1 … blocks

  KVLEAF_HD std::byte* page(std::int64_t block) const noexcept {
    return base + static_cast<std::uint64_t>(block) * page_stride;
  }
};

struct BlockCopy {
  std::uint32_t leaf = 0;  // index into the list of leaves
  std::int32_t src = 0;    // may be 0: the null block's zeros are copied
  std::int32_t dst = -1;   // -1: padding, nothing is copied
  bool operator==(const BlockCopy&) const = default;
};

struct BlockClear {
  std::uint32_t leaf = 0;
  std::int32_t block = -1;  // -1: padding, nothing is cleared
  bool operator==(const BlockClear&) const = default;
};

/// Throws KernelError, changing nothing: a leaf, source or destination that does not exist, the
/// null block as destination, or bytes that one copy writes and another one reads or writes.
/// `copies` is put in the order of destination addresses. O(n log n) beside the bytes.
void copy_pages(std::span<const Pages> leaves, std::span<BlockCopy> copies);

/// The checks and the sorting of copy_pages alone, for a list that a device will run.
void check_copies(std::span<const Pages> leaves, std::span<BlockCopy> copies);

/// Throws KernelError, changing nothing, for a leaf or block that does not exist and for the null
/// block. A block may be listed twice.
void zero_pages(std::span<const Pages> leaves, std::span<const BlockClear> clears);
void check_clears(std::span<const Pages> leaves, std::span<const BlockClear> clears);

/// Rows of one input that is bound once and addressed by row.
struct Rows {
  std::byte* base = nullptr;
  std::uint64_t row_bytes = 0;  // also the distance of rows
  std::uint64_t null_rows = 0;  // the first rows are the null block's
  std::uint64_t rows = 0;       // all of them
};

/// Rows [src, src + count) to rows [dst, dst + count).
struct RowCopy {
  std::uint64_t src = 0;
  std::uint64_t dst = 0;
  std::uint64_t count = 0;
  bool operator==(const RowCopy&) const = default;
};

/// As copy_pages.
void copy_rows(const Rows& rows, std::span<RowCopy> copies);

}  // namespace kvleaf::kernels
