#include "kvleaf/group/page_history.h"

#include <algorithm>

namespace kvleaf {

PageHistory::PageHistory(std::uint64_t pages)
    : lines_(pages), keys_of_(pages > 0 ? epochs : 0), most_(keys_per_page * pages) {
  per_epoch_ = std::max<std::uint64_t>(1, most_ / epochs_held);
}

void PageHistory::drop(std::uint32_t& entry) noexcept {
  if (counts(entry) && keys_of_[entry & epoch_mask] > 0) {
    --keys_of_[entry & epoch_mask];
    --size_;
  }
  entry = 0;
}

void PageHistory::remember(std::uint64_t key) noexcept {
  if (lines_.empty()) return;
  const std::uint32_t print = fingerprint(key);
  std::uint32_t* place = nullptr;  // its own, else one that does not count, else the oldest
  std::uint32_t most = 0;
  for (std::uint32_t& entry : lines_[line_of(key)].entries) {
    if ((entry & ~epoch_mask) == print) {
      place = &entry;
      break;
    }
    const std::uint32_t worth = counts(entry) ? age(entry) : epochs;
    if (place == nullptr || worth > most) {
      place = &entry;
      most = worth;
    }
  }
  drop(*place);
  *place = print | epoch_;
  ++keys_of_[epoch_];
  ++size_;
  if (++in_epoch_ == per_epoch_) {
    in_epoch_ = 0;
    epoch_ = (epoch_ + 1) & epoch_mask;
    if (epoch_ == oldest_) {  // all numbers are in use: the oldest is needed
      size_ -= keys_of_[oldest_];
      keys_of_[oldest_] = 0;
      oldest_ = (oldest_ + 1) & epoch_mask;
    }
  }
  while (size_ > most_) {
    size_ -= keys_of_[oldest_];
    keys_of_[oldest_] = 0;
    oldest_ = (oldest_ + 1) & epoch_mask;
  }
}

bool PageHistory::remembers(std::uint64_t key) const noexcept {
  if (lines_.empty()) return false;
  const std::uint32_t print = fingerprint(key);
  for (const std::uint32_t entry : lines_[line_of(key)].entries) {
    if ((entry & ~epoch_mask) == print) return counts(entry);
  }
  return false;
}

void PageHistory::forget(std::uint64_t key) noexcept {
  if (lines_.empty()) return;
  const std::uint32_t print = fingerprint(key);
  for (std::uint32_t& entry : lines_[line_of(key)].entries) {
    if ((entry & ~epoch_mask) == print) {
      drop(entry);
      return;
    }
  }
}

void PageHistory::prefetch(std::uint64_t key) const noexcept {
  if (!lines_.empty()) __builtin_prefetch(&lines_[line_of(key)]);
}

void PageHistory::clear() noexcept {
  std::fill(lines_.begin(), lines_.end(), Line{});
  std::fill(keys_of_.begin(), keys_of_.end(), 0);
  size_ = in_epoch_ = 0;
  oldest_ = epoch_;
}

}  // namespace kvleaf
