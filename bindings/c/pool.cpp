// The pool.
#include <memory>

#include "border.h"

namespace kvleaf::c {
namespace {

Fate fate_of(kvleaf_fate fate) {
  static_assert(static_cast<int>(Fate::cache) == KVLEAF_FATE_CACHE &&
                static_cast<int>(Fate::request) == KVLEAF_FATE_REQUEST);
  require_constant("fate", fate, KVLEAF_FATE_REQUEST);
  return static_cast<Fate>(fate);
}

/// A hint is ignored when useless, and so is one that is no huge block at all.
std::optional<HugeBlockId> hint_of(std::int64_t hint) {
  if (hint < 0 || hint > std::int64_t{0xffffffff}) return std::nullopt;
  return HugeBlockId(static_cast<std::uint32_t>(hint));
}

std::optional<Value> value_of(const std::uint64_t* value) {
  return value == nullptr ? std::nullopt : std::optional(*value);
}

// Keys are read as two numbers, the first byte the highest.
PageKey key_of(const kvleaf_key& key) {
  PageKey page;
  for (std::size_t i = 0; i < sizeof key.bytes; ++i) {
    std::uint64_t& half = i < 8 ? page.high : page.low;
    half = half << 8 | key.bytes[i];
  }
  return page;
}
kvleaf_key key_of(PageKey page) {
  kvleaf_key key{};
  for (std::size_t i = 0; i < sizeof key.bytes; ++i) {
    key.bytes[i] = static_cast<std::uint8_t>((i < 8 ? page.high : page.low) >> (56 - 8 * (i % 8)));
  }
  return key;
}

/// Why the joint rule refuses `wanted`.
[[noreturn]] void refuse(const BlockPool& pool, const std::vector<std::uint64_t>& wanted) {
  std::string asked;
  for (std::uint32_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i] == 0) continue;
    asked += fmt::format("{}{} of leaf '{}'", asked.empty() ? "" : ", ", wanted[i],
                         pool.geometry().leaf(LeafId(i)).name);
  }
  const BlockPool::Verdict verdict = pool.judge(wanted);
  if (verdict.over_ceiling) {
    const LeafGeometry& leaf = pool.geometry().leaf(*verdict.over_ceiling);
    throw PoolExhausted(fmt::format("blocks wanted: {}; leaf '{}' has {} live of at most {}", asked,
                                    leaf.name, pool.live(*verdict.over_ceiling),
                                    leaf.ceiling.value_or(leaf.blocks)));
  }
  throw PoolExhausted(
      fmt::format("blocks wanted: {}; that takes {} huge blocks more, and {} are empty or idle",
                  asked, verdict.huge_needed, verdict.huge_left));
}

void add(std::uint64_t& sum, std::uint64_t blocks) {
  sum = sum + blocks < sum ? ~std::uint64_t{0} : sum + blocks;
}

}  // namespace
}  // namespace kvleaf::c

using namespace kvleaf;
using namespace kvleaf::c;

kvleaf_status kvleaf_pool_create(const kvleaf_geometry* geometry, uint64_t max_huge_blocks,
                                 kvleaf_pool** out) {
  return guarded([&] {
    require(out, "out");
    *out = std::make_unique<kvleaf_pool>(
               std::make_unique<BlockPool>(require(geometry, "geometry").geometry,
                                           PoolOptions{.max_huge_blocks = max_huge_blocks}))
               .release();
  });
}

void kvleaf_pool_destroy(kvleaf_pool* pool) {
  if (pool != nullptr && pool->own != nullptr) delete pool;
}

kvleaf_status kvleaf_pool_geometry(const kvleaf_pool* pool, const kvleaf_geometry** out) {
  return guarded([&] { require(out, "out") = &require(pool, "pool").geometry; });
}

// ---- drawing -----------------------------------------------------------------------------------

kvleaf_status kvleaf_pool_allocate(kvleaf_pool* pool, uint32_t leaf, kvleaf_fate fate, int64_t hint,
                                   uint32_t* out_block) {
  return guarded([&] {
    require(out_block, "out_block");
    BlockPool& core = require(pool, "pool").core;
    const auto block = core.allocate(LeafId(leaf), fate_of(fate), hint_of(hint));
    if (!block) {
      std::vector<std::uint64_t> wanted(core.leaves());
      wanted[leaf] = 1;
      refuse(core, wanted);
    }
    *out_block = block->value();
  });
}

kvleaf_status kvleaf_pool_allocate_many(kvleaf_pool* pool, uint32_t leaf, size_t count,
                                        kvleaf_fate fate, int64_t hint, uint32_t* out_blocks) {
  return guarded([&] {
    const auto out = span_of(out_blocks, count, "out_blocks");
    BlockPool& core = require(pool, "pool").core;
    const Fate how = fate_of(fate);
    // Room is made only for a number of blocks that exists.
    bool drawn = count <= core.geometry().leaf(LeafId(leaf)).blocks;
    if (drawn) {
      pool->drawn.assign(count, null_block);
      drawn = core.allocate_many(LeafId(leaf), pool->drawn, how, hint_of(hint));
    }
    if (!drawn) {
      std::vector<std::uint64_t> wanted(core.leaves());
      wanted[leaf] = count;
      refuse(core, wanted);
    }
    std::copy_n(same<const std::uint32_t>(pool->drawn.data()), count, out.begin());
  });
}

