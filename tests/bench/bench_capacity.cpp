// Workload "capacity" over published models; see capacity.h. Floors are the byte-exact ideals.
#include <fmt/format.h>

#include <string>
#include <vector>

#include "bench/bench.h"
#include "bench/capacity.h"
#include "trace.h"

namespace {

std::vector<std::uint32_t> lengths_of(const char* trace) {
  std::vector<std::uint32_t> lengths;
  const kvleaf::cli::Trace rows =
      kvleaf::cli::read_trace(std::string(KVLEAF_TEST_DATA) + "/traces/" + trace);
  for (const auto& row : rows.rows) lengths.push_back(row.input_length + row.output_length);
  return lengths;
}

}  // namespace

int main(int argc, char** argv) {
  bench::Suite suite("capacity", argc, argv);
  for (const char* name : {"llama-3.1-70b", "gemma-3-27b", "gpt-oss-20b", "qwen3-next-80b-a3b",
                           "nemotron-3-nano-30b-a3b"}) {
    for (const bool caching : {true, false}) {
      suite.add([=](bool quick) {
        bench::CapacityOptions options;
        options.prefix_caching = caching;
        if (quick) options.budget_bytes = 2ull << 30;
        const auto model = kvleaf::model_from_config(
            std::string(KVLEAF_TEST_DATA) + "/models/" + name + ".json",
            {.budget_bytes = options.budget_bytes, .expected_tokens = options.expected_tokens});
        const bench::Capacity found =
            bench::measure_capacity(model, lengths_of("azure_llm_2023_conv.csv.gz"), options);
        const std::string where = fmt::format(
            "{} P=16 {} GiB, steps of 512, prefix caching {}{}", name, options.budget_bytes >> 30,
            caching ? "on" : "off",
            found.state_parts > 1 ? fmt::format(", states in {} leaves", found.state_parts) : "");
        return std::vector<bench::Figure>{
            {where, "requests", "requests", found.requests, found.ideal_requests},
            {where, "ideal_requests", "requests", found.ideal_requests},
            {where, "useful_pct", "%", found.useful_pct, 100.0}};
      });
    }
  }
  return suite.run();
}
