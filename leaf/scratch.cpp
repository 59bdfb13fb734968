#include "kvleaf/leaf/scratch.h"

#include <typeinfo>
#include <utility>

namespace kvleaf {

ScratchLeaf::ScratchLeaf(std::string leaf_id, std::uint64_t bytes_per_page,
                         std::optional<std::uint64_t> stride_alignment, std::string group)
    : KVLeafRegion(std::move(leaf_id), KVCacheGroupId::scratch(std::move(group)), bytes_per_page,
                   {.stride_alignment = stride_alignment, .tokens_per_page = std::nullopt}) {}

StagedInputs ScratchLeaf::staged_input_shapes(std::uint32_t batch, std::uint32_t) const {
  return KVLeafRegion::staged_input_shapes(batch, 1);
}

bool ScratchLeaf::can_write_delta() const { return typeid(*this) == typeid(ScratchLeaf); }

}  // namespace kvleaf
