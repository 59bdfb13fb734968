// Dilated attention: a token attends to every `dilation`-th token before it, `taps` of them with
// itself. Tokens further back are never read again, so pages behind them are let go.
//
// Staged: "taps" int32 [batch, span], the blocks of the pages that are still held, and "first_slot"
// int32 [batch], the slot that the first of them is. Tables are as wide as the span, however long
// the text.
#pragma once

#include <kvleaf/leaf/leaf.h>

#include <algorithm>
#include <string>

namespace new_leaf_kind {

class DilatedWindowLeaf : public kvleaf::AttentionLeaf {
 public:
  DilatedWindowLeaf(const std::string& leaf_id, std::uint32_t taps, std::uint32_t dilation,
                    kvleaf::AttentionOptions options)
      : AttentionLeaf(leaf_id, group_of(taps, dilation), options) {}

  bool stages_live_span() const override { return true; }

  kvleaf::StagedInputs staged_input_shapes(std::uint32_t batch,
                                           std::uint32_t num_blocks) const override {
    return {kvleaf::StagedInput{"taps", {batch, num_blocks}, kvleaf::DType::int32},
            kvleaf::StagedInput{"first_slot", {batch}, kvleaf::DType::int32}};
  }

  void write_staged_inputs(std::span<const std::span<const kvleaf::BlockId>> plans,
                           kvleaf::StagedArrays into) const override {
    const kvleaf::StagedArray& taps = into.at("taps");
    std::int32_t* first_slots = into.at("first_slot").row<std::int32_t>(0);
    for (std::size_t i = 0; i < plans.size(); ++i) {
      const auto held = [](kvleaf::BlockId block) { return block != kvleaf::null_block; };
      const auto first = std::find_if(plans[i].begin(), plans[i].end(), held);
      first_slots[i] = static_cast<std::int32_t>(first - plans[i].begin());
      std::int32_t* row = taps.row<std::int32_t>(static_cast<std::int64_t>(i));
      std::int32_t* end = std::transform(first, plans[i].end(), row, [](kvleaf::BlockId block) {
        return static_cast<std::int32_t>(block.value());
      });
      std::fill(end, row + taps.shape[1], 0);
    }
  }

 private:
  static kvleaf::KVCacheGroupId group_of(std::uint32_t taps, std::uint32_t dilation) {
    // Token n reads n, n - dilation, …: with n tokens computed, those from here on.
    const auto tail_begin = [reach = (taps - 1) * dilation](std::uint32_t n) {
      return n < reach ? 0 : n - reach;
    };
    return {"dilated_" + std::to_string(taps) + "_by_" + std::to_string(dilation),
            kvleaf::AccessPattern::custom({.tail_begin = tail_begin}), kvleaf::Writing::append};
  }
};

}  // namespace new_leaf_kind
