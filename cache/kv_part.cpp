#include "kvleaf/cache/kv_part.h"

#include <fmt/format.h>

#include "kvleaf/leaf/errors.h"

namespace kvleaf {

std::string_view name_of(KVPart part) noexcept {
  switch (part) {
    case KVPart::own: return "own";
    case KVPart::compressed: return "compressed";
    case KVPart::indexer: return "indexer";
    case KVPart::cross: return "cross";
  }
  return "";
}

KVPart require_part(std::string_view name) {
  for (const KVPart part : {KVPart::own, KVPart::compressed, KVPart::indexer, KVPart::cross})
    if (name_of(part) == name) return part;
  throw InvalidArgument(fmt::format("part '{}'; expected own, compressed, indexer or cross", name));
}

}  // namespace kvleaf
