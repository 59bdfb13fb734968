// Slot: who is in one slot of a KVCache. Internal to KVCache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "kvleaf/leaf/ids.h"

namespace kvleaf {

/// What every step touches.
struct Slot {
  RequestId request{0};
  std::uint64_t met = 0;   // the batch that met it last, of those ever given
  std::uint32_t most = 0;  // tokens that a step may bring it to: 0 where it is free
  bool used = false;       // paged: a sequence was admitted
};
static_assert(sizeof(Slot) <= 32, "two to a cache line");

/// What else is known of the sequence in it.
struct Sequence {
  std::vector<Token> prompt;     // ids that the manager knows
  std::uint32_t prompt_len = 0;  // at admission
  // Cross attention.
  std::vector<bool> filled;  // per layer of it
  std::string digest;
  bool shared_encoder = false;  // the digest is the caller's
  bool encoder_cached = false;
  std::uint32_t encoder_reserved = 0;

  bool all_filled() const noexcept {
    return std::find(filled.begin(), filled.end(), false) == filled.end();
  }
};

}  // namespace kvleaf
