// Reads a fuzzer's input as small numbers. Past the end every number is 0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace fuzz {

class Bytes {
 public:
  explicit Bytes(std::span<const std::uint8_t> data) : data_(data) {}

  bool empty() const { return data_.empty(); }

  /// A number in [0, bound), bound at most 2^16: of one byte where that is enough.
  std::uint32_t below(std::uint32_t bound) {
    std::uint32_t number = next();
    if (bound > 256) number = number << 8 | next();
    return bound == 0 ? 0 : number % bound;
  }

 private:
  std::uint8_t next() {
    if (data_.empty()) return 0;
    const std::uint8_t byte = data_.front();
    data_ = data_.subspan(1);
    return byte;
  }

  std::span<const std::uint8_t> data_;
};

}  // namespace fuzz