kvleaf_status kvleaf_pool_allocate_all(kvleaf_pool* pool, const kvleaf_demand* demand,
                                       size_t demand_count, uint32_t* out_blocks,
                                       size_t block_count) {
  return guarded([&] {
    const auto out = span_of(out_blocks, block_count, "out_blocks");
    BlockPool& core = require(pool, "pool").core;
    std::vector<BlockPool::Demand> parts;
    std::vector<std::uint64_t> wanted(core.leaves());
    std::uint64_t sum = 0;
    for (const kvleaf_demand& part : span_of(demand, demand_count, "demand")) {
      static_cast<void>(core.geometry().leaf(LeafId(part.leaf)));  // refuses one that is not there
      parts.push_back({.leaf = LeafId(part.leaf),
                       .blocks = part.blocks,
                       .fate = fate_of(part.fate),
                       .hint = hint_of(part.hint)});
      add(wanted[part.leaf], part.blocks);
      add(sum, part.blocks);
    }
    if (!core.can_allocate(wanted)) refuse(core, wanted);
    if (sum != block_count) {
      throw InvalidArgument(
          fmt::format("the demand is for {} blocks, but block_count is {}", sum, block_count));
    }
    pool->drawn.assign(block_count, null_block);
    if (!core.allocate_all(parts, pool->drawn)) refuse(core, wanted);
    std::copy_n(same<const std::uint32_t>(pool->drawn.data()), block_count, out.begin());
  });
}

kvleaf_status kvleaf_pool_can_allocate(const kvleaf_pool* pool, const uint64_t* wanted,
                                       size_t leaf_count, uint32_t* out_fits) {
  return guarded([&] {
    require(out_fits, "out_fits");
    const BlockPool& core = require(pool, "pool").core;
    const auto blocks = span_of(wanted, leaf_count, "wanted");
    if (leaf_count > core.leaves()) {
      throw InvalidArgument(
          fmt::format("wanted of {} leaves; the pool has {}", leaf_count, core.leaves()));
    }
    *out_fits = core.can_allocate(blocks);
  });
}

// ---- references --------------------------------------------------------------------------------

kvleaf_status kvleaf_pool_free(kvleaf_pool* pool, uint32_t leaf, uint32_t block) {
  return guarded([&] { require(pool, "pool").core.free(LeafId(leaf), BlockId(block)); });
}

kvleaf_status kvleaf_pool_free_many(kvleaf_pool* pool, uint32_t leaf, const uint32_t* blocks,
                                    size_t count) {
  return guarded(
      [&] { require(pool, "pool").core.free_many(LeafId(leaf), blocks_of(blocks, count)); });
}

kvleaf_status kvleaf_pool_touch(kvleaf_pool* pool, uint32_t leaf, uint32_t block,
                                const uint64_t* value) {
  return guarded(
      [&] { require(pool, "pool").core.touch(LeafId(leaf), BlockId(block), value_of(value)); });
}

kvleaf_status kvleaf_pool_touch_many(kvleaf_pool* pool, uint32_t leaf, const uint32_t* blocks,
                                     size_t count, const uint64_t* value) {
  return guarded([&] {
    require(pool, "pool").core.touch_many(LeafId(leaf), blocks_of(blocks, count), value_of(value));
  });
}

kvleaf_status kvleaf_pool_references(const kvleaf_pool* pool, uint32_t leaf, uint32_t block,
                                     uint32_t* out) {
  return guarded([&] {
    require(out, "out");
    *out = require(pool, "pool").core.references(LeafId(leaf), BlockId(block));
  });
}

// ---- the cache ---------------------------------------------------------------------------------

kvleaf_status kvleaf_pool_commit(kvleaf_pool* pool, uint32_t leaf, uint32_t block,
                                 const kvleaf_key* key, const uint64_t* value) {
  return guarded([&] {
    require(pool, "pool")
        .core.commit(LeafId(leaf), BlockId(block), key_of(require(key, "key")), value_of(value));
  });
}

kvleaf_status kvleaf_pool_commit_many(kvleaf_pool* pool, uint32_t leaf, const uint32_t* blocks,
                                      const kvleaf_key* keys, size_t count,
                                      const uint64_t* values) {
  return guarded([&] {
    std::vector<PageKey> page_keys;
    for (const kvleaf_key& key : span_of(keys, count, "keys")) page_keys.push_back(key_of(key));
    require(pool, "pool")
        .core.commit_many(
            LeafId(leaf), blocks_of(blocks, count), page_keys,
            values == nullptr ? std::span<const Value>() : std::span<const Value>(values, count));
  });
}

kvleaf_status kvleaf_pool_revalue(kvleaf_pool* pool, uint32_t leaf, uint32_t block,
                                  uint64_t value) {
  return guarded([&] { require(pool, "pool").core.revalue(LeafId(leaf), BlockId(block), value); });
}

