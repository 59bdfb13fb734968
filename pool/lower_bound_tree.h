// LowerBoundTree: finds the least of many keys where keys are changed far more often than asked
// for. A tournament of groups of eight in which every node holds a *lower bound* of the keys below
// it, not their minimum:
//
//   - a key that falls, or appears, lowers the nodes above it, and stops at the first that is low
//     enough already; keys mostly rise, so that is mostly the first;
//   - a key that rises, or disappears, does nothing at all: its nodes are corrected when the search
//   for
//     the minimum meets them. Each such change is corrected at most once, so a search is O(log n)
//     amortised.
//
// The keys themselves stay where they are: the caller passes how to read one. Nodes are eight bytes
// per eight keys, and no record needs to know its place in the tree.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvleaf {

/// Where the nodes of a tree over `size` keys lie. Level 0 is the nodes above the keys; the single
/// topmost node, the root, is kept apart by the owner.
class TreeShape {
 public:
  static constexpr std::uint32_t fan_out = 8;

  TreeShape() = default;
  explicit TreeShape(std::uint32_t size) : size_(size) {
    std::uint32_t count = size;
    while (count > fan_out) {
      count = (count + fan_out - 1) / fan_out;
      begin_[levels_] = nodes_;
      count_[levels_] = count;
      nodes_ += count;
      ++levels_;
    }
  }
  std::uint32_t size() const noexcept { return size_; }
  std::uint32_t levels() const noexcept { return levels_; }
  std::uint32_t nodes() const noexcept { return nodes_; }  // without the root
  std::uint32_t begin(std::uint32_t level) const noexcept { return begin_[level]; }
  std::uint32_t count(std::uint32_t level) const noexcept { return count_[level]; }

 private:
  static constexpr std::size_t most_levels = 11;  // 8^11 > 2^32
  std::uint32_t size_ = 0;
  std::uint32_t levels_ = 0;
  std::uint32_t nodes_ = 0;
  std::array<std::uint32_t, most_levels> begin_{};
  std::array<std::uint32_t, most_levels> count_{};
};

/// The nodes of one tree, all "no key" at first: their owner's part of it. A default-constructed
/// one belongs to no tree.
template <class Key>
struct TreeNodes {
  TreeNodes() = default;
  explicit TreeNodes(const TreeShape& shape) : nodes(shape.nodes()), used(true) {}
  std::vector<Key> nodes;
  Key root{};
  // Where the least was found last, a bound of all other keys, and one of all keys outside that
  // group of eight: the next least is mostly the same key, which rose a little, or one of its
  // group, and then nothing else is looked at.
  std::uint32_t index = 0;
  Key others{};
  Key outside{};
  // At most the least key, and that key itself from a search on until another key falls below it:
  // tells whether a search is worth its while. The root cannot say so, since nothing rises that has
  // lower nodes below it.
  Key bound{};
  bool used = false;
};

template <class Key>
struct LeastKey {
  Key key;
  std::uint32_t index;
};

/// A view: the shape, the nodes and the root belong to somebody else. A default-constructed Key is
/// "no key", greater than every other.
template <class Key>
class LowerBoundTree {
 public:
  static constexpr std::uint32_t fan_out = TreeShape::fan_out;

  LowerBoundTree(const TreeShape& shape, Key* nodes, Key& root) noexcept
      : shape_(shape), nodes_(nodes), root_(root) {}

  LowerBoundTree(const TreeShape& shape, TreeNodes<Key>& owned) noexcept
      : shape_(shape), nodes_(owned.nodes.data()), root_(owned.root), last_(&owned) {}

  /// Key `index` is now `key`, or is at least `key`. Returns whether the root fell.
  bool lower(std::uint32_t index, Key key) noexcept {
    if (last_ != nullptr) {
      if (key < last_->bound) last_->bound = key;
      if (key < last_->others && index != last_->index) last_->others = key;
      if (key < last_->outside && index / fan_out != last_->index / fan_out) last_->outside = key;
    }
    for (std::uint32_t level = 0; level < shape_.levels(); ++level) {
      index /= fan_out;
      Key& node = nodes_[shape_.begin(level) + index];
      if (!(key < node)) return false;
      node = key;
    }
    if (!(key < root_)) return false;
    root_ = key;
    return true;
  }

