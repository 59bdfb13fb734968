// Trace reading: the published files as they are, made-up ones of every format, and what is
// refused.
#include "trace.h"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <zlib.h>

#include <cstdlib>
#include <fstream>
#include <set>
#include <string>
#include <unordered_set>

#include "infinite_cache.h"

using namespace kvleaf;
using namespace kvleaf::cli;

namespace {

std::string traces(const std::string& name) { return std::string(KVLEAF_TRACES) + "/" + name; }

std::string gzip(const std::string& text) {
  z_stream stream{};
  REQUIRE(deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) == Z_OK);
  std::string out(deflateBound(&stream, text.size()) + 64, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  REQUIRE(deflate(&stream, Z_FINISH) == Z_STREAM_END);
  out.resize(out.size() - stream.avail_out);
  deflateEnd(&stream);
  return out;
}

std::string row(unsigned input, unsigned output, const std::string& ids,
                const std::string& more = "") {
  return fmt::format(
      "{{\"timestamp\": 0, \"input_length\": {}, \"output_length\": {}{}, \"hash_ids\": [{}]}}\n",
      input, output, more, ids);
}

/// What the refusal says; "" when nothing was refused.
std::string refusal(const std::string& text) {
  try {
    parse_trace(text, "t.jsonl");
    return "";
  } catch (const TraceError& error) {
    return error.what();
  }
}

std::vector<Token> prompt_of(const Trace& trace, std::size_t index) {
  std::vector<Token> tokens;
  trace.prompt(trace.rows[index], tokens);
  return tokens;
}

}  // namespace

TEST_CASE("every published trace is read, with the rows and tokens that its publisher counts") {
  struct Known {
    const char* file;
    std::size_t rows;
    std::uint32_t block;
    bool tail_has_id;
    std::uint64_t empty;
    std::uint64_t prompt_tokens;
    std::uint32_t longest_prompt;
  };
  for (const Known& known : {
           Known{"mooncake_conversation.jsonl.gz", 12031, 512, true, 0, 144793823, 126195},
           Known{"mooncake_synthetic.jsonl.gz", 3993, 512, true, 0, 61194628, 191378},
           Known{"rtp_llm_online.jsonl.gz", 8332, 1024, false, 0, 50559726, 31971},
           Known{"agent_sessions.jsonl.gz", 1566, 16, true, 53, 4009234, 36281},
           Known{"azure_llm_2023_conv.csv.gz", 19366, 0, false, 0, 22361870, 14050},
           Known{"azure_llm_2023_code.csv.gz", 8819, 0, false, 0, 18059974, 7437},
           Known{"arxiv_long_lengths.csv.gz", 10111, 0, false, 0, 298956566, 45819},
       }) {
    CAPTURE(known.file);
    const Trace trace = read_trace(traces(known.file));
    CHECK(trace.rows.size() == known.rows);
    CHECK(trace.block_tokens == known.block);
    CHECK(trace.tail_has_id == known.tail_has_id);
    CHECK(trace.empty_prompts == known.empty);
    CHECK(trace.prompt_tokens() == known.prompt_tokens);
    std::uint32_t longest = 0;
    for (const TraceRow& row : trace.rows) longest = std::max(longest, row.input_length);
    CHECK(longest == known.longest_prompt);
  }
}

TEST_CASE("the simple count over the files gives the published infinite-cache figures") {
  struct Figure {
    const char* file;
    double per_cent;
  };
  for (const Figure& figure :
       {Figure{"mooncake_conversation", 37.34}, Figure{"mooncake_synthetic", 65.04},
        Figure{"agent_sessions", 89.66}, Figure{"rtp_llm_online", 20.56}}) {
    CAPTURE(figure.file);
    const Trace trace = read_trace(traces(std::string(figure.file) + ".jsonl.gz"));
    std::uint64_t hit = 0;
    for (const std::uint32_t tokens : test::infinite_cache_hits(trace)) hit += tokens;
    CHECK(100.0 * static_cast<double>(hit) / static_cast<double>(trace.prompt_tokens()) ==
          doctest::Approx(figure.per_cent).epsilon(0.0001));
  }
}

TEST_CASE("prompts share exactly the tokens of the ids that they share") {
  const Trace trace =
      parse_trace(row(40, 3, "0,1,2") + row(45, 0, "0,1,9") + row(33, 2, "0,1,2"), "t");
  REQUIRE(trace.block_tokens == 16);
  const auto a = prompt_of(trace, 0), b = prompt_of(trace, 1), c = prompt_of(trace, 2);
  REQUIRE(a.size() == 40);
  REQUIRE(b.size() == 45);
  REQUIRE(c.size() == 33);
  CHECK(std::equal(a.begin(), a.begin() + 32, b.begin()));
  CHECK(a[32] != b[32]);
  CHECK(std::equal(c.begin(), c.end(), a.begin()));
  CHECK(a[0] == 0);
  CHECK(a[39] == 39);
  CHECK(b[32] == 9 * 16);
}

