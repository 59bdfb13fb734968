// Sinks and landmark segments: a token attends to the first `sinks` tokens, to all of its own
// segment, and to the `segments` whole ones before it. The tail moves by a segment at a time.
#pragma once

#include <kvleaf/leaf/leaf.h>

#include <string>

namespace new_leaf_kind {

class LandmarkLeaf : public kvleaf::AttentionLeaf {
 public:
  LandmarkLeaf(const std::string& leaf_id, std::uint32_t sinks, std::uint32_t segment,
               std::uint32_t segments, kvleaf::AttentionOptions options)
      : AttentionLeaf(leaf_id, group_of(sinks, segment, segments), options) {}

  // The table is the shipped one, so its deltas hold here too.
  bool can_write_delta() const override { return true; }

 private:
  static kvleaf::KVCacheGroupId group_of(std::uint32_t sinks, std::uint32_t segment,
                                         std::uint32_t segments) {
    const auto tail_begin = [=](std::uint32_t n) {
      const std::uint32_t own = n / segment * segment;
      return own - std::min(own, segments * segment);
    };
    return {"landmarks_" + std::to_string(segments) + "_of_" + std::to_string(segment),
            kvleaf::AccessPattern::custom({.head = sinks, .tail_begin = tail_begin}),
            kvleaf::Writing::append};
  }
};

}  // namespace new_leaf_kind
