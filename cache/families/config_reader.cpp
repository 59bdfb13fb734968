#include "kvleaf/cache/families/config_reader.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "kvleaf/leaf/errors.h"

namespace kvleaf {
namespace {

/// The value as a message shows it. Containers are named, not printed: they may be deep and long.
std::string shown(const nlohmann::json& value) {
  if (value.is_array()) return fmt::format("a list of {}", value.size());
  if (value.is_object()) return fmt::format("an object of {}", value.size());
  std::string text = value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

/// Floats are refused even where they are whole: 4.0 layers is a broken file.
std::optional<std::uint32_t> integer(const nlohmann::json& value, std::uint64_t least,
                                     std::uint64_t most) {
  if (!value.is_number_integer()) return {};
  if (!value.is_number_unsigned()) return {};  // negative
  const std::uint64_t n = value.get<std::uint64_t>();
  if (n < least || n > most) return {};
  return static_cast<std::uint32_t>(n);
}

}  // namespace

void ConfigReader::fail(std::string_view key, const std::string& what) const {
  throw ConfigError(fmt::format("{}: {} {}", source_, path_of(key), what));
}

const nlohmann::json* ConfigReader::find(Key key) const {
  for (const std::string_view spelling : key) {
    const auto it = object_->find(spelling);
    if (it != object_->end() && !it->is_null()) return &*it;
  }
  return nullptr;
}

std::uint32_t ConfigReader::count(Key key, std::uint32_t most) const {
  if (const std::optional<std::uint32_t> n = maybe_count(key, most)) return *n;
  const std::string also =
      key.size() == 1
          ? ""
          : fmt::format(" (also read: {})", fmt::join(key.begin() + 1, key.end(), ", "));
  fail(*key.begin(), fmt::format("is missing{}; expected an integer from 1 to {}", also, most));
}

std::uint32_t ConfigReader::count(Key key, std::uint32_t most, std::uint32_t otherwise) const {
  return maybe_count(key, most).value_or(otherwise);
}

std::optional<std::uint32_t> ConfigReader::maybe_count(Key key, std::uint32_t most) const {
  for (const std::string_view spelling : key) {
    const nlohmann::json* value = find({spelling});
    if (value == nullptr) continue;
    const std::optional<std::uint32_t> n = integer(*value, 1, most);
    if (!n)
      fail(spelling, fmt::format("is {}; expected an integer from 1 to {}", shown(*value), most));
    return n;
  }
  return {};
}

std::uint32_t ConfigReader::count_or_zero(std::string_view key, std::uint32_t most) const {
  const nlohmann::json* value = find({key});
  if (value == nullptr) return 0;
  const std::optional<std::uint32_t> n = integer(*value, 0, most);
  if (!n) fail(key, fmt::format("is {}; expected an integer from 0 to {}", shown(*value), most));
  return *n;
}

std::uint32_t ConfigReader::kernel(std::string_view key) const {
  const std::uint32_t width = count({key});
  if (width < 2)
    fail(key, fmt::format("is {}; expected an integer from 2 to {}", width, max_count));
  return width;
}

bool ConfigReader::flag(std::string_view key, bool otherwise) const {
  const nlohmann::json* value = find({key});
  if (value == nullptr) return otherwise;
  if (!value->is_boolean()) fail(key, fmt::format("is {}; expected true or false", shown(*value)));
  return value->get<bool>();
}

std::string ConfigReader::word(std::string_view key) const {
  const nlohmann::json* value = find({key});
  if (value == nullptr) fail(key, "is missing; expected a string");
  if (!value->is_string()) fail(key, fmt::format("is {}; expected a string", shown(*value)));
  return value->get<std::string>();
}

std::optional<DType> ConfigReader::maybe_dtype(Key key) const {
  for (const std::string_view spelling : key) {
    if (!has(spelling)) continue;
    const std::string name = word(spelling);
    if (name == "auto") continue;
    const std::optional<DType> dtype = dtype_of(name);
    if (!dtype)
      fail(spelling, fmt::format("is \"{}\"; expected \"bfloat16\", \"float16\", \"float32\" or "
                                 "\"float8_e4m3\"",
                                 name));
    return dtype;
  }
  return {};
}

std::vector<std::uint32_t> ConfigReader::counts(std::string_view key, std::uint32_t most) const {
  const nlohmann::json* value = find({key});
  if (value == nullptr) fail(key, "is missing; expected a list of integers");
  if (!value->is_array())
    fail(key, fmt::format("is {}; expected a list of integers", shown(*value)));
  std::vector<std::uint32_t> numbers;
  numbers.reserve(value->size());
  for (const nlohmann::json& element : *value) {
    const std::optional<std::uint32_t> n = integer(element, 0, most);
    if (!n)
      fail(fmt::format("{}[{}]", key, numbers.size()),
           fmt::format("is {}; expected an integer from 0 to {}", shown(element), most));
    numbers.push_back(*n);
  }
  return numbers;
}

std::vector<std::string> ConfigReader::words(std::string_view key) const {
  const nlohmann::json* value = find({key});
  if (value == nullptr) fail(key, "is missing; expected a list of strings");
  if (!value->is_array())
    fail(key, fmt::format("is {}; expected a list of strings", shown(*value)));
  std::vector<std::string> list;
  list.reserve(value->size());
  for (const nlohmann::json& element : *value) {
    if (!element.is_string())
      fail(fmt::format("{}[{}]", key, list.size()),
           fmt::format("is {}; expected a string", shown(element)));
    list.push_back(element.get<std::string>());
  }
  return list;
}

ConfigReader ConfigReader::section(std::string_view key) const {
  const nlohmann::json* value = find({key});
  if (value == nullptr) fail(key, "is missing; expected an object");
  if (!value->is_object()) fail(key, fmt::format("is {}; expected an object", shown(*value)));
  ConfigReader inner = *this;
  inner.object_ = value;
  inner.path_ = path_of(key) + ".";
  return inner;
}

ConfigReader ConfigReader::section_or_self(std::string_view key) const {
  return has(key) ? section(key) : *this;
}

std::uint32_t ConfigReader::shard(std::uint32_t n, std::string_view key) const {
  if (n % tensor_parallel_ != 0)
    fail(key, fmt::format("gives {}, which tensor_parallel {} does not divide; expected a divisor "
                          "of {}",
                          n, tensor_parallel_, n));
  return n / tensor_parallel_;
}

std::uint32_t ConfigReader::shard_or_replicate(std::uint32_t n, std::string_view key) const {
  if (n >= tensor_parallel_) return shard(n, key);
  if (tensor_parallel_ % n != 0)
    fail(key,
         fmt::format("gives {}, which tensor_parallel {} neither divides nor is a multiple of; "
                     "expected a divisor or a multiple of {}",
                     n, tensor_parallel_, n));
  return 1;
}

}  // namespace kvleaf
