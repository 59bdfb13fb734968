#include "kvleaf/leaf/cross_attention.h"

#include <utility>

namespace kvleaf {

CrossAttentionLeaf::CrossAttentionLeaf(std::string leaf_id, AttentionOptions options,
                                       std::string group)
    : AttentionLeaf(std::move(leaf_id), KVCacheGroupId::encoder(std::move(group)), options) {}

}  // namespace kvleaf