  /// The least key and its index; key == Key() if there is none. Among equals any may be named.
  ///   bound_of(index)   at most the key; Key() where there is none. Cheap.
  ///   exact(index)      the key
  ///   raise(index)      makes bound_of give the key
  template <class BoundOf, class Exact, class Raise>
  LeastKey<Key> least(BoundOf&& bound_of, Exact&& exact, Raise&& raise) noexcept {
    if (last_ != nullptr && shape_.size() != 0) {
      const LeastKey<Key> same{exact(last_->index), last_->index};
      if (same.key.exists()) {
        if (!(last_->others < same.key)) return remember(same);
        Key others = last_->outside;
        for_others(same.index, [&](std::uint32_t index) {
          const Key key = bound_of(index);
          others = key < others ? key : others;
        });
        last_->others = others;
        if (!(others < same.key)) return remember(same);
      }
      const std::uint32_t group = same.index / fan_out;
      const LeastKey<Key> found = least_of(group, last_->outside, same, bound_of, exact, raise);
      if (found.key.exists() && !(last_->outside < found.key)) return remember(found);
      correct(group, bound_of);
    }
    for (;;) {
      // Down to the least bound. `others`: nothing off the path is below it.
      Key others;
      std::uint32_t group = 0;
      for (std::uint32_t level = shape_.levels(); level-- > 0;) {
        const Key* nodes = nodes_ + shape_.begin(level);
        group = least_in(group, shape_.count(level), others,
                         [&](std::uint32_t node) { return nodes[node]; });
      }
      const LeastKey<Key> found =
          least_of(group, others, {Key(), shape_.size()}, bound_of, exact, raise);
      const bool is_least = !(others < found.key);
      // A path that led to what was sought stays as it is: it is low enough, and leads there again.
      if (!is_least || !found.key.exists()) correct(group, bound_of);
      if (!is_least) continue;
      if (last_ != nullptr) last_->outside = others;
      return remember(found);
    }
  }
  /// Makes the root the least key, which is at `index`.
  template <class BoundOf>
  void raise_root(std::uint32_t index, BoundOf&& bound_of) noexcept {
    correct(index / fan_out, bound_of);
  }

 private:
  LeastKey<Key> remember(LeastKey<Key> found) noexcept {
    if (last_ == nullptr) return found;
    if (last_->index != found.index) last_->others = found.key;
    last_->index = found.index;
    last_->bound = found.key;
    return found;
  }
  /// Each other index of its group of eight.
  template <class Meet>
  void for_others(std::uint32_t index, Meet&& meet) const noexcept {
    const std::uint32_t begin = index / fan_out * fan_out;
    const std::uint32_t end = std::min(begin + fan_out, shape_.size());
    for (std::uint32_t other = begin; other < end; ++other) {
      if (other != index) meet(other);
    }
  }
  /// The least of a group of eight whose keys are known by bounds but for one, `known`: bounds are
  /// corrected until the least of them is a key, or is above `limit`.
  template <class BoundOf, class Exact, class Raise>
  LeastKey<Key> least_of(std::uint32_t group, Key limit, LeastKey<Key> known, BoundOf&& bound_of,
                         Exact&& exact, Raise&& raise) const noexcept {
    for (;;) {
      const LeastKey<Key> least = least_in(group, shape_.size(), [&](std::uint32_t index) {
        return index == known.index ? known.key : bound_of(index);
      });
      const bool is_key = least.index == known.index;
      if (is_key && !(limit < least.key)) return least;
      if (known.index != shape_.size()) raise(known.index);
      if (limit < least.key || !least.key.exists()) return least;
      known = {exact(least.index), least.index};
      if (known.key == least.key) return least;
    }
  }
  /// The least in a group of eight.
  template <class KeyOf>
  static LeastKey<Key> least_in(std::uint32_t group, std::uint32_t count, KeyOf&& key_of) noexcept {
    const std::uint32_t begin = group * fan_out;
    LeastKey<Key> least{key_of(begin), begin};
    const auto meet = [&](std::uint32_t index) {
      const Key key = key_of(index);
      const bool less = key < least.key;
      least.key = less ? key : least.key;
      least.index = less ? index : least.index;
    };
    if (begin + fan_out <= count) [[likely]] {
      for (std::uint32_t i = 1; i < fan_out; ++i) meet(begin + i);
    } else {
      for (std::uint32_t index = begin + 1; index < count; ++index) meet(index);
    }
    return least;
  }
  /// Its index; `others` falls to the least of the rest.
  template <class KeyOf>
  static std::uint32_t least_in(std::uint32_t group, std::uint32_t count, Key& others,
                                KeyOf&& key_of) noexcept {
    std::uint32_t index = group * fan_out;
    const std::uint32_t end = std::min(index + fan_out, count);
    std::uint32_t best = index;
    Key least = key_of(index);
    while (++index < end) {
      const Key key = key_of(index);
      const bool less = key < least;
      const Key greater = less ? least : key;
      least = less ? key : least;
      best = less ? index : best;
      others = greater < others ? greater : others;
    }
    return best;
  }
  /// The nodes above a group of keys become the least bounds below them.
  template <class BoundOf>
  void correct(std::uint32_t group, BoundOf&& bound_of) noexcept {
    Key above = least_in(group, shape_.size(), bound_of).key;
    for (std::uint32_t level = 0; level < shape_.levels(); ++level) {
      Key* nodes = nodes_ + shape_.begin(level);
      nodes[group] = above;
      group /= fan_out;
      above =
          least_in(group, shape_.count(level), [&](std::uint32_t node) { return nodes[node]; }).key;
    }
    root_ = above;
  }

  const TreeShape& shape_;
  Key* nodes_;
  Key& root_;
  TreeNodes<Key>* last_ = nullptr;  // where to remember what was found last, if anywhere
};

}  // namespace kvleaf
