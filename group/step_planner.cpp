#include "kvleaf/group/step_planner.h"

#include <fmt/format.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>

#include "kvleaf/group/manager_impl.h"

namespace kvleaf {
namespace {

// Tables of long requests spread the entries that a step writes over as many memory pages as there
// are rows: huge pages keep them within reach of the processor's address translation.
constexpr std::size_t huge_page = std::size_t{2} << 20;

struct Free {
  std::size_t alignment = 64;
  void operator()(std::byte* memory) const noexcept {
    ::operator delete[](memory, std::align_val_t{alignment});
  }
};
using Memory = std::unique_ptr<std::byte[], Free>;

Memory zeroed(std::size_t bytes) {
  const Free free{bytes >= huge_page ? huge_page : std::size_t{64}};
  auto* memory = static_cast<std::byte*>(
      ::operator new[](std::max<std::size_t>(bytes, 1), std::align_val_t{free.alignment}));
#if defined(__linux__)
  if (bytes >= huge_page) madvise(memory, bytes / huge_page * huge_page, MADV_HUGEPAGE);
#endif
  std::memset(memory, 0, bytes);
  return Memory(memory, free);
}

std::int64_t elements(const StagedArray& array) {
  std::int64_t count = 1;
  for (const std::int64_t extent : array.shape) count *= extent;
  return count;
}

}  // namespace

/// One host set of staged arrays, and the plan that lies in it.
struct StepPlan::Data {
  struct LeafArrays {
    std::vector<Memory> memory;
    boost::container::static_vector<StagedArray, max_staged_inputs> widest;
    boost::container::static_vector<StagedArray, max_staged_inputs> narrowed;
    /// Bytes that differ from the previous plan, per array.
    std::vector<std::vector<ByteRange>> dirty;
    bool reported = false;
    std::uint32_t batch = 0;  // what `narrowed` was narrowed to; 0: nothing yet
    std::uint32_t num_blocks = 0;
    std::vector<std::int64_t> slot_mapping;
  };
  std::uint64_t plan = 0;  // number of the plan whose contents these arrays have; 0: zeros
  StepId step{0};
  const Step* served = nullptr;
  std::vector<RequestId> rows;
  std::uint32_t batch = 0;
  std::uint32_t tokens = 0;
  std::vector<LeafArrays> leaves;
  std::vector<std::int32_t> seq_lens;
  std::vector<std::int32_t> cu_seqlens;

