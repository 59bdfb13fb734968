// A device for tests: an arena of 64-bit words, one per token (or one per state), with what a word
// must be. Every word names the leaf and all that the entry was computed from, so that a wrong
// share, a stale page, a lost copy or a use after free shows up as an unequal word.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "kvleaf/group/group.h"

namespace kvleaf::testing {

struct Broken : std::runtime_error {  // what a test found
  using std::runtime_error::runtime_error;
};

inline std::uint64_t mix(std::uint64_t a, std::uint64_t b) noexcept {
  std::uint64_t x = a * 0x9E3779B97F4A7C15ull ^ (b + 0xD1B54A32D192ED03ull);
  x = (x ^ (x >> 31)) * 0xBF58476D1CE4E5B9ull;
  return x ^ (x >> 29);
}
inline std::uint64_t mix(std::uint64_t a, const std::string& text) noexcept {
  std::uint64_t hash = mix(a, text.size());
  for (const char c : text) hash = mix(hash, static_cast<unsigned char>(c));
  return hash;
}

/// A random number generator that costs nothing to seed.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(mix(seed, 77)) {}
  std::uint64_t next() noexcept { return mix(state_ += 0x9E3779B97F4A7C15ull, 1); }
  std::uint32_t below(std::uint64_t end) noexcept {
    return end == 0 ? 0 : static_cast<std::uint32_t>(next() % end);
  }
  std::uint32_t between(std::uint64_t least, std::uint64_t most) noexcept {
    return static_cast<std::uint32_t>(least + below(most - least + 1));
  }
  bool one_in(std::uint32_t n) noexcept { return below(n) == 0; }

 private:
  std::uint64_t state_;
};

class Device {
 public:
  using Index = std::uint32_t;  // of a word
  static constexpr std::uint8_t clean = 0xff;

  explicit Device(const Geometry& geometry)
      : words_(geometry.arena_bytes() / 8, 0), writers_(words_.size(), clean) {
    for (const LeafGeometry& leaf : geometry.leaves()) {
      if (leaf.base_offset % 8 != 0 || leaf.page_stride % 8 != 0) {
        throw Broken("the test's geometry is not made of words");
      }
      views_.push_back({leaf.base_offset / 8, leaf.page_stride / 8, leaf.bytes_per_page / 8});
    }
    null_words_ = geometry.null_bytes() / 8;
  }

  Index at(LeafId leaf, BlockId block, std::uint32_t word) const {
    const View& view = views_[leaf.value()];
    return static_cast<Index>(view.base + block.value() * view.stride + word);
  }
  std::uint64_t read(Index index) const { return words_[index]; }
  /// Whether the word lies there cleared, or as `leaf` wrote it: no bytes of another leaf.
  bool native(Index index, LeafId leaf) const {
    return writers_[index] == clean || writers_[index] == leaf.value();
  }
  std::uint32_t words_per_page(LeafId leaf) const {
    return static_cast<std::uint32_t>(views_[leaf.value()].words);
  }

  /// What a step did to a word: its value and writer before.
  struct Undo {
    Index index;
    std::uint64_t before;
    std::uint8_t writer;
  };
  using UndoLog = std::vector<Undo>;

  void write(Index index, std::uint64_t value, std::uint8_t writer, UndoLog* undo) {
    if (index < null_words_) throw Broken("a write into the null region");
    if (undo != nullptr) undo->push_back({index, words_[index], writers_[index]});
    words_[index] = value;
    writers_[index] = writer;
  }

  /// Copies and clears of a step, as an engine runs them: in any order, sources as they were.
  void run(std::span<const BlockCopy> copies, std::span<const ZeroFill> fills, UndoLog& undo) {
    touched_.clear();
    std::unordered_set<Index>& written = touched_;
    std::vector<std::vector<std::pair<std::uint64_t, std::uint8_t>>> sources;
    for (const BlockCopy& copy : copies) {
      auto& source = sources.emplace_back();
      for (std::uint32_t word = 0; word < words_per_page(copy.leaf); ++word) {
        const Index from = at(copy.leaf, copy.src, word);
        if (!native(from, copy.leaf)) throw Broken("a copy reads what another leaf wrote");
        source.emplace_back(words_[from], writers_[from]);
      }
    }
    for (std::size_t i = 0; i < copies.size(); ++i) {
      if (copies[i].src == copies[i].dst) throw Broken("a copy of a block to itself");
      for (std::uint32_t word = 0; word < words_per_page(copies[i].leaf); ++word) {
        const Index to = at(copies[i].leaf, copies[i].dst, word);
        if (!written.insert(to).second) throw Broken("two copies to one block");
        write(to, sources[i][word].first, sources[i][word].second, &undo);
      }
    }
    for (const ZeroFill& fill : fills) {
      for (std::uint32_t word = 0; word < words_per_page(fill.leaf); ++word) {
        const Index to = at(fill.leaf, fill.block, word);
        if (!written.insert(to).second) throw Broken("a block is cleared and copied to, or twice");
        write(to, 0, clean, &undo);
      }
    }
    for (const BlockCopy& copy : copies) {
      for (const ZeroFill& fill : fills) {
        if (copy.leaf == fill.leaf && copy.src == fill.block) {
          throw Broken("a block is copied from and cleared");
        }
      }
    }
  }

  /// The step that wrote these words failed: each word may have been written, or not, or half.
  void fail(const UndoLog& undo, Random& random) {
    for (std::size_t i = undo.size(); i-- > 0;) {
      switch (random.below(3)) {
        case 0: break;
        case 1:
          words_[undo[i].index] = undo[i].before;
          writers_[undo[i].index] = undo[i].writer;
          break;
        default:
          if (writers_[undo[i].index] != clean) words_[undo[i].index] = random.next();
      }
    }
  }

  void require_null_region() const {
    for (std::size_t i = 0; i < null_words_; ++i) {
      if (words_[i] != 0) throw Broken("the null region was written");
    }
  }

 private:
  struct View {
    std::uint64_t base, stride, words;
  };
  std::vector<std::uint64_t> words_;
  std::vector<std::uint8_t> writers_;  // leaf that wrote the word last, or clean
  std::vector<View> views_;
  std::uint64_t null_words_ = 0;
  std::unordered_set<Index> touched_;  // scratch of run
};

}  // namespace kvleaf::testing
