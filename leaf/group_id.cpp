#include "kvleaf/leaf/group_id.h"

#include <fmt/format.h>

#include <utility>

#include "kvleaf/leaf/errors.h"

namespace kvleaf {
namespace {

using Domain = AccessPattern::Domain;

Domain domain_for(Writing writing) noexcept {
  switch (writing) {
    case Writing::append:
    case Writing::in_place: return Domain::text;
    case Writing::write_once: return Domain::encoder;
    case Writing::exclusive: return Domain::nothing;
  }
  return Domain::text;
}

std::string_view name_of(Domain domain) noexcept {
  switch (domain) {
    case Domain::text: return "the request's own tokens";
    case Domain::encoder: return "the encoder's tokens";
    case Domain::nothing: return "no tokens";
  }
  return "";
}

}  // namespace

std::string_view name_of(Writing writing) noexcept {
  switch (writing) {
    case Writing::append: return "append";
    case Writing::in_place: return "in_place";
    case Writing::write_once: return "write_once";
    case Writing::exclusive: return "private";
  }
  return "";
}

Writing require_writing(std::string_view name) {
  for (const Writing writing :
       {Writing::append, Writing::in_place, Writing::write_once, Writing::exclusive}) {
    if (name == name_of(writing)) return writing;
  }
  throw InvalidArgument(
      fmt::format("unknown writing '{}'; accepted: append, in_place, write_once, private", name));
}

KVCacheGroupId::KVCacheGroupId(std::string group_name, AccessPattern access, Writing how)
    : name(std::move(group_name)), pattern(std::move(access)), writing(how) {
  if (name.empty()) throw InvalidArgument("a group needs a name");
  if (pattern.domain() != domain_for(writing)) {
    throw InvalidArgument(
        fmt::format("group '{}': entries written '{}' are of {}, but the pattern {} reaches {}",
                    name, name_of(writing), name_of(domain_for(writing)), pattern.to_string(),
                    name_of(pattern.domain())));
  }
}

KVCacheGroupId KVCacheGroupId::full() { return {"full", AccessPattern::full(), Writing::append}; }

KVCacheGroupId KVCacheGroupId::sliding_window(std::uint32_t window, std::uint32_t sinks) {
  std::string name = sinks == 0 ? fmt::format("window_{}", window)
                                : fmt::format("window_{}_sinks_{}", window, sinks);
  return {std::move(name), AccessPattern::window(window, sinks), Writing::append};
}

KVCacheGroupId KVCacheGroupId::chunked(std::uint32_t chunk) {
  return {fmt::format("chunk_{}", chunk), AccessPattern::chunk(chunk), Writing::append};
}

KVCacheGroupId KVCacheGroupId::state(std::string name) {
  return {std::move(name), AccessPattern::point(), Writing::in_place};
}

KVCacheGroupId KVCacheGroupId::encoder(std::string name) {
  return {std::move(name), AccessPattern::encoder(), Writing::write_once};
}

KVCacheGroupId KVCacheGroupId::scratch(std::string name) {
  return {std::move(name), AccessPattern::none(), Writing::exclusive};
}

}  // namespace kvleaf
