// BlockManager: requests, their rows of blocks in every leaf, and what they share.
//
//   admit      find the longest prefix that every leaf can resume, claim it, and answer whether the
//              rest of the prompt would fit; allocates nothing more
//   begin_step draw what the next tokens of a batch need; a request that does not fit is refused
//   alone settle     the device is done: commit full pages of known tokens, free what is out of
//   reach release    end a request; what it committed stays findable while memory is free
//
// Everything is a transaction: what throws or is refused has changed nothing. Steps may overlap;
// they settle in order, and a block is returned only when no step in flight reaches it. One thread
// owns a manager.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvleaf/group/request_options.h"
#include "kvleaf/leaf/leaf.h"
#include "kvleaf/pool/pool.h"

namespace kvleaf {

struct ManagerOptions {
  std::uint64_t budget_bytes = 0;        // of the arena; unused where a geometry is given
  std::uint32_t page_tokens = 16;        // boundaries are multiples of it; every leaf's page too
  std::uint32_t max_len = 0;             // tokens of the longest request; must be given
  std::uint32_t max_step_tokens = 8192;  // most tokens one request computes in one step
  std::uint32_t max_steps_in_flight = 2;
  std::optional<Geometry> geometry = {};  // of pages named like the leaves, in the leaves' order
  std::uint32_t expected_tokens = 2048;   // of a typical request: weighs leaves in the geometry
  bool enable_prefix_caching = true;
  Retention retention = Retention::tail();
  EvictionOrder eviction = EvictionOrder::value;
  KeyHash hash = KeyHash::xxh3_128;
  std::optional<std::uint64_t> seed = {};  // of page keys; none: random for xxh3_128, 0 for sha256
  bool events = false;                     // record stored / removed / cleared for take_events()
  std::span<std::byte> guarded = {};       // the arena's bytes, to debug: see PoolOptions
};

struct GroupStats {
  std::string group;
  std::uint64_t lost_tokens = 0;  // by which it shortened joint hits, summed over admissions
};
struct ManagerStats {
  PoolStats pool;
  std::vector<GroupStats> groups;
  std::uint64_t requests = 0;       // live
  std::uint64_t admitted = 0;       // since construction; resumed ones not counted
  std::uint64_t resumed = 0;        // admissions of preempted requests
  std::uint64_t refused = 0;        // admissions
  std::uint64_t prompt_tokens = 0;  // of admitted requests, counted once
  std::uint64_t hit_tokens = 0;     // of those, what hits gave
  std::uint64_t step_refusals = 0;  // rows refused by begin_step
  std::uint64_t preemptions = 0;
  std::uint64_t committed_pages = 0;      // findable and in nobody's use now, of all leaves
  std::uint64_t segments = 0;             // nodes of the prefix tree
  std::uint64_t twins = 0;                // blocks returned because the page was findable already
  std::uint64_t checkpoints = 0;          // published
  std::uint64_t checkpoints_skipped = 0;  // for want of room
  std::uint64_t quarantined = 0;          // blocks waiting for a step to settle, now
  std::uint64_t steps_in_flight = 0;
  std::uint64_t metadata_bytes = 0;  // pool, tree and rows
};

/// The pages that a pool sees of these leaves, with the weights of the manager's default:
/// blocks_to_reserve(⌈expected_tokens / tokens_per_page⌉, no caching, step_tokens 1) · bytes.
std::vector<PageSpec> page_specs(const Leaves& leaves, std::uint32_t page_tokens,
                                 std::uint32_t expected_tokens);

class BlockManager {
 public:
  /// Throws InvalidArgument, naming the leaf, for no leaf, equal ids, groups of one name that
  /// differ, a page that is no multiple of page_tokens, max_len or page_tokens 0; GeometryError as
  /// plan_geometry.
  BlockManager(Leaves leaves, ManagerOptions options);
  ~BlockManager();
  BlockManager(const BlockManager&) = delete;
  BlockManager& operator=(const BlockManager&) = delete;

