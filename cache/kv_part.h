// KVPart: which of the things that a layer keeps entry by entry.
#pragma once

#include <cstdint>
#include <string_view>

namespace kvleaf {

/// What a layer keeps beside its attention over the text, where it keeps several things.
enum class KVPart : std::uint8_t {
  own,         // keys and values of the text, latents; of a layer that keeps one thing, that
  compressed,  // latents of several tokens each
  indexer,     // the keys by which a sparse layer chooses
  cross,       // keys and values of the encoder's tokens
};
/// "own", "compressed", "indexer", "cross".
std::string_view name_of(KVPart part) noexcept;
/// Throws InvalidArgument.
KVPart require_part(std::string_view name);

}  // namespace kvleaf
