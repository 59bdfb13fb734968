// Random operations on a BlockPool beside a model that keeps every held block in a map. After each
// operation the pool audits itself, and
//   - no two blocks that are live or cached overlap in the arena, whatever their leaves;
//   - every block has the references and the key that the model gave it;
//   - what the pool evicts was cached, and is reported once;
//   - allocate_all accepts exactly what can_allocate promised, and a refusal changes nothing;
//   - a call on a block that is not live is refused and changes nothing.
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "fuzz/bytes.h"
#include "kvleaf/pool/pool.h"

namespace {

using namespace kvleaf;

#define REQUIRE(condition)                                                         \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: broken: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                \
    }                                                                              \
  } while (false)

struct Held {
  std::uint32_t references = 0;  // 0: cached
  std::optional<PageKey> key;
};

using LeafBlock = std::pair<LeafId, BlockId>;

Geometry some_geometry(fuzz::Bytes& bytes) {
  // Two leaves of one page class, one of large pages, one that pads; none larger than a huge block.
  static const std::vector<PageSpec> pages = {
      {.name = "a", .bytes_per_page = 64, .stride_alignment = 1},
      {.name = "b", .bytes_per_page = 60, .stride_alignment = 1},
      {.name = "c", .bytes_per_page = 384, .stride_alignment = 1},
      {.name = "d", .bytes_per_page = 100, .stride_alignment = 1}};
  return Geometry::by_hand(
      pages, {.huge_bytes = 384, .huge_blocks = bytes.below(12) + 1, .ratios = {6, 6, 1, 3}});
}

class Run {
 public:
  explicit Run(fuzz::Bytes& bytes)
      : bytes_(bytes), pool_(some_geometry(bytes)), huge_blocks_(pool_.geometry().huge_blocks()) {
    pool_.on_evict([this](LeafId leaf, BlockId block, PageKey key) {
      const auto found = held_.find({leaf, block});
      REQUIRE(found != held_.end());
      REQUIRE(found->second.references == 0);
      REQUIRE(found->second.key == key);
      REQUIRE(!pool_.find(leaf, key));
      held_.erase(found);
    });
  }

  void go() {
    while (!bytes_.empty()) {
      one_operation();
      pool_.audit();
      compare();
    }
  }

 private:
  LeafId some_leaf() { return LeafId(bytes_.below(pool_.leaves())); }
  Fate some_fate() { return bytes_.below(2) == 0 ? Fate::cache : Fate::request; }

  /// A held block, if there is one.
  std::optional<LeafBlock> some_held() {
    if (held_.empty()) return {};
    return std::next(held_.begin(), bytes_.below(static_cast<std::uint32_t>(held_.size())))->first;
  }

  void take(LeafId leaf, BlockId block) {
    REQUIRE(block != null_block);
    REQUIRE(held_.try_emplace({leaf, block}, Held{.references = 1, .key = {}}).second);
  }

  void allocate() {
    const LeafId leaf = some_leaf();
    std::optional<HugeBlockId> hint;
    if (bytes_.below(2) == 1) hint = HugeBlockId(bytes_.below(16));
    std::vector<std::uint64_t> demand(pool_.leaves(), 0);
    demand[leaf.value()] = 1;
    const bool fits = pool_.can_allocate(demand);
    const std::optional<BlockId> block = pool_.allocate(leaf, some_fate(), hint);
    REQUIRE(block.has_value() == fits);
    if (block) take(leaf, *block);
  }

  void allocate_all() {
    std::vector<std::uint64_t> demand(pool_.leaves());
    std::vector<BlockPool::Demand> demands;
    for (std::uint32_t leaf = 0; leaf < pool_.leaves(); ++leaf) {
      demand[leaf] = bytes_.below(8);
      demands.push_back(
          {.leaf = LeafId(leaf), .blocks = demand[leaf], .fate = some_fate(), .hint = {}});
    }
    std::vector<BlockId> out(std::accumulate(demand.begin(), demand.end(), std::size_t{0}),
                             null_block);
    const bool fits = pool_.can_allocate(demand);
    const auto before = held_.size();
    REQUIRE(pool_.allocate_all(demands, out) == fits);
    if (!fits) {
      REQUIRE(held_.size() == before);  // no eviction either
      return;
    }
    auto block = out.begin();
    for (const BlockPool::Demand& wanted : demands)
      for (std::uint64_t i = 0; i < wanted.blocks; ++i) take(wanted.leaf, *block++);
  }

  void free() {
    const std::optional<LeafBlock> chosen = some_held();
    if (!chosen) return;
    const LeafId leaf = chosen->first;
    const BlockId block = chosen->second;
    Held& held = held_.at(*chosen);
    if (held.references == 0) return must_refuse([&] { pool_.free(leaf, block); });
    pool_.free(leaf, block);
    if (--held.references == 0 && !held.key) held_.erase(*chosen);
  }

