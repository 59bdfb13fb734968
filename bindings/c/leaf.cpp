// Leaves: the kinds shipped, and what any leaf says.
#include <algorithm>
#include <filesystem>
#include <memory>

#include "border.h"
#include "callback_leaf.h"
#include "kvleaf/cache/model_leaves.h"

namespace kvleaf::c {

std::optional<DType> dtype_of(const char* name, kvleaf_dtype given) {
  static_assert(KVLEAF_UINT8 == static_cast<int>(DType::uint8) + 1 &&
                KVLEAF_BFLOAT16 == static_cast<int>(DType::bfloat16) + 1 &&
                KVLEAF_FLOAT8_E5M2 == static_cast<int>(DType::float8_e5m2) + 1);
  require_constant(name, given, KVLEAF_FLOAT8_E5M2);
  if (given == KVLEAF_DTYPE_DEFAULT) return std::nullopt;
  return static_cast<DType>(given - 1);
}

DType dtype_of(const char* name, kvleaf_dtype given, DType fallback) {
  return dtype_of(name, given).value_or(fallback);
}

kvleaf_dtype dtype_of(DType dtype) noexcept { return static_cast<kvleaf_dtype>(dtype) + 1; }

StateKernel kernel_of(kvleaf_state_kernel given) {
  require_constant("kernel", given, KVLEAF_KERNEL_IN_OUT);
  return given == KVLEAF_KERNEL_IN_OUT ? StateKernel::in_out : StateKernel::in_place;
}

kvleaf_state_kernel kernel_of(StateKernel kernel) noexcept {
  return kernel == StateKernel::in_out ? KVLEAF_KERNEL_IN_OUT : KVLEAF_KERNEL_IN_PLACE;
}

AccessPattern pattern_of(const kvleaf_pattern& pattern) {
  require_constant("pattern kind", pattern.kind, KVLEAF_PATTERN_CUSTOM);
  switch (pattern.kind) {
    case KVLEAF_PATTERN_FULL: return AccessPattern::full();
    case KVLEAF_PATTERN_WINDOW: return AccessPattern::window(pattern.tokens, pattern.head);
    case KVLEAF_PATTERN_CHUNK: return AccessPattern::chunk(pattern.tokens);
    case KVLEAF_PATTERN_POINT: return AccessPattern::point();
    case KVLEAF_PATTERN_ENCODER: return AccessPattern::encoder();
    case KVLEAF_PATTERN_NONE: return AccessPattern::none();
    default: break;
  }
  AccessPattern::TailBegin tail_begin;
  if (pattern.tail_begin != nullptr) {
    tail_begin = [function = pattern.tail_begin, data = pattern.user_data](std::uint32_t n) {
      return function(data, n);
    };
  }
  return AccessPattern::custom(
      {.head = pattern.head, .tail_begin = std::move(tail_begin), .ahead = pattern.ahead});
}

kvleaf_array array_of(const StagedArray& array) {
  // Keys are literals, of the leaves shipped, or those that a kind written in C gave: both end in a
  // zero.
  kvleaf_array shown{.key = array.key.data(),
                     .dtype = dtype_of(array.dtype),
                     .rank = static_cast<std::uint32_t>(array.shape.size()),
                     .data = array.data,
                     .shape = {},
                     .strides = {}};
  std::copy(array.shape.begin(), array.shape.end(), shown.shape);
  std::copy(array.strides.begin(), array.strides.end(), shown.strides);
  return shown;
}

namespace {

TableFormat table_of(kvleaf_table_format given) {
  require_constant("table", given, KVLEAF_TABLE_CSR);
  return given == KVLEAF_TABLE_CSR ? TableFormat::csr : TableFormat::dense;
}

std::optional<std::uint32_t> unless_zero(std::uint32_t given) {
  return given == 0 ? std::nullopt : std::optional(given);
}

AttentionOptions attention_of(const kvleaf_attention_options* given) {
  const kvleaf_attention_options options = read_struct(given, "options");
  return {.layers = options.layers,
          .kv_heads = options.kv_heads,
          .head_dim = options.head_dim,
          .value_head_dim = flag("has_value_head_dim", options.has_value_head_dim)
                                ? std::optional(options.value_head_dim)
                                : std::nullopt,
          .dtype = dtype_of("dtype", options.dtype, DType::bfloat16),
          .tokens_per_page = options.tokens_per_page,
          .slots_per_page = unless_zero(options.slots_per_page),
          .table = table_of(options.table)};
}

/// Makes a leaf and hands it over.
template <class F>
kvleaf_status make(const char* leaf_id, kvleaf_leaf** out, F&& leaf_of) {
  return guarded([&] {
    require(out, "out");
    require(leaf_id, "leaf_id");
    auto made = std::make_unique<kvleaf_leaf>(kvleaf_leaf{leaf_of()});
    *out = made.release();
  });
}

LeavesOptions leaves_options(const kvleaf_leaves_options* given) {
  const kvleaf_leaves_options options = read_optional(given, "options");
  LeavesOptions read;
  if (options.tokens_per_page != 0) read.tokens_per_page = options.tokens_per_page;
  read.dtype = dtype_of("dtype", options.dtype);
  read.kv_dtype = dtype_of("kv_dtype", options.kv_dtype);
  if (options.tensor_parallel != 0) read.tensor_parallel = options.tensor_parallel;
  if (options.budget_bytes != 0) read.budget_bytes = options.budget_bytes;
  if (options.expected_tokens != 0) read.expected_tokens = options.expected_tokens;
  if (flag("implied_values", options.implied_values)) read.equal_values = EqualValues::implied;
  if (options.scales_granularity != 0) {
    read.scales = {.granularity = options.scales_granularity,
                   .dtype = dtype_of("scales_dtype", options.scales_dtype, DType::float32)};
  }
  read.state_kernel = kernel_of(options.state_kernel);
  return read;
}

void hand_over(Leaves leaves, kvleaf_leaf*** out, std::size_t* count) {
  std::vector<std::unique_ptr<kvleaf_leaf>> made;
  for (Leaf& leaf : leaves)
    made.push_back(std::make_unique<kvleaf_leaf>(kvleaf_leaf{std::move(leaf)}));
  auto array = std::make_unique<kvleaf_leaf*[]>(made.size());
  for (std::size_t i = 0; i < made.size(); ++i) array[i] = made[i].release();
  *out = array.release();
  *count = made.size();
}

template <class T>
void require_room(const char* what, std::size_t there, std::size_t capacity, const T* into) {
  if (there > capacity || (there != 0 && into == nullptr)) {
    throw InvalidArgument(
        fmt::format("room for {} {}; there are {}", into == nullptr ? 0 : capacity, what, there));
  }
}

/// Bound rows with keys that live as long as the leaf: those of its slabs, or what a kind in C
/// gave.
kvleaf_bound_rows rows_of(const KVLeafRegion& leaf, const BoundRows& rows) {
  if (const auto* state = dynamic_cast<const RecurrentStateLeaf*>(&leaf)) {
    for (const Slab& slab : state->options().slabs) {
      if (slab.name == rows.key) return {slab.name.c_str(), rows.begin, rows.end};
    }
  }
  throw InvalidArgument(fmt::format("leaf '{}' has no bound input '{}'", leaf.leaf_id(), rows.key));
}

std::vector<kvleaf_bound_rows> span_rows(const KVLeafRegion& leaf, BlockId block) {
  if (const auto* own = dynamic_cast<const CallbackLeaf*>(&leaf)) return own->span_rows(block);
  std::vector<kvleaf_bound_rows> rows;
  for (const BoundRows& span : leaf.bound_row_span(block)) rows.push_back(rows_of(leaf, span));
  return rows;
}

CallbackLeaf::Copies copy_rows(const KVLeafRegion& leaf, BlockId src, BlockId dst) {
  if (const auto* own = dynamic_cast<const CallbackLeaf*>(&leaf)) return own->copy_rows(src, dst);
  CallbackLeaf::Copies rows;
  for (const auto& [from, to] : leaf.bound_row_copies(src, dst)) {
    rows.from.push_back(rows_of(leaf, from));
    rows.to.push_back(rows_of(leaf, to));
  }
  return rows;
}

}  // namespace
}  // namespace kvleaf::c

