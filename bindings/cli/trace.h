// A request trace: how long each request's prompt and answer are, and which prompts share a prefix.
//
// Published traces carry no text. The hashed ones (JSON lines) give one id per block of the prompt,
// which stands for the block and all before it; token ids are made from it so that prompts share
// exactly the prefixes that they shared when they were recorded. The others (CSV) give lengths
// only: nothing is shared.
//
//   block h of S tokens           tokens h · S + offset
//   a tail without an id, output  tokens from 2^30 on, each used by one request only
//
// Rows are in file order, which is the order of arrival.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvleaf/leaf/errors.h"
#include "kvleaf/leaf/ids.h"

namespace kvleaf::cli {

/// A trace that cannot be read. The message is one line: file, row, key, and what would be
/// accepted.
class TraceError : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

/// First token id that belongs to one request alone.
inline constexpr Token first_own_token = Token{1} << 30;

struct TraceRow {
  std::uint32_t number = 0;         // of the row in the file: from 1, a CSV's header is not a row
  std::uint32_t input_length = 0;   // tokens, at least 1
  std::uint32_t output_length = 0;  // tokens
  std::size_t first_id = 0;         // of this row in Trace::ids
  std::uint32_t num_ids = 0;
  Token own = first_own_token;  // first of this row's own ids: the prompt's tail, then the output
};

class Trace {
 public:
  std::string file;
  std::uint32_t block_tokens = 0;   // tokens one id stands for; 0 in a trace of lengths only
  bool tail_has_id = false;         // the last, partly filled block of a prompt has an id as well
  std::vector<TraceRow> rows;       // with a prompt
  std::vector<std::uint32_t> ids;   // of all rows, one after another
  std::uint64_t empty_prompts = 0;  // rows left out, since no request is without a token

  std::span<const std::uint32_t> ids_of(const TraceRow& row) const {
    return std::span(ids).subspan(row.first_id, row.num_ids);
  }
  /// Tokens of the prompt that have an id in the trace; the rest are the request's own.
  std::uint32_t hashed_tokens(const TraceRow& row) const;
  /// Token ids of the prompt; `into` is resized to input_length.
  void prompt(const TraceRow& row, std::vector<Token>& into) const;
  /// Token ids of the answer; `into` is resized to output_length.
  void output(const TraceRow& row, std::vector<Token>& into) const;

  std::uint64_t prompt_tokens() const;
  /// Tokens of the longest prompt with its answer.
  std::uint32_t longest() const;
};

/// Reads a trace, gzip or not (told by its first bytes); the format is told by the keys, the tokens
/// of a block from the rows. The whole file is checked, then all but the first `limit` requests are
/// dropped. Throws TraceError.
Trace read_trace(const std::string& path, std::uint64_t limit = UINT64_MAX);

/// The same of a text in memory; `name` stands for the file in messages.
Trace parse_trace(std::string_view text, const std::string& name, std::uint64_t limit = UINT64_MAX);

}  // namespace kvleaf::cli
