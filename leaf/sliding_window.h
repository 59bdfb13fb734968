// SlidingWindowLeaf: layers that attend to the last `window` tokens, the query counted, and to the
// first `sinks`. A block dies once every token in it has left the window, so blocks come back from
// the front while the request still runs.
#pragma once

#include "kvleaf/leaf/attention.h"

namespace kvleaf {

struct WindowOptions {
  std::uint32_t window = 0;
  std::uint32_t sinks = 0;
  /// Stage only what is held, so that columns do not grow with the text: "block_table" int32
  /// [batch, columns] and "first_slot" int32 [batch]. With S = ⌈sinks / P⌉, column i < S is slot i,
  /// and column S + i is slot first_slot + i. Where nothing is held behind the sinks, first_slot is
  /// the end of the row or S, whichever comes later.
  bool compact = false;
};

class SlidingWindowLeaf : public AttentionLeaf {
 public:
  /// Throws InvalidArgument, naming the leaf, for a window of 0 or a compact csr table.
  SlidingWindowLeaf(std::string leaf_id, WindowOptions window, AttentionOptions options);

  const WindowOptions& window() const noexcept { return window_; }
  bool stages_live_span() const override { return window_.compact; }
  StagedInputs staged_input_shapes(std::uint32_t batch, std::uint32_t num_blocks) const override;
  void write_staged_inputs(std::span<const std::span<const BlockId>> plans,
                           StagedArrays into) const override;
  void write_staged_delta(std::span<const RowDelta> rows, StagedArrays into) const override;

 private:
  std::uint32_t sink_slots() const noexcept;

  WindowOptions window_;
};

}  // namespace kvleaf
