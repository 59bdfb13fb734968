// RecurrentStateLeaf: layers whose memory of the past is one state of fixed size, overwritten by
// every step. A request has one live state; copies of it at page boundaries (checkpoints) are what
// a prefix can be resumed from, each valid only at the length it was taken.
//
// A page holds the slabs one after another, each with all its layers:
//
//   conv [layers, dim, width]   recurrent [layers, heads, k_dim, v_dim]
//
// Addressed by block stride (`blocks`: int32 [batch]) or, with a single slab, by row (`rows`: int32
// [layers, batch], row = block · rows per stride + layer). Kernels of kind in_out get a read and a
// write array instead of one, and kernels that emit states inside a chunk one more.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvleaf/leaf/region.h"

namespace kvleaf {

/// One array of a state, per layer.
struct Slab {
  std::string name;  // also the key of the input that is bound, where addressed by row
  std::vector<std::uint32_t> shape;
  DType dtype = DType::float32;
  std::uint64_t bytes() const noexcept;  // of one layer; 2^64 - 1 where it would be more
};

enum class StateTable : std::uint8_t { blocks, rows };
StateTable require_state_table(std::string_view name);
StateKernel require_state_kernel(std::string_view name);

struct StateOptions {
  std::uint32_t layers = 0;
  std::vector<Slab> slabs;
  StateKernel kernel = StateKernel::in_place;
  std::uint32_t rollback = 0;  // live states kept beside the first, for draft tokens
  bool in_chunk = false;       // the kernel emits states at boundaries inside a chunk
  StateTable table = StateTable::blocks;
  std::optional<std::uint32_t> tokens_per_page = {};  // distance of boundaries; none: page_tokens
  std::string group = "state";
};

/// Alignment: 256 bytes, or one row where addressed by row.
/// Staged, key: "state_rows" (in_place), or "state_read_rows" and "state_write_rows" (in_out);
/// int32 [batch] block indices (table blocks) or [layers, batch] rows. With in_chunk, also
/// "state_boundary_rows", [batch, num_blocks] or [layers, batch, num_blocks]: where the state goes
/// at each page boundary inside the step, in order. Padding is -1, as is a boundary that wants no
/// state. A plan is [block] or, in_out, [read, write]; with in_chunk the blocks of the boundaries
/// follow. An empty one is padding.
class RecurrentStateLeaf : public KVLeafRegion {
 public:
  /// Throws InvalidArgument, naming the leaf: no layer, no slab, a slab without a name or with the
  /// name of another, an empty shape, rows with several slabs, a page past 2^64 bytes.
  RecurrentStateLeaf(std::string leaf_id, StateOptions options);

  const StateOptions& options() const noexcept { return options_; }
  std::uint32_t layers() const override { return options_.layers; }
  std::uint32_t rollback() const override { return options_.rollback; }
  StateKernel state_kernel() const override { return options_.kernel; }
  bool emits_in_chunk() const override { return options_.in_chunk; }
  StagedInputs staged_input_shapes(std::uint32_t batch, std::uint32_t num_blocks) const override;
  void write_staged_inputs(std::span<const std::span<const BlockId>> plans,
                           StagedArrays into) const override;
  bool can_write_delta() const override;
  void write_staged_delta(std::span<const RowDelta> rows, StagedArrays into) const override;
  std::vector<BoundRows> bound_row_span(BlockId block) const override;
  std::vector<std::pair<BoundRows, BoundRows>> bound_row_copies(BlockId src,
                                                                BlockId dst) const override;
  /// Throws InvalidArgument for a stride that is not whole rows, or differs from the one bound
  /// before.
  void bind(std::uint64_t page_stride) override;

 private:
  StateOptions options_;
  // Rows from one block to the next: layers until bind, then constant; 1 where addressed by block.
  std::uint64_t rows_per_block_ = 1;
  bool bound_ = false;
};

}  // namespace kvleaf
