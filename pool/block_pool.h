// BlockPool: blocks of every leaf out of one arena of huge blocks. It moves no bytes and knows no
// tokens: callers see block ids, and geometry says where a block's bytes lie.
//
// A huge block is empty (owned by nobody), claimed (owned by a page class, some block live) or idle
// (owned, none live, cached blocks still findable). Every block of an owned huge block is exactly
// one of: live (referenced), cached (unreferenced but committed: it can be found again, and is
// evicted when memory is short) or clean (neither). An owned huge block with neither live nor
// cached blocks becomes empty at once.
//
// What allocate_all accepts never fails halfway; what it refuses changes nothing. Every call is
// O(1) amortised, an eviction O(log n), and nothing allocates from the heap after construction (but
// the calls that return a vector, and audit). Whoever throws a BlockError or InvalidArgument has
// changed nothing, a batch included.
//
// One thread owns a pool; stats() may be called from any.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvleaf/leaf/ids.h"
#include "kvleaf/pool/block_index.h"
#include "kvleaf/pool/counter.h"
#include "kvleaf/pool/fullest_first.h"
#include "kvleaf/pool/geometry.h"
#include "kvleaf/pool/huge_block.h"
#include "kvleaf/pool/lower_bound_tree.h"
#include "kvleaf/pool/page_guard.h"
#include "kvleaf/pool/ratio_divider.h"
#include "kvleaf/pool/records.h"
#include "kvleaf/pool/value.h"

namespace kvleaf {

/// What will become of a block: blocks that die with their request are kept apart from blocks that
/// are meant to stay findable, so that a huge block tends to fall idle as a whole.
enum class Fate : std::uint8_t { cache, request };

enum class KeyIndex : std::uint8_t {
  none,   // the owner finds blocks by itself: saves 6 to 12 bytes per block, find() throws
  by_key  // find(leaf, key) works
};

struct PoolOptions {
  KeyIndex index = KeyIndex::by_key;
  /// Huge blocks that resize() may grow to; what the pool's records, and geometry(), are sized for.
  /// 0: as many as the geometry has.
  std::uint64_t max_huge_blocks = 0;
  /// The arena's bytes, where a host can write them: finds writers to pages that were returned. The
  /// pool fills them with a pattern, and a page that is clean; a page that was written since is
  /// refused when it is drawn (InvariantError, which names the block and the byte; the pool refuses
  /// work from then on). For debugging: see page_guard.h.
  std::span<std::byte> guarded = {};
};

struct LeafStats {
  std::uint64_t live = 0;    // blocks
  std::uint64_t cached = 0;  // blocks
  std::uint64_t clean = 0;   // blocks of its page class, the same figure for each of its leaves
  std::uint64_t padding_bytes = 0;  // (stride - bytes) of live and cached blocks
  std::uint64_t evicted = 0;        // blocks, since construction
};
struct PoolStats {
  std::uint64_t huge_blocks = 0;  // in service: empty + claimed + idle
  std::uint64_t empty = 0;        // huge blocks
  std::uint64_t claimed = 0;      // huge blocks
  std::uint64_t idle = 0;         // huge blocks
  std::uint64_t retyped =
      0;  // huge blocks taken from one page class for another, since construction
  std::vector<LeafStats> leaves;
};

struct BlockMove {
  LeafId leaf{0};
  BlockId src{0};
  BlockId dst{0};
  bool operator==(const BlockMove&) const = default;
};

class BlockPool {
 public:
  /// Throws InvalidArgument for more than 65,534 leaves or page classes, or a max_huge_blocks below
  /// the geometry's.
  explicit BlockPool(Geometry geometry, PoolOptions options = {});
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  /// Of all huge blocks that may ever be in service: their ids and bytes never change.
  const Geometry& geometry() const noexcept { return geometry_; }
  std::uint32_t leaves() const noexcept { return leaf_count_; }

