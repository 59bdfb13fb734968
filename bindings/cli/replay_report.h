// What a replay found, for people, programs and browsers.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "bound.h"
#include "kvleaf/pool/geometry.h"
#include "replay.h"

namespace kvleaf::cli {

/// What was replayed, for the head of a report.
struct ReplaySubject {
  std::string trace;  // file
  std::string model;  // file
  std::string model_type;
  std::uint64_t budget_bytes = 0;
  std::uint32_t page_tokens = 0;
  std::uint32_t max_len = 0;
  std::optional<std::uint32_t> model_max_len;  // positions the model was made for
  std::uint32_t max_live = 0;
  std::uint32_t max_step_tokens = 0;
  std::string retention;
  std::string eviction;
  std::uint32_t block_tokens = 0;   // of the trace; 0: lengths only
  std::uint64_t empty_prompts = 0;  // rows left out
  std::uint64_t arena_bytes = 0;
  std::uint64_t huge_bytes = 0;
  std::uint64_t huge_blocks = 0;
  std::optional<VerifyStats> verified;
  std::optional<Bound> bound;
};

/// One object. Bytes of a leaf: `live`, `cached`, `clean`, `padding` are those of the moment when
/// all leaves together used most (their sum without clean, over leaves, is peak_bytes); `peak` and
/// `mean` hold each figure's own largest value and its mean over steps.
nlohmann::json to_json(const Replay& replay, const ReplaySubject& subject);

std::string to_text(const Replay& replay, const ReplaySubject& subject);

/// One page that needs nothing else: memory of each leaf over time, hits over time, step times.
std::string to_html(const Replay& replay, const ReplaySubject& subject);

}  // namespace kvleaf::cli
