// Compaction: a few moves inside one page class that empty one of its huge blocks, for when another
// class is short of memory while this one's claimed huge blocks are mostly clean.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "kvleaf/leaf/errors.h"
#include "kvleaf/pool/block_pool.h"
#include "kvleaf/pool/transitions.h"

namespace kvleaf {

std::vector<BlockMove> BlockPool::plan_compaction(LeafId leaf, std::uint64_t max_bytes) const {
  require(Work::telling, "plan_compaction");
  const LeafState& state = state_of(leaf);
  const PageClass& page_class = classes_[state.page_class];
  if (page_class.ratio == 1) return {};
  std::uint64_t least_bytes = ~std::uint64_t{0};
  for (const std::uint16_t index : page_class.leaves) {
    least_bytes = std::min(least_bytes, geometry_.leaves()[index].bytes_per_page);
  }

  // Few moves is many clean blocks: from the emptiest claimed huge block on.
  const auto bytes_held = [&](std::uint32_t huge) {
    std::uint64_t bytes = 0;
    for (std::uint32_t index = 0; index < page_class.ratio; ++index) {
      const Block& block = blocks_of(huge)[index];
      if (!block.clean()) bytes += geometry_.leaves()[block.leaf].bytes_per_page;
    }
    return bytes;
  };
  const auto emptiest = [&]() -> std::uint32_t {
    for (std::uint32_t moves = 1; moves < page_class.ratio && moves <= max_bytes / least_bytes;
         ++moves) {
      for (const Fate fate : {Fate::cache, Fate::request}) {
        const FullestFirst& claimed = page_class.clean[static_cast<std::uint32_t>(fate)];
        for (std::uint32_t huge = claimed.front(page_class.ratio - moves);
             huge != FullestFirst::none; huge = links_[huge].next) {
          if (bytes_held(huge) <= max_bytes) return huge;
        }
      }
    }
    return FullestFirst::none;
  };
  const std::uint32_t source = emptiest();
  if (source == FullestFirst::none) return {};

  // Into the fullest others, first those of its own fate.
  std::vector<BlockMove> moves;
  for (std::uint32_t index = 0; index < page_class.ratio; ++index) {
    const Block& block = blocks_of(source)[index];
    if (block.clean()) continue;
    moves.push_back({LeafId(block.leaf), id_at(state, {source, index}), null_block});
  }
  std::size_t placed = 0;
  const std::uint32_t own_fate = huge_[source].fate;
  for (const std::uint32_t kind : {own_fate, 1 - own_fate}) {
    const FullestFirst& claimed = page_class.clean[kind];
    for (std::uint32_t clean = 1; clean < page_class.ratio && placed < moves.size(); ++clean) {
      if (!claimed.occupied().contains(clean)) continue;
      for (std::uint32_t huge = claimed.front(clean); huge != FullestFirst::none;
           huge = links_[huge].next) {
        if (huge == source) continue;
        std::uint32_t next = links_[huge].first_clean;
        for (std::uint32_t left = clean; left > 0 && placed < moves.size(); --left) {
          const std::uint32_t index = next & ~fresh;
          next = (next & fresh) != 0 ? next + 1
                                     : static_cast<std::uint32_t>(blocks_of(huge)[index].key_low);
          moves[placed++].dst = id_at(state, {huge, index});
        }
      }
    }
  }
  // Whether the others have room does not depend on which one is emptied: its own clean blocks and
  // those to be moved are always `ratio` together.
  if (placed < moves.size()) return {};
  return moves;
}

/// Takes one clean block out of its huge block's list.
void BlockPool::unlink_clean(Place place) noexcept {
  Block* blocks = blocks_of(place.huge);
  std::uint32_t previous = FullestFirst::none;
  const auto link_to = [&](std::uint32_t next) {
    if (previous == FullestFirst::none) {
      links_[place.huge].first_clean = next;
    } else {
      blocks[previous].key_low = next;
    }
  };
  std::uint32_t next = links_[place.huge].first_clean;
  while ((next & fresh) == 0) {
    if (next == place.index) {
      link_to(static_cast<std::uint32_t>(blocks[next].key_low));
      return;
    }
    previous = next;
    next = static_cast<std::uint32_t>(blocks[next].key_low);
  }
  // It was never used: those before it become ordinary members.
  for (std::uint32_t index = next & ~fresh; index < place.index; ++index) {
    link_to(index);
    previous = index;
  }
  link_to((place.index + 1) | fresh);
}

void BlockPool::move(LeafId leaf, BlockId src, BlockId dst) {
  require(Work::ready, "move");
  LeafState& state = state_of(leaf);
  PageClass& page_class = classes_[state.page_class];
  const Place from = owned_place("move from", state, leaf, src);
  if (dst.value() - 1 >= state.blocks) refuse_block("move to", leaf, dst);
  const Place to = place_of(state, dst);
  Block& target = block_at(to);
  if (huge_[to.huge].owner != state.page_class || huge_[to.huge].live == 0 || !target.clean()) {
    throw BlockError(
        fmt::format("move to: block {} of leaf {} ({}) is not a clean block in a claimed "
                    "huge block of its page class",
                    dst.value(), leaf.value(), geometry_.leaf(leaf).name));
  }
  Block& source = block_at(from);
  const bool committed = source.is(Block::committed);
  if (committed && indexed_) index_.erase(blocks_.data(), record_at(from));
  unlink_clean(to);
  target = source;
  source.references = 0;
  source.flags = 0;
  if (committed) {
    if (indexed_) index_.insert(blocks_.data(), record_at(to));
    raise_worth(to.huge, target.value);
    doubt_worth(from.huge, target.value);
  }
  const std::uint32_t live = target.live() ? 1 : 0;
  if (live == 0) file_block(to, target.value);
  change(page_class, to.huge, live, 1 - live);
  become_clean(page_class, from);
  change(page_class, from.huge, -live, live - 1);
}

}  // namespace kvleaf