kvleaf_status kvleaf_pool_value(const kvleaf_pool* pool, uint32_t leaf, uint32_t block,
                                uint64_t* out) {
  return guarded([&] {
    require(out, "out");
    *out = require(pool, "pool").core.value(LeafId(leaf), BlockId(block));
  });
}

kvleaf_status kvleaf_pool_rekey(kvleaf_pool* pool, uint32_t leaf, uint32_t block,
                                const kvleaf_key* key) {
  return guarded([&] {
    require(pool, "pool").core.rekey(LeafId(leaf), BlockId(block), key_of(require(key, "key")));
  });
}

kvleaf_status kvleaf_pool_uncommit(kvleaf_pool* pool, uint32_t leaf, uint32_t block) {
  return guarded([&] { require(pool, "pool").core.uncommit(LeafId(leaf), BlockId(block)); });
}

kvleaf_status kvleaf_pool_committed(const kvleaf_pool* pool, uint32_t leaf, uint32_t block,
                                    uint32_t* out) {
  return guarded([&] {
    require(out, "out");
    *out = require(pool, "pool").core.committed(LeafId(leaf), BlockId(block));
  });
}

kvleaf_status kvleaf_pool_find(const kvleaf_pool* pool, uint32_t leaf, const kvleaf_key* key,
                               uint32_t* out_block) {
  return guarded([&] {
    require(out_block, "out_block");
    const auto block = require(pool, "pool").core.find(LeafId(leaf), key_of(require(key, "key")));
    *out_block = block.value_or(null_block).value();
  });
}

kvleaf_status kvleaf_pool_on_evict(kvleaf_pool* pool, kvleaf_on_evict callback, void* user_data) {
  return guarded([&] {
    if (require(pool, "pool").own == nullptr) {
      throw InvalidArgument(
          "this pool belongs to a kvleaf_manager, which is told of evictions: see "
          "kvleaf_manager_take_events");
    }
    if (callback == nullptr) {
      pool->core.on_evict({});
      return;
    }
    pool->core.on_evict([callback, user_data](LeafId leaf, BlockId block, PageKey page) {
      const kvleaf_key key = key_of(page);
      call("on_evict", callback, user_data, leaf.value(), block.value(), &key);
    });
  });
}

// ---- the arena ---------------------------------------------------------------------------------

kvleaf_status kvleaf_pool_plan_compaction(kvleaf_pool* pool, uint32_t leaf, uint64_t max_bytes,
                                          const kvleaf_block_move** out, size_t* count) {
  return guarded([&] {
    require(out, "out");
    require(count, "count");
    auto moves = require(pool, "pool").core.plan_compaction(LeafId(leaf), max_bytes);
    pool->moves = std::move(moves);
    *out = same<const kvleaf_block_move>(pool->moves.data());
    *count = pool->moves.size();
  });
}

kvleaf_status kvleaf_pool_move(kvleaf_pool* pool, uint32_t leaf, uint32_t src, uint32_t dst) {
  return guarded(
      [&] { require(pool, "pool").core.move(LeafId(leaf), BlockId(src), BlockId(dst)); });
}

kvleaf_status kvleaf_pool_resize(kvleaf_pool* pool, uint64_t huge_blocks,
                                 const kvleaf_byte_range** out, size_t* count) {
  return guarded([&] {
    require(out, "out");
    require(count, "count");
    auto ranges = require(pool, "pool").core.resize(huge_blocks);
    pool->ranges = std::move(ranges);
    *out = same<const kvleaf_byte_range>(pool->ranges.data());
    *count = pool->ranges.size();
  });
}

// ---- what it holds -----------------------------------------------------------------------------

kvleaf_status kvleaf_pool_stats(const kvleaf_pool* pool, kvleaf_pool_totals* out) {
  return guarded([&] {
    const BlockPool& core = require(pool, "pool").core;
    const Output into(out, "out");
    const PoolStats stats = core.stats();
    into.write({.struct_size = 0,
                .huge_blocks = stats.huge_blocks,
                .empty = stats.empty,
                .claimed = stats.claimed,
                .idle = stats.idle,
                .retyped = stats.retyped,
                .metadata_bytes = core.metadata_bytes()});
  });
}

kvleaf_status kvleaf_pool_leaf_stats(const kvleaf_pool* pool, uint32_t leaf,
                                     kvleaf_leaf_stats* out) {
  return guarded([&] {
    const BlockPool& core = require(pool, "pool").core;
    const Output into(out, "out");
    static_cast<void>(core.geometry().leaf(LeafId(leaf)));
    const PoolStats pool_stats = core.stats();
    const LeafStats& stats = pool_stats.leaves[leaf];
    into.write({.struct_size = 0,
                .live = stats.live,
                .cached = stats.cached,
                .clean = stats.clean,
                .padding_bytes = stats.padding_bytes,
                .evicted = stats.evicted});
  });
}

kvleaf_status kvleaf_pool_audit(const kvleaf_pool* pool) {
  return guarded([&] { require(pool, "pool").core.audit(); });
}
