// ScratchLeaf: memory of one request that no other ever reads: one block from the first step to
// release. Never cached, so it neither shortens nor lengthens a hit. Staged: "block_table" int32
// [batch, 1].
#pragma once

#include "kvleaf/leaf/region.h"

namespace kvleaf {

class ScratchLeaf : public KVLeafRegion {
 public:
  ScratchLeaf(std::string leaf_id, std::uint64_t bytes_per_page,
              std::optional<std::uint64_t> stride_alignment = 1, std::string group = "scratch");

  StagedInputs staged_input_shapes(std::uint32_t batch, std::uint32_t num_blocks) const override;
  bool can_write_delta() const override;
};

}  // namespace kvleaf
