// KVCacheGroupId: leaves with the same access pattern and the same way of writing. They are reused,
// advanced and evicted together.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "kvleaf/leaf/access_pattern.h"

namespace kvleaf {

/// How entries come into being; what may be cached follows from it.
enum class Writing : std::uint8_t {
  append,      // each token written once: cached by page
  in_place,    // a state, overwritten by every step: cached as checkpoints, copies at a boundary
  write_once,  // an encoder's output, written whole before the first decode: cached whole
  exclusive,   // scratch of one request ("private" in Python and in messages): never cached
};

std::string_view name_of(Writing writing) noexcept;
/// Throws InvalidArgument that lists "append", "in_place", "write_once", "private".
Writing require_writing(std::string_view name);

struct KVCacheGroupId {
  /// Throws InvalidArgument for an empty name, or a pattern whose entries cannot be written so:
  /// write_once needs the encoder's tokens, exclusive needs none, append and in_place need text.
  KVCacheGroupId(std::string name, AccessPattern pattern, Writing writing);

  static KVCacheGroupId full();  // "full"
  static KVCacheGroupId sliding_window(
      std::uint32_t window, std::uint32_t sinks = 0);  // "window_1024", "window_1024_sinks_4"
  static KVCacheGroupId chunked(std::uint32_t chunk);  // "chunk_8192"
  static KVCacheGroupId state(std::string name = "state");
  static KVCacheGroupId encoder(std::string name = "encoder");
  static KVCacheGroupId scratch(std::string name = "scratch");

  std::string name;
  AccessPattern pattern;
  Writing writing;

  bool operator==(const KVCacheGroupId&) const = default;
};

}  // namespace kvleaf
