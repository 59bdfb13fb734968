#include "kvleaf/cache/cache_config.h"

#include <fmt/format.h>

#include "kvleaf/leaf/errors.h"

namespace kvleaf {

std::string_view name_of(KVCacheMode mode) noexcept {
  return mode == KVCacheMode::slotted ? "slotted" : "paged";
}

KVCacheMode require_mode(std::string_view name) {
  if (name == "slotted") return KVCacheMode::slotted;
  if (name == "paged") return KVCacheMode::paged;
  throw InvalidArgument(fmt::format("mode '{}'; expected slotted or paged", name));
}

}  // namespace kvleaf
