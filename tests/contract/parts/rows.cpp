#include "kvleaf/testing/parts/rows.h"

#include <fmt/format.h>

namespace kvleaf::testing::contract {
namespace {

std::string listed(std::span<const BlockId> blocks) {
  std::string list;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    // Long rows are all alike in the middle.
    if (blocks.size() > 16 && i >= 8 && i + 4 < blocks.size()) {
      if (i == 8) list += " …";
      continue;
    }
    list += fmt::format("{}{}", list.empty() ? "" : " ", blocks[i].value());
  }
  return list.empty() ? "none" : list;
}

}  // namespace

std::string BatchRow::text(const Facts& facts) const {
  if (padding) return "padding";
  std::string text = new_owner ? "a new request" : "goes on";
  if (facts.writing == Writing::write_once) {
    text += fmt::format(", {} encoder tokens", computed);
  } else {
    text += fmt::format(", {} computed + {} new tokens", computed, planned - computed);
  }
  text += fmt::format(", blocks {}", listed(plan));
  if (!new_owner && facts.of_text()) text += fmt::format(" (changed from slot {})", first_changed);
  return text;
}

void Batch::fill_text(BatchRow& row, std::uint32_t kept_slots) {
  const std::vector<BlockId> before = row.plan;
  const SlotReach reach = facts_.reach(row.computed);
  const std::uint32_t end = pages_of(row.planned, facts_.page);
  row.plan.resize(std::min<std::size_t>(row.plan.size(), std::min(kept_slots, end)), null_block);
  row.plan.resize(end, null_block);
  for (std::uint32_t slot = 0; slot < end; ++slot) {
    const bool held = slot < reach.head_end || slot >= reach.tail_begin;
    if (!held) row.plan[slot] = null_block;
    if (held && row.plan[slot] == null_block) row.plan[slot] = next_block();
  }
  const std::size_t shared = std::min(before.size(), row.plan.size());
  row.first_changed = 0;
  while (row.first_changed < shared && before[row.first_changed] == row.plan[row.first_changed])
    ++row.first_changed;
}

void Batch::start(std::uint32_t index, std::uint32_t computed, std::uint32_t count) {
  BatchRow& row = rows_[index];
  row = BatchRow{.padding = false, .new_owner = true, .filled_columns = row.filled_columns};
  row.computed = computed;
  row.planned = computed + count;
  switch (facts_.writing) {
    case Writing::append: fill_text(row, 0); break;
    case Writing::write_once:
      row.computed = row.planned;
      for (std::uint32_t i = 0; i < pages_of(row.planned, facts_.page); ++i)
        row.plan.push_back(next_block());
      break;
    case Writing::exclusive:
      row.read = row.write = next_block();
      row.plan = {row.write};
      break;
    case Writing::in_place: extend(index, 0); break;
  }
  row.first_changed = 0;
}

void Batch::extend(std::uint32_t index, std::uint32_t count) {
  BatchRow& row = rows_[index];
  if (row.padding) return start(index, 0, std::max(count, 1u));
  if (count > 0) {
    row.new_owner = false;
    if (facts_.writing != Writing::write_once) {
      row.computed = row.planned;
      row.planned += count;
    }
  }
  switch (facts_.writing) {
    case Writing::append: fill_text(row, ~0u); break;
    case Writing::write_once:
      row.first_changed = static_cast<std::uint32_t>(row.plan.size());
      break;
    case Writing::exclusive: row.first_changed = 1; break;
    case Writing::in_place: {
      // A state stays in its block, but where one is kept for rollback, or a prefix is resumed.
      if (row.new_owner) {
        row.write = next_block();
        row.read = facts_.in_out ? next_block() : row.write;
      } else {
        row.read = row.write;
        if (facts_.rollback > 0) row.write = next_block();
        if (!facts_.in_out) row.read = row.write;
      }
      row.plan.clear();
      if (facts_.in_out) row.plan.push_back(row.read);
      row.plan.push_back(row.write);
      row.boundaries.clear();
      if (facts_.in_chunk && row.planned > 0) {
        const std::uint32_t inside = (row.planned - 1) / facts_.page - row.computed / facts_.page;
        for (std::uint32_t i = 0; i < inside; ++i)
          row.boundaries.push_back(i % 3 == 2 ? null_block : next_block());
      }
      row.plan.insert(row.plan.end(), row.boundaries.begin(), row.boundaries.end());
      break;
    }
  }
}

