// RecurrentStateLeaf: layers whose memory of the past is one state of fixed size, overwritten by every
// step. A request has one live state; copies of it at page boundaries (checkpoints) are what a prefix
// can be resumed from, each valid only at the length it was taken.
//
// A page holds the slabs one after another, each with all its layers:
//
//   conv [layers, dim, width]   recurrent [layers, heads, k_dim, v_dim]
//
// Addressed by block stride (`blocks`: int32 [batch]) or, with a single slab, by row (`rows`: int32
// [layers, batch], row = block · rows per stride + layer). Kernels of kind in_out get a read and a
// write array instead of one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvleaf/leaf/region.h"

namespace kvleaf {

/// One array of a state, per layer.
struct Slab {
  std::string name;
  std::vector<std::uint32_t> shape;
  DType dtype = DType::float32;
  std::uint64_t bytes() const noexcept;  // of one layer
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
  std::optional<std::uint32_t> tokens_per_page;  // distance of boundaries; none: page_tokens
  std::string group = "state";
};

/// Alignment: 256 bytes, or one row where addressed by row.
/// Staged, key: "state_rows" (in_place), or "state_read_rows" and "state_write_rows" (in_out);
/// int32 [batch] block indices (table blocks) or [layers, batch] rows. Padding is -1.
class RecurrentStateLeaf : public KVLeafRegion {
 public:
  /// Throws InvalidArgument: no layer, no slab, an empty shape, or rows with several slabs.
  RecurrentStateLeaf(std::string leaf_id, StateOptions options);

  const StateOptions& options() const noexcept { return options_; }
  std::uint32_t layers() const override { return options_.layers; }
  std::uint32_t rollback() const override { return options_.rollback; }
  StateKernel state_kernel() const override { return options_.kernel; }
  StagedInputs staged_input_shapes(std::uint32_t batch, std::uint32_t num_blocks) const override;
  void write_staged_inputs(std::span<const std::span<const BlockId>> plans,
                           StagedArrays into) const override;
  bool can_write_delta() const override { return true; }
  void write_staged_delta(std::span<const RowDelta> rows, StagedArrays into) const override;
  std::vector<BoundRows> bound_row_span(BlockId block) const override;
  std::vector<std::pair<BoundRows, BoundRows>> bound_row_copies(BlockId src,
                                                                BlockId dst) const override;
  void bind(std::uint64_t page_stride) override;

 private:
  StateOptions options_;
  std::uint64_t row_bytes_ = 0;        // one layer of the slab, where addressed by row
  std::uint64_t rows_per_stride_ = 0;  // layers, until bind; constant once bound
  bool bound_ = false;
};

}  // namespace kvleaf
