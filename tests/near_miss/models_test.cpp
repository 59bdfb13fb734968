// Every leaf of every published model configuration keeps the leaf contract, plain and in variants.
#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <vector>

#include "kvleaf/cache/model_leaves.h"
#include "kvleaf/testing/leaf_contract_doctest.h"

namespace kvleaf {
namespace {

std::vector<std::filesystem::path> models() {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(KVLEAF_TEST_DATA "/models")) {
    if (entry.path().extension() == ".json") files.push_back(entry.path());
  }
  std::ranges::sort(files);
  return files;
}

void check_all(const std::filesystem::path& file, const LeavesOptions& options) {
  const ModelConfig config =
      read_model_config(file, {.dtype = options.dtype, .tensor_parallel = options.tensor_parallel});
  const std::size_t leaves = compose_leaves(config, options).leaves.size();
  for (std::size_t i = 0; i < leaves; ++i) {
    CAPTURE(file.stem().string());
    CAPTURE(i);
    // Windows of 4,096 tokens and more are what a few pages are: shorter requests show as much.
    KVLEAF_CHECK_LEAF([&] { return compose_leaves(config, options).leaves[i]; },
                      testing::ContractOptions{.max_len = 1024, .histories = 4});
  }
}

TEST_CASE("every leaf of every published model keeps the contract") {
  const auto files = models();
  REQUIRE(files.size() >= 50);
  for (const auto& file : files) check_all(file, {});
}

TEST_CASE(
    "so do quantised ones with scales, one rank's, and states for kernels that read and write "
    "apart") {
  for (const char* name :
       {"gemma-3-27b", "qwen3-next-80b-a3b", "whisper-large-v3", "deepseek-v4-flash"}) {
    const std::filesystem::path file =
        std::filesystem::path(KVLEAF_TEST_DATA "/models") / (std::string(name) + ".json");
    check_all(file, {.kv_dtype = DType::float8_e4m3, .scales = ScalesOptions{.granularity = 64}});
    check_all(file,
              {.tokens_per_page = 64, .tensor_parallel = 2, .state_kernel = StateKernel::in_out});
  }
}

}  // namespace
}  // namespace kvleaf
