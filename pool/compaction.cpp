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
  const PageClass& page_class = *state.page_class;
  if (page_class.ratio == 1) return {};
  // The claimed huge blocks that have clean blocks, the emptiest first: few moves is many clean.
  std::vector<std::uint32_t> claimed;
  for (const Fate fate : {Fate::cache, Fate::request}) {
    const FullestFirst& list = page_class.clean[static_cast<std::uint32_t>(fate)];
    for (const std::uint32_t unlisted : {list.current(), list.spare()}) {
      if (unlisted != FullestFirst::none) claimed.push_back(unlisted);
    }
    for (std::uint32_t number = 1; number < list.lists(); ++number) {
      for (std::uint32_t huge = list.front(number); huge != FullestFirst::none;
           huge = links_[huge].next) {
        claimed.push_back(huge);
      }
    }
  }
  const auto clean = [&](std::uint32_t huge) { return clean_in(page_class, huge_[huge]); };
  std::sort(claimed.begin(), claimed.end(), [&](std::uint32_t a, std::uint32_t b) {
    return clean(a) != clean(b) ? clean(a) > clean(b) : a < b;
  });
  std::uint64_t room = 0;
  for (const std::uint32_t huge : claimed) room += clean(huge);
  // Whether the others have room does not depend on which one is emptied: its own clean blocks and
  // those to be moved are always `ratio` together.
  if (room < page_class.ratio) return {};

  const auto fits = [&](std::uint32_t huge) {
    std::uint64_t bytes = 0;
    for (std::uint32_t index = 0; index < page_class.ratio; ++index) {
      const Block& block = blocks_of(huge)[index];
      if (!block.clean()) bytes += geometry_.leaves()[block.leaf].bytes_per_page;
    }
    return bytes <= max_bytes;
  };
  const auto chosen = std::find_if(claimed.begin(), claimed.end(), fits);
  if (chosen == claimed.end()) return {};
  const std::uint32_t source = *chosen;
  claimed.erase(chosen);

  // Into the fullest others, first those of its own fate.
  std::reverse(claimed.begin(), claimed.end());
  std::stable_partition(claimed.begin(), claimed.end(),
                        [&](std::uint32_t huge) { return huge_[huge].fate == huge_[source].fate; });
  std::vector<BlockMove> moves;
  for (std::uint32_t index = 0; index < page_class.ratio; ++index) {
    const Block& block = blocks_of(source)[index];
    if (block.clean()) continue;
    moves.push_back({LeafId(block.leaf), id_at(state, {source, index}), null_block});
  }
  std::size_t placed = 0;
  for (const std::uint32_t huge : claimed) {
    std::uint32_t next = links_[huge].first_clean;
    for (std::uint32_t left = clean(huge); left > 0 && placed < moves.size(); --left) {
      const std::uint32_t index = next & ~fresh;
      next = (next & fresh) != 0 ? next + 1 : blocks_of(huge)[index].next_clean();
      moves[placed++].dst = id_at(state, {huge, index});
    }
  }
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
      blocks[previous].value = next;
    }
  };
  std::uint32_t next = links_[place.huge].first_clean;
  while ((next & fresh) == 0) {
    if (next == place.index) {
      link_to(blocks[next].next_clean());
      return;
    }
    previous = next;
    next = blocks[next].next_clean();
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
  PageClass& page_class = *state.page_class;
  const Place from = owned_place("move from", state, leaf, src);
  if (dst.value() - 1 >= state.blocks) refuse_block("move to", leaf, dst);
  const Place to = place_of(state, dst);
  Block& target = block_at(to);
  if (huge_[to.huge].owner != page_class.number || huge_[to.huge].live == 0 || !target.clean()) {
    throw BlockError(
        fmt::format("move to: block {} of leaf {} ({}) is not a clean block in a claimed "
                    "huge block of its page class",
                    dst.value(), leaf.value(), geometry_.leaf(leaf).name));
  }
  Block& source = block_at(from);
  const bool committed = source.is(Block::committed);
  if (committed && indexed_) index_.erase(blocks_.data(), keys_.data(), record_at(from));
  unlink_clean(to);
  target = source;
  key_at(to) = key_at(from);
  source.references = 0;
  source.flags = 0;
  if (committed) {
    if (indexed_) index_.insert(blocks_.data(), keys_.data(), record_at(to));
    raise_worth(to.huge, target.value);
    doubt_worth(from.huge, target.value);
  }
  HugeBlock& huge = huge_[to.huge];
  const bool live = target.live();
  ++(live ? huge.live : huge.cached);
  page_class.clean[huge.fate].drew_from_hinted(to.huge);
  if (!live) {
    file_block(to, target.value);
    file_huge(page_class, to.huge);
  }
  live ? live_to_clean(page_class, from) : cached_to_clean(page_class, from);
}

}  // namespace kvleaf