  const LeafArrays& at(LeafId leaf) const {
    if (leaf.value() >= leaves.size()) {
      throw PlanShapeError(fmt::format("leaf {} of {}", leaf.value(), leaves.size()));
    }
    return leaves[leaf.value()];
  }
  std::size_t index_of(LeafId leaf, std::string_view key) const {
    const LeafArrays& arrays = at(leaf);
    std::string keys;
    for (std::size_t i = 0; i < arrays.narrowed.size(); ++i) {
      if (arrays.narrowed[i].key == key) return i;
      keys += fmt::format("{}'{}'", keys.empty() ? "" : ", ", arrays.narrowed[i].key);
    }
    throw PlanShapeError(
        fmt::format("leaf {} stages no '{}'; it stages {}", leaf.value(), key, keys));
  }
};

StepId StepPlan::step() const noexcept { return data_->step; }
std::span<const Refusal> StepPlan::refused() const noexcept { return data_->served->refused; }
std::span<const RequestId> StepPlan::rows() const noexcept { return data_->rows; }
std::uint32_t StepPlan::batch() const noexcept { return data_->batch; }
std::uint32_t StepPlan::num_tokens() const noexcept { return data_->tokens; }
std::span<const StagedArray> StepPlan::arrays(LeafId leaf) const {
  const auto& arrays = data_->at(leaf).narrowed;
  return {arrays.data(), arrays.size()};
}
const StagedArray& StepPlan::array(LeafId leaf, std::string_view key) const {
  return data_->at(leaf).narrowed[data_->index_of(leaf, key)];
}
std::span<const std::int64_t> StepPlan::slot_mapping(LeafId leaf) const {
  const auto& mapping = data_->at(leaf).slot_mapping;
  return mapping.empty() ? std::span<const std::int64_t>()
                         : std::span(mapping).first(data_->tokens);
}
std::span<const std::int32_t> StepPlan::seq_lens() const noexcept {
  return std::span(data_->seq_lens).first(data_->batch);
}
std::span<const std::int32_t> StepPlan::cu_seqlens_q() const noexcept {
  return std::span(data_->cu_seqlens).first(data_->batch + std::size_t{1});
}
std::span<const BlockCopy> StepPlan::copies() const noexcept { return data_->served->copies; }
std::span<const ZeroFill> StepPlan::zero_fills() const noexcept {
  return data_->served->zero_fills;
}
std::span<const ByteRange> StepPlan::dirty(LeafId leaf, std::string_view key) const {
  return data_->at(leaf).dirty[data_->index_of(leaf, key)];
}

TableChanges StepPlan::changes(LeafId leaf, std::string_view key) const {
  const std::size_t index = data_->index_of(leaf, key);
  const StagedArray& array = data_->at(leaf).narrowed[index];
  if (array.dtype != DType::int32 || array.shape.empty() || array.shape.size() > 2) {
    throw PlanShapeError(
        fmt::format("'{}' is {} of rank {}; lists are made of int32 of rank 1 or 2", key,
                    name_of(array.dtype), array.shape.size()));
  }
  TableChanges changes;
  const std::int64_t width = array.shape.size() == 2 ? array.strides[0] : 1;
  const auto* data = reinterpret_cast<const std::int32_t*>(array.data);
  for (const ByteRange& range : data_->at(leaf).dirty[index]) {
    for (std::uint64_t at = range.begin / sizeof(std::int32_t);
         at < range.end / sizeof(std::int32_t); ++at) {
      const auto element = static_cast<std::int64_t>(at);
      changes.rows.push_back(static_cast<std::int32_t>(element / width));
      changes.columns.push_back(static_cast<std::int32_t>(element % width));
      changes.values.push_back(data[element]);
    }
  }
  return changes;
}

// ---- the planner
// -----------------------------------------------------------------------------------

class StepPlanner::Impl {
 public:
  Impl(BlockManager& manager, PlannerOptions options);
  const StepPlan& plan(std::span<const StepRequest> batch, std::optional<std::uint32_t> pad_to);

  BlockManager& manager_;
  BlockManager::Impl& core_;
  PlannerOptions options_;

 private:
  using Set = StepPlan::Data;
  struct LeafPlan {
    const LeafInfo* info = nullptr;
    std::uint32_t columns = 0;  // num_blocks at the widest
    std::uint32_t entries_per_page = 0;
    bool delta = false;
    bool live_span = false;
    bool in_chunk = false;
    std::uint32_t head_slots = 0;
    // Per row of the batch:
    std::vector<std::uint32_t> filled;  // what the leaf remembers, see RowDelta::filled_columns
    std::vector<RowDelta> deltas;       // as the leaf was told last
    std::vector<std::uint32_t> depths;  // slots that its table needs
    std::vector<std::int64_t> next_entries;  // of the slot mapping, in the page of its last token
  };
  /// A row of this plan.
  struct RowPlan {
    Request* request = nullptr;
    std::uint32_t begin = 0;  // tokens before this step
    std::uint32_t count = 0;
    bool stays = false;    // the request had this row in the previous plan
    bool goes_on = false;  // and has since taken, lost or changed no slot of any row
  };
  /// Who has a row since the previous plan: a serial, 0 for nobody, and up to where it was planned.
  struct Owner {
    std::uint64_t serial = 0;
    std::uint32_t end = 0;
  };

  void check(std::span<const StepRequest> batch, std::optional<std::uint32_t> pad_to) const;
  void catch_up(Set& set);
  void narrow(LeafPlan& leaf, Set::LeafArrays& arrays, std::uint32_t batch,
              std::uint32_t num_blocks) const;
  void stage(LeafPlan& leaf, Set& set, std::uint64_t step);
  void lay_out(LeafPlan& leaf, Set& set);
  void lay_out_states(LeafPlan& leaf, std::uint64_t step);
  void lay_out_boundaries(LeafPlan& leaf, std::uint64_t step);
  void lay_out_scratch(LeafPlan& leaf);
  std::span<const std::span<const BlockId>> whole_rows(const LeafPlan& leaf, std::uint32_t batch);
  void map_slots(LeafPlan& leaf, Set& set);
  void forget_all();
  /// Columns of a table of slots; states and scratch have no such table.
  std::uint32_t round_up(const LeafPlan& leaf, std::uint32_t columns) const noexcept {
    const Writing writing = leaf.info->writing;
    const bool slots = writing == Writing::append || writing == Writing::write_once;
    const std::uint32_t multiple = slots ? options_.column_multiple : 1;
    return ceil_div(columns, multiple) * multiple;
  }

