// The real pool and the slow one do the same hundreds of thousands of random operations; after each
// one they are compared block by block and the real one audited.
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "kvleaf/leaf/errors.h"
#include "kvleaf/pool/block_pool.h"
#include "pool/hand_made.h"
#include "pool/slow_pool.h"
#include "pool/test_access.h"

namespace kvleaf {

namespace {

using slow::u64;

struct Setting {
  std::vector<u64> ratios;
  u64 huge_blocks;
  u64 most = 0;
  std::vector<testing::Limits> limits = {};
  u64 distinct_values = 1000000;
  KeyIndex index = KeyIndex::by_key;
};

struct OwnerFault {};

class LockStep {
 public:
  LockStep(const Setting& setting, std::uint32_t seed)
      : random_(seed),
        setting_(setting),
        most_(setting.most != 0 ? setting.most : setting.huge_blocks),
        real_(testing::geometry_of(setting.huge_blocks, setting.ratios, setting.limits),
              {.index = setting.index, .max_huge_blocks = setting.most}),
        slow_(setting.huge_blocks, most_, slow_leaves(setting)) {
    real_.on_evict([this](LeafId leaf, BlockId block, PageKey key) { told(leaf, block, key); });
  }

  void run(int operations) {
    for (int operation = 0; operation < operations; ++operation) {
      try {
        step();
        compare();
        real_.audit();
      } catch (const std::exception& error) {
        FAIL(fmt::format("operation {} ({}): {}", operation, doing_, error.what()));
      }
    }
  }
  u64 evictions() const { return evictions_; }
  u64 refusals() const { return refusals_; }
  u64 faults() const { return faults_; }
  u64 compactions() const { return compactions_; }

 private:
  static std::vector<slow::Leaf> slow_leaves(const Setting& setting) {
    std::vector<slow::Leaf> leaves;
    for (std::size_t leaf = 0; leaf < setting.ratios.size(); ++leaf) {
      leaves.push_back({.ratio = setting.ratios[leaf]});
      if (leaf >= setting.limits.size()) continue;
      leaves.back().floor = setting.limits[leaf].floor;
      if (setting.limits[leaf].ceiling) leaves.back().ceiling = *setting.limits[leaf].ceiling;
    }
    return leaves;
  }

  u64 below(u64 n) { return std::uniform_int_distribution<u64>(0, n - 1)(random_); }
  bool chance(u64 one_in) { return below(one_in) == 0; }
  int any_leaf() { return static_cast<int>(below(slow_.leaves.size())); }
  /// A block of the leaf that is live or cached; rarely any number at all.
  u64 any_block(int leaf) {
    const u64 last = most_ * slow_.leaves[leaf].ratio;
    if (chance(50)) return below(last + 3);
    for (int attempt = 0; attempt < 20; ++attempt) {
      const u64 block = 1 + below(last);
      if (slow_.own(leaf, block) != nullptr) return block;
    }
    return 1 + below(last);
  }
  /// Blocks of which `wanted` is true, or rarely any; following each other, or not.
  template <class Wanted>
  std::vector<u64> any_blocks(int leaf, Wanted&& wanted) {
    std::vector<u64> blocks;
    const u64 count = 1 + below(std::max<u64>(6, slow_.leaves[leaf].ratio));
    const u64 start = any_block(leaf);
    const bool run = chance(2);
    const bool careless = chance(10);
    for (u64 i = 0; i < count; ++i) {
      const u64 block = run ? start + i : any_block(leaf);
      const slow::Block* b = slow_.own(leaf, block);
      if (careless || (b != nullptr && wanted(*b))) blocks.push_back(block);
    }
    if (blocks.empty()) blocks.push_back(start);
    return blocks;
  }
  slow::Key any_key() { return {below(3), below(100)}; }
  std::optional<u64> any_value() {
    if (chance(3)) return std::nullopt;
    return below(setting_.distinct_values);
  }
  int any_fate() { return static_cast<int>(below(2)); }
  std::optional<u64> any_hint() {
    if (chance(2)) return std::nullopt;
    return below(most_ + 1);
  }

