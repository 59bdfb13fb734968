#include "kvleaf/leaf/attention.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <typeinfo>
#include <utility>

#include "kvleaf/leaf/block_table.h"
#include "kvleaf/leaf/cross_attention.h"
#include "kvleaf/leaf/errors.h"
#include "kvleaf/leaf/saturate.h"
#include "kvleaf/leaf/scales.h"
#include "kvleaf/leaf/sliding_window.h"

namespace kvleaf {
namespace {

void require_positive(const std::string& leaf, const char* name, std::uint32_t value) {
  if (value == 0) throw InvalidArgument(fmt::format("leaf '{}': {} is 0", leaf, name));
}

AttentionOptions resolved(const std::string& leaf, AttentionOptions options) {
  require_positive(leaf, "layers", options.layers);
  require_positive(leaf, "kv_heads", options.kv_heads);
  require_positive(leaf, "head_dim", options.head_dim);
  require_positive(leaf, "tokens_per_page", options.tokens_per_page);
  if (!options.value_head_dim) options.value_head_dim = options.head_dim;
  if (!options.slots_per_page) options.slots_per_page = options.tokens_per_page;
  const std::uint32_t slots = *options.slots_per_page;
  if (slots == 0 || options.tokens_per_page % slots != 0) {
    throw InvalidArgument(
        fmt::format("leaf '{}': slots_per_page {} does not divide a page of {} tokens", leaf, slots,
                    options.tokens_per_page));
  }
  return options;
}

std::uint64_t page_bytes(const std::string& leaf, const AttentionOptions& options) {
  const std::uint64_t width = std::uint64_t{options.head_dim} + *options.value_head_dim;
  const std::uint64_t bytes = saturated_product(
      {options.layers, *options.slots_per_page, options.kv_heads, width, size_of(options.dtype)});
  if (bytes == saturated) {
    throw InvalidArgument(fmt::format("leaf '{}': a page does not fit 2^64 bytes", leaf));
  }
  return bytes;
}

// One token's row of K, and a multiple of that of V as well where they differ.
std::uint64_t row_alignment(const std::string& leaf, const AttentionOptions& options) {
  const std::uint64_t keys = options.head_dim;
  const std::uint64_t values = *options.value_head_dim;
  const std::uint64_t width = values == 0 ? keys : std::lcm(keys, values);
  const std::uint64_t bytes = saturated_product({options.kv_heads, width, size_of(options.dtype)});
  if (bytes == saturated) {
    throw InvalidArgument(
        fmt::format("leaf '{}': rows of K and V have no common multiple below 2^64", leaf));
  }
  return bytes;
}

AttentionOptions latent(const std::string& leaf, const LatentOptions& options) {
  require_positive(leaf, "width", options.width);
  return {.layers = options.layers,
          .kv_heads = 1,
          .head_dim = options.width,
          .value_head_dim = 0,
          .dtype = options.dtype,
          .tokens_per_page = options.tokens_per_page,
          .slots_per_page = options.slots_per_page,
          .table = options.table};
}

KVCacheGroupId chunked_group(const std::string& leaf, std::uint32_t chunk) {
  require_positive(leaf, "chunk", chunk);
  return KVCacheGroupId::chunked(chunk);
}

}  // namespace

TableFormat require_table_format(std::string_view name) {
  if (name == "dense") return TableFormat::dense;
  if (name == "csr") return TableFormat::csr;
  throw InvalidArgument(fmt::format("unknown table format '{}'; accepted: dense, csr", name));
}

AttentionLeaf::AttentionLeaf(std::string leaf_id, KVCacheGroupId group, AttentionOptions options)
    : KVLeafRegion(leaf_id, std::move(group), page_bytes(leaf_id, resolved(leaf_id, options)),
                   {.stride_alignment = row_alignment(leaf_id, resolved(leaf_id, options)),
                    .tokens_per_page = options.tokens_per_page}),
      options_(resolved(leaf_id, options)) {}

std::uint32_t AttentionLeaf::slots_per_page(std::uint32_t) const {
  return *options_.slots_per_page;
}

StagedInputs AttentionLeaf::staged_input_shapes(std::uint32_t batch,
                                                std::uint32_t num_blocks) const {
  if (options_.table == TableFormat::dense) {
    return KVLeafRegion::staged_input_shapes(batch, num_blocks);
  }
  // A padding row has a page, so there is room for one even where no row reaches a slot.
  const std::int64_t columns = std::max<std::int64_t>(num_blocks, 1);
  return {StagedInput{"indptr", {std::int64_t{batch} + 1}, DType::int32},
          StagedInput{"indices", {batch * columns}, DType::int32},
          StagedInput{"last_page_len", {batch}, DType::int32}};
}

void AttentionLeaf::write_staged_inputs(std::span<const std::span<const BlockId>> plans,
                                        StagedArrays into) const {
  switch (options_.table) {
    case TableFormat::dense: return DenseTable(leaf_id(), into).write(plans);
    case TableFormat::csr: return CsrTable(leaf_id(), options_.tokens_per_page, into).write(plans);
  }
}

bool AttentionLeaf::can_write_delta() const {
  // A kind from elsewhere may override write_staged_inputs alone, and must not find itself passed
  // over. CSR has no other way: a full write knows no token counts.
  const std::type_info& kind = typeid(*this);
  return options_.table == TableFormat::csr || kind == typeid(AttentionLeaf) ||
         kind == typeid(FullAttentionLeaf) || kind == typeid(LatentAttentionLeaf) ||
         kind == typeid(ChunkedAttentionLeaf) || kind == typeid(SlidingWindowLeaf) ||
         kind == typeid(CrossAttentionLeaf) || kind == typeid(ScalesLeaf);
}

void AttentionLeaf::write_staged_delta(std::span<const RowDelta> rows, StagedArrays into) const {
  switch (options_.table) {
    case TableFormat::dense: return DenseTable(leaf_id(), into).update(rows);
    case TableFormat::csr: return CsrTable(leaf_id(), options_.tokens_per_page, into).update(rows);
  }
}

FullAttentionLeaf::FullAttentionLeaf(std::string leaf_id, AttentionOptions options)
    : AttentionLeaf(std::move(leaf_id), KVCacheGroupId::full(), options) {}

LatentAttentionLeaf::LatentAttentionLeaf(std::string leaf_id, LatentOptions options)
    : AttentionLeaf(leaf_id, KVCacheGroupId::full(), latent(leaf_id, options)) {}

ChunkedAttentionLeaf::ChunkedAttentionLeaf(std::string leaf_id, std::uint32_t chunk,
                                           AttentionOptions options)
    : AttentionLeaf(leaf_id, chunked_group(leaf_id, chunk), options) {}

}  // namespace kvleaf
