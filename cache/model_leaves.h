// From a model's configuration to leaves: one leaf per group and page shape, so that layers which
// are read, advanced and evicted together lie in one page.
//
//   ModelLeaves model = model_from_config("config.json", {.budget_bytes = 16ull << 30});
//   BlockManager manager(model.leaves, {.budget_bytes = 16ull << 30, .max_len = 32768});
//
//   leaf id                       holds
//   full, window_1024, chunk_8192 keys and values of the text
//   latent, latent_4              one entry per token, or per 4 tokens, for all heads
//   indexer, indexer_4            the keys by which sparse layers choose
//   state, state_0, state_1 …     recurrent states, all slabs of a layer in one page
//   cross                         keys and values of an encoder's tokens
//   *.scales                      beside a quantised leaf, when asked for
//
// A state page holds all state layers of a request, often far more than any other page; given a
// budget, it is split into equal leaves where a pool of these pages then costs less.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvleaf/cache/model_config.h"
#include "kvleaf/leaf/leaf.h"

namespace kvleaf {

/// What is stored of a layer whose values are made from its keys' projection.
enum class EqualValues : std::uint8_t {
  stored,  // as of any layer: kernels that read K after rotation and V before it need both
  implied  // keys only: the kernel derives the values
};

struct LeavesOptions {
  std::uint32_t tokens_per_page = 16;  // of attention; states may be resumed at its multiples
  std::optional<DType> dtype = {};     // of the model; none: the config's, else bfloat16
  std::optional<DType> kv_dtype = {};  // of keys, values and latents; none: the model's
  std::uint32_t tensor_parallel = 1;   // leaves are those of one rank
  std::optional<std::uint64_t> budget_bytes = {};  // of the arena; given, states may be split
  std::uint32_t expected_tokens = 2048;  // of a typical request; weighs leaves in that choice
  EqualValues equal_values = EqualValues::stored;
  /// Of one-byte kv_dtypes: a scales leaf beside each leaf of keys, values or latents.
  std::optional<ScalesOptions> scales = {};
  StateKernel state_kernel = StateKernel::in_place;
};

/// How a state leaf's layers were divided, and what the other divisions would have cost.
struct StateSplit {
  struct Candidate {
    std::uint32_t parts = 1;
    bool fits = false;  // in the budget
    double cost = 0;    // of the geometry, plus 0.001 for each leaf beyond the first
  };
  std::string leaf;  // "state"; its parts are "state_0", "state_1", …
  std::uint32_t layers = 0;
  std::uint32_t parts = 1;            // chosen
  std::vector<Candidate> candidates;  // every divisor of `layers`
};

struct ModelLeaves {
  Leaves leaves;
  /// Per leaf, the layers of the model whose entries it holds, ascending. Layers that read
  /// another's entries are not among them: config.layers says which they read.
  std::vector<std::vector<std::uint32_t>> layers_of;
  /// Per leaf, what it holds of each of those layers; beside quantised values, their scales too.
  std::vector<LayerCache> holds;
  std::vector<StateSplit> splits;  // with a budget, one per state leaf
  ModelConfig config;
};

/// Throws InvalidArgument for options out of range, ConfigError for a model that keeps nothing, and
/// GeometryError when a budget is given and no division of the states fits it.
ModelLeaves compose_leaves(ModelConfig config, const LeavesOptions& options = {});

/// Reads and composes. Throws as read_model_config and compose_leaves.
ModelLeaves model_from_config(const std::filesystem::path& file, const LeavesOptions& options = {});
ModelLeaves model_from_json(std::string_view json, const LeavesOptions& options = {},
                            std::string_view source = "config");
/// The leaves alone.
Leaves leaves_from_config(const std::filesystem::path& file, const LeavesOptions& options = {});
Leaves leaves_from_json(std::string_view json, const LeavesOptions& options = {},
                        std::string_view source = "config");

}  // namespace kvleaf
