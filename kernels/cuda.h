// The kernels of this layer on a CUDA device: the same names and meanings, and a stream. Built
// where nvcc is found; code that links them defines KVLEAF_HAVE_CUDA.
//
// Each call is one launch, for a whole list and all leaves; it allocates nothing and waits for
// nothing, so it can be captured in a CUDA graph. Pages, entries and every list are in memory that
// the device can read (a list may lie in pinned host memory); only the list of leaves is read by
// the host.
//
// A device cannot refuse: lists are checked before (check_copies, check_clears), and an entry that
// names the null block to write, or a block beyond the last, is skipped; a gather gives zeros for
// it. Padding (-1) is skipped as on the host, so that a captured launch may serve lists of any
// length up to the one it was captured with. Throws DeviceError when a launch fails and KernelError
// for shapes. Compiled for sm_80, sm_90 and sm_100; accesses are of 16 bytes where addresses allow
// it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvleaf/kernels/append.h"
#include "kvleaf/kernels/attention.h"
#include "kvleaf/kernels/copy.h"
#include "kvleaf/kernels/gather.h"
#include "kvleaf/kernels/layout.h"
#include "kvleaf/kernels/state.h"
#include "kvleaf/kernels/table.h"

struct CUstream_st;  // a cudaStream_t points to one

namespace kvleaf::kernels::cuda {

using Stream = CUstream_st*;  // null: the default stream

/// Leaves of one launch: they travel with it.
inline constexpr std::size_t max_leaves = 64;

/// Whether this process can use a device.
bool available() noexcept;

void copy_pages(std::span<const Pages> leaves, std::span<const BlockCopy> copies, Stream stream);
void zero_pages(std::span<const Pages> leaves, std::span<const BlockClear> clears, Stream stream);

void append_rows(const std::byte* rows, std::uint64_t source_stride,
                 std::span<const std::int64_t> slots, const RowPages& pages, Stream stream);
void gather_rows(const RowPages& pages, std::span<const std::int64_t> slots, std::byte* rows,
                 std::uint64_t row_stride, Stream stream);

void append_kv(const NewEntries& entries, std::span<const std::int64_t> slots, const KVPages& pages,
               std::uint32_t layer, const ScalePages* scales, Stream stream);
void gather_kv(const KVPages& pages, std::uint32_t layer, std::span<const std::int64_t> slots,
               const GatheredEntries& into, const ScalePages* scales, Stream stream);

void scatter_table(const TableView& table, std::span<const std::int32_t> rows,
                   std::span<const std::int32_t> columns, std::span<const std::int32_t> values,
                   Stream stream);

/// Plain, as on the host: what faster kernels are compared with. `tokens`: of queries and output,
/// since only the device can read cu_seqlens_q; those behind the last row's give zeros. Slots in
/// reach that the table does not hold, or that name no block, are passed over.
void paged_attention(const PagedAttention& attention, std::int64_t tokens, Stream stream);
/// Plain as well. A batch row that reads or writes a state that does not exist is padding; no
/// written row may be another one's.
void gated_delta_rule(const GatedDeltaRule& step, Stream stream);
void mamba2(const Mamba2& step, Stream stream);

}  // namespace kvleaf::kernels::cuda