  std::vector<LeafPlan> leaves_;
  std::vector<StepPlan> plans_;  // one per host set
  std::uint64_t plans_made_ = 0;
  std::vector<Owner> owners_;
  std::vector<RowPlan> rows_;                   // of this plan
  std::vector<std::span<const BlockId>> full_;  // scratch
  std::vector<BlockId> state_blocks_;           // scratch: what full_ points to for states
  std::vector<BlockId> boundaries_;             // scratch: what RowDelta::boundary_blocks points to
  std::size_t observer_ = 0;                    // our entry of Row::changed
};

StepPlanner::Impl::Impl(BlockManager& manager, PlannerOptions options)
    : manager_(manager), core_(*manager.impl_), options_(options) {
  if (options_.max_batch == 0 || options_.max_step_tokens == 0) {
    throw PlanShapeError(
        fmt::format("max_batch is {} and max_step_tokens {}; both must be at least 1",
                    options_.max_batch, options_.max_step_tokens));
  }
  if (options_.column_multiple == 0) {
    throw PlanShapeError("column_multiple is 0; 1 leaves columns as they are");
  }
  if (core_.observers_ >= max_row_observers) {
    throw PlanShapeError(fmt::format("a manager serves at most {} planners", max_row_observers));
  }
  observer_ = core_.observers_++;
  if (options_.max_encoder_tokens == 0) {
    options_.max_encoder_tokens = std::max(core_.options_.max_len, 8192u);
  }
  for (const LeafInfo& info : core_.info_) {
    LeafPlan leaf;
    leaf.info = &info;
    leaf.entries_per_page = info.leaf->slots_per_page(info.tokens_per_page);
    leaf.delta = info.leaf->can_write_delta();
    leaf.live_span = info.leaf->stages_live_span();
    const std::uint32_t slots = ceil_div(core_.options_.max_len, info.tokens_per_page);
    switch (info.writing) {
      case Writing::append:
        leaf.columns = leaf.live_span
                           ? info.leaf->blocks_to_reserve(slots, info.tokens_per_page,
                                                          {false, core_.options_.max_step_tokens})
                           : slots;
        break;
      case Writing::write_once:
        leaf.columns = ceil_div(options_.max_encoder_tokens, info.tokens_per_page);
        break;
      case Writing::in_place: {  // boundaries that one row passes in one step
        leaf.in_chunk = info.leaf->emits_in_chunk();
        const std::uint32_t most =
            std::min(options_.max_step_tokens, core_.options_.max_step_tokens);
        leaf.columns = leaf.in_chunk ? std::max(1u, ceil_div(most - 1, info.tokens_per_page)) : 1;
        if (leaf.in_chunk) {
          boundaries_.reserve(std::max<std::size_t>(
              boundaries_.capacity(),
              options_.max_step_tokens / info.tokens_per_page + options_.max_batch));
        }
        break;
      }
      case Writing::exclusive: leaf.columns = 1; break;
    }
    leaf.columns = round_up(leaf, leaf.columns);
    leaf.head_slots = ceil_div(info.pattern.head(), info.tokens_per_page);
    leaf.filled.assign(options_.max_batch, 0);
    leaf.deltas.resize(options_.max_batch);
    for (std::size_t i = 0; i < leaf.deltas.size(); ++i)
      leaf.deltas[i].filled_columns = &leaf.filled[i];
    leaf.depths.assign(options_.max_batch, 0);
    leaf.next_entries.assign(options_.max_batch, 0);
    leaves_.push_back(std::move(leaf));
  }
  const std::size_t sets = core_.options_.max_steps_in_flight;
  for (std::size_t i = 0; i < sets; ++i) {
    auto set = std::make_shared<Set>();
    set->leaves = std::vector<Set::LeafArrays>(leaves_.size());
    for (std::size_t l = 0; l < leaves_.size(); ++l) {
      Set::LeafArrays& arrays = set->leaves[l];
      for (const StagedInput& input :
           leaves_[l].info->leaf->staged_input_shapes(options_.max_batch, leaves_[l].columns)) {
        StagedArray array;
        array.key = input.key;
        array.dtype = input.dtype;
        array.shape = input.shape;
        array.strides.resize(input.shape.size(), 1);
        for (std::size_t d = input.shape.size(); d-- > 1;)
          array.strides[d - 1] = array.strides[d] * input.shape[d];
        arrays.memory.push_back(
            zeroed(static_cast<std::size_t>(elements(array)) * size_of(array.dtype)));
        array.data = arrays.memory.back().get();
        arrays.widest.push_back(array);
        arrays.narrowed.push_back(array);
        arrays.dirty.emplace_back();
        arrays.dirty.back().reserve(std::size_t{options_.max_batch} * 4 + 16);
      }
      if (leaves_[l].info->writing == Writing::append)
        arrays.slot_mapping.assign(options_.max_step_tokens, -1);
    }
    set->rows.reserve(options_.max_batch);
    set->seq_lens.assign(options_.max_batch, 0);
    set->cu_seqlens.assign(std::size_t{options_.max_batch} + 1, 0);
    StepPlan plan;
    plan.data_ = std::move(set);
    plans_.push_back(std::move(plan));
  }
  core_.reserve_steps(options_.max_batch);
  owners_.assign(options_.max_batch, {});
  rows_.reserve(options_.max_batch);
  full_.reserve(options_.max_batch);
  state_blocks_.reserve(std::size_t{options_.max_batch} * 2 + boundaries_.capacity());
}

void StepPlanner::Impl::check(std::span<const StepRequest> batch,
                              std::optional<std::uint32_t> pad_to) const {
  const std::size_t rows = std::max<std::size_t>(batch.size(), pad_to.value_or(0));
  if (rows > options_.max_batch) {
    throw PlanShapeError(
        fmt::format("a batch of {} rows; the planner was built for {}", rows, options_.max_batch));
  }
  std::uint64_t tokens = rows - batch.size();
  for (const StepRequest& row : batch) tokens += row.new_tokens;
  if (tokens > options_.max_step_tokens) {
    throw PlanShapeError(fmt::format("{} tokens in one step; the planner was built for {}", tokens,
                                     options_.max_step_tokens));
  }
  if (core_.encoders_.empty()) return;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const Request* r = core_.find(batch[i].request);
    if (r != nullptr && r->encoder != nullptr && r->encoder->tokens > options_.max_encoder_tokens) {
      throw PlanShapeError(
          fmt::format("row {}: request {} has {} encoder tokens; the planner was built for {}", i,
                      r->id.value(), r->encoder->tokens, options_.max_encoder_tokens));
    }
  }
}

