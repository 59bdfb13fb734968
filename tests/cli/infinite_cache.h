// The hits of a cache that forgets nothing, counted from a trace alone: no tokens, no pages, no
// manager. With pages as long as the trace's blocks, a prompt finds the leading blocks that earlier
// prompts filled completely, but for the page of its last token, which has to be computed for the
// first answer token.
#pragma once

#include <algorithm>
#include <cstdint>
#include <unordered_set>
#include <vector>

#include "trace.h"

namespace kvleaf::test {

/// Hit tokens of each row, in order.
inline std::vector<std::uint32_t> infinite_cache_hits(const cli::Trace& trace) {
  const std::uint32_t block = trace.block_tokens;
  std::unordered_set<std::uint32_t> filled;
  std::vector<std::uint32_t> hits;
  for (const cli::TraceRow& row : trace.rows) {
    std::uint32_t seen = 0;
    for (const std::uint32_t id : trace.ids_of(row)) {
      if (!filled.contains(id)) break;
      ++seen;
    }
    hits.push_back(std::min(seen, (row.input_length - 1) / block) * block);
    std::uint32_t end = 0;
    for (const std::uint32_t id : trace.ids_of(row)) {
      end += block;
      if (end <= row.input_length) filled.insert(id);
    }
  }
  return hits;
}

}  // namespace kvleaf::test
