#include "kvleaf/leaf/staged.h"

#include <fmt/format.h>

#include <string>

namespace kvleaf {

void StagedArray::check_element(std::size_t bytes) const {
  if (bytes != size_of(dtype)) {
    throw PlanShapeError(
        fmt::format("staged array '{}' holds {} of {} bytes, not elements of {} bytes", key,
                    name_of(dtype), size_of(dtype), bytes));
  }
}

StagedArray* StagedArrays::find(std::string_view key) const noexcept {
  for (StagedArray& array : arrays_) {
    if (array.key == key) return &array;
  }
  return nullptr;
}

StagedArray& StagedArrays::at(std::string_view key) const {
  if (StagedArray* array = find(key)) return *array;
  std::string keys;
  for (const StagedArray& array : arrays_) {
    keys += keys.empty() ? "" : ", ";
    keys += array.key;
  }
  throw PlanShapeError(
      fmt::format("no staged array '{}'; there are: {}", key, keys.empty() ? "none" : keys));
}

}  // namespace kvleaf