void StepPlanner::Impl::catch_up(Set& set) {
  // The arrays of this set are some plans old: copy what the plans since then changed, oldest
  // first.
  for (std::uint64_t plan = set.plan + 1; plan <= plans_made_; ++plan) {
    const Set& from = *plans_[plan % plans_.size()].data_;
    for (std::size_t l = 0; l < leaves_.size(); ++l) {
      if (!leaves_[l].delta) continue;  // rewritten whole in every plan
      for (std::size_t a = 0; a < set.leaves[l].widest.size(); ++a) {
        const std::byte* source = from.leaves[l].widest[a].data;
        std::byte* target = set.leaves[l].widest[a].data;
        for (const ByteRange& range : from.leaves[l].dirty[a]) {
          std::memcpy(target + range.begin, source + range.begin, range.end - range.begin);
        }
      }
    }
  }
}

void StepPlanner::Impl::narrow(LeafPlan& leaf, Set::LeafArrays& arrays, std::uint32_t batch,
                               std::uint32_t num_blocks) const {
  const StagedInputs inputs = leaf.info->leaf->staged_input_shapes(batch, num_blocks);
  if (inputs.size() != arrays.widest.size()) {
    throw PlanShapeError(
        fmt::format("leaf '{}' stages {} arrays for this batch and {} at the widest",
                    leaf.info->leaf->leaf_id(), inputs.size(), arrays.widest.size()));
  }
  for (std::size_t a = 0; a < inputs.size(); ++a) {
    const StagedArray& widest = arrays.widest[a];
    if (inputs[a].key != widest.key || inputs[a].shape.size() != widest.shape.size()) {
      throw PlanShapeError(
          fmt::format("leaf '{}': array {} is '{}' for this batch and '{}' at the widest",
                      leaf.info->leaf->leaf_id(), a, inputs[a].key, widest.key));
    }
    for (std::size_t d = 0; d < widest.shape.size(); ++d) {
      if (inputs[a].shape[d] > widest.shape[d]) {
        throw PlanShapeError(fmt::format(
            "leaf '{}': '{}' grows to {} in dimension {}, past its widest {}",
            leaf.info->leaf->leaf_id(), widest.key, inputs[a].shape[d], d, widest.shape[d]));
      }
      arrays.narrowed[a].shape[d] = inputs[a].shape[d];
    }
  }
}

