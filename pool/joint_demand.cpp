// The joint rule: whether a demand over all leaves fits, exactly and without side effects.
//
//   d_c     = Σ over leaves of class c: max(d_i, floor_i - live_i) + promised_i
//   free_c  = clean + cached blocks in claimed huge blocks of c = claimed_c · ratio_c - live_c
//   need_c  = max(0, ⌈(d_c - free_c) / ratio_c⌉)                         huge blocks
//   fits  ⇔  Σ need_c ≤ empty + idle, and no leaf passes its ceiling
//
// Why what it accepts never fails halfway: call slack what empty + idle exceed Σ need_c by. Drawing
// a block of c from a claimed huge block lowers d_c and free_c alike: slack stays. Drawing it from
// an empty or idle one lowers empty + idle by one, and need_c by one if it was above 0 (free_c
// grows by ratio_c - 1, d_c falls by 1). So a draw may leave the claimed huge blocks if need_c > 0
// or slack > 0 (Allowance), and if it may not, need_c = 0 says that a claimed one has a block for
// it. Evictions that the owner adds while it is told of one turn cached blocks into clean ones,
// idle huge blocks into empty ones: no term changes.
//
// Source: design document, "Joint demand".
#include <fmt/format.h>

#include <algorithm>

#include "kvleaf/leaf/errors.h"
#include "kvleaf/pool/block_pool.h"
#include "kvleaf/pool/saturating.h"

namespace kvleaf {

/// `needed(class, huge blocks)` is told each class's part.
template <class DemandOf, class Needed>
BlockPool::Verdict BlockPool::judge_demand(DemandOf&& demand_of, Needed&& needed) const noexcept {
  Verdict verdict;
  verdict.huge_left = room();
  std::uint64_t huge_needed = 0;
  std::uint32_t over_ceiling = leaf_count_;
  const std::uint16_t* index = leaves_by_class_.data();
  for (const ClassTerms& page_class : class_terms_) {
    std::uint64_t demand = 0;
    std::uint64_t live_in_class = 0;
    for (const std::uint16_t* const end = index + page_class.leaves; index != end; ++index) {
      const LeafState& leaf = leaves_[*index];
      const std::uint64_t live = leaf.live.get();
      std::uint64_t wanted = demand_of(*index);
      if (wanted != 0 && saturating_add(live, wanted) > leaf.ceiling) [[unlikely]]
        over_ceiling = std::min<std::uint32_t>(over_ceiling, *index);
      if (standing_) [[unlikely]] {
        const LeafTerms& terms = terms_[*index];
        if (terms.floor > live) wanted = std::max(wanted, terms.floor - live);
        wanted = saturating_add(wanted, terms.promised);
      }
      demand = saturating_add(demand, wanted);
      live_in_class += live;
    }
    const std::uint64_t free =
        page_class.claimed->get() * page_class.divider.ratio() - live_in_class;
    const std::uint64_t part = demand <= free ? 0 : page_class.divider.round_up(demand - free);
    needed(static_cast<std::uint32_t>(&page_class - class_terms_.data()), part);
    huge_needed = saturating_add(huge_needed, part);
  }
  if (over_ceiling != leaf_count_) verdict.over_ceiling = LeafId(over_ceiling);
  verdict.huge_needed = huge_needed;
  verdict.fits = huge_needed <= verdict.huge_left && over_ceiling == leaf_count_;
  return verdict;
}

BlockPool::Verdict BlockPool::judge(std::span<const std::uint64_t> blocks) const {
  require(Work::telling, "judge");
  if (blocks.size() > leaf_count_) [[unlikely]]
    refuse_leaf(LeafId(leaf_count_));
  if (blocks.size() == leaf_count_) {
    const std::uint64_t* const wanted = blocks.data();
    return judge_demand([=](std::uint32_t leaf) { return wanted[leaf]; },
                        [](std::uint32_t, std::uint64_t) {});
  }
  return judge_demand(
      [&](std::uint32_t leaf) { return leaf < blocks.size() ? blocks[leaf] : std::uint64_t{0}; },
      [](std::uint32_t, std::uint64_t) {});
}

bool BlockPool::allow_standing(LeafId leaf, std::uint64_t blocks,
                               Allowance& allowance) const noexcept {
  const std::uint32_t own_class = leaves_[leaf.value()].page_class->number;
  const Verdict verdict = judge_demand(
      [&](std::uint32_t index) { return index == leaf.value() ? blocks : std::uint64_t{0}; },
      [&](std::uint32_t page_class, std::uint64_t part) {
        if (page_class == own_class) allowance.needed = part;
      });
  allowance.slack = verdict.huge_left - verdict.huge_needed;
  return verdict.fits;
}

bool BlockPool::allocate_all(std::span<const Demand> demand, std::span<BlockId> out) {
  require(Work::ready, "allocate_all");
  std::fill(wanted_.begin(), wanted_.end(), 0);
  std::uint64_t total = 0;
  for (const Demand& part : demand) {
    state_of(part.leaf);
    std::uint64_t& wanted = wanted_[part.leaf.value()];
    wanted = saturating_add(wanted, part.blocks);
    total = saturating_add(total, part.blocks);
  }
  const Verdict verdict = judge_demand(
      [&](std::uint32_t leaf) { return wanted_[leaf]; },
      [&](std::uint32_t page_class, std::uint64_t part) { needed_[page_class] = part; });
  if (!verdict.fits) return false;
  if (total != out.size()) {
    throw InvalidArgument(fmt::format(
        "allocate_all: a demand of {} blocks, but room for {} in the result", total, out.size()));
  }
  Allowance allowance{0, verdict.huge_left - verdict.huge_needed};
  std::size_t drawn = 0;
  std::size_t parts = 0;
  try {
    for (; parts < demand.size(); ++parts) {
      const Demand& part = demand[parts];
      std::uint64_t& needed = needed_[leaves_[part.leaf.value()].page_class->number];
      allowance.needed = needed;
      draw(part.leaf, part.fate, part.hint, out.subspan(drawn, part.blocks), allowance);
      needed = allowance.needed;
      if (guard_.on()) [[unlikely]]
        check_drawn(part.leaf, out.subspan(drawn, part.blocks));
      drawn += part.blocks;
    }
  } catch (...) {
    // The part that failed has given back its own.
    while (parts-- > 0) {
      const Demand& part = demand[parts];
      drawn -= part.blocks;
      give_back(part.leaf, out.subspan(drawn, part.blocks));
    }
    throw;
  }
  return true;
}

void BlockPool::set_promised(LeafId leaf, std::uint64_t blocks) {
  require(Work::ready, "set_promised");
  state_of(leaf);
  terms_[leaf.value()].promised = blocks;
  standing_ = std::any_of(terms_.begin(), terms_.end(), [](const LeafTerms& terms) {
    return terms.floor != 0 || terms.promised != 0;
  });
}

std::uint64_t BlockPool::promised(LeafId leaf) const {
  state_of(leaf);
  return terms_[leaf.value()].promised;
}

}  // namespace kvleaf
