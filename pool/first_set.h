// FirstSet: a set of small numbers that names its least and greatest member in O(levels): one word
// per 64 numbers, one per 64 such words, and so on. A set of up to 64 numbers is one word.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvleaf {

class FirstSet {
 public:
  static constexpr std::uint32_t none = 0xffffffffu;

  FirstSet() = default;
  /// Numbers 0 … size-1.
  explicit FirstSet(std::uint32_t size) {
    level_begin_.clear();
    std::uint32_t words = 0;
    do {
      size = (size + 63) / 64;
      if (size == 0) size = 1;
      level_begin_.push_back(words);
      words += size;
    } while (size > 1);
    words_.assign(words, 0);
  }

  void insert(std::uint32_t number) noexcept {
    for (const std::uint32_t begin : level_begin_) {
      std::uint64_t& word = words_[begin + number / 64];
      const bool was_empty = word == 0;
      word |= std::uint64_t{1} << (number % 64);
      if (!was_empty) return;
      number /= 64;
    }
  }
  void erase(std::uint32_t number) noexcept {
    for (const std::uint32_t begin : level_begin_) {
      std::uint64_t& word = words_[begin + number / 64];
      word &= ~(std::uint64_t{1} << (number % 64));
      if (word != 0) return;
      number /= 64;
    }
  }
  bool contains(std::uint32_t number) const noexcept {
    return (words_[number / 64] >> (number % 64) & 1) != 0;
  }
  std::uint32_t first() const noexcept {
    if (words_.back() == 0) return none;
    std::uint32_t number = 0;
    for (std::size_t level = level_begin_.size(); level-- > 0;) {
      const std::uint64_t word = words_[level_begin_[level] + number];
      number = number * 64 + static_cast<std::uint32_t>(std::countr_zero(word));
    }
    return number;
  }
  std::uint32_t last() const noexcept {
    if (words_.back() == 0) return none;
    std::uint32_t number = 0;
    for (std::size_t level = level_begin_.size(); level-- > 0;) {
      const std::uint64_t word = words_[level_begin_[level] + number];
      number = number * 64 + 63 - static_cast<std::uint32_t>(std::countl_zero(word));
    }
    return number;
  }
  std::size_t bytes() const noexcept { return words_.size() * sizeof(std::uint64_t); }

 private:
  std::vector<std::uint64_t> words_{0};         // level 0 first; the last is the single top word
  std::vector<std::uint32_t> level_begin_{0u};  // into words_
};

}  // namespace kvleaf