void StepPlanner::Impl::lay_out(LeafPlan& leaf, Set& set) {
  // A row that goes on in its blocks is told again with nothing new.
  const LeafInfo& info = *leaf.info;
  const bool encoder = info.writing == Writing::write_once;
  RowDelta* const deltas = leaf.deltas.data();
  const std::size_t rows = rows_.size();
  for (std::size_t i = 0; i < rows; ++i) {
    const RowPlan& row = rows_[i];
    RowDelta& delta = deltas[i];
    delta.computed = row.begin;
    delta.new_tokens = row.count;
    if (encoder) {
      delta.computed = row.request->encoder != nullptr ? row.request->encoder->tokens : 0;
      delta.new_tokens = 0;
    }
    delta.new_owner = !row.stays;
    delta.padding = false;
    if (row.goes_on) {
      delta.first_changed_slot += static_cast<std::uint32_t>(delta.blocks.size());
      delta.blocks = {};
      continue;
    }
    Row& slots = row.request->rows[info.id.value()];
    const auto end = static_cast<std::uint32_t>(slots.slots.size());
    delta.first_changed_slot = row.stays ? std::min(slots.changed[observer_], end) : 0;
    delta.blocks = std::span(slots.slots).subspan(delta.first_changed_slot);
    slots.changed[observer_] = unchanged;
    const std::uint32_t head = std::min(leaf.head_slots, slots.first);
    leaf.depths[i] = leaf.live_span ? head + end - slots.first : end;
  }
  for (std::size_t i = rows_.size(); i < set.batch; ++i) leaf.depths[i] = 0;
}

void StepPlanner::Impl::lay_out_states(LeafPlan& leaf, std::uint64_t step) {
  const LeafInfo& info = *leaf.info;
  const bool apart = info.leaf->state_kernel() == StateKernel::in_out;
  for (std::uint32_t i = 0; i < rows_.size(); ++i) {
    const RowPlan& row = rows_[i];
    RowDelta& delta = leaf.deltas[i];
    State& state = row.request->states[info.kind_index];
    delta.new_owner = !row.stays;
    delta.padding = false;
    delta.computed = row.begin;
    delta.new_tokens = row.count;
    delta.write_block = state.at(row.begin + row.count);
    delta.read_block = !apart                                      ? delta.write_block
                       : state.source && state.source_step == step ? *state.source
                                                                   : state.at(row.begin);
  }
  if (leaf.in_chunk) lay_out_boundaries(leaf, step);
}

void StepPlanner::Impl::lay_out_boundaries(LeafPlan& leaf, std::uint64_t step) {
  // Those behind `begin` and before the step's end; the manager has listed which of them it wants.
  const LeafInfo& info = *leaf.info;
  const std::uint32_t P = info.tokens_per_page;
  boundaries_.clear();  // has room for all rows: nothing that points into it moves
  for (std::uint32_t i = 0; i < rows_.size(); ++i) {
    const RowPlan& row = rows_[i];
    const std::uint32_t before = row.begin / P;
    const std::uint32_t count = (row.begin + row.count - 1) / P - before;
    const std::size_t first = boundaries_.size();
    boundaries_.resize(first + count, null_block);
    for (const PendingCheckpoint& pending : row.request->unfiled) {
      if (pending.step != step || pending.tokens <= row.begin) continue;
      boundaries_[first + pending.tokens / P - before - 1] = pending.blocks[info.kind_index];
    }
    leaf.deltas[i].boundary_blocks = std::span(boundaries_).subspan(first, count);
    leaf.depths[i] = count;
  }
  for (std::size_t i = rows_.size(); i < leaf.depths.size(); ++i) leaf.depths[i] = 0;
}

