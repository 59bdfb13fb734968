// How many requests of a real trace's lengths fit a budget, over published models. The figures are
// those of the joint rule on the cheapest geometry; see bench/capacity.h for the ideal.
#include "bench/capacity.h"

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "trace.h"

namespace kvleaf {
namespace {

struct Expected {
  const char* model;
  std::uint32_t requests;  // at least
  std::uint32_t ideal;
};

ModelLeaves model_of(const char* name, const bench::CapacityOptions& options) {
  return model_from_config(
      std::string(KVLEAF_TEST_DATA) + "/models/" + name + ".json",
      {.budget_bytes = options.budget_bytes, .expected_tokens = options.expected_tokens});
}

const std::vector<std::uint32_t>& conversation_lengths() {
  static const std::vector<std::uint32_t> lengths = [] {
    std::vector<std::uint32_t> read;
    const cli::Trace trace =
        cli::read_trace(std::string(KVLEAF_TEST_DATA) + "/traces/azure_llm_2023_conv.csv.gz");
    for (const auto& row : trace.rows) read.push_back(row.input_length + row.output_length);
    return read;
  }();
  return lengths;
}

}  // namespace

TEST_CASE(
    "16 GiB hold as many requests as the joint rule allows, prefix caching on and off alike") {
  for (const Expected& expected : {Expected{"llama-3.1-70b", 61, 61},
                                   {"gemma-3-27b", 58, 59},
                                   {"gpt-oss-20b", 524, 530},
                                   {"qwen3-next-80b-a3b", 163, 163},
                                   {"nemotron-3-nano-30b-a3b", 303, 305}}) {
    CAPTURE(expected.model);
    for (const bool caching : {true, false}) {
      CAPTURE(caching);
      bench::CapacityOptions options;
      options.prefix_caching = caching;
      const ModelLeaves model = model_of(expected.model, options);
      const bench::Capacity found = bench::measure_capacity(model, conversation_lengths(), options);
      CHECK(found.requests >= expected.requests);
      CHECK(found.ideal_requests == expected.ideal);
      CHECK(found.requests <= found.ideal_requests);
      CHECK(found.useful_pct <= 100);
      // Checkpoints are what could have cost admission: some were taken, while there was room.
      if (found.state_parts > 0) CHECK((found.checkpoints > 0) == caching);
    }
  }
}

}  // namespace kvleaf