  // ---- drawing -------------------------------------------------------------------------------
  /// One block, live with one reference; nothing when the joint rule refuses {leaf: 1}.
  ///   fate   see Fate; a huge block has the fate of the block that claimed it
  ///   hint   the huge block this request last took from. Useless, and ignored, unless the leaf's
  ///          page class has claimed it with the same fate and it has a clean block
  /// Source: design document, "Allocation" and "Eviction".
  std::optional<BlockId> allocate(LeafId leaf, Fate fate = Fate::cache,
                                  std::optional<HugeBlockId> hint = {});
  /// n = out.size() blocks or none. Faster per block than n calls, and contiguous where it can be.
  bool allocate_many(LeafId leaf, std::span<BlockId> out, Fate fate = Fate::cache,
                     std::optional<HugeBlockId> hint = {});

  /// One leaf's share of a joint demand.
  struct Demand {
    LeafId leaf{0};
    std::uint64_t blocks = 0;
    Fate fate = Fate::cache;
    std::optional<HugeBlockId> hint = {};
  };
  /// All or nothing. `out` receives the blocks of demand[0], then of demand[1], …; its size must be
  /// the sum, else InvalidArgument. A leaf may appear more than once. On false nothing has changed,
  /// to the bit.
  bool allocate_all(std::span<const Demand> demand, std::span<BlockId> out);
  /// The same rule without side effects; `blocks[i]` is wanted of leaf i, none of those left out.
  bool can_allocate(std::span<const std::uint64_t> blocks) const { return judge(blocks).fits; }
  /// Huge blocks that `blocks`, floors and promises need beyond what claimed ones hold, and those
  /// there are (empty + idle): the numbers of a refusal. `over_ceiling`: the first leaf that would
  /// pass its ceiling.
  struct Verdict {
    bool fits = false;
    std::uint64_t huge_needed = 0;
    std::uint64_t huge_left = 0;
    std::optional<LeafId> over_ceiling;
  };
  Verdict judge(std::span<const std::uint64_t> blocks) const;

  /// Blocks of `leaf` promised to somebody beyond what is live: every later decision and placement
  /// counts them as demanded. Set, not added.
  void set_promised(LeafId leaf, std::uint64_t blocks);
  std::uint64_t promised(LeafId leaf) const;

  // ---- references ----------------------------------------------------------------------------
  /// Returns one reference. The last one makes the block cached if it is committed, else clean.
  /// Throws BlockError for null, foreign, of another leaf, not live.
  void free(LeafId leaf, BlockId block);
  void free_many(LeafId leaf, std::span<const BlockId> blocks);
  /// One more reference; makes a cached block live. Throws BlockError for a clean block. A
  /// committed block takes `value`; without one, a block that was committed without one takes the
  /// time of the call, and any other keeps its value. Ceilings do not bound touches.
  void touch(LeafId leaf, BlockId block, std::optional<Value> value = {});
  void touch_many(LeafId leaf, std::span<const BlockId> blocks, std::optional<Value> value = {});
  std::uint32_t references(LeafId leaf, BlockId block) const;

