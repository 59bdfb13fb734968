// Bounds of reuse: what two plain rules would make of a trace and of a run's memory, to set beside
// what the run reached.
//
// Both see prompts alone, one after another: no request is in flight, no answer takes memory, a
// prompt's last token is always computed, and a page counts once it and all before it are there.
// LRU evicts what was asked for longest ago, of one prompt the deepest page first. The optimum
// knows the future (Belady): it evicts what will be asked for last, and does not keep what never
// will.
#pragma once

#include <cstdint>
#include <optional>

#include "kvleaf/group/group.h"
#include "trace.h"

namespace kvleaf::cli {

struct Bound {
  std::optional<std::uint64_t> pages;  // that memory holds; none: any number
  std::uint32_t page_tokens = 0;
  std::uint64_t prompt_tokens = 0;
  std::uint64_t lru_hit_tokens = 0;
  std::uint64_t optimum_hit_tokens = 0;

  std::uint64_t tokens() const { return pages.value_or(0) * page_tokens; }
  double lru_pct() const;
  double optimum_pct() const;
};

/// Both rules with a cache of `pages` pages of `page_tokens` tokens; none: a cache without end.
/// Throws InvalidArgument for page_tokens 0.
Bound bound(const Trace& trace, std::uint32_t page_tokens, std::optional<std::uint64_t> pages);

/// Pages of page_tokens tokens whose every leaf that needs a whole prefix would fit the memory, if
/// it held nothing else: no model reuses more than a cache of so many pages allows. None where no
/// leaf needs a whole prefix: then memory sets no such bound.
std::optional<std::uint64_t> prefix_pages(const BlockManager& manager);

}  // namespace kvleaf::cli
