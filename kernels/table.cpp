#include "kvleaf/kernels/table.h"

#include <string>

namespace kvleaf::kernels {

void scatter_table(const TableView& table, std::span<const std::int32_t> rows,
                   std::span<const std::int32_t> columns, std::span<const std::int32_t> values) {
  if (rows.size() != columns.size() || rows.size() != values.size()) {
    throw KernelError("a list of " + std::to_string(rows.size()) + " rows, " +
                      std::to_string(columns.size()) + " columns and " +
                      std::to_string(values.size()) + " values");
  }
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] == padding_entry) continue;
    if (rows[i] >= 0 && rows[i] < table.rows && columns[i] >= 0 && columns[i] < table.columns)
      continue;
    throw KernelError("change " + std::to_string(i) + " is at row " + std::to_string(rows[i]) +
                      ", column " + std::to_string(columns[i]) + " of a table of " +
                      std::to_string(table.rows) + " by " + std::to_string(table.columns));
  }
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] != padding_entry) table.data[table.offset(rows[i], columns[i])] = values[i];
  }
}

}  // namespace kvleaf::kernels