TEST_CASE("a tail without an id and every answer are tokens that nobody else has") {
  const Trace trace = read_trace(traces("rtp_llm_online.jsonl.gz"), 500);
  REQUIRE(trace.rows.size() == 500);
  std::unordered_set<Token> own;
  std::vector<Token> tokens;
  std::size_t count = 0;
  for (const TraceRow& row : trace.rows) {
    trace.prompt(row, tokens);
    for (std::size_t i = trace.hashed_tokens(row); i < tokens.size(); ++i, ++count)
      own.insert(tokens[i]);
    for (std::size_t i = 0; i < trace.hashed_tokens(row); ++i) REQUIRE(tokens[i] < first_own_token);
    trace.output(row, tokens);
    for (const Token token : tokens) {
      REQUIRE(token >= first_own_token);
      own.insert(token);
    }
    count += tokens.size();
  }
  CHECK(own.size() == count);
}

TEST_CASE("gzip and plain text, one stream or several, with LF or CRLF, read the same") {
  const std::string text = row(20, 1, "0,1") + "\n" + row(16, 0, "0");
  std::string crlf;
  for (const char c : text) crlf += c == '\n' ? std::string("\r\n") : std::string(1, c);
  for (const std::string& form :
       {text, crlf, gzip(text), gzip(row(20, 1, "0,1")) + gzip("\n" + row(16, 0, "0")),
        text.substr(0, text.size() - 1)}) {
    const Trace trace = parse_trace(form, "t");
    REQUIRE(trace.rows.size() == 2);
    CHECK(trace.rows[1].input_length == 16);
    CHECK(trace.rows[1].number == 3);  // the line in the file, blank ones counted
    CHECK(trace.ids == std::vector<std::uint32_t>{0, 1, 0});
  }
}

TEST_CASE(
    "the tokens of a block come from the rows, and from the keys where short rows leave a choice") {
  CHECK(parse_trace(row(6758, 1, "0,1,2,3,4,5,6,7,8,9,10,11,12,13"), "t").block_tokens == 512);
  CHECK(parse_trace(row(100, 1, "0,1"), "t").block_tokens == 64);
  CHECK(parse_trace(row(100, 1, "0"), "t").block_tokens == 512);
  CHECK(parse_trace(row(10, 1, "0", ", \"session\": 3"), "t").block_tokens == 16);
  CHECK(parse_trace(row(48, 1, "0,1,2"), "t").block_tokens == 16);
  const Trace tail_less = parse_trace(row(1500, 1, "0", ", \"priority\": 3"), "t");
  CHECK(tail_less.block_tokens == 1024);
  CHECK_FALSE(tail_less.tail_has_id);
}

TEST_CASE("a CSV's columns are found by name") {
  const Trace azure = parse_trace(
      "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023,374,44\r\n2023,0,1\r\n2023,396,109", "t");
  REQUIRE(azure.rows.size() == 2);
  CHECK(azure.empty_prompts == 1);
  CHECK(azure.rows[1].number == 3);
  CHECK(azure.rows[1].input_length == 396);
  CHECK(azure.rows[1].output_length == 109);
  const Trace arxiv = parse_trace("pd_ratio,num_decode_tokens,num_prefill_tokens\n1.5,3,7\n", "t");
  CHECK(arxiv.rows.at(0).input_length == 7);
  CHECK(arxiv.rows.at(0).output_length == 3);
}

TEST_CASE("a limit drops the later requests, but the whole file is checked") {
  const std::string text = row(20, 1, "0,1") + row(0, 0, "") + row(16, 0, "0") + row(17, 0, "0,1");
  const Trace trace = parse_trace(text, "t", 2);
  REQUIRE(trace.rows.size() == 2);
  CHECK(trace.rows[1].number == 3);
  CHECK(trace.ids.size() == 3);
  CHECK_THROWS_AS(parse_trace(text + "{", "t", 1), TraceError);
}