  void touch() {
    const std::optional<LeafBlock> chosen = some_held();
    if (!chosen) return;
    if (held_.at(*chosen).references > 1000) return;
    pool_.touch(chosen->first, chosen->second);
    ++held_.at(*chosen).references;
  }

  void commit() {
    const std::optional<LeafBlock> chosen = some_held();
    if (!chosen) return;
    const LeafId leaf = chosen->first;
    const BlockId block = chosen->second;
    Held& held = held_.at(*chosen);
    const PageKey key{.high = bytes_.below(4), .low = bytes_.below(64)};
    const auto call = [&] { pool_.commit(leaf, block, key, bytes_.below(256)); };
    if (held.references == 0 || held.key) return must_refuse(call);
    if (pool_.find(leaf, key)) {
      try {
        call();
        REQUIRE(!"a key that the leaf has already was accepted");
      } catch (const InvalidArgument&) {
      }
      return;
    }
    call();
    held.key = key;
  }

  void uncommit() {
    const std::optional<LeafBlock> chosen = some_held();
    if (!chosen || !held_.at(*chosen).key) return;
    pool_.uncommit(chosen->first, chosen->second);
    held_.at(*chosen).key.reset();
    if (held_.at(*chosen).references == 0) held_.erase(*chosen);
  }

  void revalue() {
    const std::optional<LeafBlock> chosen = some_held();
    if (!chosen || !held_.at(*chosen).key) return;
    const Value value = bytes_.below(256);
    pool_.revalue(chosen->first, chosen->second, value);
    REQUIRE(pool_.value(chosen->first, chosen->second) == value);
  }

  void strange_block() {
    const LeafId leaf = some_leaf();
    const BlockId block(bytes_.below(100));
    const auto found = held_.find({leaf, block});
    if (found != held_.end() && found->second.references > 0) return;
    must_refuse([&] { pool_.free(leaf, block); });
    if (found == held_.end()) must_refuse([&] { pool_.touch(leaf, block); });
  }

  void compact() {
    for (const BlockMove& move : pool_.plan_compaction(some_leaf(), bytes_.below(4096))) {
      pool_.move(move.leaf, move.src, move.dst);
      const auto node = held_.extract({move.leaf, move.src});
      REQUIRE(!node.empty());
      REQUIRE(held_.try_emplace({move.leaf, move.dst}, node.mapped()).second);
    }
  }

  void resize() {
    const std::uint64_t wanted = bytes_.below(static_cast<std::uint32_t>(huge_blocks_)) + 1;
    try {
      pool_.resize(wanted);
      REQUIRE(pool_.huge_blocks() == wanted);
    } catch (const PoolExhausted&) {
    }
  }

  void one_operation() {
    switch (bytes_.below(16)) {
      case 0:
      case 1:
      case 2:
      case 3: return allocate();
      case 4: return allocate_all();
      case 5:
      case 6:
      case 7: return free();
      case 8: return touch();
      case 9:
      case 10: return commit();
      case 11: return uncommit();
      case 12: return revalue();
      case 13: return strange_block();
      case 14: return compact();
      case 15: return resize();
    }
  }

  template <class Call>
  void must_refuse(Call call) {
    try {
      call();
      REQUIRE(!"a block that is not live was accepted");
    } catch (const BlockError&) {
    }
  }

  void compare() {
    std::map<std::uint64_t, std::uint64_t> ranges;  // of held blocks in the arena
    std::vector<std::uint64_t> live(pool_.leaves()), cached(pool_.leaves());
    for (const auto& [where, held] : held_) {
      const auto [leaf, block] = where;
      ++(held.references > 0 ? live : cached)[leaf.value()];
      REQUIRE(pool_.references(leaf, block) == held.references);
      REQUIRE(pool_.key(leaf, block) == held.key);
      if (held.key) REQUIRE(pool_.find(leaf, *held.key) == block);
      const ByteRange range = pool_.geometry().byte_range(leaf, block);
      REQUIRE(range.begin >= pool_.geometry().null_bytes());
      REQUIRE(range.end <= pool_.geometry().arena_bytes());
      REQUIRE(ranges.emplace(range.begin, range.end).second);
    }
    std::uint64_t end = 0;
    for (const auto& range : ranges) {
      REQUIRE(range.first >= end);
      end = range.second;
    }
    for (std::uint32_t leaf = 0; leaf < pool_.leaves(); ++leaf) {
      REQUIRE(pool_.live(LeafId(leaf)) == live[leaf]);
      REQUIRE(pool_.cached(LeafId(leaf)) == cached[leaf]);
    }
  }

  fuzz::Bytes& bytes_;
  BlockPool pool_;
  std::uint64_t huge_blocks_;  // at construction: the most that resize may ask for
  std::map<LeafBlock, Held> held_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Bytes bytes({data, size});
  Run(bytes).go();
  return 0;
}
