// Steps of a KVCache: a batch of slots is checked, planned, and described to the forward; the next
// call settles it.
#include <fmt/format.h>

#include <algorithm>

#include "kvleaf/cache/kv_cache_impl.h"

namespace kvleaf {

void KVCache::Impl::describe(std::span<const std::int32_t> cu_seqlens,
                             std::span<const std::int32_t> past,
                             std::span<const std::int32_t> slots) {
  const KVCacheConfig& config = layout_->config;
  const std::size_t n = slots.size();
  if (n == 0) throw PlanShapeError("a step without sequences; expected at least one");
  if (n > config.max_seqs)
    throw PlanShapeError(
        fmt::format("a step of {} sequences; the cache has {} slots", n, config.max_seqs));
  if (cu_seqlens.size() != n + 1 || past.size() != n)
    throw PlanShapeError(
        fmt::format("cu_seqlens_q has {} entries and past_len {} for {} slots; expected {} and {}",
                    cu_seqlens.size(), past.size(), n, n + 1, n));
  if (cu_seqlens[0] != 0)
    throw PlanShapeError(fmt::format("cu_seqlens_q begins with {}; expected 0", cu_seqlens[0]));

  Data& draft = *draft_;
  draft.forget_what_was_made();
  draft.slots.assign(slots.begin(), slots.end());
  draft.cu_q.assign(cu_seqlens.begin(), cu_seqlens.end());
  draft.past.assign(past.begin(), past.end());
  draft.seq_lens.resize(n);
  batch_.resize(n, {RequestId{0}, 0});
  const std::uint64_t met = ++batches_;
  const std::int32_t* const lengths = memory_->seq_lens.data();
  std::int32_t* const ends = draft.seq_lens.data();
  StepRequest* const batch = batch_.data();
  const std::size_t slots_there_are = slots_.size();
  const std::int64_t step_tokens = config.max_step_tokens;
  std::int32_t begin = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const auto s = static_cast<std::uint32_t>(slots[i]);
    if (s >= slots_there_are) refuse_row(i, cu_seqlens, past, slots);
    Slot& slot = slots_[s];
    const std::int32_t next = cu_seqlens[i + 1];
    const std::int32_t held = lengths[s];
    const std::int64_t end = std::int64_t{held} + next - begin;
    if (slot.met == met || next <= begin || next > step_tokens || past[i] != held ||
        end > slot.most)
      refuse_row(i, cu_seqlens, past, slots);
    slot.met = met;
    ends[i] = static_cast<std::int32_t>(end);
    batch[i].request = slot.request;
    batch[i].new_tokens = static_cast<std::uint32_t>(next - begin);
    begin = next;
  }
}

void KVCache::Impl::refuse_row(std::size_t i, std::span<const std::int32_t> cu_seqlens,
                               std::span<const std::int32_t> past,
                               std::span<const std::int32_t> slots) const {
  const KVCacheConfig& config = layout_->config;
  const std::size_t s = running(slots[i]);
  if (slots_[s].met == batches_)
    throw RequestError(fmt::format("row {}: slot {} is in the step twice", i, s));
  if (cu_seqlens[i + 1] <= cu_seqlens[i])
    throw PlanShapeError(
        fmt::format("row {}: cu_seqlens_q goes from {} to {}; expected at least one new token", i,
                    cu_seqlens[i], cu_seqlens[i + 1]));
  if (static_cast<std::uint32_t>(cu_seqlens[i + 1]) > config.max_step_tokens)
    throw PlanShapeError(
        fmt::format("rows 0 to {} have {} tokens; expected at most max_step_tokens {} in one step",
                    i, cu_seqlens[i + 1], config.max_step_tokens));
  const std::int64_t held = memory_->seq_lens[s];
  if (past[i] != held)
    throw RequestError(fmt::format(
        "row {}: past_len is {}, and slot {} holds {} tokens; update_position changes that", i,
        past[i], s, held));
  const std::int32_t count = cu_seqlens[i + 1] - cu_seqlens[i];
  if (held + count > config.max_len)
    throw RequestError(fmt::format("row {}: slot {} at {} tokens, {} more pass max_len {}", i, s,
                                   held, count, config.max_len));
  throw RequestError(fmt::format(
      "row {}: slot {}: not every layer of cross attention is filled; fill them first", i, s));
}