TEST_CASE(
    "what cannot be read is refused in one line that names file, row and key and what is "
    "accepted") {
  const std::string good = row(20, 1, "0,1");
  struct Bad {
    std::string text;
    std::vector<std::string> says;
  };
  for (const Bad& bad : {
           Bad{"", {"t.jsonl: the file is empty", "accepted"}},
           Bad{"hello\n", {"t.jsonl", "header", "'hello'", "ContextTokens"}},
           Bad{good + "{\"input_length\": 3\n",
               {"t.jsonl: row 2", "not JSON from byte", "one object a line"}},
           Bad{good + "[1, 2]\n", {"t.jsonl: row 2", "not a JSON object"}},
           Bad{good + "{\"input_length\": 3, \"hash_ids\": [0]}\n",
               {"t.jsonl: row 2", "no key output_length"}},
           Bad{"{\"output_length\": 3}\n", {"t.jsonl: row 1", "no key input_length"}},
           Bad{good + "{\"input_length\": 3, \"output_length\": 1}\n",
               {"t.jsonl: row 2", "no key hash_ids"}},
           Bad{good + "{\"input_length\": -3, \"output_length\": 1, \"hash_ids\": [0]}\n",
               {"t.jsonl: row 2", "input_length is -3", "from 0 to 1073741823"}},
           Bad{good + "{\"input_length\": \"3\", \"output_length\": 1, \"hash_ids\": [0]}\n",
               {"t.jsonl: row 2", "input_length is \"3\""}},
           Bad{good + "{\"input_length\": 3, \"output_length\": 1.5, \"hash_ids\": [0]}\n",
               {"t.jsonl: row 2", "output_length is 1.5"}},
           Bad{good + "{\"input_length\": 3, \"output_length\": 1, \"hash_ids\": 7}\n",
               {"t.jsonl: row 2", "hash_ids is 7", "a list of integers"}},
           Bad{good + "{\"input_length\": 3, \"output_length\": 1, \"hash_ids\": [null]}\n",
               {"t.jsonl: row 2", "hash_ids holds null"}},
           Bad{good + row(17, 0, "0,1") + row(33, 0, "0,1") + row(12, 0, "0"),
               {"t.jsonl: row 3", "hash_ids has 2 ids", "input_length of 33", "3 would be accepted",
                "blocks of 16"}},
           Bad{good + row(0, 0, "1"), {"t.jsonl: row 2", "hash_ids is not empty"}},
           Bad{good + row(20, 0, "0,67108864"),
               {"t.jsonl: row 2", "hash_ids holds 67108864", "below 67108864"}},
           Bad{row(0, 1, ""), {"t.jsonl: no row has a prompt"}},
           Bad{row(100000, 1, "0"),
               {"t.jsonl: row 1", "hash_ids has 1 ids",
                "196 would be accepted with blocks of 512"}},
           Bad{"a,ContextTokens,GeneratedTokens\n1,2\n",
               {"t.jsonl: row 1", "2 cells", "3 would be accepted"}},
           Bad{"a,ContextTokens,GeneratedTokens\n1,2,x\n",
               {"t.jsonl: row 1", "GeneratedTokens is 'x'", "integer from 0"}},
           Bad{"ContextTokens,GeneratedTokens\n2,3\n1073741823,1\n1,1\n",
               {"t.jsonl: row 2", "exceed the 2^30", "--limit 1"}},
       }) {
    const std::string said = refusal(bad.text);
    CAPTURE(bad.text);
    CAPTURE(said);
    CHECK(said.find('\n') == std::string::npos);
    for (const std::string& words : bad.says)
      CHECK_MESSAGE(said.find(words) != std::string::npos, words);
  }
}

TEST_CASE("a gzip file that is cut off or damaged is refused wherever it is cut") {
  std::string text;
  for (unsigned i = 0; i < 200; ++i) text += row(16 + i % 16, i, i % 16 == 0 ? "7" : "7,8");
  const std::string whole = gzip(text);
  REQUIRE(parse_trace(whole, "t").rows.size() == 200);
  for (std::size_t size = 2; size < whole.size(); size += 1 + size / 40) {
    const std::string said = refusal(whole.substr(0, size));
    CAPTURE(size);
    CHECK(said.find("t.jsonl: the gzip stream is cut off after") == 0);
  }
  std::string damaged = whole;
  damaged[damaged.size() / 2] = static_cast<char>(damaged[damaged.size() / 2] ^ 0x55);
  CHECK(refusal(damaged).find("t.jsonl: ") == 0);
  CHECK(refusal(whole + "rubbish").find("broken gzip data") != std::string::npos);
}

TEST_CASE("a file that is not there is refused by name") {
  CHECK_THROWS_WITH_AS(read_trace("/nowhere/t.jsonl"),
                       "/nowhere/t.jsonl: No such file or directory", TraceError);
  CHECK_THROWS_AS(read_trace("/"), TraceError);
}
