// Settling: steps are done in order; what was kept of their tokens stands, the rest is cut off.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <span>

#include "kvleaf/group/manager_impl.h"

namespace kvleaf {

void BlockManager::Impl::settle(StepId step, std::span<const Kept> kept) {
  if (step.value() != first_step_ || record_of(step.value()) == nullptr) {
    throw StepError(fmt::format("step {} cannot settle: {}", step.value(),
                                first_step_ == next_step_
                                    ? "no step is in flight"
                                    : fmt::format("step {} is the oldest in flight", first_step_)));
  }
  StepRecord& record = *record_of(step.value());
  kept_.clear();
  auto entry = record.entries.begin();
  for (const Kept& keep : kept) {
    // Who gives them in the order of rows is not searched for.
    const auto is_of = [&](const StepRecord::Entry& e) { return e.id == keep.request; };
    const auto behind = std::find_if(entry, record.entries.end(), is_of);
    entry = behind != record.entries.end() ? behind
                                           : std::find_if(record.entries.begin(), entry, is_of);
    if (behind == record.entries.end() && (entry == record.entries.end() || !is_of(*entry))) {
      throw RequestError(
          fmt::format("request {} is not in step {}", keep.request.value(), step.value()));
    }
    kept_.push_back(&*entry);
    if (keep.tokens > entry->count) {
      throw RequestError(fmt::format("request {} planned {} tokens in step {}; {} cannot stand",
                                     keep.request.value(), entry->count, step.value(),
                                     keep.tokens));
    }
    if (entry->request == nullptr || keep.tokens == entry->count) continue;
    const Request& r = *entry->request;
    if (r.in_flight > 1) {
      throw RequestError(
          fmt::format("request {} is in a later step too, planned behind tokens that were "
                      "rejected; abandon that step first",
                      keep.request.value()));
    }
    const std::uint32_t length = entry->begin + keep.tokens;
    for (const std::uint32_t leaf : states_) {
      if (length < r.states[info_[leaf].kind_index].valid_from) {
        throw RequestError(fmt::format(
            "request {}: leaf '{}' keeps states back to {} tokens; {} cannot be gone back to "
            "(rollback {})",
            keep.request.value(), info_[leaf].leaf->leaf_id(),
            r.states[info_[leaf].kind_index].valid_from, length, info_[leaf].leaf->rollback()));
      }
    }
  }

  for (std::size_t i = 0; i < kept.size(); ++i) kept_[i]->stands = kept[i].tokens;
  ++clock_;
  ++first_step_;
  for (const auto& [leaf, block] : record.returning) pool_->free(leaf, block);
  record.returning.clear();
  for (const StepRecord::Source& source : record.sources) {
    pool_->free(source.leaf, source.block);
    if (source.request == nullptr) continue;
    State& state = source.request->states[info_[source.leaf.value()].kind_index];
    if (state.source_step == step.value()) state.source.reset();
  }
  record.sources.clear();
  for (const PendingCopy& copy : record.held_copies) pool_->free(copy.leaf, copy.src);
  record.held_copies.clear();

  for (StepRecord::Entry& entry : record.entries) {
    if (entry.request == nullptr) continue;
    Request& r = *entry.request;
    --r.in_flight;
    const std::uint32_t length = entry.begin + entry.stands;
    if (entry.stands < entry.count) {
      unslide(r, length);
      cut_rows(r, length);
      drop_unfiled(
          r, [&](const PendingCheckpoint& pending) { return pending.tokens > length; },
          [&](LeafId leaf, BlockId block) { give_back(r, leaf, block); });
      // Ids that were known when the step was begun and lie behind what stands were drafts.
      if (entry.known > length) cut_tokens(r, length);
    }
    r.computed = length;
    commit(r);
    if (r.in_flight == 0) {
      file_live_state(r);
      if (length >= r.slide_at) slide(r, length);
    }
    if (r.may_leave) free_leaving(r);
  }
  if (!guaranteed_.empty()) form_promises();
}

void BlockManager::Impl::cut_rows(Request& r, std::uint32_t tokens) {
  for (const std::uint32_t leaf : text_) {
    const LeafInfo& info = info_[leaf];
    Row& row = r.rows[leaf];
    const std::uint32_t slots = ceil_div(tokens, info.tokens_per_page);
    if (row.slots.size() <= slots) continue;
    r.note_change(row, slots);
    while (row.slots.size() > slots) {
      const BlockId block = row.slots.back();
      row.slots.pop_back();
      if (block == null_block) continue;
      drop_pending(info.id, block);
      give_back(r, info.id, block);
    }
    row.first = std::min(row.first, slots);
  }
  r.planned = tokens;
  r.forget_bounds();
}

}  // namespace kvleaf