  static BlockId id(u64 block) { return BlockId(static_cast<std::uint32_t>(block)); }
  static LeafId leaf_id(int leaf) { return LeafId(static_cast<std::uint32_t>(leaf)); }
  static PageKey key(slow::Key key) { return {key.first, key.second}; }
  static std::vector<BlockId> ids(const std::vector<u64>& blocks) {
    std::vector<BlockId> out;
    for (const u64 block : blocks) out.push_back(id(block));
    return out;
  }
  static std::optional<HugeBlockId> hint_id(std::optional<u64> hint) {
    if (!hint) return std::nullopt;
    return HugeBlockId(static_cast<std::uint32_t>(*hint));
  }

  /// Whether the real pool refuses the call as a wrong block or argument.
  template <class Call>
  bool refuses(Call&& call) {
    try {
      call();
      return false;
    } catch (const BlockError&) {
    } catch (const InvalidArgument&) {
    }
    ++refusals_;
    return true;
  }

  // ---- the owner -------------------------------------------------------------------------------
  void told(LeafId leaf, BlockId block, PageKey key) {
    ++evictions_;
    events_.push_back({slow::Event::evicted,
                       static_cast<int>(leaf.value()),
                       block.value(),
                       {key.high, key.low},
                       0});
    if (fault_in_ != 0 && --fault_in_ == 0) throw OwnerFault();
    if (real_.committed(leaf, block)) throw slow::Wrong("what is evicted is no longer findable");
    while (chance(3)) {
      // Pages of the same slot go with it, or become unreachable.
      const int other = any_leaf();
      const u64 other_block = 1 + below(most_ * slow_.leaves[other].ratio);
      const bool committed = real_.committed(leaf_id(other), id(other_block));
      if (chance(2)) {
        const bool refused = refuses([&] { real_.uncommit(leaf_id(other), id(other_block)); });
        slow::require(refused == !committed, "uncommit is refused for what is not committed");
        if (committed) events_.push_back({slow::Event::uncommitted, other, other_block, {}, 0});
      } else if (committed) {
        const u64 value = below(setting_.distinct_values);
        real_.revalue(leaf_id(other), id(other_block), value);
        events_.push_back({slow::Event::revalued, other, other_block, {}, value});
      }
    }
    if (chance(10)) {
      slow::require(
          refuses([&] { real_.free(leaf, block); }) && refuses([&] { (void)real_.allocate(leaf); }),
          "little may be done while told");
      real_.audit();
    }
  }

  // ---- operations ------------------------------------------------------------------------------
  /// The pool fills, and is emptied again, over and over: most is decided where it is nearly full.
  void step() {
    if (chance(100)) filling_ = !filling_;
    if (chance(4)) return filling_ ? allocate_all() : free_many();
    if (chance(6)) return commit_many();
    switch (below(20)) {
      case 0:
      case 1: return allocate_one();
      case 2: return allocate_many();
      case 3:
      case 4: return allocate_all();
      case 5:
      case 6:
      case 7: return free_one();
      case 8: return free_many();
      case 9:
      case 10: return touch_many();
      case 11:
      case 12:
      case 13: return commit_one();
      case 14: return commit_many();
      case 15: return revalue();
      case 16: return uncommit_or_rekey();
      case 17: return ask();
      case 18: return compact();
      default: return resize_or_promise();
    }
  }