void StepPlanner::Impl::lay_out_scratch(LeafPlan& leaf) {
  const LeafInfo& info = *leaf.info;
  for (std::uint32_t i = 0; i < rows_.size(); ++i) {
    const RowPlan& row = rows_[i];
    RowDelta& delta = leaf.deltas[i];
    delta.new_owner = !row.stays;
    delta.padding = false;
    delta.computed = row.begin;
    delta.new_tokens = row.count;
    delta.write_block = delta.read_block = *row.request->scratch[info.kind_index];
    delta.first_changed_slot = row.stays ? 1 : 0;
    delta.blocks = row.stays ? std::span<const BlockId>() : std::span(&delta.write_block, 1);
  }
}

std::span<const std::span<const BlockId>> StepPlanner::Impl::whole_rows(const LeafPlan& leaf,
                                                                        std::uint32_t batch) {
  const LeafInfo& info = *leaf.info;
  full_.clear();
  state_blocks_.clear();
  for (std::uint32_t i = 0; i < batch; ++i) {
    const RowDelta& delta = leaf.deltas[i];
    if (delta.padding) {
      full_.emplace_back();
      continue;
    }
    switch (info.writing) {
      case Writing::append:
      case Writing::write_once:
        full_.emplace_back(rows_[i].request->rows[info.id.value()].slots);
        break;
      case Writing::in_place: {
        const bool apart = info.leaf->state_kernel() == StateKernel::in_out;
        const std::size_t first = state_blocks_.size();
        if (apart) state_blocks_.push_back(delta.read_block);
        state_blocks_.push_back(delta.write_block);
        state_blocks_.insert(state_blocks_.end(), delta.boundary_blocks.begin(),
                             delta.boundary_blocks.end());
        full_.emplace_back(std::span(state_blocks_).subspan(first));
        break;
      }
      case Writing::exclusive: full_.emplace_back(&delta.write_block, 1); break;
    }
  }
  return full_;
}

void StepPlanner::Impl::stage(LeafPlan& leaf, Set& set, std::uint64_t step) {
  const LeafInfo& info = *leaf.info;
  Set::LeafArrays& arrays = set.leaves[info.id.value()];
  switch (info.writing) {
    case Writing::append:
    case Writing::write_once: lay_out(leaf, set); break;
    case Writing::in_place: lay_out_states(leaf, step); break;
    case Writing::exclusive: lay_out_scratch(leaf); break;
  }
  for (std::size_t i = rows_.size(); i < set.batch; ++i) {
    std::uint32_t* const filled = leaf.deltas[i].filled_columns;
    leaf.deltas[i] = {
        .new_owner = owners_[i].serial != 0, .padding = true, .filled_columns = filled};
  }
  std::uint32_t deepest = 1;
  for (std::uint32_t i = 0; i < set.batch; ++i) deepest = std::max(deepest, leaf.depths[i]);
  deepest = round_up(leaf, deepest);
  if (arrays.batch != set.batch || arrays.num_blocks != deepest) {
    arrays.batch = 0;  // where a leaf refuses its shape
    narrow(leaf, arrays, set.batch, deepest);
    arrays.batch = set.batch;
    arrays.num_blocks = deepest;
  }
  for (auto& ranges : arrays.dirty) ranges.clear();
  arrays.reported = false;
  StagedArrays into({arrays.narrowed.data(), arrays.narrowed.size()});
  if (leaf.delta) {
    into.set_on_change(
        [](void* context, const StagedArray& array, std::int64_t first, std::int64_t count) {
          auto& self = *static_cast<Set::LeafArrays*>(context);
          self.reported = true;
          if (count == 0) return;
          const auto index = static_cast<std::size_t>(&array - self.narrowed.data());
          const std::uint64_t size = size_of(array.dtype);
          const ByteRange range{static_cast<std::uint64_t>(first) * size,
                                static_cast<std::uint64_t>(first + count) * size};
          auto& ranges = self.dirty[index];
          if (!ranges.empty() && ranges.back().end == range.begin) {
            ranges.back().end = range.end;
          } else {
            ranges.push_back(range);
          }
        },
        &arrays);
    info.leaf->write_staged_delta(std::span(leaf.deltas).first(set.batch), into);
  } else {
    info.leaf->write_staged_inputs(whole_rows(leaf, set.batch), into);
  }
  if (!arrays.reported) {  // all of it, row by row of the outermost dimension
    for (std::size_t a = 0; a < arrays.narrowed.size(); ++a) {
      const StagedArray& array = arrays.narrowed[a];
      const std::uint64_t size = size_of(array.dtype);
      if (array.shape.empty()) continue;
      std::uint64_t row_elements = 1;
      for (std::size_t d = 1; d < array.shape.size(); ++d) {
        row_elements =
            d == 1 ? static_cast<std::uint64_t>(array.shape[d] * array.strides[d]) : row_elements;
      }
      for (std::int64_t i = 0; i < array.shape[0]; ++i) {
        const std::uint64_t begin = static_cast<std::uint64_t>(i * array.strides[0]) * size;
        arrays.dirty[a].push_back({begin, begin + row_elements * size});
      }
    }
  }
}

