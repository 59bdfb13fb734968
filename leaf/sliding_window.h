// SlidingWindowLeaf: layers that attend to the last `window` tokens, the query counted, and to the
// first `sinks`. A block dies once every token in it has left the window, so blocks come back from
// the front while the request still runs.
#pragma once

#include "kvleaf/leaf/attention.h"

namespace kvleaf {

struct WindowOptions {
  std::uint32_t window = 0;
  std::uint32_t sinks = 0;
  /// Stage only the sinks and the live span ("block_table") with the first slot of the span
  /// ("first_slot" int32 [batch]), so that columns do not grow with the text.
  bool compact = false;
};

class SlidingWindowLeaf : public AttentionLeaf {
 public:
  SlidingWindowLeaf(std::string leaf_id, WindowOptions window, AttentionOptions options);

  const WindowOptions& window() const noexcept { return window_; }
  StagedInputs staged_input_shapes(std::uint32_t batch, std::uint32_t num_blocks) const override;
  void write_staged_inputs(std::span<const std::span<const BlockId>> plans,
                           StagedArrays into) const override;
  void write_staged_delta(std::span<const RowDelta> rows, StagedArrays into) const override;

 private:
  WindowOptions window_;
};

}  // namespace kvleaf
