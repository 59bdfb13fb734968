#include "trace.h"

#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

namespace kvleaf::cli {
namespace {

using nlohmann::json;

constexpr std::uint64_t most_tokens = (std::uint64_t{1} << 30) - 1;  // of a prompt or an answer
constexpr std::string_view accepted =
    "accepted are JSON lines with input_length, output_length and hash_ids, and CSV with the "
    "columns "
    "ContextTokens,GeneratedTokens or num_prefill_tokens,num_decode_tokens";

// ---- bytes --------------------------------------------------------------------------------------

std::string read_file(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             &std::fclose);
  if (!file) throw TraceError(fmt::format("{}: {}", path, std::strerror(errno)));
  std::string bytes;
  std::string chunk(std::size_t{1} << 18, '\0');
  while (const std::size_t got = std::fread(chunk.data(), 1, chunk.size(), file.get())) {
    bytes.append(chunk.data(), got);
  }
  if (std::ferror(file.get()) != 0) {
    throw TraceError(fmt::format("{}: {}", path, std::strerror(errno)));
  }
  return bytes;
}

bool is_gzip(std::string_view bytes) { return bytes.starts_with("\x1f\x8b"); }

std::string gunzip(std::string_view bytes, const std::string& name) {
  z_stream stream{};
  if (inflateInit2(&stream, 15 + 16) != Z_OK) throw TraceError(name + ": zlib cannot start");
  const std::unique_ptr<z_stream, int (*)(z_stream*)> end(&stream, &inflateEnd);
  const auto refuse = [&](std::string_view what) {
    throw TraceError(fmt::format(
        "{}: {} after {} of {} compressed bytes; a whole gzip file or plain text would be accepted",
        name, what, bytes.size() - stream.avail_in, bytes.size()));
  };
  if (bytes.size() > UINT32_MAX) throw TraceError(name + ": larger than 4 GiB");
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));
  stream.avail_in = static_cast<uInt>(bytes.size());

  std::string text;
  std::string chunk(std::size_t{1} << 18, '\0');
  for (;;) {
    stream.next_out = reinterpret_cast<Bytef*>(chunk.data());
    stream.avail_out = static_cast<uInt>(chunk.size());
    const int result = inflate(&stream, Z_NO_FLUSH);
    text.append(chunk.data(), chunk.size() - stream.avail_out);
    if (result == Z_STREAM_END) {
      if (stream.avail_in == 0) return text;
      inflateReset(&stream);  // gzip files may be concatenated
    } else if (result == Z_BUF_ERROR ||
               (result == Z_OK && stream.avail_in == 0 && stream.avail_out != 0)) {
      refuse("the gzip stream is cut off");
    } else if (result != Z_OK) {
      refuse(
          fmt::format("broken gzip data ({})", stream.msg != nullptr ? stream.msg : "no reason"));
    }
  }
}

