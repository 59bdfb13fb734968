#include "kvleaf/group/leaf_rows.h"

#include <algorithm>

namespace kvleaf {

LeafRows::LeafRows(const LeafInfo& info, const PlannerOptions& options,
                   const ManagerOptions& manager, std::size_t observer)
    : info_(&info), observer_(observer) {
  const KVLeafRegion& leaf = *info.leaf;
  const std::uint32_t P = info.tokens_per_page;
  const std::uint32_t slots = ceil_div(manager.max_len, P);
  const std::uint32_t rows = options.max_batch;
  entries_per_page_ = leaf.slots_per_page(P);
  by_changes_ = leaf.can_write_delta();
  live_span_ = leaf.stages_live_span();
  head_slots_ = ceil_div(info.pattern.head(), P);
  switch (info.writing) {
    case Writing::append:
      tokens_per_entry_ = P / entries_per_page_;
      columns_ =
          live_span_ ? leaf.blocks_to_reserve(slots, P, {false, manager.max_step_tokens}) : slots;
      column_multiple_ = options.column_multiple;
      break;
    case Writing::write_once:
      columns_ = ceil_div(options.max_encoder_tokens, P);
      column_multiple_ = options.column_multiple;
      break;
    case Writing::in_place:  // boundaries that one row passes in one step
      columns_ = 1;
      apart_ = leaf.state_kernel() == StateKernel::in_out;
      in_chunk_ = leaf.emits_in_chunk();
      if (in_chunk_) {
        const std::uint32_t most = std::min(options.max_step_tokens, manager.max_step_tokens);
        columns_ = std::max(1u, ceil_div(most - 1, P));
        boundaries_.reserve(options.max_step_tokens / P + rows);
      }
      break;
    case Writing::exclusive: columns_ = 1; break;
  }
  columns_ = round_up(columns_);
  deltas_.resize(rows);
  filled_.assign(rows, 0);
  for (std::size_t i = 0; i < rows; ++i) deltas_[i].filled_columns = &filled_[i];
  depths_.assign(rows, 0);
  next_entries_.assign(rows, 0);
  if (!by_changes_) {
    full_.reserve(rows);
    state_blocks_.reserve(std::size_t{rows} * 2 + boundaries_.capacity());
  }
}

std::uint32_t LeafRows::round_up(std::uint32_t columns) const noexcept {
  return ceil_div(columns, column_multiple_) * column_multiple_;
}

std::uint32_t LeafRows::columns_now(std::uint32_t batch) const noexcept {
  std::uint32_t deepest = 1;
  for (std::uint32_t i = 0; i < batch; ++i) deepest = std::max(deepest, depths_[i]);
  return round_up(deepest);
}

void LeafRows::lay_out(PlannedRows rows, std::uint32_t rows_before, std::uint32_t batch,
                       std::uint64_t step, std::int64_t* mapping) {
  switch (info_->writing) {
    case Writing::append: lay_out_text(rows, mapping); break;
    case Writing::write_once: lay_out_encoder(rows); break;
    case Writing::in_place: lay_out_states(rows, step); break;
    case Writing::exclusive: lay_out_scratch(rows); break;
  }
  for (std::size_t i = rows.size(); i < batch; ++i) {
    deltas_[i] = {.new_owner = i < rows_before, .padding = true, .filled_columns = &filled_[i]};
    depths_[i] = 0;
  }
}

void LeafRows::lay_out_text(PlannedRows rows, std::int64_t* out) {
  const PlannedRow* const planned = rows.data();
  const std::size_t count = rows.size();
  RowDelta* const deltas = deltas_.data();
  std::int64_t* const next = next_entries_.data();
  const bool entry_per_token = tokens_per_entry_ == 1;
  for (std::size_t i = 0; i < count; ++i) {
    const PlannedRow& row = planned[i];
    RowDelta& delta = deltas[i];
    delta.new_owner = !row.stays;
    delta.padding = false;
    delta.computed = row.begin;
    delta.new_tokens = row.count;
    if (!row.goes_on || !entry_per_token) {
      tell_slots(i, row);
      out = map_slots(i, row, out);
      continue;
    }
    // Told again with nothing new, and its tokens go into the page of the last one.
    if (!delta.blocks.empty()) {
      delta.first_changed_slot += static_cast<std::uint32_t>(delta.blocks.size());
      delta.blocks = {};
    }
    std::int64_t entry = next[i];
    *out++ = entry++;
    for (std::uint32_t t = 1; t < row.count; ++t) *out++ = entry++;
    next[i] = entry;
  }
}

void LeafRows::lay_out_encoder(PlannedRows rows) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const PlannedRow& row = rows[i];
    RowDelta& delta = deltas_[i];
    delta.new_owner = !row.stays;
    delta.padding = false;
    delta.computed = row.request->encoder != nullptr ? row.request->encoder->tokens : 0;
    delta.new_tokens = 0;
    tell_slots(i, row);
  }
}