  /// Runs an allocation that may be interrupted by the owner; true if it was.
  template <class Call>
  bool interrupted(Call&& call) {
    events_.clear();
    fault_in_ = chance(5) ? 1 + below(4) : 0;
    try {
      call();
      fault_in_ = 0;
      return false;
    } catch (const OwnerFault&) {
    }
    ++faults_;
    slow_.undone(events_);
    for (std::uint32_t h = 0; h < slow_.huge.size(); ++h) {
      if (slow_.huge[h].owner >= 0 && slow_.huge[h].idle()) {
        slow_.huge[h].fate = BlockPoolTestAccess::fate(real_, h);
      }
    }
    return true;
  }
  void check_drawn(std::vector<u64> demand, int leaf, int fate, std::optional<u64> hint,
                   std::span<const BlockId> drawn) {
    for (const BlockId block : drawn) {
      slow_.draw(demand, leaf, fate, hint, block.value(), events_);
    }
    slow::require(events_.empty(), "nothing is evicted without need");
  }

  void allocate_one() {
    const int leaf = any_leaf();
    const int fate = any_fate();
    const auto hint = any_hint();
    doing_ = fmt::format("allocate leaf {}", leaf);
    std::vector<u64> demand(slow_.leaves.size());
    demand[leaf] = 1;
    std::optional<BlockId> drawn;
    const bool fits = slow_.fits(demand);
    if (interrupted([&] {
          drawn = real_.allocate(leaf_id(leaf), static_cast<Fate>(fate), hint_id(hint));
        })) {
      return;
    }
    slow::require(drawn.has_value() == fits, "allocate is a transaction of one");
    if (drawn) check_drawn(demand, leaf, fate, hint, {&*drawn, 1});
  }
  void allocate_many() {
    const int leaf = any_leaf();
    const int fate = any_fate();
    const auto hint = any_hint();
    std::vector<u64> demand(slow_.leaves.size());
    demand[leaf] = below(2 * slow_.leaves[leaf].ratio + 2);
    doing_ = fmt::format("allocate {} of leaf {}", demand[leaf], leaf);
    std::vector<BlockId> drawn(demand[leaf], null_block);
    bool accepted = false;
    const bool fits = slow_.fits(demand);
    if (interrupted([&] {
          accepted =
              real_.allocate_many(leaf_id(leaf), drawn, static_cast<Fate>(fate), hint_id(hint));
        })) {
      return;
    }
    slow::require(accepted == fits, "allocate_many follows the joint rule");
    if (accepted) check_drawn(demand, leaf, fate, hint, drawn);
  }
  void allocate_all() {
    doing_ = "allocate_all";
    std::vector<BlockPool::Demand> parts;
    std::vector<u64> demand(slow_.leaves.size());
    u64 total = 0;
    const u64 count = below(slow_.leaves.size() + 2);
    for (u64 part = 0; part < count; ++part) {
      const int leaf = any_leaf();
      const u64 blocks = below(slow_.leaves[leaf].ratio + 2);
      parts.push_back({.leaf = leaf_id(leaf),
                       .blocks = blocks,
                       .fate = static_cast<Fate>(any_fate()),
                       .hint = hint_id(any_hint())});
      demand[leaf] += blocks;
      total += blocks;
    }
    std::vector<BlockId> drawn(total, null_block);
    bool accepted = false;
    const bool fits = slow_.fits(demand);
    slow::require(real_.can_allocate(demand) == fits, "can_allocate is the joint rule");
    if (interrupted([&] { accepted = real_.allocate_all(parts, drawn); })) return;
    slow::require(accepted == fits, "allocate_all accepts what can_allocate does");
    if (!accepted) return;
    std::size_t next = 0;
    for (const BlockPool::Demand& part : parts) {
      const auto hint = part.hint ? std::optional<u64>(part.hint->value()) : std::optional<u64>();
      for (u64 block = 0; block < part.blocks; ++block) {
        slow_.draw(demand, static_cast<int>(part.leaf.value()), static_cast<int>(part.fate), hint,
                   drawn[next++].value(), events_);
      }
    }
    slow::require(events_.empty(), "nothing is evicted without need");
  }

  void free_one() {
    const int leaf = any_leaf();
    const u64 block = any_block(leaf);
    doing_ = fmt::format("free leaf {} block {}", leaf, block);
    const bool refused = refuses([&] { real_.free(leaf_id(leaf), id(block)); });
    slow::require(refused != slow_.free(leaf, block), "free takes a live block of the leaf");
  }
  void free_many() {
    const int leaf = any_leaf();
    const std::vector<u64> blocks = any_blocks(leaf, [](const slow::Block& b) { return b.live(); });
    doing_ = fmt::format("free {} of leaf {}", blocks.size(), leaf);
    const slow::Pool before = slow_;
    bool legal = true;
    for (const u64 block : blocks) legal = legal && slow_.free(leaf, block);
    const bool refused = refuses([&] { real_.free_many(leaf_id(leaf), ids(blocks)); });
    slow::require(refused != legal, "free_many takes live blocks of the leaf");
    if (!legal) slow_ = before;
  }
  void touch_many() {
    const int leaf = any_leaf();
    const std::vector<u64> blocks = any_blocks(leaf, [](const slow::Block&) { return true; });
    const auto value = any_value();
    doing_ = fmt::format("touch {} of leaf {}", blocks.size(), leaf);
    const slow::Pool before = slow_;
    bool legal = true;
    for (const u64 block : blocks) legal = legal && slow_.touch(leaf, block);
    const bool refused = refuses([&] {
      if (blocks.size() == 1) {
        real_.touch(leaf_id(leaf), id(blocks[0]), value);
      } else {
        real_.touch_many(leaf_id(leaf), ids(blocks), value);
      }
    });
    slow::require(refused != legal, "touch takes live and cached blocks of the leaf");
    if (!legal) {
      slow_ = before;
    } else {
      for (const u64 block : blocks) slow_.touch_value(leaf, block, value);
    }
  }
  void commit_one() {
    const int leaf = any_leaf();
    const u64 block = any_block(leaf);
    const slow::Key as = any_key();
    const auto value = any_value();
    doing_ = fmt::format("commit leaf {} block {}", leaf, block);
    if (setting_.index == KeyIndex::none && slow_.find(leaf, as)) return;  // the owner's business
    const bool refused = refuses([&] { real_.commit(leaf_id(leaf), id(block), key(as), value); });
    slow::require(refused != slow_.commit(leaf, block, as, value),
                  "commit takes a live, uncommitted block and a new key");
  }
  void commit_many() {
    const int leaf = any_leaf();
    const std::vector<u64> blocks =
        any_blocks(leaf, [](const slow::Block& b) { return b.live() && !b.committed; });
    doing_ = fmt::format("commit {} of leaf {}", blocks.size(), leaf);
    std::vector<PageKey> keys;
    std::vector<Value> values;
    const bool timed = chance(3);
    const slow::Pool before = slow_;
    bool legal = true;
    for (const u64 block : blocks) {
      const slow::Key as = any_key();
      keys.push_back(key(as));
      const u64 value = below(setting_.distinct_values);
      if (!timed) values.push_back(value);
      if (setting_.index == KeyIndex::none && slow_.find(leaf, as)) {
        slow_ = before;
        return;
      }
      legal = legal && slow_.commit(leaf, block, as, timed ? std::nullopt : std::optional(value));
    }
    const bool refused =
        refuses([&] { real_.commit_many(leaf_id(leaf), ids(blocks), keys, values); });
    slow::require(refused != legal, "commit_many takes live, uncommitted blocks and new keys");
    if (!legal) slow_ = before;
  }
  void revalue() {
    const int leaf = any_leaf();
    const u64 block = any_block(leaf);
    const u64 value = chance(10) ? ~u64{0} - below(3) : below(setting_.distinct_values);
    doing_ = fmt::format("revalue leaf {} block {} to {}", leaf, block, value);
    const bool refused = refuses([&] { real_.revalue(leaf_id(leaf), id(block), value); });
    slow::Block* b = slow_.committed(leaf, block);
    slow::require(refused == (b == nullptr), "revalue takes a committed block");
    if (b == nullptr) return;
    b->value = value;
    b->timed = false;
  }
  void uncommit_or_rekey() {
    const int leaf = any_leaf();
    const u64 block = any_block(leaf);
    if (chance(2)) {
      doing_ = fmt::format("uncommit leaf {} block {}", leaf, block);
      const bool refused = refuses([&] { real_.uncommit(leaf_id(leaf), id(block)); });
      slow::require(refused != slow_.uncommit(leaf, block), "uncommit takes a committed block");
      return;
    }
    const slow::Key as = any_key();
    doing_ = fmt::format("rekey leaf {} block {}", leaf, block);
    const auto found = slow_.find(leaf, as);
    if (setting_.index == KeyIndex::none && found) return;
    const bool refused = refuses([&] { real_.rekey(leaf_id(leaf), id(block), key(as)); });
    slow::Block* b = slow_.committed(leaf, block);
    const bool legal = b != nullptr && (!found || *found == block);
    slow::require(refused != legal, "rekey takes a committed block and a new key");
    if (legal) b->key = as;
  }