using namespace kvleaf;
using namespace kvleaf::c;

kvleaf_status kvleaf_pattern_reach(const kvleaf_pattern* pattern, uint32_t n,
                                   uint32_t tokens_per_page, uint32_t encoder_tokens,
                                   kvleaf_slot_reach* out) {
  return guarded([&] {
    require(out, "out");
    const SlotReach reach =
        pattern_of(require(pattern, "pattern")).slots(n, tokens_per_page, encoder_tokens);
    *out = {reach.head_end, reach.tail_begin, reach.end};
  });
}

void kvleaf_leaf_destroy(kvleaf_leaf* leaf) { delete leaf; }

// ---- the kinds shipped -------------------------------------------------------------------------

kvleaf_status kvleaf_full_attention_leaf(const char* leaf_id,
                                         const kvleaf_attention_options* options,
                                         kvleaf_leaf** out) {
  return make(leaf_id, out,
              [&] { return std::make_shared<FullAttentionLeaf>(leaf_id, attention_of(options)); });
}

kvleaf_status kvleaf_latent_attention_leaf(const char* leaf_id, const kvleaf_latent_options* given,
                                           kvleaf_leaf** out) {
  return make(leaf_id, out, [&] {
    const kvleaf_latent_options options = read_struct(given, "options");
    return std::make_shared<LatentAttentionLeaf>(
        leaf_id, LatentOptions{.layers = options.layers,
                               .width = options.width,
                               .dtype = c::dtype_of("dtype", options.dtype, DType::bfloat16),
                               .tokens_per_page = options.tokens_per_page,
                               .slots_per_page = unless_zero(options.slots_per_page),
                               .table = table_of(options.table)});
  });
}

