// Counter: a number that one thread changes and any thread may read. Loads and stores are relaxed
// and never combined into a locked instruction, so the writer pays what a plain integer costs; a
// reader sees each figure whole, though several figures need not belong to one moment.
#pragma once

#include <atomic>
#include <cstdint>

namespace kvleaf {

class Counter {
 public:
  std::uint64_t get() const noexcept { return value_.load(std::memory_order_relaxed); }
  void set(std::uint64_t value) noexcept { value_.store(value, std::memory_order_relaxed); }
  /// Adds `change`, which may be negative modulo 2^64.
  void add(std::uint64_t change) noexcept { set(get() + change); }
  void operator++() noexcept { set(get() + 1); }
  void operator--() noexcept { set(get() - 1); }

 private:
  std::atomic<std::uint64_t> value_{0};
};

}  // namespace kvleaf
