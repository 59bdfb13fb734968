// The joint hit: the deepest boundary at which every leaf can resume. Exact for any number of
// access patterns and independent of their order.
//
// Each leaf is given as the runs of slots that it lacks on the matched path. A boundary n is good
// for a leaf iff no missing run meets reach(n). Where one does, the next boundary worth trying is
// that run's begin: tail_begin never decreases, so every boundary between would need a slot of the
// same run - or have no tail at all, as a chunk has none where it begins. Such boundaries are met
// by going from tail to tail. So each step of the search passes a whole run, and the cost is one
// pass over the path plus the runs met.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvleaf/leaf/access_pattern.h"

namespace kvleaf {

/// Slots [begin, end) that a leaf does not hold.
struct MissingRun {
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
};

/// One leaf on the matched path.
struct LeafResidency {
  const AccessPattern* pattern = nullptr;
  std::uint32_t tokens_per_page = 0;
  std::uint32_t group = 0;
  std::vector<MissingRun> missing;  // ascending, disjoint, not adjacent; all slots behind the path
                                    // are missing too, and not listed
  std::uint32_t slots = 0;          // whole slots on the path

  /// Adds slot `slot` to the missing runs; slots come in ascending order.
  void lacks(std::uint32_t slot, std::uint32_t count = 1) {
    if (!missing.empty() && missing.back().end == slot) {
      missing.back().end = slot + count;
    } else {
      missing.push_back({slot, slot + count});
    }
  }

  /// The deepest boundary <= `limit`, a multiple of `unit`, that this leaf can resume at.
  std::uint32_t deepest(std::uint32_t limit, std::uint32_t unit) const;

 private:
  /// The deepest boundary below n that slots of the run that begins at slot `run`, and reaches into
  /// the tail of n, need not be held for.
  std::uint64_t before_run(std::uint32_t n, std::uint32_t run, std::uint32_t unit) const;
};

/// Tokens that no boundary may lie strictly inside of.
struct Uncut {
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
};

/// The deepest boundary <= `limit`, a multiple of `unit`, outside every item of `uncut`, that all
/// leaves can resume at. Leaves of group `without` are left out (none: no group has this number).
///   unit   multiple of every leaf's page
std::uint32_t joint_hit(std::span<const LeafResidency> leaves, std::uint32_t limit,
                        std::uint32_t unit, std::span<const Uncut> uncut,
                        std::uint32_t without = 0xffffffff);

/// The last boundary <= n, a multiple of `unit`, outside every item.
std::uint32_t boundary_outside(std::uint32_t n, std::uint32_t unit, std::span<const Uncut> uncut);

}  // namespace kvleaf
