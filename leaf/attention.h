// Leaves of attention over the request's own text: keys and values, one entry per token and layer.
//
// A page holds, for each layer, its keys and then its values:
//
//   layer 0  K [slots, kv_heads, head_dim]   V [slots, kv_heads, value_head_dim]
//   layer 1  K …
//
// The stride alignment is one token's row, so a padded page can be read through a paged view: row
// bytes of K, or the least common multiple of those of K and V where they differ.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "kvleaf/leaf/region.h"

namespace kvleaf {

/// How the blocks of a row are staged.
enum class TableFormat : std::uint8_t {
  dense,  // "block_table" int32 [batch, columns], null where nothing is reached
  csr,    // "indptr" int32 [batch + 1], "indices" int32 [batch * columns], "last_page_len" int32
          // [batch]
};
/// "dense" or "csr"; throws InvalidArgument.
TableFormat require_table_format(std::string_view name);

struct AttentionOptions {
  std::uint32_t layers = 0;
  std::uint32_t kv_heads = 0;
  std::uint32_t head_dim = 0;
  std::optional<std::uint32_t> value_head_dim = {};  // none: head_dim; 0: V is K
  DType dtype = DType::bfloat16;
  std::uint32_t tokens_per_page = 0;                 // required: a page's bytes follow from it
  std::optional<std::uint32_t> slots_per_page = {};  // none: one per token; must divide the page
  TableFormat table = TableFormat::dense;
};

/// What the attention leaves share: page layout and table writing. Not a kind of its own: the reach
/// is its group's. Derive from it for a new kind of text attention with K and V pages.
///
/// CSR: indices hold every slot of a row, null where it is out of reach, so that positions stay
/// right; last_page_len is in tokens, 1 … tokens_per_page (a padding row: one null block, 1 token).
/// Only write_staged_delta knows a row's tokens: write_staged_inputs takes the last page for full.
/// Entries behind indptr[batch] are nobody's; a delta leaves them as they are.
class AttentionLeaf : public KVLeafRegion {
 public:
  /// Throws InvalidArgument, naming the leaf: no layer, head, width or token; slots_per_page that
  /// does not divide the page; a page past 2^64 bytes.
  AttentionLeaf(std::string leaf_id, KVCacheGroupId group, AttentionOptions options);

  /// As given, value_head_dim and slots_per_page filled in.
  const AttentionOptions& options() const noexcept { return options_; }
  std::uint32_t layers() const override { return options_.layers; }
  /// The entries declared, for a page of the tokens declared.
  std::uint32_t slots_per_page(std::uint32_t tokens_per_page) const override;
  StagedInputs staged_input_shapes(std::uint32_t batch, std::uint32_t num_blocks) const override;
  void write_staged_inputs(std::span<const std::span<const BlockId>> plans,
                           StagedArrays into) const override;
  bool can_write_delta() const override;
  void write_staged_delta(std::span<const RowDelta> rows, StagedArrays into) const override;

 private:
  AttentionOptions options_;
};

/// Attends to all earlier tokens. Holds ⌈n/P⌉ blocks.
class FullAttentionLeaf : public AttentionLeaf {
 public:
  FullAttentionLeaf(std::string leaf_id, AttentionOptions options);
};

struct LatentOptions {
  std::uint32_t layers = 0;
  std::uint32_t width = 0;  // elements per token and layer: latent + rope, or an indexer key
  DType dtype = DType::bfloat16;
  std::uint32_t tokens_per_page = 0;  // required
  std::optional<std::uint32_t> slots_per_page = {};
  TableFormat table = TableFormat::dense;
};

/// One shared entry per token and layer (MLA); also indexer keys. Full reach.
class LatentAttentionLeaf : public AttentionLeaf {
 public:
  LatentAttentionLeaf(std::string leaf_id, LatentOptions options);
};

/// Attends to its own chunk: from the last multiple of `chunk`. A chunk need not be whole pages: a
/// page that two chunks share is held by both.
class ChunkedAttentionLeaf : public AttentionLeaf {
 public:
  ChunkedAttentionLeaf(std::string leaf_id, std::uint32_t chunk, AttentionOptions options);
};

}  // namespace kvleaf
