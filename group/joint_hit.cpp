#include "kvleaf/group/joint_hit.h"

#include <algorithm>

namespace kvleaf {

std::uint64_t LeafResidency::before_run(std::uint32_t n, std::uint32_t run,
                                        std::uint32_t unit) const {
  const std::uint64_t run_begin = std::uint64_t{run} * tokens_per_page;
  for (std::uint64_t m = n;;) {
    m = pattern->tail_begin(static_cast<std::uint32_t>(m)) / unit * unit;
    if (m <= run_begin) return run_begin;
    if (pattern->tail_begin(static_cast<std::uint32_t>(m)) == m) return m;
  }
}

std::uint32_t LeafResidency::deepest(std::uint32_t limit, std::uint32_t unit) const {
  std::uint64_t n =
      std::min<std::uint64_t>(limit, std::uint64_t{slots} * tokens_per_page) / unit * unit;
  while (n > 0) {
    const SlotReach reach = pattern->slots(static_cast<std::uint32_t>(n), tokens_per_page);
    // The last run that begins before the tail's end is the only one that can be first in the way.
    const auto behind =
        std::lower_bound(missing.begin(), missing.end(), reach.end,
                         [](const MissingRun& run, std::uint32_t end) { return run.begin < end; });
    std::uint64_t next = n;
    if (behind != missing.begin()) {
      const MissingRun& run = *(behind - 1);
      if (run.end > reach.tail_begin && reach.tail_begin < reach.end) {
        next = before_run(static_cast<std::uint32_t>(n), run.begin, unit);
      } else if (missing.front().begin < reach.head_end) {
        next = std::uint64_t{missing.front().begin} * tokens_per_page;
      }
    }
    if (next == n) break;
    n = next / unit * unit;
  }
  return static_cast<std::uint32_t>(n);
}

std::uint32_t boundary_outside(std::uint32_t n, std::uint32_t unit, std::span<const Uncut> uncut) {
  n = n / unit * unit;
  for (std::size_t i = uncut.size();
       i-- > 0;) {  // items ascend, so one pass from the back suffices
    if (n > uncut[i].begin && n < uncut[i].end) n = uncut[i].begin / unit * unit;
  }
  return n;
}

std::uint32_t joint_hit(std::span<const LeafResidency> leaves, std::uint32_t limit,
                        std::uint32_t unit, std::span<const Uncut> uncut, std::uint32_t without) {
  std::uint32_t n = boundary_outside(limit, unit, uncut);
  for (bool moved = true; moved && n > 0;) {
    moved = false;
    for (const LeafResidency& leaf : leaves) {
      if (leaf.group == without) continue;
      const std::uint32_t deepest = boundary_outside(leaf.deepest(n, unit), unit, uncut);
      if (deepest < n) {
        n = deepest;
        moved = true;
      }
    }
  }
  return n;
}

}  // namespace kvleaf