kvleaf_status kvleaf_sliding_window_leaf(const char* leaf_id, const kvleaf_window_options* window,
                                         const kvleaf_attention_options* options,
                                         kvleaf_leaf** out) {
  return make(leaf_id, out, [&] {
    const kvleaf_window_options reach = read_struct(window, "window");
    return std::make_shared<SlidingWindowLeaf>(
        leaf_id,
        WindowOptions{.window = reach.window,
                      .sinks = reach.sinks,
                      .compact = flag("compact", reach.compact)},
        attention_of(options));
  });
}

kvleaf_status kvleaf_chunked_attention_leaf(const char* leaf_id, uint32_t chunk,
                                            const kvleaf_attention_options* options,
                                            kvleaf_leaf** out) {
  return make(leaf_id, out, [&] {
    return std::make_shared<ChunkedAttentionLeaf>(leaf_id, chunk, attention_of(options));
  });
}

kvleaf_status kvleaf_recurrent_state_leaf(const char* leaf_id, const kvleaf_state_options* given,
                                          kvleaf_leaf** out) {
  return make(leaf_id, out, [&] {
    const kvleaf_state_options options = read_struct(given, "options");
    require_constant("state table", options.table, KVLEAF_STATE_ROWS);
    StateOptions state;
    state.layers = options.layers;
    for (const kvleaf_slab& slab : span_of(options.slabs, options.slab_count, "slabs")) {
      const std::span<const std::uint32_t> shape = span_of(slab.shape, slab.rank, "slab shape");
      state.slabs.push_back({.name = &require(slab.name, "slab name"),
                             .shape = {shape.begin(), shape.end()},
                             .dtype = c::dtype_of("slab dtype", slab.dtype, DType::float32)});
    }
    state.kernel = kernel_of(options.kernel);
    state.rollback = options.rollback;
    state.in_chunk = flag("in_chunk", options.in_chunk);
    state.table = options.table == KVLEAF_STATE_ROWS ? StateTable::rows : StateTable::blocks;
    state.tokens_per_page = unless_zero(options.tokens_per_page);
    if (options.group != nullptr) state.group = options.group;
    return std::make_shared<RecurrentStateLeaf>(leaf_id, std::move(state));
  });
}

