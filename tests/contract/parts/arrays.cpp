#include "kvleaf/testing/parts/arrays.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>

namespace kvleaf::testing::contract {
namespace {

constexpr std::size_t guard_bytes = 256;
constexpr std::byte guard{0x5a};

}  // namespace

Arrays::Arrays(const StagedInputs& widest, std::byte fill) {
  for (const StagedInput& input : widest) {
    One one{input, {}, {}, {}, size_of(input.dtype)};
    std::size_t bytes = one.element;
    for (const std::int64_t extent : input.shape) bytes *= static_cast<std::size_t>(extent);
    one.memory.assign(bytes + 2 * guard_bytes, guard);
    std::fill_n(one.memory.begin() + guard_bytes, bytes, fill);
    one.before = one.mirror = one.memory;
    ones_.push_back(std::move(one));
  }
}

void Arrays::refill(std::byte fill) {
  for (One& one : ones_) {
    std::fill(one.memory.begin() + guard_bytes, one.memory.end() - guard_bytes, fill);
    one.mirror = one.memory;
  }
}

StagedArrays Arrays::narrow(const StagedInputs& shapes) {
  if (shapes.size() != ones_.size()) {
    throw PlanShapeError(fmt::format("{} arrays are staged for this batch, {} at the widest",
                                     shapes.size(), ones_.size()));
  }
  arrays_.assign(shapes.size(), StagedArray{});
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    One& one = ones_[i];
    if (shapes[i].key != one.widest.key || shapes[i].shape.size() != one.widest.shape.size()) {
      throw PlanShapeError(fmt::format("array {} is '{}' for this batch and '{}' at the widest", i,
                                       shapes[i].key, one.widest.key));
    }
    StagedArray& array = arrays_[i];
    array.key = shapes[i].key;
    array.dtype = shapes[i].dtype;
    array.data = one.memory.data() + guard_bytes;
    array.shape = shapes[i].shape;
    array.strides.assign(array.shape.size(), 1);
    for (std::size_t d = array.shape.size(); d-- > 1;) {
      array.strides[d - 1] = array.strides[d] * one.widest.shape[d];
    }
    for (std::size_t d = 0; d < array.shape.size(); ++d) {
      if (array.shape[d] > one.widest.shape[d]) {
        throw PlanShapeError(fmt::format("'{}' is {} long in dimension {}, {} at the widest",
                                         array.key, array.shape[d], d, one.widest.shape[d]));
      }
    }
    one.before = one.memory;
  }
  reported_ = false;
  StagedArrays into(arrays_);
  into.set_on_change(&Arrays::on_change, this);
  return into;
}

std::vector<std::size_t> Arrays::entries(std::size_t array) const {
  std::vector<std::size_t> offsets = {guard_bytes};
  const StagedArray& narrowed = arrays_[array];
  for (std::size_t d = 0; d < narrowed.shape.size(); ++d) {
    std::vector<std::size_t> deeper;
    deeper.reserve(offsets.size() * static_cast<std::size_t>(narrowed.shape[d]));
    for (const std::size_t base : offsets) {
      for (std::int64_t i = 0; i < narrowed.shape[d]; ++i) {
        deeper.push_back(base +
                         static_cast<std::size_t>(i * narrowed.strides[d]) * ones_[array].element);
      }
    }
    offsets = std::move(deeper);
  }
  return offsets;
}

std::vector<std::size_t> Arrays::read_entries(std::size_t array) const {
  std::vector<std::size_t> offsets = entries(array);
  if (arrays_[array].key != "indices" || arrays_[array].shape.size() != 1) return offsets;
  for (const StagedArray& other : arrays_) {
    if (other.key != "indptr" || other.dtype != DType::int32 || other.shape.size() != 1) continue;
    const std::int32_t used = other.row<std::int32_t>(other.shape[0] - 1)[0];
    offsets.resize(
        std::clamp<std::size_t>(static_cast<std::size_t>(std::max(used, 0)), 0, offsets.size()));
  }
  return offsets;
}

std::vector<std::byte> Arrays::visible() const {
  std::vector<std::byte> bytes;
  for (std::size_t a = 0; a < arrays_.size(); ++a) {
    const std::size_t all = bytes.size() + entries(a).size() * ones_[a].element;
    for (const std::size_t offset : read_entries(a)) {
      const std::byte* entry = ones_[a].memory.data() + offset;
      bytes.insert(bytes.end(), entry, entry + ones_[a].element);
    }
    bytes.resize(all);
  }
  return bytes;
}