  // ---- the cache -----------------------------------------------------------------------------
  /// Makes a live block findable under `key`. Without a value, the time of the call (a counter).
  /// Throws BlockError if the block is not live or is committed, InvalidArgument if, with an index,
  /// the leaf has the key already.
  void commit(LeafId leaf, BlockId block, PageKey key, std::optional<Value> value = {});
  void commit_many(LeafId leaf, std::span<const BlockId> blocks, std::span<const PageKey> keys,
                   std::span<const Value> values = {});
  /// A committed block's place in the order of eviction.
  void revalue(LeafId leaf, BlockId block, Value value);
  void revalue_many(LeafId leaf, std::span<const BlockId> blocks, std::span<const Value> values);
  Value value(LeafId leaf, BlockId block) const;
  /// Another key for a committed block, its value unchanged (a segment was split).
  void rekey(LeafId leaf, BlockId block, PageKey key);
  /// No longer findable. A cached block becomes clean; a live one stays live.
  void uncommit(LeafId leaf, BlockId block);
  bool committed(LeafId leaf, BlockId block) const;
  /// All of that at once, for loops over many blocks: no references and not committed unless it is
  /// live or cached and this leaf's.
  struct BlockState {
    std::uint32_t references = 0;
    bool committed = false;
    Value value = 0;  // while committed
  };
  BlockState look(LeafId leaf, BlockId block) const {
    const LeafState& state = state_of(leaf);
    if (block.value() - 1 >= state.blocks) return {};
    const Place place = place_of(state, block);
    const Block& record = blocks_of(place.huge)[place.index];
    if (record.leaf != leaf.value()) return {};
    return {record.references, record.is(Block::committed), record.value};
  }
  std::optional<PageKey> key(LeafId leaf, BlockId block) const;
  std::optional<BlockId> find(LeafId leaf, PageKey key) const;

  /// Called once per evicted block, after it ceased to be findable and before it is used again. May
  /// call uncommit, revalue, rekey and the queries; anything else throws InvalidArgument. What it
  /// throws reaches the caller of the allocation, which then has taken nothing (evictions stay).
  using OnEvict = std::function<void(LeafId leaf, BlockId block, PageKey key)>;
  void on_evict(OnEvict callback);

  // ---- the arena -----------------------------------------------------------------------------
  /// Moves within the leaf's page class that would empty one of its claimed huge blocks into clean
  /// blocks of its other claimed ones: the set with the fewest moves, of at most `max_bytes` of
  /// data; empty if there is none. Changes nothing.
  std::vector<BlockMove> plan_compaction(LeafId leaf, std::uint64_t max_bytes) const;
  /// Everything known of src (references, commit, key, value) now belongs to dst, which must be
  /// clean in a claimed huge block; src becomes clean. Call it after the bytes were copied. Throws
  /// BlockError otherwise.
  void move(LeafId leaf, BlockId src, BlockId dst);
  /// Another number of huge blocks in service, up to max_huge_blocks. Growing takes those out of
  /// service back, the lowest first. Shrinking takes empty ones, the highest first, then the least
  /// valuable idle ones, whose commits are dropped; claimed ones, floors and promises are never
  /// touched: where they are in the way it throws PoolExhausted that names the least number
  /// possible. Returns the bytes of the huge blocks concerned, ascending and merged: they may be
  /// unmapped (shrinking) or must be mapped (growing).
  std::vector<ByteRange> resize(std::uint64_t huge_blocks);
  std::uint64_t huge_blocks() const noexcept;  // in service

  // ---- what it holds -------------------------------------------------------------------------
  PoolStats stats() const;
  std::uint64_t live(LeafId leaf) const;
  std::uint64_t cached(LeafId leaf) const;
  /// Bytes of the pool's own records: all that grows with huge blocks or ratios.
  std::uint64_t metadata_bytes() const noexcept;
  /// Recounts everything from scratch. Throws InvariantError that names the first broken equation;
  /// from then on the pool refuses all work with the same message.
  void audit() const;

 private:
  friend struct BlockPoolTestAccess;  // breaks invariants on purpose; defined by tests

  // Kinds of owned huge blocks: claimed ones by fate, and idle ones.
  static constexpr std::uint32_t clean_kinds = 3;
  static constexpr std::uint32_t idle_kind = 2;

