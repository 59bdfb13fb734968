// A leaf kind written in C: every declaration is a member of its kvleaf_leaf_kind, and what it does
// not define behaves as in the class it derives from.
#pragma once

#include <vector>

#include "border.h"

namespace kvleaf::c {

class CallbackLeaf final : public KVLeafRegion {
 public:
  explicit CallbackLeaf(const kvleaf_leaf_kind& kind);
  ~CallbackLeaf() override;

  bool cacheable() const override;
  std::uint32_t slots_per_page(std::uint32_t tokens_per_page) const override;
  std::uint32_t blocks_to_reserve(std::uint32_t num_blocks, std::uint32_t tokens_per_page,
                                  ReserveOptions options) const override;
  std::uint32_t rollback() const override { return kind_.rollback; }
  StateKernel state_kernel() const override { return kernel_; }
  bool emits_in_chunk() const override { return emits_in_chunk_; }
  bool stages_live_span() const override { return stages_live_span_; }
  std::uint32_t layers() const override { return kind_.layers; }
  StagedInputs staged_input_shapes(std::uint32_t batch, std::uint32_t num_blocks) const override;
  void write_staged_inputs(std::span<const std::span<const BlockId>> plans,
                           StagedArrays into) const override;
  bool can_write_delta() const override;
  void write_staged_delta(std::span<const RowDelta> rows, StagedArrays into) const override;
  std::vector<BoundRows> bound_row_span(BlockId block) const override;
  std::vector<std::pair<BoundRows, BoundRows>> bound_row_copies(BlockId src,
                                                                BlockId dst) const override;
  void bind(std::uint64_t page_stride) override;

  /// The same rows with the keys that the kind gave.
  std::vector<kvleaf_bound_rows> span_rows(BlockId block) const;
  struct Copies {
    std::vector<kvleaf_bound_rows> from;
    std::vector<kvleaf_bound_rows> to;
  };
  Copies copy_rows(BlockId src, BlockId dst) const;

 private:
  std::string called(const char* callback) const;  // "leaf 'x': bind", for messages

  kvleaf_leaf_kind kind_;
  StateKernel kernel_;
  bool never_cached_;
  bool emits_in_chunk_;
  bool stages_live_span_;
};

}  // namespace kvleaf::c
