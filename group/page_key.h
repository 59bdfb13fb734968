// Keys of pages: 128 bits, chained, so that one key stands for all tokens up to the page's end and
// all extra keys on the way. Made only for those who ask: events, tiers, other machines.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "kvleaf/group/request_options.h"
#include "kvleaf/leaf/ids.h"

namespace kvleaf {

using PageDigest = std::array<std::uint8_t, 16>;

/// Equal for equal input and seed. xxh3_128 is fast; sha256 (its first 16 bytes) is the same on
/// every machine and byte order: tokens enter as little endian.
class PageHasher {
 public:
  PageHasher() = default;
  PageHasher(KeyHash hash, std::uint64_t seed) : hash_(hash), seed_(seed) {}

  /// The key that the first page's parent has: of salt and adapter.
  PageDigest root(std::string_view salt, std::string_view adapter) const;
  /// The key of a page behind `parent`. `extra` is empty for most pages.
  PageDigest page(const PageDigest& parent, std::span<const Token> tokens,
                  std::string_view extra) const;
  /// The keys of out.size() pages behind `parent`, without extra keys; tokens.size() is a multiple.
  void pages(const PageDigest& parent, std::span<const Token> tokens,
             std::span<PageDigest> out) const;

 private:
  KeyHash hash_ = KeyHash::xxh3_128;
  std::uint64_t seed_ = 0;
};

/// Appends `part` to `to` so that no two sequences of parts give the same string: "ab","c" and
/// "a","bc" differ.
void append_unambiguously(std::string& to, std::string_view part);

}  // namespace kvleaf