  struct PageClass {
    std::uint32_t ratio = 1;
    std::uint16_t number = 0;
    Counter claimed, idle;  // huge blocks
    // Huge blocks with clean blocks, where the ratio is above 1: else an owned huge block has none.
    FullestFirst clean[clean_kinds];
    // Orders of eviction, over huge blocks: bounds of their least valuable cached block, by kind as
    // above; bounds of the worth of idle ones. Where the ratio is 1 there is that of idle ones
    // only: a claimed one has nothing cached, and worth is that one block's value.
    TreeNodes<Rank> order[clean_kinds];
    TreeNodes<Worth> worth_order;
    RatioDivider divider;
    std::vector<std::uint16_t> leaves;
  };
  struct alignas(64) LeafState {
    RatioDivider divider;
    std::uint32_t blocks = 0;  // ids are 1 … blocks
    PageClass* page_class = nullptr;
    Counter live, cached;
    std::uint64_t ceiling = 0;
  };
  struct LeafTerms {
    std::uint64_t floor = 0;
    std::uint64_t promised = 0;
    Counter evicted;
  };
  /// What the joint rule reads of a page class.
  struct ClassTerms {
    const Counter* claimed = nullptr;
    RatioDivider divider;
    std::uint32_t leaves = 0;  // of leaves_by_class_, those of earlier classes first
  };
  /// Where a block's records are. A value: it stays right whatever happens to the block.
  struct Place {
    std::uint32_t huge;
    std::uint32_t index;
  };
  /// What placement and eviction may still spend in the transaction being done: see
  /// joint_demand.cpp.
  struct Allowance {
    std::uint64_t needed;  // huge blocks that the class still needs
    std::uint64_t slack;   // empty and idle ones that nobody needs
    bool may_spend() const noexcept { return needed != 0 || slack != 0; }
    void spend() noexcept { needed != 0 ? --needed : --slack; }
  };
  enum class Work : std::uint8_t { ready, telling, poisoned };

  // joint_demand.cpp
  std::uint64_t room() const noexcept { return empty_.get() + idle_.get(); }
  std::uint64_t free_blocks(const PageClass& page_class) const noexcept;
  template <class DemandOf, class Needed>
  Verdict judge_demand(DemandOf&& demand_of, Needed&& needed) const noexcept;
  bool allow(LeafId leaf, std::uint64_t blocks, Allowance& allowance) const noexcept;
  bool allow_standing(LeafId leaf, std::uint64_t blocks, Allowance& allowance) const noexcept;

  // block_pool.cpp
  void require(Work most, const char* call) const {
    if (work_ > most) [[unlikely]]
      refuse_work(call);
  }
  [[noreturn]] void refuse_work(const char* call) const;
  [[noreturn]] void refuse_block(const char* call, LeafId leaf, BlockId block) const;
  [[noreturn]] void refuse_leaf(LeafId leaf) const;
  LeafState& state_of(LeafId leaf) {
    if (leaf.value() >= leaves_.size()) [[unlikely]]
      refuse_leaf(leaf);
    return leaves_[leaf.value()];
  }
  const LeafState& state_of(LeafId leaf) const {
    if (leaf.value() >= leaves_.size()) [[unlikely]]
      refuse_leaf(leaf);
    return leaves_[leaf.value()];
  }
  static Place place_of(const LeafState& leaf, BlockId block) noexcept {
    const std::uint32_t number = block.value() - 1;
    const std::uint32_t huge = leaf.divider.quotient(number);
    return {huge, number - huge * leaf.divider.ratio()};
  }
  BlockId id_at(const LeafState& leaf, Place place) const noexcept {
    return BlockId(place.huge * leaf.divider.ratio() + place.index + 1);
  }
  std::uint32_t record_at(Place place) const noexcept {
    return place.huge * max_ratio_ + place.index;
  }
  Block* blocks_of(std::uint32_t huge) noexcept {
    return blocks_.data() + std::uint64_t{huge} * max_ratio_;
  }
  const Block* blocks_of(std::uint32_t huge) const noexcept {
    return blocks_.data() + std::uint64_t{huge} * max_ratio_;
  }
  Block& block_at(Place place) noexcept { return blocks_of(place.huge)[place.index]; }
  PageKey& key_at(Place place) noexcept { return keys_[record_at(place)]; }
  const PageKey& key_at(Place place) const noexcept { return keys_[record_at(place)]; }
  Place owned_place(const char* call, const LeafState& state, LeafId leaf, BlockId block) const;
  Place committed_place(const char* call, const LeafState& state, LeafId leaf, BlockId block) const;

