// Eviction: which cached block, or which idle huge block, has to go. All candidates are compared by
// value; the searches are O(log n) amortised (see lower_bound_tree.h).
#include <algorithm>
#include <utility>

#include "kvleaf/leaf/errors.h"
#include "kvleaf/pool/block_pool.h"
#include "kvleaf/pool/transitions.h"

namespace kvleaf {

void BlockPool::on_evict(OnEvict callback) {
  require(Work::ready, "on_evict");
  on_evict_ = std::move(callback);
}

/// Tells the owner that a block is no longer findable. While it is told, it may do little.
void BlockPool::tell(std::uint16_t leaf, BlockId block, PageKey key) {
  if (!on_evict_) return;
  work_ = Work::telling;
  try {
    on_evict_(LeafId(leaf), block, key);
  } catch (...) {
    if (work_ == Work::telling) work_ = Work::ready;
    throw;
  }
  if (work_ == Work::telling) work_ = Work::ready;
}

/// The least valuable cached block of one huge block.
LeastKey<Rank> BlockPool::least_block(std::uint32_t huge, Bound bound) noexcept {
  const Block* blocks = blocks_of(huge);
  const auto rank_of = [&](std::uint32_t index) {
    return blocks[index].cached() ? Rank::of(blocks[index].value) : Rank();
  };
  LeastKey<Rank> least{Rank(), 0};
  if (bounds_.empty()) {
    for (std::uint32_t index = 0; index < max_ratio_; ++index) {
      if (rank_of(index) < least.key) least = {rank_of(index), index};
    }
    return least;
  }
  LowerBoundTree<Rank> order = block_order(huge);
  least = order.least(rank_of, rank_of, [](std::uint32_t) {});
  if (bound == Bound::raise) order.raise_root(least.index, rank_of);
  return least;
}

/// The least valuable cached block in the class's huge blocks of this kind; no rank if there is
/// none.
BlockPool::Victim BlockPool::least_cached(PageClass& page_class, std::uint32_t kind) noexcept {
  TreeNodes<Rank>& nodes = page_class.order[kind];
  if (!nodes.used) return {};
  LowerBoundTree<Rank> order(huge_shape_, nodes);
  if (max_ratio_ == 1) {  // a huge block is its one block
    const auto rank_of = [&](std::uint32_t huge) {
      const Block& block = blocks_[huge];
      const bool member =
          (int{block.cached()} & int{huge_[huge].owner == page_class.number}) != 0;  // no branch
      return member ? Rank::of(block.value) : Rank();
    };
    const LeastKey<Rank> least = order.least(rank_of, rank_of, [](std::uint32_t) {});
    return {least.key, {least.index, 0}};
  }
  const bool claimed = kind != idle_kind;
  const auto member = [&](std::uint32_t huge) {
    const HugeBlock& record = huge_[huge];
    return (record.cached != 0) & (record.owner == page_class.number) &
           ((record.live != 0) == claimed) &
           (!claimed | (record.fate == kind));  // no branch: searched
  };
  Place place{0, 0};
  const LeastKey<Rank> huge =
      order.least([&](std::uint32_t index) { return member(index) ? bound_of(index) : Rank(); },
                  [&](std::uint32_t index) {
                    if (!member(index)) return Rank();
                    const LeastKey<Rank> block = least_block(index, Bound::keep);
                    place = {index, block.index};
                    return block.key;
                  },
                  [&](std::uint32_t index) {
                    if (member(index)) least_block(index, Bound::raise);
                  });
  return {huge.key, place};
}

/// What the idle huge block is worth, exactly.
Worth BlockPool::worth_of(std::uint32_t huge) noexcept {
  HugeBlock& record = huge_[huge];
  if (worths_.empty() || record.worth_unsure) {
    Rank best{0};
    const Block* blocks = blocks_of(huge);
    for (std::uint32_t index = 0; index < max_ratio_; ++index) {
      if (blocks[index].cached()) best = std::max(best, Rank::of(blocks[index].value));
    }
    if (worths_.empty()) return {best, record.cached};
    worths_[huge] = best;
    record.worth_unsure = 0;
  }
  return {worths_[huge], record.cached};
}

/// The class's idle huge block of least worth.
LeastKey<Worth> BlockPool::least_idle(PageClass& page_class) noexcept {
  if (!page_class.worth_order.used) {
    const Victim block = least_cached(page_class, idle_kind);
    return {block.rank.exists() ? Worth{block.rank, 1} : Worth(), block.place.huge};
  }
  const auto member = [&](std::uint32_t huge) {
    const HugeBlock& record = huge_[huge];
    return record.owner == page_class.number && record.state() == HugeState::idle;
  };
  return LowerBoundTree<Worth>(huge_shape_, page_class.worth_order)
      .least(
          [&](std::uint32_t huge) {
            if (!member(huge)) return Worth();
            const bool unsure = !worths_.empty() && huge_[huge].worth_unsure;
            return unsure ? Worth{bound_of(huge), 0} : worth_of(huge);
          },
          [&](std::uint32_t huge) { return member(huge) ? worth_of(huge) : Worth(); },
          [](std::uint32_t) {});  // worth_of did
}

/// Drops every commit of an idle huge block, which is empty then, and tells the owner of each.
void BlockPool::drain(std::uint32_t huge) {
  for (std::uint32_t index = 0; index < max_ratio_; ++index) {
    const Block block = blocks_of(huge)[index];
    if (!block.cached()) continue;
    LeafState& leaf = leaves_[block.leaf];
    ++terms_[block.leaf].evicted;
    drop_commit(leaf, {huge, index});
    tell(block.leaf, id_at(leaf, {huge, index}), key_at({huge, index}));
  }
}

/// Draws by evicting: the class's own least valuable cached block, or all of the least valuable
/// idle huge block of another class, whichever is worth less. Returns how many blocks that gave; if
/// the owner throws, none. Source: design document, "Eviction".
///
/// Fates stay apart here too, so that what is cached is not stuck beside what is live: a draw that
/// dies with its request first fills up the huge blocks that such draws have claimed, and then
/// takes a whole idle one, the least worth of all; and nobody takes from the other fate's before
/// the last.
std::size_t BlockPool::evict(LeafId leaf, Fate fate, Allowance& allowance, std::span<BlockId> out) {
  LeafState& state = leaves_[leaf.value()];
  PageClass& page_class = *state.page_class;
  const auto own_kind = static_cast<std::uint32_t>(fate);
  const bool dies = fate == Fate::request;
  Victim own = least_cached(page_class, own_kind);
  LeastKey<Worth> other{Worth(), 0};
  if (allowance.may_spend() && !(dies && own.rank.exists())) {
    // An order whose bound is not below the best so far need not be searched.
    if (dies && page_class.idle.get() != 0) {
      other = least_idle(page_class);
    } else if (page_class.idle.get() != 0 && page_class.order[idle_kind].bound < own.rank) {
      own = std::min(own, least_cached(page_class, idle_kind),
                     [](const Victim& a, const Victim& b) { return a.rank < b.rank; });
    }
    for (PageClass& another : classes_) {
      if (&another == &page_class || another.idle.get() == 0) continue;
      const Rank bound = another.worth_order.used ? another.worth_order.bound.best
                                                  : another.order[idle_kind].bound;
      if (own.rank <= bound || other.key.best < bound) continue;
      const LeastKey<Worth> least = least_idle(another);
      if (least.key < other.key) other = least;
    }
    if (dies && other.key.exists() && huge_[other.index].owner == page_class.number) {
      const LeastKey<Rank> block = least_block(other.index, Bound::keep);
      own = {block.key, {other.index, block.index}};
      other.key = Worth();
    }
  }
  if (!own.rank.exists() && !other.key.exists()) own = least_cached(page_class, 1 - own_kind);

  if (other.key.best < own.rank) {
    drain(other.index);
    ++retyped_;
    allowance.spend();
    const std::uint32_t huge = claim(page_class, fate);
    // One block only: what the owner did meanwhile may have made a fuller huge block fit for the
    // next.
    const std::uint32_t taken = take(leaf, huge, out.first(1));
    if (page_class.ratio > 1) page_class.clean[own_kind].drew_from(huge);
    return taken;
  }
  if (!own.rank.exists()) {
    poison("a draw that the joint rule accepted finds a clean block, a cached one or a huge block");
  }
  Block& block = block_at(own.place);
  const Block evicted = block;
  LeafState& loser = leaves_[evicted.leaf];
  forget(own.place);
  --loser.cached;
  ++terms_[evicted.leaf].evicted;
  block.references = 1;
  block.leaf = static_cast<std::uint16_t>(leaf.value());
  ++state.live;
  HugeBlock& huge = huge_[own.place.huge];
  const bool was_idle = huge.live == 0;
  if (was_idle) {
    allowance.spend();
    leave_idle(page_class, own.place.huge);
    huge.fate = static_cast<std::uint16_t>(fate) & 1;
  }
  ++huge.live;
  --huge.cached;
  if (was_idle) list_claimed(page_class, own.place.huge);
  if (guard_.on()) [[unlikely]]
    guard_.fill(own.place.huge, own.place.index, page_class.ratio);
  out[0] = id_at(state, own.place);
  try {
    tell(evicted.leaf, out[0], key_at(own.place));
  } catch (...) {
    give_back(leaf, out.first(1));
    throw;
  }
  return 1;
}

}  // namespace kvleaf
