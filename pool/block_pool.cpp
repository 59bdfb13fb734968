#include "kvleaf/pool/block_pool.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "kvleaf/leaf/errors.h"
#include "kvleaf/pool/saturating.h"
#include "kvleaf/pool/transitions.h"

namespace kvleaf {

// ---- construction ------------------------------------------------------------------------------

BlockPool::BlockPool(Geometry geometry, PoolOptions options)
    : indexed_(options.index == KeyIndex::by_key),
      leaf_count_(static_cast<std::uint32_t>(geometry.leaves().size())),
      leaves_(geometry.leaves().size()),
      geometry_(std::move(geometry)),
      classes_(geometry_.page_classes()),
      terms_(leaves_.size()),
      wanted_(leaves_.size()),
      needed_(classes_.size()) {
  const std::uint64_t in_service = geometry_.huge_blocks();
  if (leaves_.size() >= HugeBlock::absent) {
    throw InvalidArgument(
        fmt::format("a pool of {} leaves; at most {}", leaves_.size(), HugeBlock::absent - 1));
  }
  if (options.max_huge_blocks != 0) {
    if (options.max_huge_blocks < in_service) {
      throw InvalidArgument(fmt::format("max_huge_blocks {}, but the geometry has {}",
                                        options.max_huge_blocks, in_service));
    }
    geometry_ = geometry_.resized(options.max_huge_blocks);
  }
  const auto huge_blocks = static_cast<std::uint32_t>(geometry_.huge_blocks());

  for (std::uint32_t index = 0; index < leaves_.size(); ++index) {
    const LeafGeometry& geometry_of = geometry_.leaves()[index];
    LeafState& leaf = leaves_[index];
    leaf.divider = RatioDivider(static_cast<std::uint32_t>(geometry_of.ratio));
    leaf.blocks = static_cast<std::uint32_t>(geometry_of.blocks);
    leaf.page_class = &classes_[geometry_of.page_class.value()];
    leaf.page_class->leaves.push_back(static_cast<std::uint16_t>(index));
    leaf.ceiling = geometry_of.ceiling.value_or(~std::uint64_t{0});
    terms_[index].floor = geometry_of.floor;
    standing_ = standing_ || geometry_of.floor != 0;
    max_ratio_ = std::max(max_ratio_, static_cast<std::uint32_t>(geometry_of.ratio));
  }
  max_divider_ = RatioDivider(max_ratio_);
  huge_shape_ = TreeShape(huge_blocks);
  for (std::uint32_t index = 0; index < classes_.size(); ++index) {
    PageClass& page_class = classes_[index];
    page_class.ratio = static_cast<std::uint32_t>(geometry_.class_ratio(PageClassId(index)));
    page_class.number = static_cast<std::uint16_t>(index);
    page_class.divider = RatioDivider(page_class.ratio);
    class_terms_.push_back({&page_class.claimed, page_class.divider,
                            static_cast<std::uint32_t>(page_class.leaves.size())});
    leaves_by_class_.insert(leaves_by_class_.end(), page_class.leaves.begin(),
                            page_class.leaves.end());
    page_class.order[idle_kind] = TreeNodes<Rank>(huge_shape_);
    if (page_class.ratio == 1) continue;
    for (const Fate fate : {Fate::cache, Fate::request}) {
      page_class.order[static_cast<std::uint32_t>(fate)] = TreeNodes<Rank>(huge_shape_);
    }
    page_class.worth_order = TreeNodes<Worth>(huge_shape_);
  }

  const std::uint64_t records = std::uint64_t{huge_blocks} * max_ratio_;
  blocks_ = Records<Block>(records);
  keys_ = Records<PageKey>(records);
  huge_ = Records<HugeBlock>(huge_blocks);
  if (max_ratio_ > 1) links_ = Records<CleanLink>(huge_blocks);
  for (PageClass& page_class : classes_) {
    for (FullestFirst& clean : page_class.clean) {
      if (page_class.ratio > 1) {
        clean = FullestFirst(page_class.ratio, huge_.data(), links_.data());
      }
    }
  }
  if (max_ratio_ > small_ratio) {
    block_shape_ = TreeShape(max_ratio_);
    block_nodes_ = Records<Rank>(std::uint64_t{huge_blocks} * block_shape_.nodes());
    bounds_ = Records<Rank>(huge_blocks);
    worths_ = Records<Rank>(huge_blocks);
    std::fill_n(block_nodes_.data(), block_nodes_.size(), Rank());
    std::fill_n(bounds_.data(), bounds_.size(), Rank());
  }
  if (indexed_) index_ = BlockIndex(records);

  for (std::uint32_t huge = 0; huge < huge_blocks; ++huge) {
    huge_[huge].owner = huge < in_service ? HugeBlock::nobody : HugeBlock::absent;
  }
  empty_.set(in_service);
  if (!options.guarded.empty()) {
    guard_ = PageGuard(geometry_, options.guarded);
    for (std::uint32_t huge = 0; huge < huge_blocks; ++huge) {
      if (huge_[huge].owner == HugeBlock::absent) guard_.lose(huge);
    }
  }
}

// ---- refusals ----------------------------------------------------------------------------------

void BlockPool::refuse_work(const char* call) const {
  if (work_ == Work::poisoned) throw InvariantError(broken_);
  throw InvalidArgument(fmt::format("{} must not be called from inside on_evict", call));
}

void BlockPool::refuse_leaf(LeafId leaf) const {
  throw InvalidArgument(
      fmt::format("leaf {}, but the pool has {} leaves", leaf.value(), leaves_.size()));
}

void BlockPool::refuse_block(const char* call, LeafId leaf, BlockId block) const {
  const LeafState& state = leaves_[leaf.value()];
  const std::string asked = fmt::format("{}: block {} of leaf {} ({})", call, block.value(),
                                        leaf.value(), geometry_.leaf(leaf).name);
  if (block == null_block) throw BlockError(asked + " is the null block");
  if (block.value() > state.blocks) {
    throw BlockError(fmt::format("{} is past the leaf's last, {}", asked, state.blocks));
  }
  const Place place = place_of(state, block);
  const Block& record = blocks_of(place.huge)[place.index];
  const HugeBlock& huge = huge_[place.huge];
  if (huge.state() == HugeState::empty) {
    throw BlockError(fmt::format("{} is not allocated: huge block {} is {}", asked, place.huge,
                                 huge.owner == HugeBlock::absent ? "out of service" : "empty"));
  }
  if (huge.owner != state.page_class->number) {
    throw BlockError(fmt::format("{} is not allocated: huge block {} serves page class {}", asked,
                                 place.huge, huge.owner));
  }
  if (record.clean()) throw BlockError(asked + " is clean: neither live nor committed");
  if (record.leaf != leaf.value()) {
    throw BlockError(fmt::format("{} belongs to leaf {} ({})", asked, record.leaf,
                                 geometry_.leaf(LeafId(record.leaf)).name));
  }
  throw BlockError(fmt::format("{} has {} references and is {}committed", asked, record.references,
                               record.is(Block::committed) ? "" : "not "));
}

/// Where a live or cached block of this leaf is. Enough to look at the record alone: in an empty
/// huge block and in one of another class, no record is this leaf's and not clean.
BlockPool::Place BlockPool::owned_place(const char* call, const LeafState& state, LeafId leaf,
                                        BlockId block) const {
  if (block.value() - 1 >= state.blocks) [[unlikely]]
    refuse_block(call, leaf, block);
  const Place place = place_of(state, block);
  const Block& record = blocks_of(place.huge)[place.index];
  if (record.leaf != leaf.value() || record.clean()) [[unlikely]]
    refuse_block(call, leaf, block);
  return place;
}

BlockPool::Place BlockPool::committed_place(const char* call, const LeafState& state, LeafId leaf,
                                            BlockId block) const {
  const Place place = owned_place(call, state, leaf, block);
  if (!blocks_of(place.huge)[place.index].is(Block::committed)) refuse_block(call, leaf, block);
  return place;
}

// ---- drawing -----------------------------------------------------------------------------------

std::uint64_t BlockPool::free_blocks(const PageClass& page_class) const noexcept {
  std::uint64_t live = 0;
  for (const std::uint16_t leaf : page_class.leaves) live += leaves_[leaf].live.get();
  return page_class.claimed.get() * page_class.ratio - live;
}

/// The rule for {leaf: blocks}, and what drawing them may spend.
inline bool BlockPool::allow(LeafId leaf, std::uint64_t blocks,
                             Allowance& allowance) const noexcept {
  if (standing_) [[unlikely]]
    return allow_standing(leaf, blocks, allowance);
  // Without floors and promises nobody but this leaf's class needs anything.
  const LeafState& state = leaves_[leaf.value()];
  if (saturating_add(state.live.get(), blocks) > state.ceiling && blocks != 0) return false;
  const std::uint64_t left = room();
  allowance.slack = left;
  if (blocks <= left) return true;  // a huge block for each: every draw may spend
  const PageClass& page_class = *state.page_class;
  const std::uint64_t free = free_blocks(page_class);
  allowance.needed = blocks <= free ? 0 : page_class.divider.round_up(blocks - free);
  allowance.slack = left - allowance.needed;
  return allowance.needed <= left;
}

/// From the claimed huge blocks in `own`, the fullest first, as much as they have.
std::size_t BlockPool::take_from_claimed(LeafId leaf, FullestFirst& own,
                                         std::span<BlockId> out) noexcept {
  LeafState& state = leaves_[leaf.value()];
  const std::uint32_t ratio = state.divider.ratio();
  BlockId* next_out = out.data();
  BlockId* const end = next_out + out.size();
  while (next_out != end) {
    const std::uint32_t huge = own.fullest();
    if (huge == FullestFirst::none) break;
    HugeBlock& record = huge_[huge];
    const std::uint32_t clean = ratio - record.live - record.cached;
    const auto left = static_cast<std::size_t>(end - next_out);
    const std::uint32_t count = left < clean ? static_cast<std::uint32_t>(left) : clean;
    record.live += count;
    draw_clean(leaf, huge, ratio, count, next_out);
    next_out += count;
    count == clean ? own.used_up(huge) : own.drew_from(huge);
  }
  const auto drawn = static_cast<std::size_t>(next_out - out.data());
  state.live.add(drawn);
  return drawn;
}

/// Where the ratio is 1: claims empty huge blocks. Returns how many.
std::size_t BlockPool::take_single(LeafId leaf, Fate fate, Allowance& allowance,
                                   std::span<BlockId> out) noexcept {
  LeafState& state = leaves_[leaf.value()];
  PageClass& page_class = *state.page_class;
  const std::uint64_t most = std::min(empty_.get(), allowance.needed + allowance.slack);
  const std::size_t taken = std::min<std::uint64_t>(out.size(), most);
  Block* const records = blocks_.data();
  HugeBlock* const huge = huge_.data();
  const std::uint64_t stride = max_ratio_;
  const std::uint16_t owner = page_class.number;
  const auto leaf_number = static_cast<std::uint16_t>(leaf.value());
  const bool valued = !worths_.empty();
  std::uint32_t first_empty = first_empty_;
  for (std::size_t index = 0; index < taken; ++index) {
    const std::uint32_t number = first_empty & ~fresh;
    Block& block = records[number * stride];
    first_empty = (first_empty & fresh) != 0 ? first_empty + 1 : block.next_clean();
    block.draw(leaf_number);
    HugeBlock& record = huge[number];
    record.live = 1;
    record.owner = owner;
    record.fate = static_cast<std::uint16_t>(fate) & 1;
    record.worth_unsure = 0;
    if (valued) worths_[number] = Rank{0};
    out[index] = BlockId(number + 1);
  }
  first_empty_ = first_empty;
  empty_.add(-std::uint64_t{taken});
  page_class.claimed.add(taken);
  state.live.add(taken);
  const std::uint64_t from_needed = std::min<std::uint64_t>(allowance.needed, taken);
  allowance.needed -= from_needed;
  allowance.slack -= taken - from_needed;
  return taken;
}

std::optional<BlockId> BlockPool::allocate(LeafId leaf, Fate fate,
                                           std::optional<HugeBlockId> hint) {
  require(Work::ready, "allocate");
  LeafState& state = state_of(leaf);
  PageClass& page_class = *state.page_class;
  // Nearly always a clean block of a claimed huge block is there, or an empty huge block: a draw of
  // one fits then, unless there is more to ask.
  if (!standing_ && state.live.get() < state.ceiling && !guard_.on()) [[likely]] {
    BlockId block = null_block;
    if (page_class.ratio > 1) {
      if (hint && take_from_hinted(leaf, fate, *hint, {&block, 1}) != 0) return block;
      FullestFirst& own = page_class.clean[static_cast<std::uint32_t>(fate)];
      if (!own.empty()) {
        const std::uint32_t huge = own.fullest();
        block = take_one(state, leaf, huge);
        own.drew_from(huge);
        return block;
      }
    } else if (empty_.get() != 0) {
      return take_one(state, leaf, claim(page_class, fate));
    }
  }
  return allocate_slowly(leaf, fate, hint);
}

std::optional<BlockId> BlockPool::allocate_slowly(LeafId leaf, Fate fate,
                                                  std::optional<HugeBlockId> hint) {
  BlockId block = null_block;
  if (!allocate_many(leaf, {&block, 1}, fate, hint)) return std::nullopt;
  return block;
}

bool BlockPool::allocate_many(LeafId leaf, std::span<BlockId> out, Fate fate,
                              std::optional<HugeBlockId> hint) {
  require(Work::ready, "allocate");
  state_of(leaf);
  Allowance allowance{0, 0};
  if (!allow(leaf, out.size(), allowance)) return false;
  draw(leaf, fate, hint, out, allowance);
  if (guard_.on()) [[unlikely]]
    check_drawn(leaf, out);
  return true;
}

/// Draws out.size() blocks, which the rule has accepted, in the order of preference. What the owner
/// throws while it is told of an eviction passes through; then nothing of `out` is held.
void BlockPool::draw(LeafId leaf, Fate fate, std::optional<HugeBlockId> hint,
                     std::span<BlockId> out, Allowance& allowance) {
  PageClass& page_class = *leaves_[leaf.value()].page_class;
  FullestFirst& own = page_class.clean[static_cast<std::uint32_t>(fate)];
  std::size_t drawn = 0;
  while (drawn < out.size()) {
    if (page_class.ratio > 1) {
      if (hint) drawn += take_from_hinted(leaf, fate, *hint, out.subspan(drawn));
      if (!own.empty()) drawn += take_from_claimed(leaf, own, out.subspan(drawn));
    }
    if (drawn == out.size()) return;
    // What is cached beside blocks that die with their request is stuck, and goes before such a
    // draw claims another huge block that is not empty.
    const bool fills_up = fate == Fate::request && !(empty_.get() != 0 && allowance.may_spend()) &&
                          least_cached(page_class, static_cast<std::uint32_t>(fate)).rank.exists();
    const std::size_t taken =
        fills_up ? 0 : take_from_new(leaf, fate, allowance, out.subspan(drawn));
    drawn += taken;
    if (taken != 0) continue;
    try {
      drawn += evict(leaf, fate, allowance, out.subspan(drawn));
    } catch (...) {
      give_back(leaf, out.first(drawn));
      throw;
    }
  }
}

/// From the huge block that the request last took from; 0 where that is useless.
inline std::size_t BlockPool::take_from_hinted(LeafId leaf, Fate fate, HugeBlockId hint,
                                               std::span<BlockId> out) noexcept {
  const std::uint32_t huge = hint.value();
  if (out.empty() || huge >= huge_.size()) return 0;
  PageClass& page_class = *leaves_[leaf.value()].page_class;
  const HugeBlock& record = huge_[huge];
  if (record.live == 0 || record.owner != page_class.number ||
      record.fate != static_cast<std::uint32_t>(fate) || clean_in(page_class, record) == 0) {
    return 0;
  }
  const std::uint32_t taken = take(leaf, huge, out);
  page_class.clean[record.fate].drew_from_hinted(huge);
  return taken;
}

/// Where no claimed huge block of its fate has a clean block: from an empty one, an idle one of its
/// class, or one of another fate; 0 if there is nothing without evicting.
std::size_t BlockPool::take_from_new(LeafId leaf, Fate fate, Allowance& allowance,
                                     std::span<BlockId> out) noexcept {
  PageClass& page_class = *leaves_[leaf.value()].page_class;
  const auto own_kind = static_cast<std::uint32_t>(fate);
  if (page_class.ratio == 1) return take_single(leaf, fate, allowance, out);
  if (empty_.get() != 0 && allowance.may_spend()) {
    allowance.spend();
    const std::uint32_t huge = claim(page_class, fate);
    const std::uint32_t taken = take(leaf, huge, out);
    page_class.clean[own_kind].drew_from(huge);
    return taken;
  }
  FullestFirst& idle_ones = page_class.clean[idle_kind];
  if (!idle_ones.empty() && allowance.may_spend()) {
    const std::uint32_t idle = idle_ones.fullest();
    allowance.spend();
    leave_idle(page_class, idle);
    ++page_class.claimed;
    huge_[idle].fate = own_kind & 1;
    const std::uint32_t taken = take(leaf, idle, out);
    page_class.clean[own_kind].drew_from(idle);
    file_huge(page_class, idle);
    return taken;
  }
  FullestFirst& other = page_class.clean[1 - own_kind];
  if (other.empty()) return 0;
  const std::uint32_t huge = other.fullest();
  const std::uint32_t taken = take(leaf, huge, out);
  other.drew_from(huge);
  return taken;
}

// ---- guarded pages -----------------------------------------------------------------------------

void BlockPool::check_drawn(LeafId leaf, std::span<const BlockId> blocks) const {
  const LeafState& state = leaves_[leaf.value()];
  for (const BlockId block : blocks) {
    const Place place = place_of(state, block);
    const std::uint32_t ratio = state.divider.ratio();
    const auto written = guard_.written(place.huge, place.index, ratio);
    if (!written) continue;
    poison(fmt::format(
        "a page is not written after it was returned: byte {} of block {} of leaf {} ({}) is "
        "0x{:02x}, not 0x{:02x}",
        *written, block.value(), leaf.value(), geometry_.leaf(leaf).name,
        static_cast<unsigned>(guard_.at(place.huge, place.index, ratio, *written)),
        static_cast<unsigned>(PageGuard::pattern)));
  }
}

/// Throws what free_many would, before any page is filled.
void BlockPool::check_returned(LeafId leaf, std::span<const BlockId> blocks) {
  const LeafState& state = leaves_[leaf.value()];
  std::size_t good = 0;
  for (; good < blocks.size(); ++good) {
    if (blocks[good].value() - 1 >= state.blocks) break;
    Block& record = block_at(place_of(state, blocks[good]));
    if (record.leaf != leaf.value() || !record.live()) break;
    --record.references;
  }
  for (std::size_t index = good; index-- > 0;) {
    ++block_at(place_of(state, blocks[index])).references;
  }
  if (good < blocks.size()) refuse_block("free", leaf, blocks[good]);
}

/// Undoes the draw of these blocks, newest first.
void BlockPool::give_back(LeafId leaf, std::span<const BlockId> blocks) noexcept {
  LeafState& state = leaves_[leaf.value()];
  for (std::size_t index = blocks.size(); index-- > 0;) {
    const Place place = place_of(state, blocks[index]);
    block_at(place).references = 0;
    release(state, place);
  }
}

// ---- references --------------------------------------------------------------------------------

// Where the ratio is 1, a huge block is its one block: no lists, and one pass over the records.

/// Returns references from the back, until it meets one that is not the last of an uncommitted
/// block. Returns how many.
std::size_t BlockPool::free_single(LeafId leaf, std::span<const BlockId> blocks) noexcept {
  LeafState& state = leaves_[leaf.value()];
  Block* const records = blocks_.data();
  HugeBlock* const huge = huge_.data();
  const std::uint64_t stride = max_ratio_;
  const std::uint32_t last = state.blocks;
  std::uint32_t first_empty = first_empty_;
  std::size_t freed = 0;
  for (std::size_t index = blocks.size(); index-- > 0; ++freed) {
    const std::uint32_t number = blocks[index].value() - 1;
    if (number >= last) break;
    Block& block = records[number * stride];
    if (!block.is_only(static_cast<std::uint16_t>(leaf.value()))) break;
    block.references = 0;
    block.value = first_empty;
    first_empty = number;
    huge[number].live = 0;
    huge[number].owner = HugeBlock::nobody;
  }
  first_empty_ = first_empty;
  empty_.add(freed);
  state.page_class->claimed.add(-std::uint64_t{freed});
  state.live.add(-std::uint64_t{freed});
  return freed;
}

/// The same where the ratio is above 1; stops too at the last live block of a huge block. Those
/// that get their first clean block are listed at the end, when it is known where they belong: no
/// branch depends on which they are.
std::size_t BlockPool::free_run(LeafId leaf, std::span<const BlockId> blocks) noexcept {
  LeafState& state = leaves_[leaf.value()];
  PageClass& page_class = *state.page_class;
  Block* const records = blocks_.data();
  HugeBlock* const huge = huge_.data();
  CleanLink* const links = links_.data();
  const std::uint64_t stride = max_ratio_;
  const std::uint32_t last = state.blocks;
  const RatioDivider divider = state.divider;
  std::uint32_t unlisted[64];
  std::size_t unlisted_size = 0;
  std::size_t freed = 0;
  const std::size_t most = std::min(blocks.size(), std::size(unlisted));
  for (; freed < most; ++freed) {
    const std::uint32_t number = blocks[blocks.size() - 1 - freed].value() - 1;
    if (number >= last) break;
    const std::uint32_t at = divider.quotient(number);
    const std::uint32_t index = number - at * divider.ratio();
    Block& block = records[at * stride + index];
    HugeBlock& record = huge[at];
    if (!block.is_only(static_cast<std::uint16_t>(leaf.value())) || record.live == 1) break;
    block.references = 0;
    block.value = links[at].first_clean;
    links[at].first_clean = index;
    --record.live;
    unlisted[unlisted_size] = at;
    unlisted_size += clean_in(page_class, record) == 1 ? 1 : 0;
  }
  state.live.add(-std::uint64_t{freed});
  for (std::size_t index = 0; index < unlisted_size; ++index) {
    page_class.clean[huge[unlisted[index]].fate].insert(unlisted[index]);
  }
  return freed;
}

/// Returns the last references of committed blocks, from the back, as long as they lie in one huge
/// block: it is filed once. Returns how many.
std::size_t BlockPool::free_committed(LeafId leaf, std::span<const BlockId> blocks) noexcept {
  LeafState& state = leaves_[leaf.value()];
  if (blocks.back().value() - 1 >= state.blocks) return 0;
  const std::uint32_t huge = place_of(state, blocks.back()).huge;
  const std::uint32_t ratio = state.divider.ratio();
  const std::uint32_t first_id = huge * ratio + 1;
  Block* const records = blocks_of(huge);
  std::uint32_t freed = 0;
  for (; freed < blocks.size(); ++freed) {
    const std::uint32_t index = blocks[blocks.size() - 1 - freed].value() - first_id;
    if (index >= ratio) break;
    Block& block = records[index];
    if (block.leaf != leaf.value() || block.references != 1 || !block.is(Block::committed)) break;
    block.references = 0;
    file_block({huge, index}, block.value);
  }
  if (freed == 0) return 0;
  HugeBlock& record = huge_[huge];
  state.live.add(-std::uint64_t{freed});
  state.cached.add(freed);
  record.live -= freed;
  record.cached += freed;
  if (record.live == 0) {
    leave_claimed(*state.page_class, huge);
  } else {
    file_huge(*state.page_class, huge);
  }
  return freed;
}

void BlockPool::free(LeafId leaf, BlockId block) {
  require(Work::ready, "free");
  LeafState& state = state_of(leaf);
  if (block.value() - 1 >= state.blocks) [[unlikely]]
    refuse_block("free", leaf, block);
  const Place place = place_of(state, block);
  Block& record = block_at(place);
  if (record.leaf != leaf.value() || !record.live()) [[unlikely]] {
    refuse_block("free", leaf, block);
  }
  if (--record.references != 0) return;
  if (record.flags != 0) return release(state, place);
  --state.live;
  live_to_clean(*state.page_class, place);
}

void BlockPool::free_many(LeafId leaf, std::span<const BlockId> blocks) {
  require(Work::ready, "free");
  LeafState& state = state_of(leaf);
  const bool single = state.page_class->ratio == 1;
  const bool guarded = guard_.on();
  if (guarded) [[unlikely]]
    check_returned(leaf, blocks);
  // Backwards: the next to draw them gets them in the order given here.
  for (std::size_t index = blocks.size(); index > 0;) {
    if (!guarded) [[likely]] {
      index -=
          single ? free_single(leaf, blocks.first(index)) : free_run(leaf, blocks.first(index));
    }
    if (index == 0) return;
    if (const std::size_t freed = free_committed(leaf, blocks.first(index)); freed != 0) {
      index -= freed;
      continue;
    }
    const BlockId block = blocks[--index];
    if (block.value() - 1 < state.blocks) [[likely]] {
      const Place place = place_of(state, block);
      Block& record = block_at(place);
      if (record.leaf == leaf.value() && record.live()) [[likely]] {
        if (--record.references == 0) release(state, place);
        continue;
      }
    }
    for (std::size_t done = index + 1; done < blocks.size(); ++done) {
      take_again(state, place_of(state, blocks[done]));
    }
    refuse_block("free", leaf, block);
  }
}

/// Undoes the return of one reference, last undone first.
void BlockPool::take_again(LeafState& leaf, Place place) noexcept {
  Block& block = block_at(place);
  if (block.references++ != 0) return;
  PageClass& page_class = *leaf.page_class;
  if (block.is(Block::committed)) {
    ++leaf.live;
    --leaf.cached;
    return cached_to_live(page_class, place.huge, 1);
  }
  HugeBlock& huge = huge_[place.huge];
  const HugeState before = huge.state();
  if (before == HugeState::empty) {
    claim(page_class, static_cast<Fate>(huge.fate));  // the one that became empty last
  } else if (before == HugeState::idle) {
    leave_idle(page_class, place.huge);
    ++page_class.claimed;
  }
  if (page_class.ratio > 1) unlink_clean(place);
  ++leaf.live;
  ++huge.live;
  if (page_class.ratio == 1) return;
  FullestFirst& list = page_class.clean[huge.fate];
  before == HugeState::claimed ? list.drew_from_hinted(place.huge) : list.drew_from(place.huge);
  if (before == HugeState::idle) file_huge(page_class, place.huge);
}

}  // namespace kvleaf