  const ManagerOptions& options() const noexcept;
  const Leaves& leaves() const noexcept;
  const Geometry& geometry() const noexcept;
  BlockPool& pool() noexcept;
  const BlockPool& pool() const noexcept;
  /// Throws InvalidArgument that lists the ids there are.
  LeafId find_leaf(std::string_view leaf_id) const;
  std::uint32_t tokens_per_page(LeafId leaf) const;

  /// Tokens of the longest request that an empty pool serves, in chunks of max_step_tokens; at most
  /// max_len.
  std::uint32_t longest_request() const;

  // ---- a request's life ------------------------------------------------------------------------
  /// Throws PoolExhausted when it cannot be admitted now, RequestError for an id that is live, no
  /// tokens, more than max_len, media out of order or outside the prompt, an encoder that is
  /// missing or not wanted.
  Admission admit(RequestId request, std::span<const Token> tokens,
                  const AdmitOptions& options = {});
  /// What admit would answer; claims nothing, counts nothing.
  Admission probe(std::span<const Token> tokens, const AdmitOptions& options = {}) const;
  /// Ids that became known; they may have been planned before.
  void append(RequestId request, std::span<const Token> tokens);
  /// Where the next chunk should end so that what a kept boundary needs can be committed.
  std::optional<std::uint32_t> next_stop(RequestId request) const;
  /// The engine has written the encoder's pages of this request.
  void encoder_filled(RequestId request);
  /// Ends a request. In flight: blocks come back when the steps that use them have settled.
  void release(RequestId request, Prefix prefix = Prefix::keep,
               std::optional<std::uint32_t> addressable = {});
  /// Returns its blocks, keeps what is committed. Resumed by admit with the same id and all its
  /// tokens.
  void preempt(RequestId request);

  // ---- steps -----------------------------------------------------------------------------------
  /// Draws blocks for the next tokens of each request, in order. Throws, with nothing changed:
  /// RequestError (unknown, twice, zero tokens, past max_len, above max_step_tokens, ends inside a
  /// whole item, encoder not filled), StepError (max_steps_in_flight are in flight).
  const Step& begin_step(std::span<const StepRequest> batch);
  /// Throws StepError for a step that is not the oldest in flight, RequestError for kept of a
  /// request that was not in it or more tokens than it planned.
  void settle(StepId step, std::span<const Kept> kept = {});
  /// The device work of `step`, and of all begun after it, failed. Returns the length (tokens
  /// computed) that each request of those steps goes back to.
  std::vector<std::pair<RequestId, std::uint32_t>> abandon(StepId step);

  // ---- sharing ---------------------------------------------------------------------------------
  /// `child` shares the parent's full pages and gets its own partly filled page, state and scratch.
  /// Throws PoolExhausted, RequestError.
  void fork(RequestId parent, RequestId child);
  /// Keeps the first `tokens` tokens. Throws RequestError that names the nearest shorter length
  /// that works where the reach or a state at `tokens` is no longer held, or with a step in flight.
  void rewind(RequestId request, std::uint32_t tokens);
  /// Drops every commit; running requests go on and publish nothing computed before.
  void reset_cache();

  // ---- what it holds
  // -----------------------------------------------------------------------------
  bool contains(RequestId request) const noexcept;
  std::uint32_t length(RequestId request) const;    // tokens known
  std::uint32_t computed(RequestId request) const;  // tokens of settled steps
  std::uint32_t planned(RequestId request) const;   // the same, and of steps in flight
  /// Blocks in slot order, null where nothing is held. States: checkpoints are not in a row; empty.
  std::span<const BlockId> blocks(RequestId request, LeafId leaf) const;  // until the next call
  /// The state's or scratch's block; nothing before the first step.
  std::optional<BlockId> live_block(RequestId request, LeafId leaf) const;
  ManagerStats stats() const;
  void audit() const;
  /// Recorded since the last call, in order. Empty unless options.events.
  std::vector<Event> take_events();

 private:
  friend class StepPlanner;
  friend struct BlockManagerTestAccess;  // looks inside; defined by tests
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvleaf
