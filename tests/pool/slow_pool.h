// SlowPool: what the design says about a pool, written down as plainly as possible and recounted
// from scratch at every question. It shares no code with the real pool and keeps no order, list or
// sum.
//
// It does not choose blocks: it is told which block the real pool gave and which blocks its owner
// was told of, and says whether the rules allow that. Where the design leaves placement open (which
// of two equally full huge blocks, which of two equal values), every such choice is allowed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace slow {

using u64 = std::uint64_t;
using Key = std::pair<u64, u64>;

struct Wrong : std::logic_error {
  using std::logic_error::logic_error;
};
inline void require(bool condition, const std::string& rule) {
  if (!condition) throw Wrong(rule);
}

/// What happened while the owner was told of evictions, in order.
struct Event {
  enum Kind { evicted, uncommitted, revalued } kind;
  int leaf;
  u64 block;
  Key key;
  u64 value;
};

/// A value's place in the order: the two greatest share one.
inline u64 place(u64 value) { return std::min(value, std::numeric_limits<u64>::max() - 1); }

struct Leaf {
  u64 ratio;
  u64 floor = 0;
  u64 ceiling = std::numeric_limits<u64>::max();
  u64 promised = 0;
  int page_class = 0;
};

struct Block {
  u64 references = 0;
  bool committed = false;
  bool timed = false;
  int leaf = -1;
  Key key;
  u64 value = 0;
  bool live() const { return references > 0; }
  bool cached() const { return references == 0 && committed; }
  bool clean() const { return references == 0 && !committed; }
};

struct Huge {
  bool in_service = true;
  int owner = -1;  // page class
  int fate = 0;
  std::vector<Block> blocks;
  u64 count(bool (Block::*is)() const) const {
    return static_cast<u64>(
        std::count_if(blocks.begin(), blocks.end(), [&](const Block& b) { return (b.*is)(); }));
  }
  bool empty() const { return in_service && owner < 0; }
  bool claimed() const { return owner >= 0 && count(&Block::live) > 0; }
  bool idle() const { return owner >= 0 && count(&Block::live) == 0; }
  u64 clean() const { return owner < 0 ? 0 : count(&Block::clean); }
};

class Pool {
 public:
  Pool(u64 in_service, u64 most, std::vector<Leaf> given) : leaves(std::move(given)), huge(most) {
    for (u64 h = in_service; h < most; ++h) huge[h].in_service = false;
    std::map<u64, int> classes;
    for (Leaf& leaf : leaves) {
      leaf.page_class = classes.emplace(leaf.ratio, static_cast<int>(classes.size())).first->second;
    }
    for (const Leaf& leaf : leaves) ratio_of[leaf.page_class] = leaf.ratio;
  }

  // ---- questions -------------------------------------------------------------------------------
  u64 count(bool (Huge::*is)() const) const {
    return static_cast<u64>(
        std::count_if(huge.begin(), huge.end(), [&](const Huge& h) { return (h.*is)(); }));
  }
  u64 live(int leaf) const { return count_blocks(leaf, &Block::live); }
  u64 cached(int leaf) const { return count_blocks(leaf, &Block::cached); }
  u64 clean_of_class(int page_class) const {
    u64 sum = 0;
    for (const Huge& h : huge) sum += h.owner == page_class ? h.clean() : 0;
    return sum;
  }
  std::optional<u64> find(int leaf, Key key) const {
    for (u64 h = 0; h < huge.size(); ++h) {
      for (u64 j = 0; j < huge[h].blocks.size(); ++j) {
        const Block& b = huge[h].blocks[j];
        if (b.committed && b.leaf == leaf && b.key == key) return h * leaves[leaf].ratio + j + 1;
      }
    }
    return std::nullopt;
  }
  const Block* at(int leaf, u64 block) const {
    const u64 ratio = leaves[leaf].ratio;
    const Huge& h = huge[(block - 1) / ratio];
    return h.owner == leaves[leaf].page_class ? &h.blocks[(block - 1) % ratio] : nullptr;
  }
  Block* own(int leaf, u64 block) {  // live or cached, and the leaf's
    if (block == 0 || block > huge.size() * leaves[leaf].ratio) return nullptr;
    auto* b = const_cast<Block*>(at(leaf, block));
    return b != nullptr && !b->clean() && b->leaf == leaf ? b : nullptr;
  }

  /// Demands are small here, so plain sums do.
  u64 need(int page_class, const std::vector<u64>& demand) const {
    u64 wanted = 0;
    for (u64 i = 0; i < leaves.size(); ++i) {
      const Leaf& leaf = leaves[i];
      if (leaf.page_class != page_class) continue;
      const u64 held = live(static_cast<int>(i));
      const u64 for_floor = leaf.floor > held ? leaf.floor - held : 0;
      wanted += std::max(demand[i], for_floor) + leaf.promised;
    }
    u64 free = 0;
    for (const Huge& h : huge) {
      if (h.owner == page_class && h.claimed()) free += h.clean() + h.count(&Block::cached);
    }
    const u64 ratio = ratio_of.at(page_class);
    return wanted > free ? (wanted - free + ratio - 1) / ratio : 0;
  }
  u64 needed(const std::vector<u64>& demand) const {
    u64 sum = 0;
    for (const auto& [page_class, ratio] : ratio_of) sum += need(page_class, demand);
    return sum;
  }
  u64 left() const { return count(&Huge::empty) + count(&Huge::idle); }
  bool fits(const std::vector<u64>& demand) const {
    for (u64 i = 0; i < leaves.size(); ++i) {
      if (demand[i] > 0 && live(static_cast<int>(i)) + demand[i] > leaves[i].ceiling) return false;
    }
    return needed(demand) <= left();
  }

  // ---- drawing ---------------------------------------------------------------------------------
  /// The real pool drew `block` as the next of a transaction of which `demand` is still to be
  /// drawn, this block included. Consumes the events that belong to it.
  void draw(std::vector<u64>& demand, int leaf, int fate, std::optional<u64> hint, u64 block,
            std::deque<Event>& events) {
    const int own_class = leaves[leaf].page_class;
    const u64 ratio = leaves[leaf].ratio;
    require(block >= 1 && block <= ratio * huge.size(), "a block's id is 1 … huge blocks · ratio");
    require(needed(demand) <= left(), "what was accepted can still be served");
    const bool may_spend = need(own_class, demand) > 0 || left() > needed(demand);
    const u64 from = (block - 1) / ratio;
    Huge& h = huge[from];

    const auto fullest =
        [&](auto&& eligible) {  // clean blocks of the fullest eligible one, 0 if none
          u64 least = 0;
          for (const Huge& other : huge) {
            if (other.owner != own_class || other.clean() == 0 || !eligible(other)) continue;
            if (least == 0 || other.clean() < least) least = other.clean();
          }
          return least;
        };
    const auto same_fate = [&](const Huge& o) { return o.claimed() && o.fate == fate; };
    const auto other_fate = [&](const Huge& o) { return o.claimed() && o.fate != fate; };
    const auto idle = [&](const Huge& o) { return o.idle(); };
    const auto is_fullest = [&](auto&& eligible, const std::string& rule) {
      require(h.owner == own_class && eligible(h) && h.clean() == fullest(eligible), rule);
    };

    const Huge* hinted = hint && *hint < huge.size() ? &huge[*hint] : nullptr;
    bool evicts = false;
    if (hinted && hinted->owner == own_class && same_fate(*hinted) && hinted->clean() > 0) {
      require(from == *hint, "clean in the hinted huge block first");
    } else if (fullest(same_fate) > 0) {
      is_fullest(same_fate, "then clean in the fullest claimed one of its class and fate");
    } else if (count(&Huge::empty) > 0 && may_spend) {
      require(h.empty(), "then an empty huge block");
      h.owner = own_class;
      h.blocks.assign(ratio, Block());
    } else if (fate == 1 && least_of(own_class, same_fate)) {
      evicts = true;  // a draw that dies with its request fills up what such draws have claimed
    } else if (fullest(idle) > 0 && may_spend) {
      is_fullest(idle, "then clean in an own idle one");
    } else if (fullest(other_fate) > 0) {
      is_fullest(other_fate, "then clean in one of another fate");
    } else {
      evicts = true;
    }
    if (evicts) {
      evict(own_class, fate, may_spend, block, events);
    } else {
      require(h.blocks[(block - 1) % ratio].clean(), "a block that is drawn is clean");
    }
    if (!h.claimed()) h.fate = fate;
    Block& b = h.blocks[(block - 1) % ratio];
    b = Block();
    b.references = 1;
    b.leaf = leaf;
    // What the owner did while told of a block of this very huge block comes after it was taken.
    follow(events);
    --demand[leaf];
  }

  /// The owner threw while told of the last of these events, and the transaction was undone.
  void undone(std::deque<Event>& events) {
    while (!events.empty()) {
      drop(take_evicted(events));
      follow(events);
    }
  }

  // ---- references and commits ------------------------------------------------------------------
  bool free(int leaf, u64 block) {
    Block* b = own(leaf, block);
    if (b == nullptr || !b->live()) return false;
    --b->references;
    tidy();
    return true;
  }
  bool touch(int leaf, u64 block) {
    Block* b = own(leaf, block);
    if (b == nullptr) return false;
    ++b->references;
    return true;
  }
  void touch_value(int leaf, u64 block, std::optional<u64> value) {
    Block* b = own(leaf, block);
    if (!b->committed) return;
    if (value) {
      b->value = *value;
      b->timed = false;
    } else if (b->timed) {
      b->value = ++clock;
    }
  }
  bool commit(int leaf, u64 block, Key key, std::optional<u64> value) {
    Block* b = own(leaf, block);
    if (b == nullptr || !b->live() || b->committed || find(leaf, key)) return false;
    b->committed = true;
    b->timed = !value;
    b->key = key;
    b->value = value ? *value : ++clock;
    return true;
  }
  Block* committed(int leaf, u64 block) {
    Block* b = own(leaf, block);
    return b != nullptr && b->committed ? b : nullptr;
  }
  bool uncommit(int leaf, u64 block) {
    Block* b = committed(leaf, block);
    if (b == nullptr) return false;
    b->committed = false;
    tidy();
    return true;
  }
  bool move(int leaf, u64 src, u64 dst) {
    Block* from = own(leaf, src);
    const Block* to = at(leaf, dst);
    const bool claimed = huge[(dst - 1) / leaves[leaf].ratio].claimed();
    if (from == nullptr || to == nullptr || !to->clean() || !claimed) return false;
    *const_cast<Block*>(to) = *from;
    *from = Block();
    tidy();
    return true;
  }

  std::vector<Leaf> leaves;
  std::vector<Huge> huge;
  std::map<int, u64> ratio_of;  // by page class
  u64 clock = 0;

  /// A huge block with neither live nor cached blocks is owned by nobody.
  void tidy() {
    for (Huge& h : huge) {
      if (h.owner >= 0 && h.clean() == h.blocks.size()) {
        h.owner = -1;
        h.blocks.clear();
      }
    }
  }
  /// Worth of an idle huge block: its most valuable block, then how many there are.
  static std::pair<u64, u64> worth(const Huge& h) {
    u64 best = 0;
    for (const Block& b : h.blocks) {
      if (b.cached()) best = std::max(best, place(b.value));
    }
    return {best, h.count(&Block::cached)};
  }
  Event take_evicted(std::deque<Event>& events) {
    require(!events.empty(), "the owner is told of every eviction");
    const Event event = events.front();
    events.pop_front();
    require(event.kind == Event::evicted, "the owner acts only while it is told of an eviction");
    const Block* b = own(event.leaf, event.block);
    require(b != nullptr && b->cached() && b->key == event.key,
            "what is evicted was cached, under the key that is told");
    return event;
  }
  void drop(const Event& event) {
    own(event.leaf, event.block)->committed = false;
    tidy();
  }
  /// What the owner did while it was told of an eviction.
  void follow(std::deque<Event>& events) {
    while (!events.empty() && events.front().kind != Event::evicted) {
      const Event event = events.front();
      events.pop_front();
      if (event.kind == Event::uncommitted) {
        require(uncommit(event.leaf, event.block), "the owner uncommits what is committed");
      } else {
        Block* b = committed(event.leaf, event.block);
        require(b != nullptr, "the owner revalues what is committed");
        b->value = event.value;
        b->timed = false;
      }
    }
  }

 private:
  u64 count_blocks(int leaf, bool (Block::*is)() const) const {
    u64 sum = 0;
    for (const Huge& h : huge) {
      for (const Block& b : h.blocks) sum += (b.*is)() && b.leaf == leaf;
    }
    return sum;
  }

  static std::optional<u64> least_in(const Huge& h) {
    std::optional<u64> least;
    for (const Block& b : h.blocks) {
      if (b.cached() && (!least || place(b.value) < *least)) least = place(b.value);
    }
    return least;
  }
  /// The least valuable cached block of the class's huge blocks that are eligible.
  std::optional<u64> least_of(int own_class,
                              const std::function<bool(const Huge&)>& eligible) const {
    std::optional<u64> least;
    for (const Huge& h : huge) {
      if (h.owner != own_class || !eligible(h)) continue;
      const auto here = least_in(h);
      if (here && (!least || *here < *least)) least = here;
    }
    return least;
  }

  void evict(int own_class, int fate, bool may_spend, u64 block, std::deque<Event>& events) {
    const int request = 1;  // Fate::request
    const auto own_fate = [&](const Huge& h) { return h.claimed() && h.fate == fate; };
    const auto other_fate = [&](const Huge& h) { return h.claimed() && h.fate != fate; };
    std::function<bool(const Huge&)> eligible = own_fate;
    std::optional<u64> own_least = least_of(own_class, own_fate);
    std::optional<std::pair<u64, u64>> other_least;
    if (may_spend && !(fate == request && own_least)) {
      std::optional<std::pair<u64, u64>> own_idle;  // the least worth
      for (const Huge& h : huge) {
        if (h.owner < 0 || !h.idle()) continue;
        auto& least = h.owner == own_class ? own_idle : other_least;
        if (!least || worth(h) < *least) least = worth(h);
      }
      if (fate != request) {
        eligible = [&](const Huge& h) { return own_fate(h) || h.idle(); };
        own_least = least_of(own_class, eligible);
      } else if (own_idle && (!other_least || *own_idle <= *other_least)) {
        other_least.reset();
        const Event& told = events.at(0);
        const Huge& chosen = huge[(told.block - 1) / leaves[told.leaf].ratio];
        require(chosen.owner == own_class && chosen.idle() && worth(chosen) == *own_idle,
                "the idle huge block of least worth is claimed");
        eligible = [&chosen](const Huge& h) { return &h == &chosen; };
        own_least = least_in(chosen);
      }
    }
    if (!own_least && !other_least) {
      eligible = other_fate;
      own_least = least_of(own_class, other_fate);
    }
    require(own_least || other_least, "an accepted draw finds something to evict");
    require(!events.empty(), "the owner is told of every eviction");
    const Event told = events.front();
    Huge& victim = huge[(told.block - 1) / leaves[told.leaf].ratio];
    if (!other_least || (own_least && *own_least <= other_least->first)) {
      take_evicted(events);
      require(victim.owner == own_class && place(own(told.leaf, told.block)->value) == *own_least &&
                  eligible(victim),
              "the class's own least valuable cached block is evicted");
      require(told.block == block, "and it is the block that is drawn");
      own(told.leaf, told.block)->committed = false;  // not tidied: it is drawn at once
      return;
    }
    require(victim.owner != own_class && victim.idle() && worth(victim) == *other_least,
            "the least valuable idle huge block of another class is taken");
    const int loser = victim.owner;
    while (victim.owner == loser) {
      const Event event = take_evicted(events);
      require(&huge[(event.block - 1) / leaves[event.leaf].ratio] == &victim,
              "every commit of the huge block that is taken goes, and no other");
      drop(event);
      follow(events);
    }
    Huge& h = huge[(block - 1) / ratio_of.at(own_class)];
    require(h.empty(), "the huge block that became empty is drawn from");
    h.owner = own_class;
    h.blocks.assign(ratio_of.at(own_class), Block());
  }
};

}  // namespace slow