  void ask() {
    doing_ = "ask";
    std::vector<u64> demand(slow_.leaves.size());
    for (std::size_t leaf = 0; leaf < demand.size(); ++leaf) {
      if (chance(2)) demand[leaf] = below(slow_.leaves[leaf].ratio * most_ + 2);
    }
    const BlockPool::Verdict verdict = real_.judge(demand);
    slow::require(verdict.fits == slow_.fits(demand), "judge is the joint rule");
    slow::require(verdict.huge_needed == slow_.needed(demand), "judge says what is needed");
    slow::require(verdict.huge_left == slow_.left(), "judge says what is left");
  }

  void compact() {
    const int leaf = any_leaf();
    doing_ = fmt::format("compact leaf {}", leaf);
    const int own = slow_.leaves[leaf].page_class;
    const u64 bytes = real_.geometry().leaf(leaf_id(leaf)).bytes_per_page;
    const u64 most_moves = below(slow_.leaves[leaf].ratio + 2);
    // The fewest moves that would empty a claimed huge block of the class into its others.
    std::optional<u64> fewest;
    for (const slow::Huge& h : slow_.huge) {
      if (h.owner != own || !h.claimed()) continue;
      u64 elsewhere = 0;
      for (const slow::Huge& other : slow_.huge) {
        if (&other != &h && other.owner == own && other.claimed()) elsewhere += other.clean();
      }
      const u64 moves = h.blocks.size() - h.clean();
      if (moves <= elsewhere && moves <= most_moves && (!fewest || moves < *fewest)) fewest = moves;
    }
    const std::vector<BlockMove> moves =
        real_.plan_compaction(leaf_id(leaf), most_moves * bytes + below(bytes));
    slow::require(moves.size() == fewest.value_or(0), "a compaction is the one with fewest moves");
    if (moves.empty()) {
      const u64 src = any_block(leaf);
      const u64 dst = any_block(leaf);
      if (src == 0 || dst == 0 || dst > most_ * slow_.leaves[leaf].ratio) return;
      const bool refused = refuses([&] { real_.move(leaf_id(leaf), id(src), id(dst)); });
      slow::require(refused != slow_.move(leaf, src, dst), "move takes a clean target");
      return;
    }
    ++compactions_;
    const u64 empty = slow_.count(&slow::Huge::empty);
    for (const BlockMove& move : moves) {
      slow::require(
          slow_.move(static_cast<int>(move.leaf.value()), move.src.value(), move.dst.value()),
          "a planned move is possible");
      real_.move(move.leaf, move.src, move.dst);
    }
    slow::require(slow_.count(&slow::Huge::empty) == empty + 1,
                  "a compaction empties a huge block");
  }

