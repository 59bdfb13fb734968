// ConfigReader: typed access to one object of a config.json. Every value is checked where it is
// read, and what is wrong is reported with the file, the path of the key and what would be
// accepted.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvleaf/leaf/dtype.h"

namespace kvleaf {

class ConfigReader {
 public:
  /// The spellings of one key, the usual one first: models rename keys more than they change them.
  using Key = std::initializer_list<std::string_view>;

  static constexpr std::uint32_t max_count = 1 << 16;  // heads, widths of a head, kernels
  static constexpr std::uint32_t max_width = 1 << 20;  // hidden sizes
  static constexpr std::uint32_t max_layers = 1 << 12;
  static constexpr std::uint32_t max_tokens = 0x7fffffff;  // positions and windows

  ConfigReader(const nlohmann::json& object, std::string source, std::uint32_t tensor_parallel)
      : object_(&object), source_(std::move(source)), tensor_parallel_(tensor_parallel) {}

  /// Present and not null: a null means "not used" in every published config.
  bool has(std::string_view key) const { return find({key}) != nullptr; }
  bool has(Key key) const { return find(key) != nullptr; }

  /// An integer from 1 to `most`.
  std::uint32_t count(Key key, std::uint32_t most = max_count) const;
  std::uint32_t count(Key key, std::uint32_t most, std::uint32_t otherwise) const;
  std::optional<std::uint32_t> maybe_count(Key key, std::uint32_t most = max_count) const;
  /// An integer from 0 to `most`; 0 where absent.
  std::uint32_t count_or_zero(std::string_view key, std::uint32_t most = max_count) const;
  /// Width of a convolution: an integer from 2, since a state keeps one input less.
  std::uint32_t kernel(std::string_view key) const;
  bool flag(std::string_view key, bool otherwise) const;
  std::string word(std::string_view key) const;
  std::optional<DType> maybe_dtype(Key key) const;
  /// A list of integers from 0 to `most`.
  std::vector<std::uint32_t> counts(std::string_view key, std::uint32_t most = max_count) const;
  std::vector<std::string> words(std::string_view key) const;
  /// The raw value, nullptr when absent or null.
  const nlohmann::json* find(Key key) const;

  ConfigReader section(std::string_view key) const;
  /// The object under `key`, or this one where there is none.
  ConfigReader section_or_self(std::string_view key) const;

  /// What one rank holds of `n` things that are divided evenly. Throws ConfigError blaming `key`.
  std::uint32_t shard(std::uint32_t n, std::string_view key) const;
  /// The same, but fewer things than ranks are replicated.
  std::uint32_t shard_or_replicate(std::uint32_t n, std::string_view key) const;

  const std::string& source() const noexcept { return source_; }
  /// Throws ConfigError "FILE: PATH.KEY <what>".
  [[noreturn]] void fail(std::string_view key, const std::string& what) const;

 private:
  std::string path_of(std::string_view key) const { return path_ + std::string(key); }

  const nlohmann::json* object_;  // outlived by the document
  std::string source_;
  std::string path_;  // "text_config." inside a section
  std::uint32_t tensor_parallel_;
};

}  // namespace kvleaf