void StepPlanner::Impl::map_slots(LeafPlan& leaf, Set& set) {
  // Entry of token t: block of its slot · entries per page + entry in the page.
  const LeafInfo& info = *leaf.info;
  const std::uint32_t P = info.tokens_per_page;
  const std::uint32_t tokens_per_entry = P / leaf.entries_per_page;
  std::int64_t* out = set.leaves[info.id.value()].slot_mapping.data();
  std::int64_t* const next = leaf.next_entries.data();
  const RowPlan* const rows = rows_.data();
  const std::size_t count = rows_.size();
  for (std::size_t i = 0; i < count; ++i) {
    const RowPlan& row = rows[i];
    if (row.goes_on && tokens_per_entry == 1) {  // in the page of its last token
      std::int64_t entry = next[i];
      *out++ = entry++;
      for (std::uint32_t t = 1; t < row.count; ++t) *out++ = entry++;
      next[i] = entry;
      continue;
    }
    const auto& slots = row.request->rows[info.id.value()].slots;
    if (row.count == 1 && tokens_per_entry == 1) {
      const auto in_page = static_cast<std::uint32_t>(row.begin - (slots.size() - 1) * P);
      *out = std::int64_t{slots.back().value()} * P + in_page;
      next[i] = *out++ + 1;
      continue;
    }
    const std::uint32_t end = row.begin + row.count;
    // The last token lies in the last slot; where there are few, so does the first, or nearly.
    std::uint64_t slot = slots.size() - 1;
    if (row.count > P) {
      slot = row.begin / P;
    } else if (slot * P > row.begin) {
      --slot;
    }
    for (std::uint32_t t = row.begin; t < end; ++slot) {
      const auto stop = static_cast<std::uint32_t>(std::min<std::uint64_t>(end, (slot + 1) * P));
      const std::int64_t base = std::int64_t{slots[slot].value()} * leaf.entries_per_page;
      auto in_page = static_cast<std::uint32_t>(t - slot * P);
      if (tokens_per_entry == 1) {
        for (; t < stop; ++t) *out++ = base + in_page++;
      } else {
        for (; t < stop; ++t) *out++ = base + in_page++ / tokens_per_entry;
      }
    }
    next[i] = out[-1] + 1;
  }
  std::fill_n(out, set.batch - rows_.size(), -1);
}