  void resize_or_promise() {
    if (chance(2)) {
      const int leaf = any_leaf();
      doing_ = fmt::format("promise leaf {}", leaf);
      slow_.leaves[leaf].promised = chance(2) ? 0 : below(slow_.leaves[leaf].ratio + 1);
      real_.set_promised(leaf_id(leaf), slow_.leaves[leaf].promised);
      return;
    }
    if (setting_.most == 0) return;
    const u64 wanted = below(most_ + 1);
    const u64 now = real_.huge_blocks();
    doing_ = fmt::format("resize from {} to {}", now, wanted);
    const u64 needed = slow_.needed(std::vector<u64>(slow_.leaves.size()));
    const u64 spare = slow_.left() > needed ? slow_.left() - needed : 0;
    const bool legal = wanted >= now || now - wanted <= spare;
    std::vector<ByteRange> ranges;
    events_.clear();
    fault_in_ = chance(8) ? 1 + below(4) : 0;
    bool refused = false;
    try {
      ranges = real_.resize(wanted);
    } catch (const PoolExhausted&) {
      refused = true;
    } catch (const OwnerFault&) {
      ++faults_;
      return slow_.undone(events_);
    }
    fault_in_ = 0;
    slow::require(refused != legal, "resize spends no more than the slack");
    if (refused) return;
    // Which ones left: idle ones by worth, after all empty ones are gone.
    const u64 huge_bytes = real_.geometry().huge_bytes();
    std::vector<u64> concerned;
    for (const ByteRange& range : ranges) {
      for (u64 byte = range.begin; byte < range.end; byte += huge_bytes) {
        concerned.push_back((byte - real_.geometry().null_bytes()) / huge_bytes);
      }
    }
    slow::require(concerned.size() == (wanted > now ? wanted - now : now - wanted),
                  "resize names the bytes of each huge block");
    if (wanted > now) {
      for (const u64 h : concerned) {
        slow::require(!slow_.huge[h].in_service, "what comes back was out of service");
        slow_.huge[h].in_service = true;
      }
      return;
    }
    while (!events_.empty()) {
      slow::Huge& victim =
          slow_.huge[(events_.front().block - 1) / slow_.leaves[events_.front().leaf].ratio];
      std::optional<std::pair<u64, u64>> least;
      for (const slow::Huge& h : slow_.huge) {
        if (h.owner >= 0 && h.idle() && (!least || slow::Pool::worth(h) < *least)) {
          least = slow::Pool::worth(h);
        }
      }
      slow::require(victim.idle() && slow::Pool::worth(victim) == *least,
                    "shrinking drops the least valuable idle huge block");
      while (victim.owner >= 0) {
        slow_.drop(slow_.take_evicted(events_));
        slow_.follow(events_);
      }
    }
    for (const u64 h : concerned) {
      slow::require(slow_.huge[h].empty(), "what leaves service is empty");
      slow_.huge[h].in_service = false;
    }
  }

