#include "callback_leaf.h"

#include <boost/container/static_vector.hpp>

#include <exception>

// What a delta reports goes to whoever fills the arrays; what that throws waits until the callback
// is over, for it must not cross C code.
struct kvleaf_staging {
  const kvleaf::StagedArrays* into;
  mutable std::exception_ptr error;

  template <class F>
  void report(F&& f) const noexcept {
    if (error != nullptr) return;
    try {
      f();
    } catch (...) {
      error = std::current_exception();
    }
  }
};

namespace kvleaf::c {
namespace {

KVCacheGroupId group_of(const kvleaf_leaf_kind& kind) {
  static_assert(KVLEAF_WRITING_IN_PLACE == static_cast<int>(Writing::in_place) &&
                KVLEAF_WRITING_WRITE_ONCE == static_cast<int>(Writing::write_once) &&
                KVLEAF_WRITING_PRIVATE == static_cast<int>(Writing::exclusive));
  require_constant("writing", kind.writing, KVLEAF_WRITING_PRIVATE);
  return {&require(kind.group, "group"), pattern_of(kind.pattern),
          static_cast<Writing>(kind.writing)};
}

using Views = boost::container::static_vector<kvleaf_array, max_staged_inputs>;
Views views_of(StagedArrays into) {
  Views views;
  for (const StagedArray& array : into.all()) views.push_back(array_of(array));
  return views;
}

/// Room for rows that is kept from call to call, so that a step calls no heap. Whoever is called
/// in between, on the same thread, gets room of its own.
template <class T>
class Scratch {
 public:
  Scratch() : rows_(std::exchange(kept(), {})) { rows_.clear(); }
  ~Scratch() { kept() = std::move(rows_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  std::vector<T>& rows() noexcept { return rows_; }

 private:
  static std::vector<T>& kept() noexcept {
    thread_local std::vector<T> rows;
    return rows;
  }
  std::vector<T> rows_;
};

void require_count(const std::string& what, std::size_t count) {
  if (count > max_staged_inputs) {
    throw InvalidArgument(
        fmt::format("{} gave {} inputs; accepted: at most {}", what, count, max_staged_inputs));
  }
}

}  // namespace

CallbackLeaf::CallbackLeaf(const kvleaf_leaf_kind& kind)
    : KVLeafRegion(
          &require(kind.leaf_id, "leaf_id"), group_of(kind), kind.bytes_per_page,
          {.stride_alignment =
               kind.stride_alignment == 0 ? std::nullopt : std::optional(kind.stride_alignment),
           .tokens_per_page =
               kind.tokens_per_page == 0 ? std::nullopt : std::optional(kind.tokens_per_page)}),
      kind_(kind),
      kernel_(kernel_of(kind.state_kernel)),
      never_cached_(flag("never_cached", kind.never_cached)),
      emits_in_chunk_(flag("emits_in_chunk", kind.emits_in_chunk)),
      stages_live_span_(flag("stages_live_span", kind.stages_live_span)) {}

CallbackLeaf::~CallbackLeaf() {
  if (kind_.destroy != nullptr) kind_.destroy(kind_.user_data);
}

std::string CallbackLeaf::called(const char* callback) const {
  return fmt::format("leaf '{}': {}", leaf_id(), callback);
}

bool CallbackLeaf::cacheable() const { return !never_cached_ && KVLeafRegion::cacheable(); }

std::uint32_t CallbackLeaf::slots_per_page(std::uint32_t tokens_per_page) const {
  return kind_.slots_per_page == nullptr ? KVLeafRegion::slots_per_page(tokens_per_page)
                                         : kind_.slots_per_page(kind_.user_data, tokens_per_page);
}

std::uint32_t CallbackLeaf::blocks_to_reserve(std::uint32_t num_blocks,
                                              std::uint32_t tokens_per_page,
                                              ReserveOptions options) const {
  if (kind_.blocks_to_reserve == nullptr) {
    return KVLeafRegion::blocks_to_reserve(num_blocks, tokens_per_page, options);
  }
  return kind_.blocks_to_reserve(kind_.user_data, num_blocks, tokens_per_page,
                                 options.enable_prefix_caching, options.step_tokens);
}

StagedInputs CallbackLeaf::staged_input_shapes(std::uint32_t batch,
                                               std::uint32_t num_blocks) const {
  if (kind_.staged_input_shapes == nullptr) {
    return KVLeafRegion::staged_input_shapes(batch, num_blocks);
  }
  const std::string what = called("staged_input_shapes");
  kvleaf_staged_input given[max_staged_inputs] = {};
  std::size_t count = 0;
  call(what, kind_.staged_input_shapes, kind_.user_data, batch, num_blocks, given, &count);
  require_count(what, count);
  StagedInputs inputs;
  for (const kvleaf_staged_input& input : std::span(given, count)) {
    if (input.key == nullptr || *input.key == '\0') {
      throw InvalidArgument(fmt::format("{} gave input {} no key", what, inputs.size()));
    }
    if (input.rank == 0 || input.rank > max_staged_rank) {
      throw InvalidArgument(fmt::format("{} gave '{}' {} dimensions; accepted: 1 to {}", what,
                                        input.key, input.rank, max_staged_rank));
    }
    StagedInput& shape = inputs.emplace_back();
    shape.key = input.key;
    shape.dtype = dtype_of("dtype of a staged input", input.dtype, DType::int32);
    for (const std::int64_t extent : std::span(input.shape, input.rank)) {
      if (extent < 0) {
        throw InvalidArgument(fmt::format("{} gave '{}' an extent of {}", what, input.key, extent));
      }
      shape.shape.push_back(extent);
    }
  }
  return inputs;
}

void CallbackLeaf::write_staged_inputs(std::span<const std::span<const BlockId>> plans,
                                       StagedArrays into) const {
  if (kind_.write_staged_inputs == nullptr) {
    KVLeafRegion::write_staged_inputs(plans, into);
    return;
  }
  const Views views = views_of(into);
  Scratch<kvleaf_row_plan> scratch;
  for (const std::span<const BlockId> blocks : plans) {
    scratch.rows().push_back({same<const std::uint32_t>(blocks.data()), blocks.size()});
  }
  call(called("write_staged_inputs"), kind_.write_staged_inputs, kind_.user_data,
       scratch.rows().data(), scratch.rows().size(), views.data(), views.size());
}

bool CallbackLeaf::can_write_delta() const {
  return kind_.write_staged_delta != nullptr ||
         (kind_.write_staged_inputs == nullptr && kind_.staged_input_shapes == nullptr);
}

void CallbackLeaf::write_staged_delta(std::span<const RowDelta> rows, StagedArrays into) const {
  if (kind_.write_staged_delta == nullptr) {
    KVLeafRegion::write_staged_delta(rows, into);
    return;
  }
  const Views views = views_of(into);
  Scratch<kvleaf_row_delta> scratch;
  for (const RowDelta& row : rows) {
    scratch.rows().push_back(
        {.new_owner = row.new_owner,
         .padding = row.padding,
         .first_changed_slot = row.first_changed_slot,
         .computed = row.computed,
         .new_tokens = row.new_tokens,
         .read_block = row.read_block.value(),
         .write_block = row.write_block.value(),
         .block_count = static_cast<std::uint32_t>(row.blocks.size()),
         .blocks = same<const std::uint32_t>(row.blocks.data()),
         .boundary_blocks = same<const std::uint32_t>(row.boundary_blocks.data()),
         .boundary_count = static_cast<std::uint32_t>(row.boundary_blocks.size()),
         .filled_columns = row.filled_columns});
  }
  const kvleaf_staging staging{&into, nullptr};
  call(called("write_staged_delta"), kind_.write_staged_delta, kind_.user_data,
       scratch.rows().data(), scratch.rows().size(), views.data(), views.size(), &staging);
  if (staging.error != nullptr) std::rethrow_exception(staging.error);
}

std::vector<kvleaf_bound_rows> CallbackLeaf::span_rows(BlockId block) const {
  std::vector<kvleaf_bound_rows> rows;
  if (kind_.bound_row_span == nullptr) return rows;
  const std::string what = called("bound_row_span");
  kvleaf_bound_rows given[max_staged_inputs] = {};
  std::size_t count = 0;
  call(what, kind_.bound_row_span, kind_.user_data, block.value(), given, &count);
  require_count(what, count);
  rows.assign(given, given + count);
  return rows;
}

CallbackLeaf::Copies CallbackLeaf::copy_rows(BlockId src, BlockId dst) const {
  Copies rows;
  if (kind_.bound_row_copies == nullptr) return rows;
  const std::string what = called("bound_row_copies");
  kvleaf_bound_rows from[max_staged_inputs] = {};
  kvleaf_bound_rows to[max_staged_inputs] = {};
  std::size_t count = 0;
  call(what, kind_.bound_row_copies, kind_.user_data, src.value(), dst.value(), from, to, &count);
  require_count(what, count);
  rows.from.assign(from, from + count);
  rows.to.assign(to, to + count);
  return rows;
}

std::vector<BoundRows> CallbackLeaf::bound_row_span(BlockId block) const {
  std::vector<BoundRows> spans;
  for (const kvleaf_bound_rows& rows : span_rows(block)) {
    spans.push_back({&require(rows.key, "key of a bound input"), rows.begin, rows.end});
  }
  return spans;
}

std::vector<std::pair<BoundRows, BoundRows>> CallbackLeaf::bound_row_copies(BlockId src,
                                                                            BlockId dst) const {
  const Copies rows = copy_rows(src, dst);
  std::vector<std::pair<BoundRows, BoundRows>> copies;
  for (std::size_t i = 0; i < rows.from.size(); ++i) {
    const kvleaf_bound_rows &from = rows.from[i], &to = rows.to[i];
    copies.push_back({{&require(from.key, "key of a bound input"), from.begin, from.end},
                      {&require(to.key, "key of a bound input"), to.begin, to.end}});
  }
  return copies;
}

void CallbackLeaf::bind(std::uint64_t page_stride) {
  if (kind_.bind != nullptr) call(called("bind"), kind_.bind, kind_.user_data, page_stride);
}

}  // namespace kvleaf::c

using namespace kvleaf::c;

void kvleaf_staging_reports_changes(const kvleaf_staging* staging) {
  if (staging != nullptr) staging->report([&] { staging->into->reports_changes(); });
}

void kvleaf_staging_changed(const kvleaf_staging* staging, size_t array, int64_t first,
                            int64_t count) {
  if (staging == nullptr) return;
  staging->report([&] {
    const auto arrays = staging->into->all();
    if (array >= arrays.size()) {
      throw kvleaf::InvalidArgument(
          fmt::format("array {} has changed; there are {}", array, arrays.size()));
    }
    if (count > 0) staging->into->changed(arrays[array], first, count);
  });
}

kvleaf_status kvleaf_custom_leaf(const kvleaf_leaf_kind* kind, kvleaf_leaf** out) {
  return guarded([&] {
    require(out, "out");
    const kvleaf_leaf_kind read = read_struct(kind, "kind");
    auto made = std::make_unique<kvleaf_leaf>();
    made->leaf = std::make_shared<CallbackLeaf>(read);
    *out = made.release();
  });
}