const std::shared_ptr<StepIndices::Data>& KVCache::Impl::begin(
    std::span<const std::int32_t> cu_seqlens, std::span<const std::int32_t> past,
    std::span<const std::int32_t> slots) {
  describe(cu_seqlens, past, slots);
  Data& draft = *draft_;
  if (layout_->paged()) {
    settle();
    const std::span<const std::int32_t> before =
        rows_known_ ? current_->slots : std::span<const std::int32_t>();
    rows_known_ = false;  // if a leaf fails
    const StepPlan& plan = planner_->plan(batch_);
    rows_known_ = plan.refused().empty();
    if (!rows_known_) {  // the planner's arrays went on, the tables by slot did not
      const Refusal& first = plan.refused().front();
      std::string why =
          fmt::format("{} of {} sequences of the step do not fit, and so none was served; {}",
                      plan.refused().size(), slots.size(), first.why);
      planner_->withdraw(plan.step());
      rotate();
      throw PoolExhausted(why);
    }
    step_ = plan.step();
    draft.plan = plan;
    states_->run(plan, draft.slots);
    tables_->update(plan, draft.slots, draft.seq_lens, before);
  } else {
    for (std::size_t i = 0; i < slots.size(); ++i)
      if (draft.past[i] == 0) memory_->clear_states(static_cast<std::size_t>(draft.slots[i]));
  }
  for (std::size_t i = 0; i < slots.size(); ++i)
    memory_->seq_lens[static_cast<std::size_t>(draft.slots[i])] = draft.seq_lens[i];
  if (!cross_layers_.empty()) {
    for (std::size_t i = 0; i < slots.size(); ++i)
      draft.encoder_lens[i] = memory_->encoder_lens[static_cast<std::size_t>(draft.slots[i])];
  }
  rotate();
  return current_;
}

void KVCache::Impl::rotate() {
  if (previous_.use_count() > 1) {
    // Somebody still holds the step before last: it is told, and left its own arrays of lengths.
    previous_->make_stale();
    previous_ = std::make_shared<Data>(layout_);
  }
  previous_.swap(current_);
  current_.swap(draft_);
}

std::optional<std::size_t> KVCache::Impl::row_of(std::size_t slot) const {
  if (!step_) return {};
  const std::vector<std::int32_t>& slots = current_->slots;
  const auto at = std::find(slots.begin(), slots.end(), static_cast<std::int32_t>(slot));
  if (at == slots.end()) return {};
  return static_cast<std::size_t>(at - slots.begin());
}

void KVCache::Impl::settle() {
  if (!step_) return;
  planner_->settle(*step_, rejecting_);
  rejecting_.clear();
  step_.reset();
  reserved_ = false;
  if (states_->empty()) return;
  for (std::size_t i = 0; i < current_->slots.size(); ++i)
    states_->settled(static_cast<std::size_t>(current_->slots[i]),
                     static_cast<std::uint32_t>(current_->seq_lens[i]));
}

void KVCache::Impl::abandon_step() {
  if (!step_) return;
  const auto lengths = planner_->abandon(*step_);
  step_.reset();
  rejecting_.clear();
  reserved_ = false;
  rows_known_ = false;
  for (const auto& [request, length] : lengths) {
    const auto at = std::ranges::find_if(slots_, [request = request](const Slot& slot) {
      return slot.used && slot.request == request;
    });
    if (at == slots_.end()) continue;
    const auto s = static_cast<std::size_t>(at - slots_.begin());
    memory_->seq_lens[s] = static_cast<std::int32_t>(length);
    states_->moved(s);
    tables_->rewrite(s, request);
  }
}

}  // namespace kvleaf