const StepPlan& StepPlanner::Impl::plan(std::span<const StepRequest> batch,
                                        std::optional<std::uint32_t> pad_to) {
  check(batch, pad_to);
  const Step& step = core_.begin_step(batch);
  StepPlan& plan = plans_[(plans_made_ + 1) % plans_.size()];
  Set& set = *plan.data_;
  try {
    catch_up(set);
    set.step = step.id;
    set.served = &step;
    set.rows.assign(step.served.begin(), step.served.end());
    set.batch =
        static_cast<std::uint32_t>(std::max<std::size_t>(step.served.size(), pad_to.value_or(0)));
    const std::vector<StepRecord::Entry>& entries = core_.record_of(step.id.value())->entries;
    const std::size_t live = entries.size();
    rows_.resize(live);
    RowPlan* const rows = rows_.data();
    const Owner* const owners = owners_.data();
    std::int32_t* const lengths = set.seq_lens.data();
    std::int32_t* const begins = set.cu_seqlens.data();
    const auto seen = static_cast<std::uint8_t>(1u << observer_);
    std::int32_t tokens = 0;
    begins[0] = 0;
    for (std::size_t i = 0; i < live; ++i) {
      const StepRecord::Entry& entry = entries[i];
      Request& r = *entry.request;
      const std::uint8_t unseen = r.unseen;
      const bool stays = owners[i].serial == r.serial;
      const bool goes_on = stays && owners[i].end == entry.begin && (unseen & seen) == 0;
      rows[i] = {&r, entry.begin, entry.count, stays, goes_on};
      tokens += static_cast<std::int32_t>(entry.count);
      lengths[i] = static_cast<std::int32_t>(entry.begin + entry.count);
      begins[i + 1] = tokens;
      if ((unseen & seen) != 0) r.unseen = unseen & static_cast<std::uint8_t>(~seen);
    }
    for (std::size_t i = live; i < set.batch; ++i) {
      lengths[i] = 1;
      begins[i + 1] = ++tokens;
    }
    set.tokens = static_cast<std::uint32_t>(tokens);
    for (LeafPlan& leaf : leaves_) {
      stage(leaf, set, step.id.value());
      if (leaf.info->writing == Writing::append) map_slots(leaf, set);
    }
  } catch (...) {
    // A leaf failed: no step was begun, and every row is written anew next time.
    set.plan = 0;
    forget_all();
    core_.abandon(step.id, BlockManager::Impl::DeviceWork::never_ran);
    throw;
  }
  for (std::uint32_t i = 0; i < options_.max_batch; ++i) {
    if (i < rows_.size()) [[likely]] {
      owners_[i] = {rows_[i].request->serial, rows_[i].begin + rows_[i].count};
    } else {
      if (owners_[i].serial == 0) break;
      owners_[i] = {};
    }
  }
  set.plan = ++plans_made_;
  return plan;
}

void StepPlanner::Impl::forget_all() {
  // What the arrays hold is not known any more: back to zeros, in every set.
  std::fill(owners_.begin(), owners_.end(), Owner{});
  for (LeafPlan& leaf : leaves_) std::fill(leaf.filled.begin(), leaf.filled.end(), 0);
  for (StepPlan& plan : plans_) {
    Set& set = *plan.data_;
    set.plan = plans_made_;
    for (auto& arrays : set.leaves) {
      for (std::size_t a = 0; a < arrays.widest.size(); ++a) {
        std::memset(
            arrays.widest[a].data, 0,
            static_cast<std::size_t>(elements(arrays.widest[a])) * size_of(arrays.widest[a].dtype));
      }
    }
  }
}

StepPlanner::StepPlanner(BlockManager& manager, PlannerOptions options)
    : impl_(std::make_unique<Impl>(manager, options)) {}
StepPlanner::~StepPlanner() = default;
const StepPlan& StepPlanner::plan(std::span<const StepRequest> batch,
                                  std::optional<std::uint32_t> pad_to) {
  return impl_->plan(batch, pad_to);
}
void StepPlanner::settle(StepId step, std::span<const Kept> kept) {
  impl_->manager_.settle(step, kept);
}
std::vector<std::pair<RequestId, std::uint32_t>> StepPlanner::abandon(StepId step) {
  return impl_->manager_.abandon(step);
}
void StepPlanner::withdraw(StepId step) {
  BlockManager::Impl& core = impl_->core_;
  if (core.record_of(step.value()) == nullptr || step.value() + 1 != core.next_step_) {
    throw StepError(fmt::format("step {} cannot be taken back: {}", step.value(),
                                core.first_step_ == core.next_step_
                                    ? "no step is in flight"
                                    : fmt::format("step {} was begun last", core.next_step_ - 1)));
  }
  core.abandon(step, BlockManager::Impl::DeviceWork::never_ran);
}
BlockManager& StepPlanner::manager() noexcept { return impl_->manager_; }
const PlannerOptions& StepPlanner::options() const noexcept { return impl_->options_; }

}  // namespace kvleaf
