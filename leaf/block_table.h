// How rows of blocks are written into staged arrays: as a dense table, as CSR, or as a compact
// table of a window's live span. Each has a full write, for plans, and an update, for deltas; both
// leave the same arrays, and both check everything before they write anything (PlanShapeError). For
// the leaf kinds of this folder. A table lives for one call: it refers to the leaf's id.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "kvleaf/leaf/index_array.h"

namespace kvleaf {

using RowPlans = std::span<const std::span<const BlockId>>;
using RowDeltas = std::span<const RowDelta>;

/// "block_table" int32 [batch, columns]: slot i of a row in column i, 0 behind its end.
class DenseTable {
 public:
  DenseTable(const std::string& leaf, const StagedArrays& into);
  void write(RowPlans plans);
  void update(RowDeltas rows);

 private:
  const std::string& leaf_;
  StagedArrays into_;
  IndexArray table_;
};

/// "indptr" int32 [batch + 1], "indices" int32 [capacity], "last_page_len" int32 [batch]: the
/// blocks of row i are indices[indptr[i] … indptr[i + 1]), every slot of it, null where out of
/// reach. last_page_len is in tokens, 1 … P, and 0 for a row without blocks. A padding row is one
/// null block with one token in it. Plans do not say how many tokens a row has, so a full write
/// takes the last page for full. Entries of indices behind indptr[batch] belong to nobody: a full
/// write zeroes them, an update leaves them.
///   Kernels that plan on CSR take a row to end where the next one begins, so there can be no room
/// between rows: one that takes a page shifts all that lie behind it, in a large batch in nearly
/// every step. An update moves those as they are and reports them as one range.
class CsrTable {
 public:
  CsrTable(const std::string& leaf, std::uint32_t tokens_per_page, const StagedArrays& into);
  void write(RowPlans plans);
  void update(RowDeltas rows);

 private:
  void require_room(std::size_t rows, std::int64_t total) const;
  void check(RowDeltas rows) const;

  const std::string& leaf_;
  std::uint32_t tokens_per_page_;
  StagedArrays into_;
  IndexArray indptr_;
  IndexArray indices_;
  IndexArray last_page_len_;
};

/// "block_table" int32 [batch, columns], "first_slot" int32 [batch]: column i is slot i for the
/// `sinks` first slots, and column sinks + i is slot first_slot + i. The span runs from the first
/// slot behind the sinks that is not null to the row's end; where there is none, first_slot is the
/// end of the row or of the sinks, whichever comes later.
class CompactTable {
 public:
  CompactTable(const std::string& leaf, std::uint32_t sink_slots, const StagedArrays& into);
  void write(RowPlans plans);
  void update(RowDeltas rows);

 private:
  struct Layout {
    std::int64_t first_slot;
    std::int64_t filled;  // columns
  };
  Layout layout(std::int64_t first_changed, std::span<const BlockId> blocks) const noexcept;
  Layout layout(std::int64_t row, const RowDelta& delta) const noexcept;
  void check(std::int64_t row, Layout layout) const;

  const std::string& leaf_;
  std::int64_t sinks_;  // slots
  StagedArrays into_;
  IndexArray table_;
  IndexArray first_slot_;
};

}  // namespace kvleaf
