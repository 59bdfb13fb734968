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
  // Where the least was found last, and a bound of all keys outside that group of eight: the next
  // least is mostly there too, and then nothing else is looked at.
  std::uint32_t group = 0;
  Key outside{};
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
    if (last_ != nullptr && key < last_->outside && index / fan_out != last_->group) {
      last_->outside = key;
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
    if (last_ != nullptr) {
      Key others = last_->outside;
      const std::uint32_t index = least_in(last_->group, shape_.size(), others, bound_of);
      const Key key = exact(index);
      if (!(key == Key()) && !(others < key)) return {key, index};
      raise(index);
      correct(last_->group, bound_of);
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
      const Key outside = others;
      const std::uint32_t index = least_in(group, shape_.size(), others, bound_of);
      const Key key = exact(index);
      const bool found = !(others < key);
      // A path that led to what was sought stays as it is: it is low enough, and leads there again.
      if (!found || key == Key()) {
        raise(index);
        correct(group, bound_of);
      }
      if (!found) continue;
      if (last_ != nullptr) {
        last_->group = group;
        last_->outside = outside;
      }
      return {key, index};
    }
  }
  /// Makes the root the least key, which is at `index`.
  template <class BoundOf>
  void raise_root(std::uint32_t index, BoundOf&& bound_of) noexcept {
    correct(index / fan_out, bound_of);
  }

 private:
  /// The index of the least in a group of eight; `others` falls to the least of the rest.
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
    Key above = least_of(group, shape_.size(), bound_of);
    for (std::uint32_t level = 0; level < shape_.levels(); ++level) {
      Key* nodes = nodes_ + shape_.begin(level);
      nodes[group] = above;
      group /= fan_out;
      above = least_of(group, shape_.count(level), [&](std::uint32_t node) { return nodes[node]; });
    }
    root_ = above;
  }
  template <class KeyOf>
  static Key least_of(std::uint32_t group, std::uint32_t count, KeyOf&& key_of) noexcept {
    Key others;
    return key_of(least_in(group, count, others, key_of));
  }

  const TreeShape& shape_;
  Key* nodes_;
  Key& root_;
  TreeNodes<Key>* last_ = nullptr;  // where to remember what was found last, if anywhere
};

}  // namespace kvleaf
