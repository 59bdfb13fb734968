#include "kvleaf/kernels/cuda.h"
#include "kvleaf/kernels/cuda/device.cuh"

namespace kvleaf::kernels::cuda {

namespace {

__global__ void scatter_kernel(TableView table, const std::int32_t* rows,
                               const std::int32_t* columns, const std::int32_t* values,
                               std::uint64_t count) {
  const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += step) {
    const std::int64_t row = rows[i], column = columns[i];
    if (row < 0 || row >= table.rows || column < 0 || column >= table.columns) continue;
    table.data[table.offset(row, column)] = values[i];
  }
}

}  // namespace

void scatter_table(const TableView& table, std::span<const std::int32_t> rows,
                   std::span<const std::int32_t> columns, std::span<const std::int32_t> values,
                   Stream stream) {
  if (rows.size() != columns.size() || rows.size() != values.size()) {
    throw KernelError("lists of rows, columns and values of unequal lengths");
  }
  if (rows.empty()) return;
  scatter_kernel<<<grid_for(rows.size(), block_threads), block_threads, 0, stream>>>(
      table, rows.data(), columns.data(), values.data(), rows.size());
  check_launch();
}

}  // namespace kvleaf::kernels::cuda
