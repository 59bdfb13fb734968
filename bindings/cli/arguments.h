// Values on the command line: sizes, counts, element types, and the arguments that say which model.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "kvleaf/cache/model_leaves.h"

namespace kvleaf::cli {

/// "16GiB", "64 MiB", "1.5G", "1000000" in bytes. K, M, G, T and KiB … TiB count by 1024, KB … TB
/// by 1000. Throws InvalidArgument that says what is accepted.
std::uint64_t parse_size(std::string_view text);
/// An integer from 1 to `most`. Throws InvalidArgument.
std::uint32_t parse_count(std::string_view text, std::uint32_t most);

/// Options that read these. A wrong value is a CLI::ValidationError that names the option.
CLI::Option* add_size(CLI::App& app, const std::string& name, std::uint64_t& value,
                      const std::string& help);
CLI::Option* add_count(CLI::App& app, const std::string& name, std::uint32_t& value,
                       const std::string& help, std::uint32_t most = 0x7fffffff);
CLI::Option* add_count(CLI::App& app, const std::string& name, std::optional<std::uint32_t>& value,
                       const std::string& help, std::uint32_t most = 0x7fffffff);

/// Which model, and how its entries are stored. Outlives the parsing of the application it is added
/// to.
struct ModelArguments {
  std::string config;  // file
  LeavesOptions leaves;

  /// `config_name`: of the argument that gives the file, positional or an option.
  void add_to(CLI::App& app, const std::string& config_name = "CONFIG");
  ModelLeaves load() const { return model_from_config(config, leaves); }
};

/// Positions of a request when neither the command line nor the model says how many.
inline constexpr std::uint32_t usual_max_len = 131072;

}  // namespace kvleaf::cli
