// FirstSet: a set of small numbers that names its least member in O(levels): one word per 64
// numbers, one per 64 such words, and so on. The first word, where the least member mostly is, is
// at hand.
#pragma once

#include <array>
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
    std::uint32_t words = 0;
    for (bool more = size > 64; more; more = size > 1) {
      size = (size + 63) / 64;
      begin_[levels_++] = words;
      words += size;
    }
    words_.assign(words, 0);
  }

  void insert(std::uint32_t number) noexcept {
    if (number < 64) {
      low_ |= std::uint64_t{1} << number;
    } else {
      insert_high(number);
    }
  }
  void erase(std::uint32_t number) noexcept {
    if (number < 64) {
      low_ &= ~(std::uint64_t{1} << number);
    } else {
      erase_high(number);
    }
  }
  std::uint32_t first() const noexcept {
    if (low_ != 0) return static_cast<std::uint32_t>(std::countr_zero(low_));
    return first_high();
  }
  bool empty() const noexcept { return low_ == 0 && (levels_ == 0 || words_.back() == 0); }
  bool contains(std::uint32_t number) const noexcept {
    const std::uint64_t word = number < 64 ? low_ : words_[number / 64];
    return (word >> (number % 64) & 1) != 0;
  }
  std::size_t bytes() const noexcept { return words_.size() * sizeof(std::uint64_t); }

 private:
  void insert_high(std::uint32_t number) noexcept {
    for (std::uint32_t level = 0; level < levels_; ++level, number /= 64) {
      std::uint64_t& word = words_[begin_[level] + number / 64];
      const bool was_empty = word == 0;
      word |= std::uint64_t{1} << (number % 64);
      if (!was_empty) return;
    }
  }
  void erase_high(std::uint32_t number) noexcept {
    for (std::uint32_t level = 0; level < levels_; ++level, number /= 64) {
      std::uint64_t& word = words_[begin_[level] + number / 64];
      word &= ~(std::uint64_t{1} << (number % 64));
      if (word != 0) return;
    }
  }
  std::uint32_t first_high() const noexcept {
    std::uint32_t number = 0;
    for (std::uint32_t level = levels_; level-- > 0;) {
      const std::uint64_t word = words_[begin_[level] + number];
      if (word == 0) return none;  // at the top only: a word above says which are not
      number = number * 64 + static_cast<std::uint32_t>(std::countr_zero(word));
    }
    return levels_ == 0 ? none : number;
  }

  static constexpr std::size_t most_levels = 5;  // 64^6 > 2^32
  std::uint64_t low_ = 0;                        // 0 … 63
  std::vector<std::uint64_t> words_;             // 64 and above, level 0 first, one word at the top
  std::array<std::uint32_t, most_levels> begin_{};  // of each level's words
  std::uint32_t levels_ = 0;
};

}  // namespace kvleaf