/// Lines without their ends; a file's last line may lack one.
class Lines {
 public:
  explicit Lines(std::string_view text) : rest_(text) {}
  std::optional<std::string_view> next() {
    if (rest_.empty()) return {};
    const std::size_t end = std::min(rest_.find('\n'), rest_.size());
    std::string_view line = rest_.substr(0, end);
    rest_.remove_prefix(std::min(end + 1, rest_.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    return line;
  }

 private:
  std::string_view rest_;
};

bool is_blank(std::string_view line) { return line.find_first_not_of(" \t") == line.npos; }

// ---- JSON lines ---------------------------------------------------------------------------------

/// How ids stand for tokens.
struct Blocks {
  std::uint32_t tokens;
  bool tail_has_id;

  std::uint64_t ids_for(std::uint64_t length) const {
    return (length + (tail_has_id ? tokens - 1 : 0)) / tokens;
  }
  std::string to_string() const {
    return fmt::format("blocks of {} tokens{}", tokens,
                       tail_has_id ? ", the tail's included" : ", none for the tail");
  }
};

class JsonTrace {
 public:
  JsonTrace(std::string_view text, Trace& trace) : text_(text), trace_(trace) {}

  void read() {
    Lines lines(text_);
    std::uint32_t number = 0;
    while (const auto line = lines.next()) {
      ++number;
      if (!is_blank(*line)) read_row(*line, number);
    }
    settle_blocks();
  }

 private:
  [[noreturn]] void refuse(std::uint32_t number, std::string_view what) const {
    throw TraceError(fmt::format("{}: row {}: {}", trace_.file, number, what));
  }

  void read_row(std::string_view line, std::uint32_t number) {
    json row;
    try {
      row = json::parse(line);
    } catch (const json::parse_error& error) {
      refuse(number, fmt::format("not JSON from byte {} on; one object a line would be accepted",
                                 error.byte));
    }
    if (!row.is_object()) refuse(number, "not a JSON object; one object a line would be accepted");
    has_session_ |= row.contains("session");
    has_priority_ |= row.contains("priority");

    TraceRow read{.number = number};
    read.input_length = tokens(row, "input_length", number);
    read.output_length = tokens(row, "output_length", number);
    read.first_id = trace_.ids.size();
    const json& ids = at(row, "hash_ids", number);
    if (!ids.is_array()) {
      refuse(number,
             fmt::format("hash_ids is {}; a list of integers would be accepted", brief(ids)));
    }
    for (const json& id : ids) {
      if (!id.is_number_unsigned() || id.get<std::uint64_t>() > most_tokens) {
        refuse(number, fmt::format("hash_ids holds {}; integers from 0 to {} would be accepted",
                                   brief(id), most_tokens));
      }
      trace_.ids.push_back(id.get<std::uint32_t>());
    }
    read.num_ids = static_cast<std::uint32_t>(ids.size());
    if (read.input_length == 0) {
      if (read.num_ids != 0) refuse(number, "hash_ids is not empty, but input_length is 0");
      ++trace_.empty_prompts;
    } else {
      trace_.rows.push_back(read);
    }
  }

  const json& at(const json& row, const char* key, std::uint32_t number) const {
    const auto found = row.find(key);
    if (found == row.end()) refuse(number, fmt::format("no key {}; {}", key, accepted));
    return *found;
  }

  std::uint32_t tokens(const json& row, const char* key, std::uint32_t number) const {
    const json& value = at(row, key, number);
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() > most_tokens) {
      refuse(number, fmt::format("{} is {}; an integer from 0 to {} would be accepted", key,
                                 brief(value), most_tokens));
    }
    return value.get<std::uint32_t>();
  }

  static std::string brief(const json& value) {
    std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
    if (text.size() > 40) text = text.substr(0, 37) + "...";
    return text;
  }

  /// The size of a block is not written in a trace. It is the one that explains the number of ids
  /// of most rows, and then has to explain all. Where short rows leave a choice, the keys tell the
  /// origin.
  void settle_blocks() {
    if (trace_.rows.empty()) return;
    std::vector<Blocks> candidates = {{512, true}, {16, true}, {1024, false}};
    if (has_priority_) std::swap(candidates[0], candidates[2]);
    if (has_session_) std::swap(candidates[0], candidates[1]);
    for (const bool tail_has_id : {true, false}) {
      for (std::uint32_t size = 1; size <= 4096; size *= 2)
        candidates.push_back({size, tail_has_id});
    }
    const auto explained = [&](const Blocks& blocks) {
      return std::ranges::count_if(trace_.rows, [&](const TraceRow& row) {
        return row.num_ids == blocks.ids_for(row.input_length);
      });
    };
    const Blocks chosen =
        *std::ranges::max_element(candidates, {}, explained);  // the first of equals
    for (const TraceRow& row : trace_.rows) {
      const std::uint64_t wanted = chosen.ids_for(row.input_length);
      if (row.num_ids != wanted) {
        refuse(row.number, fmt::format("hash_ids has {} ids for an input_length of {}; {} would be "
                                       "accepted with {}",
                                       row.num_ids, row.input_length, wanted, chosen.to_string()));
      }
      const std::uint64_t most_ids = (std::uint64_t{1} << 30) / chosen.tokens;
      for (const std::uint32_t id : trace_.ids_of(row)) {
        if (id >= most_ids) {
          refuse(row.number,
                 fmt::format("hash_ids holds {}; with {} ids below {} would be accepted", id,
                             chosen.to_string(), most_ids));
        }
      }
    }
    trace_.block_tokens = chosen.tokens;
    trace_.tail_has_id = chosen.tail_has_id;
  }

  std::string_view text_;
  Trace& trace_;
  bool has_session_ = false;
  bool has_priority_ = false;
};

// ---- CSV ----------------------------------------------------------------------------------------

std::vector<std::string_view> cells_of(std::string_view line) {
  std::vector<std::string_view> cells;
  for (;;) {
    const std::size_t comma = line.find(',');
    cells.push_back(line.substr(0, comma));
    if (comma == line.npos) return cells;
    line.remove_prefix(comma + 1);
  }
}

struct Columns {
  std::size_t input;
  std::size_t output;
  std::size_t count;
};

std::optional<Columns> columns_of(std::string_view header) {
  const auto cells = cells_of(header);
  const auto column = [&](std::string_view name) {
    return static_cast<std::size_t>(std::ranges::find(cells, name) - cells.begin());
  };
  for (const auto& [input, output] : {std::pair{"ContextTokens", "GeneratedTokens"},
                                      std::pair{"num_prefill_tokens", "num_decode_tokens"}}) {
    const Columns columns{column(input), column(output), cells.size()};
    if (columns.input < cells.size() && columns.output < cells.size()) return columns;
  }
  return {};
}

void read_csv(std::string_view text, Trace& trace) {
  Lines lines(text);
  const std::string_view header = lines.next().value_or("");
  const auto columns = columns_of(header);
  if (!columns) {
    throw TraceError(fmt::format("{}: row 0 (the header) is '{}'; {}", trace.file,
                                 header.substr(0, 60), accepted));
  }
  const auto names = cells_of(header);
  std::uint32_t number = 0;
  while (const auto line = lines.next()) {
    ++number;
    if (is_blank(*line)) continue;
    const auto cells = cells_of(*line);
    if (cells.size() != columns->count) {
      throw TraceError(fmt::format("{}: row {}: {} cells; {} would be accepted: {}", trace.file,
                                   number, cells.size(), columns->count, header));
    }
    const auto tokens = [&](std::size_t column) {
      const std::string_view cell = cells[column];
      std::uint64_t value = 0;
      const auto [end, error] = std::from_chars(cell.data(), cell.data() + cell.size(), value);
      if (error != std::errc{} || end != cell.data() + cell.size() || value > most_tokens) {
        throw TraceError(
            fmt::format("{}: row {}: {} is '{}'; an integer from 0 to {} would be accepted",
                        trace.file, number, names[column], cell.substr(0, 40), most_tokens));
      }
      return static_cast<std::uint32_t>(value);
    };
    const TraceRow row{.number = number,
                       .input_length = tokens(columns->input),
                       .output_length = tokens(columns->output)};
    if (row.input_length == 0) {
      ++trace.empty_prompts;
    } else {
      trace.rows.push_back(row);
    }
  }
}

/// Gives every row the ids that only it uses.
void assign_own(Trace& trace) {
  std::uint64_t next = static_cast<std::uint64_t>(first_own_token);
  for (TraceRow& row : trace.rows) {
    row.own = static_cast<Token>(next);
    next += row.input_length - trace.hashed_tokens(row) + std::uint64_t{row.output_length};
    if (next >= (std::uint64_t{1} << 31)) {
      throw TraceError(fmt::format(
          "{}: row {}: the {} tokens without an id up to here exceed the 2^30 token ids there are "
          "for "
          "them; fewer rows (--limit {}) would be accepted",
          trace.file, row.number, next - (std::uint64_t{1} << 30), &row - trace.rows.data()));
    }
  }
}

}  // namespace

