#include "arguments.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>

#include "kvleaf/leaf/errors.h"

namespace kvleaf::cli {
namespace {

struct Unit {
  std::string_view name;  // in lower case
  double bytes;
};
constexpr double k = 1024;
constexpr std::array units = {
    Unit{"", 1},
    Unit{"b", 1},
    Unit{"k", k},
    Unit{"kib", k},
    Unit{"kb", 1e3},
    Unit{"m", k* k},
    Unit{"mib", k* k},
    Unit{"mb", 1e6},
    Unit{"g", k* k* k},
    Unit{"gib", k* k* k},
    Unit{"gb", 1e9},
    Unit{"t", k* k* k* k},
    Unit{"tib", k* k* k* k},
    Unit{"tb", 1e12},
};
constexpr double most_bytes = 9223372036854775808.0;  // 2^63: sums of sizes stay in 64 bits

[[noreturn]] void not_a_size(std::string_view text) {
  throw InvalidArgument(
      fmt::format("\"{}\" is no size; expected a number of bytes with a unit or without "
                  "one, as 16GiB, 64 MiB, 1.5G or 1000000",
                  text));
}

/// Reports what a parser throws as an error of this option.
template <class Parse>
CLI::Option* add_parsed(CLI::App& app, const std::string& name, const std::string& type,
                        const std::string& help, Parse parse) {
  return app
      .add_option(
          name,
          [name, parse](const CLI::results_t& results) {
            try {
              parse(results.at(0));
            } catch (const KVError& error) {
              throw CLI::ValidationError(name, error.what());
            }
            return true;
          },
          help)
      ->type_name(type);
}

}  // namespace

std::uint64_t parse_size(std::string_view text) {
  std::string number, unit;
  for (const char c : text) {
    const bool is_space = c == ' ';
    if (unit.empty() && (std::isdigit(static_cast<unsigned char>(c)) || c == '.'))
      number += c;
    else if (!is_space)
      unit += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    else if (!unit.empty())
      not_a_size(text);
  }
  double value = 0;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), value);
  const auto found = std::ranges::find(units, std::string_view(unit), &Unit::name);
  if (number.empty() || error != std::errc() || end != number.data() + number.size() ||
      found == units.end())
    not_a_size(text);
  value *= found->bytes;
  if (value < 1 || value >= most_bytes)
    throw InvalidArgument(
        fmt::format("\"{}\" is out of range; expected 1 byte to 8388607 TiB", text));
  if (value != std::floor(value) && found->bytes == 1) not_a_size(text);  // half a byte
  return static_cast<std::uint64_t>(value);
}

std::uint32_t parse_count(std::string_view text, std::uint32_t most) {
  std::uint32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value == 0 || value > most)
    throw InvalidArgument(
        fmt::format("\"{}\" is out of range; expected an integer from 1 to {}", text, most));
  return value;
}

CLI::Option* add_size(CLI::App& app, const std::string& name, std::uint64_t& value,
                      const std::string& help) {
  return add_parsed(app, name, "SIZE", help,
                    [&value](const std::string& text) { value = parse_size(text); });
}

CLI::Option* add_count(CLI::App& app, const std::string& name, std::uint32_t& value,
                       const std::string& help, std::uint32_t most) {
  return add_parsed(app, name, "N", fmt::format("{} [{}]", help, value),
                    [&value, most](const std::string& text) { value = parse_count(text, most); });
}

CLI::Option* add_count(CLI::App& app, const std::string& name, std::optional<std::uint32_t>& value,
                       const std::string& help, std::uint32_t most) {
  return add_parsed(app, name, "N", help,
                    [&value, most](const std::string& text) { value = parse_count(text, most); });
}

void ModelArguments::add_to(CLI::App& app, const std::string& config_name) {
  app.add_option(config_name, config, "the model's config.json")->required()->type_name("FILE");
  add_count(app, "--page-tokens", leaves.tokens_per_page, "tokens of a page of attention", 65536);
  add_parsed(app, "--dtype", "TYPE", "element type of the model [the config's, else bfloat16]",
             [this](const std::string& name) { leaves.dtype = require_dtype(name); });
  add_parsed(app, "--kv-dtype", "TYPE", "element type of keys and values [the model's]",
             [this](const std::string& name) { leaves.kv_dtype = require_dtype(name); });
  add_count(app, "--tensor-parallel", leaves.tensor_parallel,
            "ranks that divide the heads; figures are those of one rank", 65536);
  add_count(app, "--expected-tokens", leaves.expected_tokens,
            "tokens of a typical request, by which leaves are weighed");
}

}  // namespace kvleaf::cli
