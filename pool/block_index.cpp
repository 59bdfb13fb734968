#include "kvleaf/pool/block_index.h"

#include <bit>

namespace kvleaf {

BlockIndex::BlockIndex(std::uint64_t blocks)
    : slots_(std::bit_ceil(blocks + blocks / 2 + 1)), mask_(slots_.size() - 1) {}

// Keys are opaque, so they may be small numbers: multiply and fold until every bit counts.
std::uint64_t BlockIndex::home(std::uint16_t leaf, PageKey key) const noexcept {
  std::uint64_t mixed = (key.high ^ (std::uint64_t{leaf} << 48)) * 0x9e3779b97f4a7c15u;
  mixed = (std::rotl(mixed, 29) ^ key.low) * 0xbf58476d1ce4e5b9u;
  mixed = (mixed ^ mixed >> 32) * 0x94d049bb133111ebu;
  return (mixed ^ mixed >> 29) & mask_;
}

std::optional<std::uint32_t> BlockIndex::find(const Block* blocks, const PageKey* keys,
                                              std::uint16_t leaf, PageKey key) const noexcept {
  for (std::uint64_t slot = home(leaf, key);; slot = (slot + 1) & mask_) {
    if (slots_[slot] == 0) return std::nullopt;
    const std::uint32_t record = slots_[slot] - 1;
    if (keys[record] == key && blocks[record].leaf == leaf) return record;
  }
}

void BlockIndex::insert(const Block* blocks, const PageKey* keys, std::uint32_t record) noexcept {
  std::uint64_t slot = home(blocks[record].leaf, keys[record]);
  while (slots_[slot] != 0) slot = (slot + 1) & mask_;
  slots_[slot] = record + 1;
  ++entries_;
}

void BlockIndex::erase(const Block* blocks, const PageKey* keys, std::uint32_t record) noexcept {
  std::uint64_t hole = home(blocks[record].leaf, keys[record]);
  while (slots_[hole] != record + 1) hole = (hole + 1) & mask_;
  --entries_;
  // Later entries of the run move back into the hole unless that would put them before their home,
  // so that no tombstones pile up.
  for (std::uint64_t slot = (hole + 1) & mask_; slots_[slot] != 0; slot = (slot + 1) & mask_) {
    const std::uint32_t other = slots_[slot] - 1;
    const std::uint64_t from_home = (slot - home(blocks[other].leaf, keys[other])) & mask_;
    if (from_home < ((slot - hole) & mask_)) continue;
    slots_[hole] = slots_[slot];
    hole = slot;
  }
  slots_[hole] = 0;
}

}  // namespace kvleaf
