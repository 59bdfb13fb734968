#include "kvleaf/leaf/dtype.h"

#include <fmt/format.h>

#include <string>

#include "kvleaf/leaf/errors.h"

namespace kvleaf {
namespace {

struct Name {
  std::string_view name;
  DType dtype;
};

// The first name of each type is the one we print. "fp8" alone means e4m3, as in serving engines.
constexpr Name names[] = {
    {"uint8", DType::uint8},
    {"int8", DType::int8},
    {"int32", DType::int32},
    {"int64", DType::int64},
    {"float16", DType::float16},
    {"fp16", DType::float16},
    {"half", DType::float16},
    {"bfloat16", DType::bfloat16},
    {"bf16", DType::bfloat16},
    {"float32", DType::float32},
    {"fp32", DType::float32},
    {"float", DType::float32},
    {"float8_e4m3", DType::float8_e4m3},
    {"float8_e4m3fn", DType::float8_e4m3},
    {"fp8", DType::float8_e4m3},
    {"fp8_e4m3", DType::float8_e4m3},
    {"float8_e5m2", DType::float8_e5m2},
    {"fp8_e5m2", DType::float8_e5m2},
};

}  // namespace

std::string_view name_of(DType dtype) noexcept {
  for (const Name& entry : names) {
    if (entry.dtype == dtype) return entry.name;
  }
  return "";
}

std::optional<DType> dtype_of(std::string_view name) noexcept {
  constexpr std::string_view torch = "torch.";
  if (name.substr(0, torch.size()) == torch) name.remove_prefix(torch.size());
  for (const Name& entry : names) {
    if (entry.name == name) return entry.dtype;
  }
  return std::nullopt;
}

DType require_dtype(std::string_view name) {
  if (const auto dtype = dtype_of(name)) return *dtype;
  std::string accepted;
  for (const Name& entry : names) {
    accepted += accepted.empty() ? "" : ", ";
    accepted += entry.name;
  }
  throw InvalidArgument(fmt::format("unknown dtype '{}'; accepted: {}", name, accepted));
}

}  // namespace kvleaf
