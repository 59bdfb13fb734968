#include "kvleaf/group/step_planner.h"

#include <fmt/format.h>

#include <algorithm>

#include "kvleaf/group/host_set.h"
#include "kvleaf/group/leaf_rows.h"
#include "kvleaf/group/manager_impl.h"

namespace kvleaf {

class StepPlanner::Impl {
 public:
  Impl(BlockManager& manager, PlannerOptions options);
  const StepPlan& plan(std::span<const StepRequest> batch, std::optional<std::uint32_t> pad_to);

  BlockManager& manager_;
  BlockManager::Impl& core_;
  PlannerOptions options_;

 private:
  using HostSet = StepPlan::Data;
  /// Who has a row since the previous plan: a serial, 0 for nobody, and up to where it was planned.
  struct Owner {
    std::uint64_t serial = 0;
    std::uint32_t end = 0;
  };

  void check(std::span<const StepRequest> batch, std::optional<std::uint32_t> pad_to) const;
  void catch_up(HostSet& set) const;
  void take_rows(HostSet& set, const std::vector<StepRecord::Entry>& entries);
  void stage(LeafRows& leaf, HostSet& set);
  void forget_all();

  std::vector<LeafRows> leaves_;
  std::vector<StepPlan> plans_;  // one per host set
  std::uint64_t plans_made_ = 0;
  std::vector<Owner> owners_;      // of all rows there can be
  std::uint32_t rows_before_ = 0;  // of the previous plan; those behind are nobody's
  std::vector<PlannedRow> rows_;   // of this plan
  std::size_t observer_ = 0;       // our entry of Row::changed
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
  for (const LeafInfo& info : core_.info_)
    leaves_.emplace_back(info, options_, core_.options_, observer_);
  for (std::size_t i = 0; i < core_.options_.max_steps_in_flight; ++i) {
    auto set = std::make_shared<HostSet>();
    for (const LeafRows& leaf : leaves_) {
      set->leaves.push_back(
          {LeafArrays(*leaf.info().leaf, options_.max_batch, leaf.columns()), {}});
      if (leaf.maps_slots()) set->leaves.back().slot_mapping.assign(options_.max_step_tokens, -1);
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

void StepPlanner::Impl::catch_up(HostSet& set) const {
  // The arrays of this set are some plans old: copy what the plans since then changed, oldest
  // first.
  for (std::uint64_t plan = set.plan + 1; plan <= plans_made_; ++plan) {
    const HostSet& from = *plans_[plan % plans_.size()].data_;
    for (std::size_t l = 0; l < leaves_.size(); ++l) {
      // Of others all is rewritten in every plan.
      if (leaves_[l].by_changes()) set.leaves[l].arrays.copy_changes(from.leaves[l].arrays);
    }
  }
}

void StepPlanner::Impl::take_rows(HostSet& set, const std::vector<StepRecord::Entry>& entries) {
  const std::size_t live = entries.size();
  rows_.resize(live);
  PlannedRow* const rows = rows_.data();
  Owner* const owners = owners_.data();
  std::int32_t* const lengths = set.seq_lens.data();
  std::int32_t* const begins = set.cu_seqlens.data();
  const auto seen = static_cast<std::uint8_t>(1u << observer_);
  std::int32_t tokens = 0;
  begins[0] = 0;
  for (std::size_t i = 0; i < live; ++i) {
    const StepRecord::Entry& entry = entries[i];
    Request& r = *entry.request;
    Owner& owner = owners[i];
    const std::uint32_t end = entry.begin + entry.count;
    const bool stays = owner.serial == r.serial;
    const bool goes_on = stays && owner.end == entry.begin && (r.unseen & seen) == 0;
    rows[i] = {&r, entry.begin, entry.count, stays, goes_on};
    owner.serial = r.serial;
    owner.end = end;
    tokens += static_cast<std::int32_t>(entry.count);
    lengths[i] = static_cast<std::int32_t>(end);
    begins[i + 1] = tokens;
    if ((r.unseen & seen) != 0) r.unseen &= static_cast<std::uint8_t>(~seen);
  }
  for (std::size_t i = live; i < set.batch; ++i) {
    lengths[i] = 1;
    begins[i + 1] = ++tokens;
  }
  set.tokens = static_cast<std::uint32_t>(tokens);
}

void StepPlanner::Impl::stage(LeafRows& leaf, HostSet& set) {
  HostSet::Leaf& of = set.leaves[leaf.info().id.value()];
  std::int64_t* const mapping = of.slot_mapping.data();
  leaf.lay_out(rows_, rows_before_, set.batch, set.step.value(), mapping);
  if (leaf.maps_slots())
    std::fill(mapping + set.tokens - (set.batch - rows_.size()), mapping + set.tokens, -1);
  of.arrays.narrow(set.batch, leaf.columns_now(set.batch));
  if (leaf.by_changes()) {
    leaf.info().leaf->write_staged_delta(leaf.deltas(set.batch), of.arrays.open_delta());
  } else {
    leaf.info().leaf->write_staged_inputs(leaf.whole(rows_, set.batch), of.arrays.open_whole());
  }
  of.arrays.close();
}

const StepPlan& StepPlanner::Impl::plan(std::span<const StepRequest> batch,
                                        std::optional<std::uint32_t> pad_to) {
  check(batch, pad_to);
  const Step& step = core_.begin_step(batch);
  StepPlan& plan = plans_[(plans_made_ + 1) % plans_.size()];
  HostSet& set = *plan.data_;
  try {
    catch_up(set);
    set.step = step.id;
    set.served = &step;
    set.rows.assign(step.served.begin(), step.served.end());
    set.batch =
        static_cast<std::uint32_t>(std::max<std::size_t>(step.served.size(), pad_to.value_or(0)));
    take_rows(set, core_.record_of(step.id.value())->entries);
    for (LeafRows& leaf : leaves_) stage(leaf, set);
  } catch (...) {
    // A leaf failed: no step was begun, and every row is written anew next time.
    set.plan = 0;
    forget_all();
    core_.abandon(step.id, BlockManager::Impl::DeviceWork::never_ran);
    throw;
  }
  const auto live = static_cast<std::uint32_t>(rows_.size());
  for (std::uint32_t i = live; i < rows_before_; ++i) owners_[i] = {};
  rows_before_ = live;
  set.plan = ++plans_made_;
  return plan;
}

void StepPlanner::Impl::forget_all() {
  // What the arrays hold is not known any more: back to zeros, in every set.
  std::fill(owners_.begin(), owners_.end(), Owner{});
  rows_before_ = 0;
  for (LeafRows& leaf : leaves_) leaf.forget();
  for (StepPlan& plan : plans_) {
    plan.data_->plan = plans_made_;
    for (HostSet::Leaf& leaf : plan.data_->leaves) leaf.arrays.zero();
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
