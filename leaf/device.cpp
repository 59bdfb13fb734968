#include "kvleaf/leaf/device.h"

#include <fmt/format.h>

#include <charconv>

namespace kvleaf {

std::string to_string(Device device) {
  return device.kind == Device::Kind::cpu ? "cpu" : fmt::format("cuda:{}", device.index);
}

Device require_device(std::string_view name) {
  if (name == "cpu") return {};
  if (name == "cuda") return {Device::Kind::cuda, 0};
  constexpr std::string_view prefix = "cuda:";
  if (name.starts_with(prefix)) {
    const std::string_view number = name.substr(prefix.size());
    std::int32_t index = -1;
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), index);
    if (error == std::errc() && end == number.data() + number.size() && index >= 0)
      return {Device::Kind::cuda, index};
  }
  throw InvalidArgument(fmt::format("device '{}'; expected cpu, cuda or cuda:N", name));
}

}  // namespace kvleaf
