// Audit and figures: recounts everything from the block records up, and names the first equation
// that does not hold.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "kvleaf/leaf/errors.h"
#include "kvleaf/pool/block_pool.h"
#include "kvleaf/pool/transitions.h"

namespace kvleaf {

void BlockPool::poison(std::string equation) const {
  work_ = Work::poisoned;
  broken_ = "broken invariant of the pool: " + std::move(equation);
  throw InvariantError(broken_);
}

// A check costs no formatting while it holds.
#define KVLEAF_AUDIT(condition, ...) \
  if (!(condition)) poison(fmt::format(__VA_ARGS__))

/// Every node is at most what is below it.
template <class Key, class KeyOf>
void BlockPool::audit_order(const std::string& name, const TreeShape& shape, const Key* nodes,
                            Key root, KeyOf&& key_of) const {
  const auto above = [&](std::uint32_t level, std::uint32_t index) {
    return level == shape.levels() ? root : nodes[shape.begin(level) + index / TreeShape::fan_out];
  };
  for (std::uint32_t index = 0; index < shape.size(); ++index) {
    KVLEAF_AUDIT(!(key_of(index) < above(0, index)), "{}: the node above {} bounds it from below",
                 name, index);
  }
  for (std::uint32_t level = 0; level < shape.levels(); ++level) {
    for (std::uint32_t index = 0; index < shape.count(level); ++index) {
      KVLEAF_AUDIT(!(nodes[shape.begin(level) + index] < above(level + 1, index)),
                   "{}: the node above node {} of level {} bounds it from below", name, index,
                   level);
    }
  }
}

/// What an order remembers of its last search bounds the keys it speaks of.
template <class Key, class KeyOf>
void BlockPool::audit_memory(const std::string& name, const TreeShape& shape,
                             const TreeNodes<Key>& order, KeyOf&& key_of) const {
  for (std::uint32_t index = 0; index < shape.size(); ++index) {
    const Key key = key_of(index);
    const bool same_group = index / TreeShape::fan_out == order.index / TreeShape::fan_out;
    KVLEAF_AUDIT(!(key < order.bound), "{}: its bound is not above key {}", name, index);
    KVLEAF_AUDIT(index == order.index || !(key < order.others),
                 "{}: its bound of all but {} is not above key {}", name, order.index, index);
    KVLEAF_AUDIT(same_group || !(key < order.outside),
                 "{}: its bound outside the group of {} is not above key {}", name, order.index,
                 index);
  }
}

void BlockPool::audit_huge_block(std::uint32_t huge) const {
  const HugeBlock& record = huge_[huge];
  const Block* blocks = blocks_of(huge);
  const HugeState state = record.state();
  const bool owned = state != HugeState::empty;
  if (!owned) {
    KVLEAF_AUDIT(record.owner >= HugeBlock::absent, "huge block {}: empty = owned by nobody: {}",
                 huge, record.owner);
  } else {
    KVLEAF_AUDIT(record.owner < classes_.size(), "huge block {}: owner {} is a page class", huge,
                 record.owner);
  }
  const std::uint32_t ratio = owned ? classes_[record.owner].ratio : 0;
  std::uint32_t live = 0;
  std::uint32_t cached = 0;
  Rank best{0};
  Rank least;
  for (std::uint32_t index = 0; index < max_ratio_; ++index) {
    const Block& block = blocks[index];
    KVLEAF_AUDIT((block.flags & ~(Block::committed | Block::timed)) == 0 &&
                     (block.flags == 0 || block.is(Block::committed)),
                 "huge block {}: flags {} of block {}", huge, block.flags, index);
    if (block.clean()) continue;
    KVLEAF_AUDIT(index < ratio, "huge block {}: block {} is clean, past ratio {}", huge, index,
                 ratio);
    KVLEAF_AUDIT(
        block.leaf < leaves_.size() && leaves_[block.leaf].page_class->number == record.owner,
        "huge block {}: block {} belongs to a leaf of its page class: leaf {}, class {}", huge,
        index, block.leaf, record.owner);
    (block.live() ? live : cached) += 1;
    if (!block.is(Block::committed)) continue;
    best = std::max(best, Rank::of(block.value));
    if (!block.live()) least = std::min(least, Rank::of(block.value));
    if (!indexed_) continue;
    const auto found = index_.find(blocks_.data(), keys_.data(), block.leaf, key_at({huge, index}));
    KVLEAF_AUDIT(found == record_at({huge, index}), "huge block {}: block {} is found by its key",
                 huge, index);
  }
  KVLEAF_AUDIT(live == record.live, "huge block {}: live blocks: {} recorded, {} counted", huge,
               record.live, live);
  KVLEAF_AUDIT(cached == record.cached, "huge block {}: cached blocks: {} recorded, {} counted",
               huge, record.cached, cached);
  if (!owned) return;
  if (ratio > 1) {
    std::vector<bool> seen(ratio);
    std::uint32_t next = links_[huge].first_clean;
    for (std::uint32_t left = ratio - live - cached; left > 0; --left) {
      const std::uint32_t index = next & ~fresh;
      KVLEAF_AUDIT(
          index < ratio && !seen[index] && blocks[index].clean(),
          "huge block {}: its list of {} clean blocks holds block {} once, and it is clean", huge,
          ratio - live - cached, index);
      seen[index] = true;
      next = (next & fresh) != 0 ? next + 1 : blocks[index].next_clean();
    }
  }
  if (bounds_.empty()) return;
  KVLEAF_AUDIT(bounds_[huge] <= least, "huge block {}: bound {} <= least value {}", huge,
               bounds_[huge].value, least.value);
  audit_order(fmt::format("order of huge block {}", huge), block_shape_,
              block_nodes_.data() + std::uint64_t{huge} * block_shape_.nodes(), bounds_[huge],
              [&](std::uint32_t index) {
                return blocks[index].cached() ? Rank::of(blocks[index].value) : Rank();
              });
  KVLEAF_AUDIT(record.worth_unsure ? worths_[huge] >= best : worths_[huge] == best,
               "huge block {}: worth {} recorded{}, {} counted", huge, worths_[huge].value,
               record.worth_unsure ? " as a bound" : "", best.value);
}

void BlockPool::audit_page_class(std::uint32_t number) const {
  const PageClass& page_class = classes_[number];
  std::uint64_t claimed = 0, idle = 0;
  std::uint64_t listed[clean_kinds] = {};  // huge blocks that have to be in the lists
  for (std::uint32_t huge = 0; huge < huge_.size(); ++huge) {
    const HugeBlock& record = huge_[huge];
    if (record.state() == HugeState::empty || record.owner != number) continue;
    const bool is_idle = record.state() == HugeState::idle;
    (is_idle ? idle : claimed) += 1;
    if (clean_in(page_class, record) != 0) ++listed[is_idle ? idle_kind : record.fate];
  }
  KVLEAF_AUDIT(page_class.claimed.get() == claimed,
               "class {}: claimed huge blocks: {} = {} counted", number, page_class.claimed.get(),
               claimed);
  KVLEAF_AUDIT(page_class.idle.get() == idle, "class {}: idle huge blocks: {} = {} counted", number,
               page_class.idle.get(), idle);

  for (std::uint32_t kind = 0; page_class.ratio > 1 && kind < clean_kinds; ++kind) {
    const FullestFirst& list = page_class.clean[kind];
    const auto belongs = [&](std::uint32_t huge) {
      const HugeBlock& record = huge_[huge];
      return record.state() != HugeState::empty && record.owner == number &&
             (record.state() == HugeState::idle ? idle_kind : record.fate) == kind &&
             clean_in(page_class, record) != 0;
    };
    std::uint64_t members = 0;
    KVLEAF_AUDIT(list.current() == FullestFirst::none || list.current() != list.spare(),
                 "class {}: the current and the spare one of kind {} are two", number, kind);
    for (const std::uint32_t huge : {list.current(), list.spare()}) {
      if (huge == FullestFirst::none) continue;
      KVLEAF_AUDIT(belongs(huge) && huge_[huge].listed == 0,
                   "class {}: huge block {} is the current or spare one of kind {}", number, huge,
                   kind);
      ++members;
    }
    for (std::uint32_t index = 0; index < list.lists(); ++index) {
      std::uint32_t previous = FullestFirst::none;
      KVLEAF_AUDIT(list.occupied().contains(index) == (list.front(index) != FullestFirst::none),
                   "class {}: the set of lists of kind {} holds {} if that list has members",
                   number, kind, index);
      for (std::uint32_t huge = list.front(index); huge != FullestFirst::none;
           huge = links_[huge].next) {
        KVLEAF_AUDIT(belongs(huge) && huge_[huge].listed == index &&
                         clean_in(page_class, huge_[huge]) >= index &&
                         (previous == FullestFirst::none || links_[huge].previous == previous),
                     "class {}: huge block {} is in list {} of kind {}", number, huge, index, kind);
        previous = huge;
        ++members;
      }
    }
    KVLEAF_AUDIT(members == listed[kind],
                 "class {}: members of the lists of kind {}: {} = {} counted", number, kind,
                 members, listed[kind]);
  }

  for (std::uint32_t kind = 0; kind < clean_kinds; ++kind) {
    const TreeNodes<Rank>& order = page_class.order[kind];
    if (!order.used) continue;
    const std::string name = fmt::format("class {}: order of huge blocks of kind {}", number, kind);
    const auto member = [&](std::uint32_t huge) {
      const HugeBlock& record = huge_[huge];
      return record.cached != 0 && record.owner == number && kind_of(record) == kind;
    };
    audit_order(name, huge_shape_, order.nodes.data(), order.root,
                [&](std::uint32_t huge) { return member(huge) ? bound_of(huge) : Rank(); });
    audit_memory(name, huge_shape_, order, [&](std::uint32_t huge) {
      Rank least;
      for (std::uint32_t index = 0; member(huge) && index < page_class.ratio; ++index) {
        const Block& block = blocks_of(huge)[index];
        if (block.cached()) least = std::min(least, Rank::of(block.value));
      }
      return least;
    });
  }
  if (!page_class.worth_order.used) return;
  const std::string name = fmt::format("class {}: order of worth", number);
  const auto worth_of = [&](std::uint32_t huge) {
    const HugeBlock& record = huge_[huge];
    if (record.state() != HugeState::idle || record.owner != number) return Worth();
    Worth worth{Rank{0}, record.cached};
    for (std::uint32_t index = 0; index < page_class.ratio; ++index) {
      const Block& block = blocks_of(huge)[index];
      if (block.cached()) worth.best = std::max(worth.best, Rank::of(block.value));
    }
    return worth;
  };
  audit_order(name, huge_shape_, page_class.worth_order.nodes.data(), page_class.worth_order.root,
              worth_of);
  audit_memory(name, huge_shape_, page_class.worth_order, worth_of);
}

void BlockPool::audit_sums() const {
  std::uint64_t empty = 0, absent = 0, claimed = 0, idle = 0;
  for (std::uint32_t huge = 0; huge < huge_.size(); ++huge) {
    switch (huge_[huge].state()) {
      case HugeState::empty: (huge_[huge].owner == HugeBlock::absent ? absent : empty) += 1; break;
      case HugeState::claimed: ++claimed; break;
      case HugeState::idle: ++idle; break;
    }
  }
  KVLEAF_AUDIT(empty_.get() == empty, "empty huge blocks: {} = {} counted", empty_.get(), empty);
  KVLEAF_AUDIT(idle_.get() == idle, "idle huge blocks: {} = {} counted", idle_.get(), idle);
  KVLEAF_AUDIT(huge_blocks() + absent == huge_.size(),
               "empty {} + claimed {} + idle {} + out of service {} = huge blocks {}", empty,
               claimed, idle, absent, huge_.size());

  std::vector<bool> seen(huge_.size());
  std::uint32_t next = first_empty_;
  for (std::uint64_t left = empty; left > 0; --left) {
    const std::uint32_t huge = next & ~fresh;
    KVLEAF_AUDIT(huge < huge_.size() && !seen[huge] && huge_[huge].owner == HugeBlock::nobody,
                 "the list of {} empty huge blocks holds {} once, and it is empty", empty, huge);
    seen[huge] = true;
    next = (next & fresh) != 0 ? next + 1 : blocks_of(huge)[0].next_clean();
  }

  std::vector<std::uint64_t> live(leaves_.size()), cached(leaves_.size());
  std::uint64_t committed = 0;
  for (std::size_t record = 0; record < blocks_.size(); ++record) {
    const Block& block = blocks_[record];
    if (block.is(Block::committed)) ++committed;
    if (!block.clean()) ++(block.live() ? live : cached)[block.leaf];
  }
  for (std::uint32_t leaf = 0; leaf < leaves_.size(); ++leaf) {
    KVLEAF_AUDIT(leaves_[leaf].live.get() == live[leaf], "leaf {}: live blocks: {} = {} counted",
                 leaf, leaves_[leaf].live.get(), live[leaf]);
    KVLEAF_AUDIT(leaves_[leaf].cached.get() == cached[leaf],
                 "leaf {}: cached blocks: {} = {} counted", leaf, leaves_[leaf].cached.get(),
                 cached[leaf]);
  }
  KVLEAF_AUDIT(!indexed_ || index_.entries() == committed,
               "entries of the index: {} = {} committed", index_.entries(), committed);
}

#undef KVLEAF_AUDIT

void BlockPool::audit() const {
  require(Work::telling, "audit");
  for (std::uint32_t huge = 0; huge < huge_.size(); ++huge) audit_huge_block(huge);
  for (std::uint32_t number = 0; number < classes_.size(); ++number) audit_page_class(number);
  audit_sums();
}

PoolStats BlockPool::stats() const {
  PoolStats stats;
  stats.empty = empty_.get();
  for (const PageClass& page_class : classes_) stats.claimed += page_class.claimed.get();
  stats.idle = idle_.get();
  stats.huge_blocks = stats.empty + stats.claimed + stats.idle;
  stats.retyped = retyped_.get();
  stats.leaves.reserve(leaves_.size());
  for (std::size_t index = 0; index < leaves_.size(); ++index) {
    const LeafState& leaf = leaves_[index];
    const PageClass& page_class = *leaf.page_class;
    const LeafGeometry& geometry_of = geometry_.leaves()[index];
    LeafStats figures;
    figures.live = leaf.live.get();
    figures.cached = leaf.cached.get();
    const std::uint64_t owned =
        (page_class.claimed.get() + page_class.idle.get()) * page_class.ratio;
    std::uint64_t used = 0;
    for (const std::uint16_t other : page_class.leaves) {
      used += leaves_[other].live.get() + leaves_[other].cached.get();
    }
    figures.clean = owned - std::min(owned, used);  // another thread may read between two changes
    figures.padding_bytes =
        (figures.live + figures.cached) * (geometry_of.page_stride - geometry_of.bytes_per_page);
    figures.evicted = terms_[index].evicted.get();
    stats.leaves.push_back(figures);
  }
  return stats;
}

std::uint64_t BlockPool::live(LeafId leaf) const { return state_of(leaf).live.get(); }
std::uint64_t BlockPool::cached(LeafId leaf) const { return state_of(leaf).cached.get(); }

std::uint64_t BlockPool::metadata_bytes() const noexcept {
  std::uint64_t bytes = blocks_.bytes() + keys_.bytes() + huge_.bytes() + links_.bytes() +
                        block_nodes_.bytes() + bounds_.bytes() + worths_.bytes() + index_.bytes();
  for (const PageClass& page_class : classes_) {
    for (const FullestFirst& clean : page_class.clean) bytes += clean.bytes();
    for (const TreeNodes<Rank>& order : page_class.order)
      bytes += order.nodes.size() * sizeof(Rank);
    bytes += page_class.worth_order.nodes.size() * sizeof(Worth);
  }
  return bytes;
}

}  // namespace kvleaf