std::string Arrays::name(std::size_t array, std::size_t offset) const {
  std::int64_t rest = (static_cast<std::int64_t>(offset) - static_cast<std::int64_t>(guard_bytes)) /
                      static_cast<std::int64_t>(ones_[array].element);
  if (offset < guard_bytes || offset >= ones_[array].memory.size() - guard_bytes) {
    return fmt::format("'{}', entry {} of its memory, which is not part of it", arrays_[array].key,
                       rest);
  }
  std::vector<std::int64_t> index;
  for (const std::int64_t stride : arrays_[array].strides) {
    index.push_back(rest / stride);
    rest %= stride;
  }
  return fmt::format("'{}'[{}]", arrays_[array].key, fmt::join(index, ", "));
}

namespace {

std::string shown(DType dtype, const std::byte* entry, std::size_t bytes) {
  if (dtype == DType::int32) {
    std::int32_t value = 0;
    std::memcpy(&value, entry, sizeof value);
    return std::to_string(value);
  }
  if (dtype == DType::int64) {
    std::int64_t value = 0;
    std::memcpy(&value, entry, sizeof value);
    return std::to_string(value);
  }
  std::string hex = "0x";
  for (std::size_t i = bytes; i-- > 0;)
    hex += fmt::format("{:02x}", static_cast<unsigned>(entry[i]));
  return hex;
}

}  // namespace

std::string Arrays::difference(const Arrays& other) const {
  for (std::size_t a = 0; a < arrays_.size() && a < other.arrays_.size(); ++a) {
    const std::vector<std::size_t> here = read_entries(a);
    const std::vector<std::size_t> there = other.read_entries(a);
    for (std::size_t i = 0; i < std::min(here.size(), there.size()); ++i) {
      const std::byte* mine = ones_[a].memory.data() + here[i];
      const std::byte* its = other.ones_[a].memory.data() + there[i];
      if (std::memcmp(mine, its, ones_[a].element) == 0) continue;
      return fmt::format("{} is {}, and not {}", name(a, here[i]),
                         shown(arrays_[a].dtype, mine, ones_[a].element),
                         shown(arrays_[a].dtype, its, ones_[a].element));
    }
  }
  return "";
}

std::optional<std::string> Arrays::outside() const {
  for (std::size_t a = 0; a < arrays_.size(); ++a) {
    const One& one = ones_[a];
    if (one.memory == one.before) continue;
    std::vector<bool> inside(one.memory.size(), false);
    for (const std::size_t offset : entries(a)) {
      std::fill_n(inside.begin() + static_cast<std::ptrdiff_t>(offset), one.element, true);
    }
    for (std::size_t i = 0; i < one.memory.size(); ++i) {
      if (inside[i] || one.memory[i] == one.before[i]) continue;
      const std::size_t begin = i - i % one.element;  // guards are whole entries
      std::vector<std::int64_t> shape(arrays_[a].shape.begin(), arrays_[a].shape.end());
      return fmt::format("{} was written, and the array of this batch is [{}]", name(a, begin),
                         fmt::join(shape, ", "));
    }
  }
  return {};
}

std::optional<std::string> Arrays::unreported() {
  for (std::size_t a = 0; a < arrays_.size(); ++a) {
    One& one = ones_[a];
    if (!reported_) {
      one.mirror = one.memory;
      continue;
    }
    for (const std::size_t offset : read_entries(a)) {
      const auto at = static_cast<std::ptrdiff_t>(offset);
      if (std::equal(one.memory.begin() + at,
                     one.memory.begin() + at + static_cast<std::ptrdiff_t>(one.element),
                     one.mirror.begin() + at)) {
        continue;
      }
      return name(a, offset);
    }
  }
  return {};
}

void Arrays::on_change(void* context, const StagedArray& array, std::int64_t first,
                       std::int64_t count) {
  auto& self = *static_cast<Arrays*>(context);
  self.reported_ = true;
  for (std::size_t a = 0; a < self.arrays_.size(); ++a) {
    if (self.arrays_[a].key != array.key || count <= 0) continue;
    One& one = self.ones_[a];
    const std::size_t begin =
        guard_bytes + static_cast<std::size_t>(std::max<std::int64_t>(first, 0)) * one.element;
    const std::size_t end = std::min(begin + static_cast<std::size_t>(count) * one.element,
                                     one.memory.size() - guard_bytes);
    if (begin >= end) continue;
    std::copy(one.memory.begin() + static_cast<std::ptrdiff_t>(begin),
              one.memory.begin() + static_cast<std::ptrdiff_t>(end),
              one.mirror.begin() + static_cast<std::ptrdiff_t>(begin));
  }
}

}  // namespace kvleaf::testing::contract
