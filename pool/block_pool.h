// BlockPool: blocks of every leaf out of one arena of huge blocks. It moves no bytes and knows no
// tokens: callers see block ids, and geometry says where a block's bytes lie.
//
// A huge block is empty (owned by nobody), claimed (owned by a page class, some block live) or idle
// (owned, none live, cached blocks still findable). Every block of an owned huge block is exactly one
// of: live (referenced), cached (unreferenced but committed: it can be found again, and is evicted
// when memory is short) or clean (neither). An owned huge block with neither live nor cached blocks
// becomes empty at once.
//
// What allocate_all accepts never fails halfway; what it refuses changes nothing. Every call is O(1)
// amortised, an eviction O(log n), and nothing allocates from the heap after construction.
// One thread owns a pool; stats_snapshot() may be called from another.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvleaf/leaf/ids.h"
#include "kvleaf/pool/geometry.h"

namespace kvleaf {

/// What will become of a block: blocks that die with their request are kept apart from blocks that
/// are meant to stay findable, so that a huge block tends to fall idle as a whole.
enum class Fate : std::uint8_t { cache, request };

/// Opaque to the pool: what the owner knows a committed block by.
struct PageKey {
  std::uint64_t high = 0;
  std::uint64_t low = 0;
  auto operator<=>(const PageKey&) const = default;
};

/// Order of eviction, least first. The owner packs into it whatever it values pages by.
using Value = std::uint64_t;

enum class KeyIndex : std::uint8_t {
  none,   // the owner finds blocks by itself: saves 8 bytes per block, find() throws
  by_key  // find(leaf, key) works
};

struct PoolOptions {
  KeyIndex index = KeyIndex::by_key;
};

struct LeafStats {
  std::uint64_t live = 0;    // blocks
  std::uint64_t cached = 0;  // blocks
  std::uint64_t clean = 0;   // blocks of its page class, the same figure for each of its leaves
  std::uint64_t padding_bytes = 0;  // (stride - bytes) of live and cached blocks
  std::uint64_t evicted = 0;        // blocks, since construction
};
struct PoolStats {
  std::uint64_t empty = 0;    // huge blocks
  std::uint64_t claimed = 0;  // huge blocks
  std::uint64_t idle = 0;     // huge blocks
  std::uint64_t retyped = 0;  // huge blocks taken from one page class for another, since construction
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
  explicit BlockPool(Geometry geometry, PoolOptions options = {});
  ~BlockPool();
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  const Geometry& geometry() const noexcept;
  std::uint32_t leaves() const noexcept;

  // ---- drawing -------------------------------------------------------------------------------
  /// One block, live with one reference; nothing when the joint rule refuses {leaf: 1}.
  ///   hint   the huge block this request last took from; ignored when useless
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
    std::optional<HugeBlockId> hint;
  };
  /// All or nothing. `out` receives the blocks of demand[0], then of demand[1], …; its size must be
  /// the sum. A leaf may appear more than once. On false nothing has changed, to the bit.
  bool allocate_all(std::span<const Demand> demand, std::span<BlockId> out);
  /// The same rule without side effects; `blocks[i]` is wanted of leaf i.
  bool can_allocate(std::span<const std::uint64_t> blocks) const;
  /// Huge blocks that `blocks` would need beyond what claimed ones hold, and those there are
  /// (empty + idle): the numbers of a refusal.
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
  /// One more reference; makes a cached block live. Throws BlockError for a clean block.
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
  Value value(LeafId leaf, BlockId block) const;
  /// Another key for a committed block, its value unchanged (a segment was split).
  void rekey(LeafId leaf, BlockId block, PageKey key);
  /// No longer findable. A cached block becomes clean; a live one stays live.
  void uncommit(LeafId leaf, BlockId block);
  bool committed(LeafId leaf, BlockId block) const;
  std::optional<PageKey> key(LeafId leaf, BlockId block) const;
  std::optional<BlockId> find(LeafId leaf, PageKey key) const;

  /// Called once per evicted block, after it ceased to be findable and before it is used again. May
  /// call uncommit, revalue and the queries; nothing else. What it throws reaches the caller of the
  /// allocation, which then has taken nothing (evictions stay).
  using OnEvict = std::function<void(LeafId leaf, BlockId block, PageKey key)>;
  void on_evict(OnEvict callback);

  // ---- the arena -----------------------------------------------------------------------------
  /// Moves within the leaf's page class that would empty one of its claimed huge blocks, of at most
  /// `max_bytes`; empty if there is no such set. Changes nothing.
  std::vector<BlockMove> plan_compaction(LeafId leaf, std::uint64_t max_bytes) const;
  /// Everything known of src (references, commit, key, value) now belongs to dst, which must be clean
  /// in a claimed huge block; src becomes clean. Call it after the bytes were copied.
  void move(LeafId leaf, BlockId src, BlockId dst);
  /// Another number of huge blocks, at most the number at construction times the growth reserved by
  /// the geometry's 2^31 ids. Shrinking drops the least valuable idle huge blocks at the end first
  /// and throws PoolExhausted, naming the least count possible, where live blocks are in the way.
  /// Returns byte ranges that may be unmapped (shrinking) or must be mapped (growing).
  std::vector<ByteRange> resize(std::uint64_t huge_blocks);

  // ---- what it holds -------------------------------------------------------------------------
  PoolStats stats() const;
  std::uint64_t live(LeafId leaf) const;
  std::uint64_t cached(LeafId leaf) const;
  /// Bytes of the pool's own records.
  std::uint64_t metadata_bytes() const;
  /// Recounts everything from scratch. Throws InvariantError that names the first broken equation;
  /// from then on the pool refuses all work with the same message.
  void audit() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvleaf
