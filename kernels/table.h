// Scatter of table deltas: what a step changed in a table, as a list of (row, column, value), so
// that a copy of the table elsewhere (on a device) is brought up to date by the bytes that changed.
#pragma once

#include <cstdint>
#include <span>

#include "kvleaf/kernels/errors.h"
#include "kvleaf/kernels/layout.h"

namespace kvleaf::kernels {

/// A table of int32. An array of one dimension is a table of one row.
struct TableView {
  std::int32_t* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t row_stride = 0;     // elements
  std::int64_t column_stride = 1;  // elements

  KVLEAF_HD std::int64_t offset(std::int64_t row, std::int64_t column) const noexcept {
    return row * row_stride + column * column_stride;
  }
};

/// table[rows[i], columns[i]] = values[i]. A row of -1 is padding and is skipped; a place is listed
/// at most once (a device writes them in any order). Throws KernelError, writing nothing, for
/// unequal lengths or a place outside the table.
void scatter_table(const TableView& table, std::span<const std::int32_t> rows,
                   std::span<const std::int32_t> columns, std::span<const std::int32_t> values);

}  // namespace kvleaf::kernels
