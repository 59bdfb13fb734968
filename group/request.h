// One request: its tokens, its rows of blocks, and where it stands in the prefix tree. Internal to
// the block manager.
#pragma once

#include <algorithm>
#include <array>
#include <boost/container/small_vector.hpp>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "kvleaf/group/joint_hit.h"
#include "kvleaf/group/prefix_tree.h"
#include "kvleaf/group/request_options.h"
#include "kvleaf/leaf/leaf.h"

namespace kvleaf {

/// Observers of row changes: each is told the first slot that changed since it last looked.
inline constexpr std::size_t max_row_observers = 4;
inline constexpr std::uint32_t unchanged = std::numeric_limits<std::uint32_t>::max();
inline constexpr std::uint8_t all_observers = 0xff;
static_assert(max_row_observers <= 8, "a request keeps a bit for each");

/// One request's blocks in one leaf that is written token by token, or in an encoder leaf.
struct Row {
  /// Slot order. Null where the reach of the step begun last has passed, or nothing was ever held.
  std::vector<BlockId> slots;
  /// Tail slots before `first` (and behind the head) are null in `slots`.
  std::uint32_t first = 0;
  /// Slots leaving_first … first - 1 that are null above but still reached by a step in flight:
  /// they are freed when it settles, and may be committed before.
  std::vector<BlockId> leaving;
  std::uint32_t leaving_first = 0;
  std::optional<HugeBlockId> hint;                         // where this row last drew
  std::array<std::uint32_t, max_row_observers> changed{};  // first changed slot per observer

  void note_change(std::uint32_t slot) noexcept {
    for (auto& first_changed : changed) {
      if (slot < first_changed) first_changed = slot;
    }
  }
  /// The block of a slot, leaving ones included; null if none is held.
  BlockId held(std::uint32_t slot) const noexcept {
    if (slot >= leaving_first && slot - leaving_first < leaving.size()) {
      return leaving[slot - leaving_first];
    }
    return slot < slots.size() ? slots[slot] : null_block;
  }
};

/// One request's memory in one state leaf.
struct State {
  /// rollback + 1 blocks once the first step was begun: the state after m tokens lies in ring[m %
  /// size]. Before that empty, or null but for a checkpoint that was taken over.
  std::vector<BlockId> ring;
  std::uint32_t valid_from = 0;  // states after valid_from … planned tokens are in the ring
  std::optional<BlockId>
      read;  // what the next step reads instead of the ring: a checkpoint, referenced
  std::optional<BlockId>
      source;  // what the step `source_step` reads; its record holds the reference
  std::uint64_t source_step = 0;
  bool fresh = true;  // the next step must clear what it reads: nothing was computed yet

  /// Blocks that the ring still needs.
  std::uint64_t lacks(std::uint32_t rollback) const noexcept {
    if (ring.empty()) return std::uint64_t{rollback} + 1;
    return static_cast<std::uint64_t>(std::count(ring.begin(), ring.end(), null_block));
  }
  BlockId& at(std::uint32_t tokens) noexcept { return ring[tokens % ring.size()]; }
};

/// A checkpoint whose tokens are not in the tree yet, or whose copy has not settled.
struct PendingCheckpoint {
  std::uint32_t tokens = 0;
  std::uint64_t step = 0;                             // it is complete once this step has settled
  boost::container::small_vector<BlockId, 4> blocks;  // one per state leaf, one reference each
};

/// An encoder's pages: one node per input, shared by all requests with that input. Whole or absent.
struct EncoderNode {
  std::uint64_t id = 0;
  std::string name;  // key in the manager's index
  std::uint32_t tokens = 0;
  std::vector<std::vector<BlockId>> blocks;  // per encoder leaf
  std::uint32_t users = 0;                   // live requests
  bool filled = false;                       // written, and committed
  bool findable = true;                      // in the index
};

struct Request {
  RequestId id{0};
  std::uint64_t serial = 0;  // never used twice: tells a row's owner from the next with the same id
  std::vector<Token> tokens;      // known ids
  std::uint32_t prompt = 0;       // tokens at admission
  std::uint32_t hit = 0;          // of those, given by the hit
  std::uint32_t computed = 0;     // of settled steps
  std::uint32_t planned = 0;      // and of those in flight
  std::uint32_t in_flight = 0;    // steps begun and not settled that hold it
  std::uint64_t last_step = 0;    // none of them is later
  std::uint64_t long_step = 0;    // the last one of more than page_tokens tokens
  std::uint32_t since_long = 0;   // steps begun after it
  std::uint32_t addressable = 0;  // tokens that may be committed
  std::int32_t priority = 0;
  std::optional<std::uint32_t> guarantee;
  bool publish = true;           // false once the cache was reset
  std::uint64_t batch_mark = 0;  // the call of begin_step that last met it

  // What spares a decode step a look at every leaf. Both are bounds that may be lower than need be;
  // 0 says that nothing is known, and whoever takes slots from a row, gives them back or shares
  // them says so.
  std::uint32_t open_until = 0;  // steps up to this length neither draw nor copy pages of text
  std::uint32_t slide_at = 0;    // below this length no row slides
  bool may_leave = false;        // some row may have blocks that leave
  std::uint8_t unseen = all_observers;  // observers that have not seen the last change of a row

  TreeCursor cursor;                  // behind its committed pages; its segment is pinned
  std::uint32_t committed = 0;        // pages filed in the tree
  std::uint32_t ahead_committed = 0;  // the same, of leaves that need the next token
  std::uint32_t matched = 0;  // pages that were asked for before: what the tree held or remembered
  PageExtras extras;
  std::vector<std::uint32_t> begins;  // tokens at which media items and the encoder's input begin
  std::vector<Uncut> uncut;
  std::vector<std::uint32_t> kept;  // boundaries worth keeping, in tokens, ascending
  std::uint32_t rolling = 0;  // boundary of its last checkpoint that only the sequence's end keeps

  std::vector<Row> rows;                        // per leaf; empty rows for states and scratch
  std::vector<State> states;                    // per state leaf
  std::vector<std::optional<BlockId>> scratch;  // per scratch leaf
  std::vector<PendingCheckpoint> unfiled;
  EncoderNode* encoder = nullptr;

  std::uint32_t known() const noexcept { return static_cast<std::uint32_t>(tokens.size()); }
  /// Slots of `row`, one of its rows, have changed from this one on.
  void note_change(Row& row, std::uint32_t slot) noexcept {
    row.note_change(slot);
    unseen = all_observers;
  }
  void forget_bounds() noexcept { open_until = slide_at = 0; }
};

}  // namespace kvleaf