kvleaf_status kvleaf_cross_attention_leaf(const char* leaf_id,
                                          const kvleaf_attention_options* options,
                                          const char* group, kvleaf_leaf** out) {
  return make(leaf_id, out, [&] {
    return std::make_shared<CrossAttentionLeaf>(leaf_id, attention_of(options),
                                                group == nullptr ? "encoder" : group);
  });
}

kvleaf_status kvleaf_scratch_leaf(const char* leaf_id, uint64_t bytes_per_page,
                                  uint64_t stride_alignment, const char* group, kvleaf_leaf** out) {
  return make(leaf_id, out, [&] {
    return std::make_shared<ScratchLeaf>(
        leaf_id, bytes_per_page,
        stride_alignment == 0 ? std::nullopt : std::optional(stride_alignment),
        group == nullptr ? "scratch" : group);
  });
}

kvleaf_status kvleaf_scales_leaf(const kvleaf_leaf* values, uint32_t granularity,
                                 kvleaf_dtype dtype, kvleaf_leaf** out) {
  return make("", out, [&] {
    const auto* leaf = dynamic_cast<const AttentionLeaf*>(require(values, "values").leaf.get());
    if (leaf == nullptr) {
      throw InvalidArgument(
          fmt::format("leaf '{}' has no scales: it is no attention leaf", values->leaf->leaf_id()));
    }
    return std::make_shared<ScalesLeaf>(
        *leaf, ScalesOptions{.granularity = granularity,
                             .dtype = c::dtype_of("dtype", dtype, DType::float32)});
  });
}

// ---- from a configuration ----------------------------------------------------------------------

kvleaf_status kvleaf_leaves_from_config(const char* path, const kvleaf_leaves_options* options,
                                        kvleaf_leaf*** out, size_t* count) {
  return guarded([&] {
    require(out, "out");
    require(count, "count");
    require(path, "path");
    hand_over(leaves_from_config(std::filesystem::path(path), leaves_options(options)), out, count);
  });
}

kvleaf_status kvleaf_leaves_from_json(const char* json, size_t bytes,
                                      const kvleaf_leaves_options* options, kvleaf_leaf*** out,
                                      size_t* count) {
  return guarded([&] {
    require(out, "out");
    require(count, "count");
    require(json, "json");
    hand_over(leaves_from_json({json, bytes}, leaves_options(options)), out, count);
  });
}

void kvleaf_leaves_destroy(kvleaf_leaf** leaves, size_t count) {
  if (leaves == nullptr) return;
  for (size_t i = 0; i < count; ++i) delete leaves[i];
  delete[] leaves;
}

// ---- what a leaf says --------------------------------------------------------------------------

kvleaf_status kvleaf_leaf_describe(const kvleaf_leaf* leaf, kvleaf_leaf_info* out) {
  return guarded([&] {
    const KVLeafRegion& region = *require(leaf, "leaf").leaf;
    Output(out, "out")
        .write({.struct_size = 0,
                .leaf_id = region.leaf_id().c_str(),
                .group = region.group_id().name.c_str(),
                .bytes_per_page = region.bytes_per_page(),
                .stride_alignment = region.stride_alignment().value_or(0),
                .tokens_per_page = region.tokens_per_page().value_or(0),
                .writing = static_cast<kvleaf_writing>(region.group_id().writing),
                .cacheable = region.cacheable(),
                .layers = region.layers(),
                .rollback = region.rollback(),
                .state_kernel = kernel_of(region.state_kernel())});
  });
}

