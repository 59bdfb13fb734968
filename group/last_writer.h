// LastWriter: whose bytes lie in a block. A block whose bytes last served another leaf must be
// cleared before its new owner's kernels read it: an old state read as keys is full of NaNs. Knows
// only which leaf each block was last drawn for; untouched memory is zero and needs no clearing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kvleaf/pool/geometry.h"
#include "kvleaf/pool/ratio_divider.h"

namespace kvleaf {

class LastWriter {
 public:
  explicit LastWriter(const Geometry& geometry)
      : huge_blocks_(geometry.huge_blocks(), Huge{}), leaves_(geometry.leaves().size()) {
    for (std::size_t i = 0; i < leaves_.size(); ++i) {
      const LeafGeometry& g = geometry.leaves()[i];
      leaves_[i] = {RatioDivider(static_cast<std::uint32_t>(g.ratio)),
                    static_cast<std::uint16_t>(g.page_class.value() + 1)};
      most_ = std::max(most_, leaves_[i].divider.ratio());
    }
    writers_.resize(geometry.huge_blocks() * most_, untouched);
  }

  /// The block is drawn for `leaf`. True if its bytes last served another leaf.
  bool draw(LeafId leaf, BlockId block) noexcept {
    const Leaf& of = leaves_[leaf.value()];
    const std::uint32_t huge = of.divider.quotient(block.value() - 1);
    const std::uint32_t index = block.value() - 1 - huge * of.divider.ratio();
    std::uint16_t* writers = writers_.data() + std::size_t{huge} * most_;
    if (huge_blocks_[huge].page_class != of.page_class) {
      // Another tiling: which bytes were written is not known block by block any more.
      const std::uint16_t before = huge_blocks_[huge].page_class == 0 ? untouched : somebody;
      std::fill(writers, writers + of.divider.ratio(), before);
      huge_blocks_[huge].page_class = of.page_class;
    }
    const std::uint16_t writer = writers[index];
    writers[index] = static_cast<std::uint16_t>(leaf.value());
    return writer != leaf.value() && writer != untouched;
  }

  /// The block was drawn for `leaf`, but nothing cleared or wrote it: its bytes are still
  /// somebody's.
  void forget(LeafId leaf, BlockId block) noexcept {
    const Leaf& of = leaves_[leaf.value()];
    const std::uint32_t huge = of.divider.quotient(block.value() - 1);
    if (huge_blocks_[huge].page_class != of.page_class)
      return;  // forgotten with the whole huge block
    writers_[std::size_t{huge} * most_ + (block.value() - 1 - huge * of.divider.ratio())] =
        somebody;
  }

  /// Of a block that the leaf has.
  HugeBlockId huge_block_of(LeafId leaf, BlockId block) const noexcept {
    return HugeBlockId(leaves_[leaf.value()].divider.quotient(block.value() - 1));
  }

  /// Huge blocks behind the old end hold fresh, zeroed memory.
  void resize(std::uint64_t huge_blocks) {
    huge_blocks_.resize(huge_blocks);
    writers_.resize(huge_blocks * most_, untouched);
  }
  std::uint64_t bytes() const noexcept { return writers_.size() * sizeof(std::uint16_t); }

 private:
  static constexpr std::uint16_t untouched = 0xffff;
  static constexpr std::uint16_t somebody = 0xfffe;
  struct Leaf {
    RatioDivider divider;
    std::uint16_t page_class = 0;  // from 1
  };
  struct Huge {
    std::uint16_t page_class = 0;  // whose tiling `writers_` follows; 0: never drawn from
  };
  std::vector<Huge> huge_blocks_;
  std::vector<Leaf> leaves_;
  std::vector<std::uint16_t> writers_;  // per huge block, at the largest ratio
  std::uint32_t most_ = 1;
};

}  // namespace kvleaf