  void draw(LeafId leaf, Fate fate, std::optional<HugeBlockId> hint, std::span<BlockId> out,
            Allowance& allowance);
  std::optional<BlockId> allocate_slowly(LeafId leaf, Fate fate, std::optional<HugeBlockId> hint);
  std::size_t take_from_hinted(LeafId leaf, Fate fate, HugeBlockId hint,
                               std::span<BlockId> out) noexcept;
  std::size_t take_from_claimed(LeafId leaf, FullestFirst& own, std::span<BlockId> out) noexcept;
  std::size_t take_single(LeafId leaf, Fate fate, Allowance& allowance,
                          std::span<BlockId> out) noexcept;
  std::size_t free_single(LeafId leaf, std::span<const BlockId> blocks) noexcept;
  std::size_t free_run(LeafId leaf, std::span<const BlockId> blocks) noexcept;
  std::size_t free_committed(LeafId leaf, std::span<const BlockId> blocks) noexcept;
  std::size_t take_from_new(LeafId leaf, Fate fate, Allowance& allowance,
                            std::span<BlockId> out) noexcept;
  std::uint32_t take(LeafId leaf, std::uint32_t huge, std::span<BlockId> out) noexcept;
  void draw_clean(LeafId leaf, std::uint32_t huge, std::uint32_t ratio, std::uint32_t count,
                  BlockId* out) noexcept;
  BlockId take_one(LeafState& state, LeafId leaf, std::uint32_t huge) noexcept;
  void check_drawn(LeafId leaf, std::span<const BlockId> blocks) const;
  void check_returned(LeafId leaf, std::span<const BlockId> blocks);
  void give_back(LeafId leaf, std::span<const BlockId> blocks) noexcept;
  void take_again(LeafState& leaf, Place place) noexcept;

  // transitions.h
  static std::uint32_t kind_of(const HugeBlock& huge) noexcept {  // of one that has an owner
    return huge.live != 0 ? huge.fate : idle_kind;
  }
  std::uint32_t clean_in(const PageClass& page_class, const HugeBlock& huge) const noexcept {
    return page_class.ratio - huge.live - huge.cached;
  }
  std::uint32_t pop_empty() noexcept;
  void push_empty(std::uint32_t huge) noexcept;
  void became_empty(std::uint32_t huge) noexcept;
  std::uint32_t claim(PageClass& page_class, Fate fate) noexcept;
  void leave_claimed(PageClass& page_class, std::uint32_t huge) noexcept;
  void leave_idle(PageClass& page_class, std::uint32_t huge) noexcept;
  void list_claimed(PageClass& page_class, std::uint32_t huge) noexcept;
  void push_clean(PageClass& page_class, Place place) noexcept;
  void live_to_clean(PageClass& page_class, Place place) noexcept;
  void cached_to_clean(PageClass& page_class, Place place) noexcept;
  void release(LeafState& leaf, Place place) noexcept;
  void cached_to_live(PageClass& page_class, std::uint32_t huge, std::uint32_t count) noexcept;
  void forget(Place place) noexcept;
  void drop_commit(LeafState& leaf, Place place) noexcept;

  // commits.cpp
  void set_value(LeafState& leaf, Place place, Value value) noexcept;
  void require_new_key(const char* call, LeafId leaf, BlockId block, PageKey key) const;

