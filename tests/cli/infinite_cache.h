// The hits of a cache that forgets nothing, counted from a trace alone: no tokens, no pages, no
// manager. Pages are as long as the trace's blocks.
//
// Attention: a prompt finds the leading blocks that earlier prompts filled completely, but for the
// page of its last token, which has to be computed for the first answer token.
//
// States: of those, up to the deepest boundary that has a checkpoint. One is left at the last
// boundary before a prompt's end, where the look-up left a path that goes on (a junction), and at
// the last boundary of the sequence; by `tail` also at the last multiple of 512 tokens (of the
// least whole pages that are as long) before a prompt's end, by `spaced` at 1, 2, 4, … pages before
// the first of these and from the prompt's start. A request also lends its live state, until its
// answer moves it on: so at most `max_live` of them, finished in order of arrival, are part of the
// count.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "trace.h"

namespace kvleaf::test {

enum class Checkpoints { everywhere, tail, spaced };  // everywhere: none is needed

/// Hit tokens of each row, in order.
inline std::vector<std::uint32_t> infinite_cache_hits(
    const cli::Trace& trace, Checkpoints checkpoints = Checkpoints::everywhere,
    std::size_t max_live = 64) {
  const std::uint32_t page = trace.block_tokens;
  std::unordered_set<std::uint32_t> filled;
  std::unordered_set<std::uint32_t> goes_on;  // blocks with a filled one, or an answer's, behind
  bool any = false;                           // the root goes on
  std::unordered_set<std::uint32_t> resumable;
  std::unordered_map<std::uint32_t, std::uint32_t> lent;  // by live states: how many
  std::deque<const cli::TraceRow*> live;

  const auto end_of = [&](const cli::TraceRow& row, std::uint32_t tokens) -> const std::uint32_t* {
    const std::uint32_t pages = tokens / page;  // the block that ends the last whole page, if it is
    return pages == 0 || pages * page > row.input_length ? nullptr : &trace.ids_of(row)[pages - 1];
  };
  // The state at the prompt's end is findable where that is a boundary.
  const auto lends = [&](const cli::TraceRow& row) {
    return row.input_length % page == 0 ? end_of(row, row.input_length) : nullptr;
  };
  const auto finish = [&](const cli::TraceRow& row) {
    if (const std::uint32_t* block = lends(row)) --lent[*block];
    const std::uint32_t length = row.input_length + row.output_length;
    if (const std::uint32_t* block = end_of(row, length)) resumable.insert(*block);
    const std::uint32_t* last = end_of(row, row.input_length);
    if (length / page > row.input_length / page) {
      if (last != nullptr) goes_on.insert(*last);
      any = true;
    }
  };

  std::vector<std::uint32_t> hits;
  for (const cli::TraceRow& row : trace.rows) {
    if (live.size() == max_live) {
      finish(*live.front());
      live.pop_front();
    }
    const std::span<const std::uint32_t> ids = trace.ids_of(row);
    const std::uint32_t whole = row.input_length / page;
    const std::uint32_t most = (row.input_length - 1) / page;
    std::uint32_t seen = 0;
    while (seen < whole && filled.contains(ids[seen])) ++seen;
    std::uint32_t hit = std::min(seen, most);
    if (checkpoints != Checkpoints::everywhere) {
      const auto resumes = [&](std::uint32_t block) {
        const auto live_state = lent.find(block);
        return resumable.contains(block) || (live_state != lent.end() && live_state->second > 0);
      };
      while (hit > 0 && !resumes(ids[hit - 1])) --hit;
    }
    hits.push_back(hit * page);

    const auto leave = [&](std::uint32_t pages) {
      if (pages > hit && pages <= most) resumable.insert(ids[pages - 1]);
    };
    leave(most);
    const std::uint32_t coarse = (512 + page - 1) / page;  // pages
    if (checkpoints == Checkpoints::tail) leave(most / coarse * coarse);
    if (seen < whole && (seen > 0 ? goes_on.contains(ids[seen - 1]) : any)) leave(seen);
    for (std::uint32_t pages = 1; checkpoints == Checkpoints::spaced && pages <= most; pages *= 2) {
      leave(pages);
      leave(most - pages);
    }
    for (std::uint32_t i = 0; i < whole; ++i) {
      if (filled.insert(ids[i]).second)
        (i > 0 ? void(goes_on.insert(ids[i - 1])) : void(any = true));
    }
    if (const std::uint32_t* block = lends(row)) ++lent[*block];
    live.push_back(&row);
  }
  return hits;
}

}  // namespace kvleaf::test
