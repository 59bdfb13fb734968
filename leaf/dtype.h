// Element types of pages and staged arrays, with the names that frameworks use.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace kvleaf {

enum class DType : std::uint8_t {
  uint8,
  int8,
  int32,
  int64,
  float16,
  bfloat16,
  float32,
  float8_e4m3,
  float8_e5m2,
};

/// Bytes of one element.
constexpr std::uint32_t size_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::uint8:
    case DType::int8:
    case DType::float8_e4m3:
    case DType::float8_e5m2: return 1;
    case DType::float16:
    case DType::bfloat16: return 2;
    case DType::int32:
    case DType::float32: return 4;
    case DType::int64: return 8;
  }
  return 0;
}

/// "bfloat16", "float8_e4m3", …
std::string_view name_of(DType dtype) noexcept;

/// The type with this name. Accepts "bf16", "fp16", "half", "fp8", "float8_e4m3fn",
/// "torch.bfloat16" and the like as well; nothing for a name it does not know.
std::optional<DType> dtype_of(std::string_view name) noexcept;

/// The same, throwing InvalidArgument that lists the accepted names.
DType require_dtype(std::string_view name);

}  // namespace kvleaf
