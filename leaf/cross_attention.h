// CrossAttentionLeaf: keys and values of an encoder's output. Written whole before the first
// decode, identified by the encoder input's digest and length, shared by all requests with the same
// input, and whole or absent: losing one page makes the rest unreachable.
#pragma once

#include <string>

#include "kvleaf/leaf/attention.h"

namespace kvleaf {

class CrossAttentionLeaf : public AttentionLeaf {
 public:
  CrossAttentionLeaf(std::string leaf_id, AttentionOptions options, std::string group = "encoder");
};

}  // namespace kvleaf