  // eviction.cpp
  struct Victim {
    Rank rank;
    Place place{0, 0};
  };
  std::size_t evict(LeafId leaf, Fate fate, Allowance& allowance, std::span<BlockId> out);
  Victim least_cached(PageClass& page_class, std::uint32_t kind) noexcept;
  LeastKey<Worth> least_idle(PageClass& page_class) noexcept;
  void drain(std::uint32_t huge);
  void tell(std::uint16_t leaf, BlockId block, PageKey key);
  LowerBoundTree<Rank> block_order(std::uint32_t huge) noexcept {
    return {block_shape_, block_nodes_.data() + std::uint64_t{huge} * block_shape_.nodes(),
            bounds_[huge]};
  }
  Rank bound_of(std::uint32_t huge) const noexcept;
  enum class Bound : std::uint8_t { keep, raise };
  LeastKey<Rank> least_block(std::uint32_t huge, Bound bound) noexcept;
  Worth worth_of(std::uint32_t huge) noexcept;
  void file_block(Place place, Value value) noexcept;
  void file_huge(PageClass& page_class, std::uint32_t huge) noexcept;
  void file_worth(PageClass& page_class, std::uint32_t huge) noexcept;
  void raise_worth(std::uint32_t huge, Value value) noexcept;
  void doubt_worth(std::uint32_t huge, Value lost) noexcept;

  // compaction.cpp
  void unlink_clean(Place place) noexcept;

  // resize.cpp
  void relink_empty();

  // audit.cpp
  [[noreturn]] void poison(std::string equation) const;
  template <class Key, class KeyOf>
  void audit_order(const std::string& name, const TreeShape& shape, const Key* nodes, Key root,
                   KeyOf&& key_of) const;
  template <class Key, class KeyOf>
  void audit_memory(const std::string& name, const TreeShape& shape, const TreeNodes<Key>& order,
                    KeyOf&& key_of) const;
  void audit_huge_block(std::uint32_t huge) const;
  void audit_page_class(std::uint32_t page_class) const;
  void audit_sums() const;

  // What every draw and return reads comes first.
  mutable Work work_ = Work::ready;
  bool standing_ = false;  // whether any leaf has a floor or a promise
  bool indexed_ = false;
  std::uint32_t leaf_count_ = 0;
  std::vector<LeafState> leaves_;
  std::uint32_t max_ratio_ = 1;
  RatioDivider max_divider_;
  Records<Block> blocks_;     // [huge block][max_ratio_]
  Records<PageKey> keys_;     // the same: of committed blocks
  Records<HugeBlock> huge_;   // [huge block]
  Records<CleanLink> links_;  // [huge block]; empty if max_ratio_ is 1
  // Orders of eviction inside huge blocks. With ratios up to `small_ratio` there are none: a look
  // at each block is as fast, and a small page must not cost more records than it saves.
  static constexpr std::uint32_t small_ratio = 3;
  TreeShape huge_shape_;       // over huge blocks
  TreeShape block_shape_;      // over max_ratio_ blocks
  Records<Rank> block_nodes_;  // [huge block][block_shape_.nodes()]
  Records<Rank> bounds_;       // [huge block]: at most the rank of its least valuable cached block
  Records<Rank> worths_;  // [huge block]: of its most valuable committed block, at least if unsure

  Counter empty_, idle_;  // huge blocks
  Counter retyped_;
  std::uint32_t first_empty_ =
      fresh;  // last in, first out, linked through their first block's record
  Geometry geometry_;
  std::vector<PageClass> classes_;              // leaves point into it
  std::vector<LeafTerms> terms_;                // [leaf]
  std::vector<ClassTerms> class_terms_;         // [class]
  std::vector<std::uint16_t> leaves_by_class_;  // every leaf once
  std::vector<std::uint64_t> wanted_;           // [leaf]: scratch of allocate_all
  std::vector<std::uint64_t> needed_;           // [class]: scratch of allocate_all
  BlockIndex index_;
  Value clock_ = 0;  // value of what was last committed or touched without one
  OnEvict on_evict_;
  PageGuard guard_;
  mutable std::string broken_;  // the first broken equation, while poisoned
};

}  // namespace kvleaf