std::uint32_t Trace::hashed_tokens(const TraceRow& row) const {
  return static_cast<std::uint32_t>(
      std::min<std::uint64_t>(row.input_length, std::uint64_t{row.num_ids} * block_tokens));
}

void Trace::prompt(const TraceRow& row, std::vector<Token>& into) const {
  into.resize(row.input_length);
  const std::uint32_t hashed = hashed_tokens(row);
  Token* at = into.data();
  std::uint32_t left = hashed;
  for (const std::uint32_t id : ids_of(row)) {
    const std::uint32_t count = std::min(left, block_tokens);
    std::iota(at, at + count, static_cast<Token>(id * block_tokens));
    at += count;
    left -= count;
  }
  std::iota(at, into.data() + into.size(), row.own);
}

void Trace::output(const TraceRow& row, std::vector<Token>& into) const {
  into.resize(row.output_length);
  std::iota(
      into.begin(), into.end(),
      static_cast<Token>(row.own + static_cast<Token>(row.input_length - hashed_tokens(row))));
}

std::uint64_t Trace::prompt_tokens() const {
  return std::accumulate(
      rows.begin(), rows.end(), std::uint64_t{0},
      [](std::uint64_t sum, const TraceRow& row) { return sum + row.input_length; });
}

std::uint32_t Trace::longest() const {
  std::uint32_t longest = 0;
  for (const TraceRow& row : rows)
    longest = std::max(longest, row.input_length + row.output_length);
  return longest;
}

Trace parse_trace(std::string_view text, const std::string& name, std::uint64_t limit) {
  Trace trace;
  trace.file = name;
  std::string unpacked;
  if (is_gzip(text)) {
    unpacked = gunzip(text, name);
    text = unpacked;
  }
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  if (first == text.npos)
    throw TraceError(fmt::format("{}: the file is empty; {}", name, accepted));
  if (text[first] == '{') {
    JsonTrace(text, trace).read();
  } else {
    read_csv(text, trace);
  }
  if (trace.rows.empty()) {
    throw TraceError(fmt::format("{}: no row has a prompt; at least one would be accepted", name));
  }
  if (limit < trace.rows.size()) {
    trace.rows.resize(limit);
    trace.ids.resize(limit == 0 ? 0 : trace.rows.back().first_id + trace.rows.back().num_ids);
  }
  assign_own(trace);
  return trace;
}

Trace read_trace(const std::string& path, std::uint64_t limit) {
  return parse_trace(read_file(path), path, limit);
}

}  // namespace kvleaf::cli