void LeafRows::tell_slots(std::size_t i, const PlannedRow& row) {
  RowDelta& delta = deltas_[i];
  if (row.goes_on) {
    delta.first_changed_slot += static_cast<std::uint32_t>(delta.blocks.size());
    delta.blocks = {};
    return;
  }
  Row& slots = row.request->rows[info_->id.value()];
  const auto end = static_cast<std::uint32_t>(slots.slots.size());
  delta.first_changed_slot = row.stays ? std::min(slots.changed[observer_], end) : 0;
  delta.blocks = std::span(slots.slots).subspan(delta.first_changed_slot);
  slots.changed[observer_] = unchanged;
  const std::uint32_t head = std::min(head_slots_, slots.first);
  depths_[i] = live_span_ ? head + end - slots.first : end;
}

std::int64_t* LeafRows::map_slots(std::size_t i, const PlannedRow& row, std::int64_t* out) {
  // Entry of token t: block of its slot · entries per page + entry in the page.
  const std::uint32_t P = info_->tokens_per_page;
  const auto& slots = row.request->rows[info_->id.value()].slots;
  if (row.count == 1 && tokens_per_entry_ == 1) {  // most of decoding: it lies in the last slot
    const auto in_page = static_cast<std::uint32_t>(row.begin - (slots.size() - 1) * P);
    *out = std::int64_t{slots.back().value()} * P + in_page;
    next_entries_[i] = *out + 1;
    return out + 1;
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
    const std::int64_t base = std::int64_t{slots[slot].value()} * entries_per_page_;
    auto in_page = static_cast<std::uint32_t>(t - slot * P);
    if (tokens_per_entry_ == 1) {
      for (; t < stop; ++t) *out++ = base + in_page++;
    } else {
      for (; t < stop; ++t) *out++ = base + in_page++ / tokens_per_entry_;
    }
  }
  next_entries_[i] = out[-1] + 1;
  return out;
}

void LeafRows::lay_out_states(PlannedRows rows, std::uint64_t step) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const PlannedRow& row = rows[i];
    RowDelta& delta = deltas_[i];
    State& state = row.request->states[info_->kind_index];
    delta.new_owner = !row.stays;
    delta.padding = false;
    delta.computed = row.begin;
    delta.new_tokens = row.count;
    delta.write_block = state.at(row.begin + row.count);
    delta.read_block = !apart_                                     ? delta.write_block
                       : state.source && state.source_step == step ? *state.source
                                                                   : state.at(row.begin);
  }
  if (in_chunk_) lay_out_boundaries(rows, step);
}

void LeafRows::lay_out_boundaries(PlannedRows rows, std::uint64_t step) {
  // Those behind `begin` and before the step's end; the manager has listed which of them it wants.
  const std::uint32_t P = info_->tokens_per_page;
  boundaries_.clear();  // has room for all rows: nothing that points into it moves
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const PlannedRow& row = rows[i];
    const std::uint32_t before = row.begin / P;
    const std::uint32_t count = (row.begin + row.count - 1) / P - before;
    const std::size_t first = boundaries_.size();
    boundaries_.resize(first + count, null_block);
    for (const PendingCheckpoint& pending : row.request->unfiled) {
      if (pending.step != step || pending.tokens <= row.begin) continue;
      boundaries_[first + pending.tokens / P - before - 1] = pending.blocks[info_->kind_index];
    }
    deltas_[i].boundary_blocks = std::span(boundaries_).subspan(first, count);
    depths_[i] = count;
  }
}

void LeafRows::lay_out_scratch(PlannedRows rows) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const PlannedRow& row = rows[i];
    RowDelta& delta = deltas_[i];
    delta.new_owner = !row.stays;
    delta.padding = false;
    delta.computed = row.begin;
    delta.new_tokens = row.count;
    delta.write_block = delta.read_block = *row.request->scratch[info_->kind_index];
    delta.first_changed_slot = row.stays ? 1 : 0;
    delta.blocks = row.stays ? std::span<const BlockId>() : std::span(&delta.write_block, 1);
  }
}

RowPlans LeafRows::whole(PlannedRows rows, std::uint32_t batch) {
  full_.clear();
  state_blocks_.clear();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const RowDelta& delta = deltas_[i];
    switch (info_->writing) {
      case Writing::append:
      case Writing::write_once:
        full_.emplace_back(rows[i].request->rows[info_->id.value()].slots);
        break;
      case Writing::in_place: {
        const std::size_t first = state_blocks_.size();
        if (apart_) state_blocks_.push_back(delta.read_block);
        state_blocks_.push_back(delta.write_block);
        state_blocks_.insert(state_blocks_.end(), delta.boundary_blocks.begin(),
                             delta.boundary_blocks.end());
        full_.emplace_back(std::span(state_blocks_).subspan(first));
        break;
      }
      case Writing::exclusive: full_.emplace_back(&delta.write_block, 1); break;
    }
  }
  full_.resize(batch);  // dummy rows have no blocks
  return full_;
}

void LeafRows::forget() { std::fill(filled_.begin(), filled_.end(), 0); }

}  // namespace kvleaf