  // ---- comparison ------------------------------------------------------------------------------
  void compare() {
    const PoolStats stats = real_.stats();
    slow::require(stats.empty == slow_.count(&slow::Huge::empty), "empty huge blocks");
    slow::require(stats.claimed == slow_.count(&slow::Huge::claimed), "claimed huge blocks");
    slow::require(stats.idle == slow_.count(&slow::Huge::idle), "idle huge blocks");
    for (int leaf = 0; leaf < static_cast<int>(slow_.leaves.size()); ++leaf) {
      const LeafStats& figures = stats.leaves[static_cast<std::size_t>(leaf)];
      slow::require(figures.live == slow_.live(leaf), "live blocks");
      slow::require(figures.cached == slow_.cached(leaf), "cached blocks");
      slow::require(figures.clean == slow_.clean_of_class(slow_.leaves[leaf].page_class),
                    "clean blocks");
      for (u64 block = 1; block <= most_ * slow_.leaves[leaf].ratio; ++block) {
        const slow::Block* b = slow_.own(leaf, block);
        slow::require(
            real_.references(leaf_id(leaf), id(block)) == (b != nullptr ? b->references : 0),
            "references");
        const auto found = real_.key(leaf_id(leaf), id(block));
        const bool committed = b != nullptr && b->committed;
        slow::require(found.has_value() == committed, "committed");
        if (!committed) continue;
        slow::require(*found == key(b->key), "key");
        slow::require(real_.value(leaf_id(leaf), id(block)) == b->value, "value");
        if (setting_.index == KeyIndex::by_key) {
          slow::require(real_.find(leaf_id(leaf), *found) == id(block), "found by key");
        }
      }
    }
    if (setting_.index == KeyIndex::none) return;
    const int leaf = any_leaf();
    const slow::Key any = any_key();
    const auto found = real_.find(leaf_id(leaf), key(any));
    const auto expected = slow_.find(leaf, any);
    slow::require(found.has_value() == expected.has_value(), "found or not");
  }

  std::mt19937 random_;
  Setting setting_;
  u64 most_;
  BlockPool real_;
  slow::Pool slow_;
  std::deque<slow::Event> events_;
  std::string doing_;
  bool filling_ = true;
  u64 fault_in_ = 0;
  u64 evictions_ = 0;
  u64 refusals_ = 0;
  u64 faults_ = 0;
  u64 compactions_ = 0;
};

}  // namespace

TEST_CASE("in lock step with the slow pool, over random operations on pools of every shape") {
  const Setting settings[] = {
      {.ratios = {1}, .huge_blocks = 6},
      {.ratios = {1, 1}, .huge_blocks = 7, .distinct_values = 4},
      {.ratios = {2, 1}, .huge_blocks = 5, .most = 7},
      {.ratios = {2, 3}, .huge_blocks = 5, .distinct_values = 6},
      {.ratios = {3, 3, 1}, .huge_blocks = 4, .index = KeyIndex::none},
      {.ratios = {4, 2, 1}, .huge_blocks = 6, .most = 8},
      {.ratios = {4, 4}, .huge_blocks = 3},
      {.ratios = {8, 5, 5}, .huge_blocks = 4, .distinct_values = 10},
      {.ratios = {9, 1}, .huge_blocks = 5},
      {.ratios = {12, 7, 2},
       .huge_blocks = 5,
       .most = 5,
       .limits = {{.floor = 3}, {.ceiling = 9}, {}}},
      {.ratios = {30, 1}, .huge_blocks = 3, .limits = {{}, {.floor = 1, .ceiling = 2}}},
      {.ratios = {70, 9}, .huge_blocks = 2},
  };
  // KVLEAF_LOCK_STEP_ROUNDS makes a long hunt of it: 5 are 270,000 operations.
  const char* asked = std::getenv("KVLEAF_LOCK_STEP_ROUNDS");
  const int rounds = asked != nullptr ? std::atoi(asked) : 5;
  REQUIRE(rounds > 0);
  std::uint32_t seed = 1;
  u64 compactions = 0, all_faults = 0;
  for (const Setting& setting : settings) {
    CAPTURE(fmt::format("ratios {}", fmt::join(setting.ratios, ", ")));
    u64 evictions = 0, refusals = 0, faults = 0;
    for (int round = 0; round < rounds; ++round) {
      CAPTURE(seed);
      LockStep run(setting, seed++);
      run.run(setting.ratios[0] >= 30 ? 3000 : 5000);
      evictions += run.evictions();
      refusals += run.refusals();
      faults += run.faults();
      compactions += run.compactions();
    }
    // The generator reaches what it is there to reach.
    CHECK(evictions > 100);
    CHECK(refusals > 100);
    all_faults += faults;
  }
  CHECK(all_faults > 200);
  CHECK(compactions > 100);
}

}  // namespace kvleaf
