#include "kvleaf/leaf/scales.h"

#include <fmt/format.h>

#include "kvleaf/leaf/errors.h"

namespace kvleaf {
namespace {

// Scales are laid out as the values are, `granularity` times narrower.
AttentionOptions scales_of(const AttentionLeaf& values, const ScalesOptions& options) {
  AttentionOptions scales = values.options();
  const std::uint32_t granularity = options.granularity;
  if (granularity == 0 || scales.head_dim % granularity != 0 ||
      *scales.value_head_dim % granularity != 0) {
    throw InvalidArgument(fmt::format(
        "leaf '{}.scales': granularity {} does not divide a head's widths, {} of K and {} of V",
        values.leaf_id(), granularity, scales.head_dim, *scales.value_head_dim));
  }
  scales.head_dim /= granularity;
  *scales.value_head_dim /= granularity;
  scales.dtype = options.dtype;
  return scales;
}

}  // namespace

ScalesLeaf::ScalesLeaf(const AttentionLeaf& values, ScalesOptions options)
    : AttentionLeaf(values.leaf_id() + ".scales", values.group_id(), scales_of(values, options)) {}

}  // namespace kvleaf