void Batch::rewind(std::uint32_t index, std::uint32_t tokens, std::uint32_t count) {
  BatchRow& row = rows_[index];
  if (row.padding || !facts_.of_text() || tokens >= row.planned) return extend(index, count);
  const SlotReach reach = facts_.reach(tokens);
  for (std::uint32_t slot = 0; slot < reach.end; ++slot) {
    if (reach.contains(slot) && row.plan[slot] == null_block) return extend(index, count);
  }
  row.new_owner = false;
  row.computed = tokens;
  row.planned = tokens + count;
  // The page it now ends in may be shared: a step that writes into it gets a block of its own.
  fill_text(row, tokens / facts_.page);
}

void Batch::pad(std::uint32_t index) {
  const std::uint32_t filled = rows_[index].filled_columns;
  const bool owned = !rows_[index].padding;
  rows_[index] = BatchRow{.padding = true, .new_owner = owned, .filled_columns = filled};
}

void Batch::exchange(std::uint32_t index, std::uint32_t slot) {
  BatchRow& row = rows_[index];
  if (row.padding || !facts_.of_text() || row.plan.empty()) return;
  slot %= static_cast<std::uint32_t>(row.plan.size());
  if (row.plan[slot] == null_block) return;
  row.plan[slot] = next_block();
  row.first_changed = std::min(row.first_changed, slot);
}

void Batch::blur(std::uint32_t index, std::uint32_t slots) {
  BatchRow& row = rows_[index];
  if (!row.padding && facts_.of_text()) row.first_changed -= std::min(row.first_changed, slots);
}

void Batch::set_rows(std::uint32_t rows) { rows_.resize(rows); }

std::uint32_t Batch::num_blocks() const {
  std::size_t deepest = 1;
  for (const BatchRow& row : rows_) {
    if (row.padding) continue;
    if (facts_.is_state()) {
      deepest = std::max(deepest, row.boundaries.size());
    } else if (facts_.live_span && facts_.of_text()) {
      const SlotReach reach = facts_.reach(row.computed);
      deepest = std::max<std::size_t>(deepest, reach.head_end + row.plan.size() - reach.tail_begin);
    } else {
      deepest = std::max(deepest, row.plan.size());
    }
  }
  return static_cast<std::uint32_t>(deepest);
}

std::vector<std::span<const BlockId>> Batch::plans() const {
  std::vector<std::span<const BlockId>> plans;
  for (const BatchRow& row : rows_) plans.emplace_back(row.plan);
  return plans;
}

RowDelta Batch::describe(const BatchRow& row) const {
  RowDelta delta;
  delta.new_owner = row.new_owner;
  delta.padding = row.padding;
  if (row.padding) return delta;
  delta.computed = row.computed;
  delta.new_tokens = row.planned - row.computed;
  delta.read_block = row.read;
  delta.write_block = row.write;
  delta.boundary_blocks = row.boundaries;
  if (facts_.is_state()) return delta;
  delta.first_changed_slot = row.new_owner ? 0 : row.first_changed;
  delta.blocks = std::span(row.plan).subspan(delta.first_changed_slot);
  return delta;
}

std::vector<RowDelta> Batch::deltas() {
  std::vector<RowDelta> deltas;
  for (BatchRow& row : rows_) {
    deltas.push_back(describe(row));
    deltas.back().filled_columns = &row.filled_columns;
  }
  return deltas;
}

std::vector<RowDelta> Batch::fresh_deltas() const {
  std::vector<RowDelta> deltas;
  for (const BatchRow& row : rows_) {
    BatchRow fresh = row;
    fresh.new_owner = true;
    deltas.push_back(describe(fresh));
    // The spans must outlive the copy.
    deltas.back().blocks = !row.padding && !facts_.is_state() ? std::span<const BlockId>(row.plan)
                                                              : std::span<const BlockId>();
    deltas.back().boundary_blocks = row.boundaries;
  }
  return deltas;
}

bool Batch::plans_say_all() const {
  return std::ranges::none_of(rows_, [&](const BatchRow& row) {
    const bool whole =
        facts_.is_state() || facts_.writing == Writing::exclusive || row.planned % facts_.page == 0;
    return row.padding || !whole;
  });
}

std::uint32_t widest_blocks(const Facts& facts, const KVLeafRegion& leaf, std::uint32_t tokens,
                            std::uint32_t step) {
  if (facts.is_state()) return facts.in_chunk ? pages_of(step, facts.page) + 1 : 1;
  if (facts.writing == Writing::exclusive) return 1;
  const std::uint32_t slots = std::max(pages_of(tokens, facts.page), 1u);
  if (!facts.of_text() || !facts.live_span) return slots;
  return std::max(leaf.blocks_to_reserve(slots, facts.page,
                                         {.enable_prefix_caching = false, .step_tokens = step}),
                  1u);
}

}  // namespace kvleaf::testing::contract
