// ScalesLeaf: the scales of a quantised attention leaf, in pages of their own but of the same
// group, so that a slot whose values or scales are missing is a hit for neither.
#pragma once

#include "kvleaf/leaf/attention.h"

namespace kvleaf {

struct ScalesOptions {
  std::uint32_t granularity = 0;  // values that share one scale; must divide a head's K and V width
  DType dtype = DType::float32;
};

/// `values`: the leaf that holds the quantised entries; its id with ".scales" is this leaf's id.
/// Pages have the same tokens and entries, laid out as the values are, one scale for every
/// `granularity` of them; alignment is one token's row of scales. The table is dense or CSR as that
/// of the values, but never compact: slot i of a row is column i.
class ScalesLeaf : public AttentionLeaf {
 public:
  /// Throws InvalidArgument where the granularity does not divide the widths.
  ScalesLeaf(const AttentionLeaf& values, ScalesOptions options);
};

}  // namespace kvleaf
