// PageHistory: which pages were findable once. A page that is asked for again long after it was
// evicted has proved that its prefix comes back; without a memory of it, a cache that is smaller
// than the time between two requests of a conversation never learns that.
//
// It remembers keys, no pages: 64 bytes, one line of the processor's cache, for every page the pool
// can hold, and at most six keys for each; beyond that the oldest are forgotten. Approximate by
// design: a crowded line forgets its oldest key early, all that were remembered in a stretch of
// time (1/256 of the whole) are forgotten together, and once in 60,000 questions it takes a page it
// never saw for one it did. Each misjudges the worth of a few pages, nothing else. Sized at
// construction; never allocates after it.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace kvleaf {

class PageHistory {
 public:
  /// More remembers pages that come back too seldom to be worth their memory; on real traces 6 did
  /// best, 4 and 8 a little worse.
  static constexpr std::uint64_t keys_per_page = 6;

  /// For a pool of `pages` pages; with 0 it remembers nothing.
  explicit PageHistory(std::uint64_t pages);

  /// Keys are uniform 64-bit hashes.
  void remember(std::uint64_t key) noexcept;
  bool remembers(std::uint64_t key) const noexcept;
  /// The page is findable again. Leaves the time to older ones.
  void forget(std::uint64_t key) noexcept;
  std::uint64_t size() const noexcept { return size_; }  // keys
  void prefetch(std::uint64_t key) const noexcept;
  void clear() noexcept;

  std::uint64_t metadata_bytes() const noexcept { return lines_.size() * sizeof(Line); }

 private:
  // An entry is a fingerprint and the epoch in which it was remembered: that tells whether it
  // counts still, and which entry of a line is oldest. Epochs are numbered round; an entry of one
  // that was forgotten is overwritten long before its number comes again, a hundred keys in its
  // line later.
  static constexpr std::uint32_t epoch_bits = 12;
  static constexpr std::uint32_t epochs = 1u << epoch_bits;
  static constexpr std::uint32_t epoch_mask = epochs - 1;
  static constexpr std::uint64_t epochs_held = 256;  // by as many keys as are remembered at most
  struct alignas(64) Line {
    std::array<std::uint32_t, 16> entries{};  // 0: none
  };

  std::uint32_t age(std::uint32_t entry) const noexcept { return (epoch_ - entry) & epoch_mask; }
  bool counts(std::uint32_t entry) const noexcept {
    return entry != 0 && age(entry) <= ((epoch_ - oldest_) & epoch_mask);
  }
  static std::uint32_t fingerprint(std::uint64_t key) noexcept {
    const std::uint32_t bits = static_cast<std::uint32_t>(key) & ~epoch_mask;
    return bits != 0 ? bits : epochs;
  }
  std::size_t line_of(std::uint64_t key) const noexcept {
    return static_cast<std::size_t>((static_cast<__uint128_t>(key) * lines_.size()) >> 64);
  }
  void drop(std::uint32_t& entry) noexcept;

  std::vector<Line> lines_;
  std::vector<std::uint32_t> keys_of_;  // per epoch, those that count
  std::uint64_t most_ = 0;              // keys
  std::uint64_t size_ = 0;
  std::uint64_t per_epoch_ = 1;  // keys remembered in one
  std::uint64_t in_epoch_ = 0;   // of them, in this one so far
  std::uint32_t epoch_ = 0;      // the present one, and the oldest that counts: both in [0, epochs)
  std::uint32_t oldest_ = 0;
};

}  // namespace kvleaf
