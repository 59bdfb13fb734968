// Valuing: which pages kept boundaries use, what each is worth to eviction, and what follows when
// the pool evicts one.
#include <algorithm>
#include <bit>
#include <limits>

#include "kvleaf/group/manager_impl.h"

namespace kvleaf {
namespace {

constexpr std::uint32_t low_bits(std::uint32_t count) noexcept {
  return count >= 32 ? ~0u : (1u << count) - 1;
}

// Of the findable pages, those that may count as proven: the rest is left to newcomers, which must
// stay long enough to be asked for again. On real traces a twentieth for them did best.
constexpr std::uint64_t proven_share = 19;
constexpr std::uint64_t of_shares = 20;

}  // namespace

BlockManager::Impl::KeptRun BlockManager::Impl::kept_run(const Request& r, const LeafInfo& leaf,
                                                         std::uint32_t slot) const {
  constexpr std::uint32_t forever = std::numeric_limits<std::uint32_t>::max();
  if (options_.retention.kind == Retention::Kind::dense) return {true, forever};
  const std::uint64_t end = (std::uint64_t{slot} + 1) * leaf.tokens_per_page;
  KeptRun run{false, forever};
  const auto ask = [&](std::uint64_t n) {  // the nearest boundary of its kind for slots below n
    run.until =
        static_cast<std::uint32_t>(std::min<std::uint64_t>(run.until, n / leaf.tokens_per_page));
    if (n > options_.max_len) return;
    const SlotReach reach = leaf.pattern.slots(static_cast<std::uint32_t>(n), leaf.tokens_per_page);
    run.kept = run.kept || reach.contains(slot);
    for (const std::uint32_t change : {reach.head_end, reach.tail_begin}) {
      if (slot < change) run.until = std::min(run.until, change);
    }
  };
  // The nearest boundary behind the slot reaches back furthest of all: tail_begin never decreases.
  const auto next = std::lower_bound(r.kept.begin(), r.kept.end(), end);
  if (next != r.kept.end()) ask(*next);
  if (options_.retention.kind == Retention::Kind::every) {
    const std::uint64_t step = std::uint64_t{ceil_div(options_.retention.tokens, unit_)} * unit_;
    ask((end + step - 1) / step * step);
  }
  return run;
}

bool BlockManager::Impl::kept_boundary(const Request& r, std::uint32_t tokens) const {
  if (tokens == 0 || tokens % unit_ != 0 || tokens > r.addressable) return false;
  if (boundary_outside(tokens, unit_, r.uncut) != tokens) return false;
  if (std::binary_search(r.kept.begin(), r.kept.end(), tokens)) return true;
  switch (options_.retention.kind) {
    case Retention::Kind::dense: return true;
    case Retention::Kind::every:
      if (tokens % (ceil_div(options_.retention.tokens, unit_) * unit_) == 0) return true;
      break;
    case Retention::Kind::tail:
    case Retention::Kind::spaced: break;
  }
  // The last boundary of the sequence as it is known now.
  return tokens + unit_ > r.known();
}

PageValue BlockManager::Impl::page_value(const Request& r) const noexcept {
  return PageValue(options_.eviction, clock_, r.priority);
}

bool BlockManager::Impl::proven_by(const Request& r, const LeafInfo& leaf, std::uint32_t slot) {
  return leaf.completes ||
         (std::uint64_t{slot + 1} * leaf.pages <= r.matched && leaf.writing != Writing::write_once);
}

bool BlockManager::Impl::proven_in_tree(const LeafInfo& info, SegmentId segment,
                                        std::uint32_t page) const {
  return info.completes || tree_->proven(segment, page);
}

std::span<const BlockId> BlockManager::Impl::value_given_up(const Request& r, const LeafInfo& info,
                                                            std::uint32_t first,
                                                            std::span<const BlockId> blocks,
                                                            Proof proof) {
  const PageValue value = page_value(r);
  KeptRun run;
  pages_.clear();
  given_up_.clear();
  for (std::uint32_t slot = first; const BlockId block : blocks) {
    const std::uint32_t here = slot++;
    if (block == null_block) continue;
    given_up_.push_back(block);
    const BlockPool::BlockState before = pool_->look(info.id, block);
    if (!before.committed) continue;
    if (here >= run.until) run = kept_run(r, info, here);
    pages_.push(block, value.at(here, run.kept || PageValue::kept(before.value),
                                proof == Proof::of_path ? proven_by(r, info, here)
                                                        : PageValue::proven(before.value)));
  }
  pool_->revalue_many(info.id, pages_.blocks, pages_.values);
  return given_up_;
}

void BlockManager::Impl::refresh(Request& r, const Found& found, std::uint32_t hit) {
  const std::uint32_t P = options_.page_tokens;
  ++clock_;
  const PageValue value = page_value(r);
  for (const LeafInfo& info : info_) {
    if (!info.tree) continue;
    if (info.needs_all && hit == found.path.pages * P) continue;  // all of it is claimed
    const bool rows = info.writing == Writing::append;
    const SlotReach claimed = info.pattern.slots(hit, info.tokens_per_page);
    const SlotReach junction = info.pattern.slots(found.junction, info.tokens_per_page);
    KeptRun run;
    for (const TreePath::Part& part : found.path.parts) {
      std::uint32_t bits = tree_->mask(part.segment, *info.tree) & low_bits(part.pages);
      // What rows claimed is valued when it is returned; a checkpoint is as recent as its look-up.
      if (rows && info.pages == 1 && hit > 0) {
        const auto below = [&](std::uint32_t page) {  // bits of pages before this one
          return low_bits(page > part.first ? page - part.first : 0);
        };
        const std::uint32_t end = hit / P;
        bits &=
            ~(below(std::min(claimed.head_end, end)) | (below(end) & ~below(claimed.tail_begin)));
      }
      const BlockId* blocks =
          tree_->blocks(part.segment, *info.tree) + (part.first - tree_->first_page(part.segment));
      pages_.clear();
      for (; bits != 0; bits &= bits - 1) {
        const auto at = static_cast<std::uint32_t>(std::countr_zero(bits));
        const std::uint32_t page = part.first + at;
        const std::uint32_t slot = page / info.pages;
        if (rows && hit > 0 && (page + 1) * P <= hit && claimed.contains(slot)) continue;
        const BlockId block = blocks[at];
        if (slot >= run.until) run = kept_run(r, info, slot);
        const bool kept = run.kept || (found.junction > 0 && junction.contains(slot)) ||
                          PageValue::kept(pool_->look(info.id, block).value);
        pages_.push(block, value.at(slot, kept, proven_in_tree(info, part.segment, page)));
      }
      pool_->revalue_many(info.id, pages_.blocks, pages_.values);
      tree_->set_mark(part.segment, *info.tree, false);
    }
  }
}

void BlockManager::Impl::limit_proven() {
  while (tree_->proven_in_all() * of_shares > tree_->pages_in_all() * proven_share) {
    const std::optional<TreeCursor> oldest = tree_->unprove_oldest();
    if (!oldest) return;
    // As new as what was just filed: it has been of use before, so it is given that much longer.
    const std::uint32_t page = oldest->pages - 1;
    for (const LeafInfo& info : info_) {
      if (!info.tree || info.completes || !tree_->resident(oldest->segment, page, *info.tree))
        continue;
      const BlockId block = tree_->block(oldest->segment, page, *info.tree);
      pool_->revalue(info.id, block, PageValue::unproven(pool_->value(info.id, block), clock_));
    }
  }
}

void BlockManager::Impl::forget(std::uint32_t leaf, SegmentId segment, std::uint32_t page) {
  const LeafInfo& info = info_[leaf];
  record(Event::Kind::removed, leaf, segment, page);
  pool_->uncommit(info.id, tree_->block(segment, page, *info.tree));
  tree_->clear_block(segment, page, *info.tree);
}

void BlockManager::Impl::mark_unreachable(std::uint32_t leaf, SegmentId segment,
                                          std::uint32_t page) {
  if (options_.eviction == EvictionOrder::lru) return;
  const LeafInfo& info = info_[leaf];
  const auto lower = [&](SegmentId at, std::uint32_t from) {
    const std::uint32_t first = tree_->first_page(at);
    std::uint32_t bits = tree_->mask(at, *info.tree);
    if (from > first) bits &= ~((1u << (from - first)) - 1);
    for (; bits != 0; bits &= bits - 1) {
      const BlockId block =
          tree_->block(at, first + static_cast<std::uint32_t>(std::countr_zero(bits)), *info.tree);
      pool_->revalue(info.id, block, PageValue::unreachable(pool_->value(info.id, block)));
    }
  };
  if (page + 1 < tree_->first_page(segment) + tree_->pages(segment)) lower(segment, page + 1);
  tree_->each_below(segment, [&](SegmentId below) {
    if (tree_->marked(below, *info.tree)) return false;  // and so is all that lies below it
    lower(below, tree_->first_page(below));
    tree_->set_mark(below, *info.tree, true);
    return true;
  });
}

void BlockManager::Impl::evicted(LeafId leaf, BlockId block, PageKey key) {
  if ((key.high & encoder_key) != 0) {
    const auto it = encoder_ids_.find(key.high & ~encoder_key);
    if (it != encoder_ids_.end()) encoder_lost(*it->second);
    return;
  }
  const SegmentId segment{static_cast<std::uint32_t>(key.high)};
  const auto page = static_cast<std::uint32_t>(key.low);
  const LeafInfo& info = info_[leaf.value()];
  tree_->pin(segment);
  if (info.needs_all) mark_unreachable(leaf.value(), segment, page);
  record(Event::Kind::removed, leaf.value(), segment, page);
  tree_->clear_block(segment, page, *info.tree);
  // The slot's other pages of the group serve nobody alone: values without their scales.
  for (const std::uint32_t other : groups_[info.group].leaves) {
    const LeafInfo& sibling = info_[other];
    if (other == leaf.value() || !sibling.tree || !tree_->resident(segment, page, *sibling.tree))
      continue;
    if (pool_->references(sibling.id, tree_->block(segment, page, *sibling.tree)) == 0)
      forget(other, segment, page);
  }
  tree_->unpin(segment);
  if (options_.eviction == EvictionOrder::value) limit_proven();
}

}  // namespace kvleaf