kvleaf_status kvleaf_leaf_blocks_to_reserve(const kvleaf_leaf* leaf, uint32_t num_blocks,
                                            uint32_t tokens_per_page,
                                            uint32_t enable_prefix_caching, uint32_t step_tokens,
                                            uint32_t* out) {
  return guarded([&] {
    require(out, "out");
    *out = require(leaf, "leaf")
               .leaf->blocks_to_reserve(
                   num_blocks, tokens_per_page,
                   {.enable_prefix_caching = flag("enable_prefix_caching", enable_prefix_caching),
                    .step_tokens = step_tokens});
  });
}

kvleaf_status kvleaf_leaf_staged_input_shapes(const kvleaf_leaf* leaf, uint32_t batch,
                                              uint32_t num_blocks, kvleaf_staged_input* into,
                                              size_t capacity, size_t* count) {
  return guarded([&] {
    require(count, "count");
    const StagedInputs inputs = require(leaf, "leaf").leaf->staged_input_shapes(batch, num_blocks);
    require_room("staged inputs", inputs.size(), capacity, into);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      into[i] = {.key = inputs[i].key.data(),
                 .dtype = c::dtype_of(inputs[i].dtype),
                 .rank = static_cast<std::uint32_t>(inputs[i].shape.size()),
                 .shape = {}};
      std::copy(inputs[i].shape.begin(), inputs[i].shape.end(), into[i].shape);
    }
    *count = inputs.size();
  });
}

kvleaf_status kvleaf_leaf_write_staged_inputs(const kvleaf_leaf* leaf, const kvleaf_row_plan* plans,
                                              size_t rows, const kvleaf_array* arrays,
                                              size_t array_count) {
  return guarded([&] {
    std::vector<std::span<const BlockId>> blocks;
    for (const kvleaf_row_plan& plan : span_of(plans, rows, "plans")) {
      blocks.push_back(blocks_of(plan.blocks, plan.count));
    }
    std::vector<StagedArray> staged;
    for (const kvleaf_array& array : span_of(arrays, array_count, "arrays")) {
      if (array.rank == 0 || array.rank > max_staged_rank) {
        throw_no_constant("rank of an array", array.rank, max_staged_rank);
      }
      StagedArray& view = staged.emplace_back();
      view.key = &require(array.key, "key of an array");
      view.dtype = c::dtype_of("dtype of an array", array.dtype, DType::int32);
      view.data = &require(static_cast<std::byte*>(array.data), "data of an array");
      view.shape.assign(array.shape, array.shape + array.rank);
      view.strides.assign(array.strides, array.strides + array.rank);
    }
    require(leaf, "leaf").leaf->write_staged_inputs(blocks, StagedArrays(staged));
  });
}

kvleaf_status kvleaf_leaf_bound_row_span(const kvleaf_leaf* leaf, uint32_t block,
                                         kvleaf_bound_rows* into, size_t capacity, size_t* count) {
  return guarded([&] {
    require(count, "count");
    const auto rows = span_rows(*require(leaf, "leaf").leaf, BlockId(block));
    require_room("inputs", rows.size(), capacity, into);
    std::copy(rows.begin(), rows.end(), into);
    *count = rows.size();
  });
}

kvleaf_status kvleaf_leaf_bound_row_copies(const kvleaf_leaf* leaf, uint32_t src, uint32_t dst,
                                           kvleaf_bound_rows* from, kvleaf_bound_rows* to,
                                           size_t capacity, size_t* count) {
  return guarded([&] {
    require(count, "count");
    const auto rows = copy_rows(*require(leaf, "leaf").leaf, BlockId(src), BlockId(dst));
    require_room("inputs", rows.from.size(), capacity, from);
    require_room("inputs", rows.to.size(), capacity, to);
    std::copy(rows.from.begin(), rows.from.end(), from);
    std::copy(rows.to.begin(), rows.to.end(), to);
    *count = rows.from.size();
  });
}
