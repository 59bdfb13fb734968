#include "kvleaf/leaf/block_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

namespace kvleaf {
namespace {

std::int64_t length(std::span<const BlockId> blocks) noexcept {
  return static_cast<std::int64_t>(blocks.size());
}

// Slots that hold what they held; the rest of the row is in delta.blocks.
std::int64_t kept_slots(const RowDelta& delta) noexcept {
  return delta.new_owner || delta.padding ? 0 : delta.first_changed_slot;
}

std::span<const BlockId> changed_blocks(const RowDelta& delta) noexcept {
  return delta.padding ? std::span<const BlockId>() : delta.blocks;
}

std::int64_t row_end(const RowDelta& delta) noexcept {
  return kept_slots(delta) + length(changed_blocks(delta));
}

// Whether the row's entries are what they were, in a table with a column for each slot.
bool as_it_was(const RowDelta& delta) noexcept {
  return !delta.new_owner && changed_blocks(delta).empty() && delta.filled_columns != nullptr &&
         *delta.filled_columns == row_end(delta);
}

void require_whole_rows(const std::string& leaf, RowDeltas rows) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].new_owner && !rows[i].padding && rows[i].first_changed_slot != 0) {
      throw PlanShapeError(
          fmt::format("leaf '{}': row {} has a new owner, but its first {} slots are not given",
                      leaf, i, rows[i].first_changed_slot));
    }
  }
}

void require_columns(const std::string& leaf, std::int64_t row, std::int64_t wanted,
                     std::int64_t columns) {
  if (wanted > columns) {
    throw PlanShapeError(fmt::format("leaf '{}': row {} has {} blocks, its table {} columns", leaf,
                                     row, wanted, columns));
  }
}

// Zeroes what is visible of a row behind `filled` columns: as far as the leaf's note says, or all.
void clear_behind(IndexArray& table, std::int64_t row, std::int64_t filled, const RowDelta& delta) {
  if (delta.filled_columns != nullptr && *delta.filled_columns <= filled) {
    *delta.filled_columns = static_cast<std::uint32_t>(filled);
    return;
  }
  const std::int64_t columns = table.extent(1);
  const std::int64_t at = row * table.stride(0);
  std::int64_t until = columns;
  if (delta.filled_columns != nullptr) {
    std::uint32_t& noted = *delta.filled_columns;
    until = std::min<std::int64_t>(noted, columns);
    // What lies beyond this view is not ours to clear; a wider view will find it by the note.
    const std::int64_t widest = std::max(table.stride(0), columns);
    const std::int64_t beyond = std::min<std::int64_t>(noted, widest);
    noted = static_cast<std::uint32_t>(beyond > columns ? beyond : filled);
  }
  table.clear(at + filled, at + until);
}

}  // namespace

// ---- dense -------------------------------------------------------------------------------------

DenseTable::DenseTable(const std::string& leaf, const StagedArrays& into)
    : leaf_(leaf), into_(into), table_(leaf, into, "block_table", 2) {}

void DenseTable::write(RowPlans plans) {
  const std::int64_t batch = static_cast<std::int64_t>(plans.size());
  const std::int64_t columns = table_.extent(1);
  table_.require_extent(0, batch);
  for (std::int64_t i = 0; i < batch; ++i) require_columns(leaf_, i, length(plans[i]), columns);

  for (std::int64_t i = 0; i < batch; ++i) {
    const std::int64_t at = i * table_.stride(0);
    table_.fill(at, plans[i]);
    table_.fill(at + length(plans[i]), columns - length(plans[i]), 0);
  }
}

void DenseTable::update(RowDeltas rows) {
  const std::int64_t batch = static_cast<std::int64_t>(rows.size());
  const std::int64_t columns = table_.extent(1);
  table_.require_extent(0, batch);
  bool fits = true;
  for (const RowDelta& delta : rows) {
    const bool whole = !delta.new_owner || delta.padding || delta.first_changed_slot == 0;
    fits = fits && whole && row_end(delta) <= columns;
  }
  if (!fits) {
    require_whole_rows(leaf_, rows);
    for (std::int64_t i = 0; i < batch; ++i) require_columns(leaf_, i, row_end(rows[i]), columns);
  }

  into_.reports_changes();
  for (std::int64_t i = 0; i < batch; ++i) {
    const RowDelta& delta = rows[i];
    if (as_it_was(delta)) continue;
    const std::int64_t at = i * table_.stride(0);
    if (delta.new_owner) {
      table_.put(at, changed_blocks(delta));
    } else if (delta.blocks.size() == 1 && !delta.padding) {  // a page more
      table_.put_change(at + delta.first_changed_slot,
                        static_cast<std::int32_t>(delta.blocks.front().value()));
    } else {
      table_.put_changes(at + kept_slots(delta), changed_blocks(delta));
    }
    clear_behind(table_, i, row_end(delta), delta);
  }
}

// ---- CSR ---------------------------------------------------------------------------------------

namespace {

// A padding row reads one token of the null block: kernels take no row without a page.
constexpr BlockId padding_blocks[] = {null_block};

std::span<const BlockId> csr_blocks(const RowDelta& delta) noexcept {
  return delta.padding ? std::span<const BlockId>(padding_blocks) : delta.blocks;
}

std::int64_t csr_length(const RowDelta& delta) noexcept {
  return kept_slots(delta) + length(csr_blocks(delta));
}

std::int32_t last_page_tokens(const RowDelta& delta, std::uint32_t tokens_per_page) noexcept {
  if (delta.padding) return 1;
  const std::uint64_t tokens = std::uint64_t{delta.computed} + delta.new_tokens;
  if (csr_length(delta) == 0 || tokens == 0) return 0;
  return static_cast<std::int32_t>((tokens - 1) % tokens_per_page + 1);
}

/// Moves of entries, joined where neighbours go the same distance: most rows of a batch shift as
/// the one before them does.
class JoinedMoves {
 public:
  explicit JoinedMoves(IndexArray& entries) : entries_(entries) {}
  void add(std::int64_t from, std::int64_t to, std::int64_t count) noexcept {
    const bool same_distance = count_ > 0 && from - to == from_ - to_;
    if (same_distance && from == from_ + count_) {
      count_ += count;
    } else if (same_distance && from + count == from_) {
      from_ = from, to_ = to, count_ += count;
    } else {
      run();
      from_ = from, to_ = to, count_ = count;
    }
  }
  void run() noexcept {
    entries_.move(from_, to_, count_);
    count_ = 0;
  }

 private:
  IndexArray& entries_;
  std::int64_t from_ = 0, to_ = 0, count_ = 0;
};

}  // namespace

CsrTable::CsrTable(const std::string& leaf, std::uint32_t tokens_per_page, const StagedArrays& into)
    : leaf_(leaf),
      tokens_per_page_(tokens_per_page),
      into_(into),
      indptr_(leaf, into, "indptr", 1),
      indices_(leaf, into, "indices", 1),
      last_page_len_(leaf, into, "last_page_len", 1) {}

void CsrTable::require_room(std::size_t rows, std::int64_t total) const {
  indptr_.require_extent(0, static_cast<std::int64_t>(rows) + 1);
  last_page_len_.require_extent(0, static_cast<std::int64_t>(rows));
  const std::int64_t room =
      std::min<std::int64_t>(indices_.extent(0), std::numeric_limits<std::int32_t>::max());
  if (total > room) {
    throw PlanShapeError(fmt::format("leaf '{}': the rows have {} blocks, 'indices' room for {}",
                                     leaf_, total, room));
  }
}

void CsrTable::write(RowPlans plans) {
  std::int64_t total = 0;
  for (const auto& plan : plans) total += length(plan);
  require_room(plans.size(), total);

  std::int64_t begin = 0;
  for (std::size_t i = 0; i < plans.size(); ++i) {
    const auto row = static_cast<std::int64_t>(i);
    indptr_.fill(row, 1, static_cast<std::int32_t>(begin));
    indices_.fill(begin, plans[i]);
    last_page_len_.fill(row, 1, plans[i].empty() ? 0 : static_cast<std::int32_t>(tokens_per_page_));
    begin += length(plans[i]);
  }
  indptr_.fill(static_cast<std::int64_t>(plans.size()), 1, static_cast<std::int32_t>(total));
  indices_.fill(total, indices_.extent(0) - total, 0);
}

void CsrTable::check(RowDeltas rows) const {
  require_whole_rows(leaf_, rows);
  std::int64_t total = 0;
  for (const RowDelta& delta : rows) total += csr_length(delta);
  require_room(rows.size(), total);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto row = static_cast<std::int64_t>(i);
    const std::int64_t kept = kept_slots(rows[i]);
    const std::int64_t held = std::int64_t{indptr_.get(row + 1)} - indptr_.get(row);
    if (kept > 0 && (indptr_.get(row) < 0 || kept > held)) {
      throw PlanShapeError(fmt::format("leaf '{}': row {} keeps {} slots, but was written with {}",
                                       leaf_, i, kept, held));
    }
  }
}

void CsrTable::update(RowDeltas rows) {
  check(rows);
  into_.reports_changes();
  const auto batch = static_cast<std::int64_t>(rows.size());

  // Rows lie one behind the other, so one that grew shifts all behind it. The slots that each keeps
  // are moved in place: first those that go left, from the left, then those that go right, from the
  // right. So none is written over before it was moved: kept slots lie in the same order before and
  // after, and none of a row's new places reaches into what a row still waiting for its turn keeps.
  JoinedMoves moves(indices_);
  std::int64_t total = 0;
  for (std::int64_t i = 0; i < batch; ++i) {
    const std::int64_t old_begin = indptr_.get(i);
    if (total < old_begin) moves.add(old_begin, total, kept_slots(rows[i]));
    total += csr_length(rows[i]);
  }
  moves.run();
  std::int64_t begin = total;
  for (std::int64_t i = batch - 1; i >= 0; --i) {
    const std::int64_t old_begin = indptr_.get(i);
    begin -= csr_length(rows[i]);
    if (begin > old_begin) moves.add(old_begin, begin, kept_slots(rows[i]));
  }
  moves.run();

  for (std::int64_t i = 0; i < batch; ++i) {  // begin is 0 again
    const std::int64_t kept = kept_slots(rows[i]);
    if (begin != indptr_.get(i)) indices_.report(begin, kept);
    indices_.put_changes(begin + kept, csr_blocks(rows[i]));
    indptr_.put_change(i, static_cast<std::int32_t>(begin));
    last_page_len_.put_change(i, last_page_tokens(rows[i], tokens_per_page_));
    begin += csr_length(rows[i]);
  }
  indptr_.put_change(batch, static_cast<std::int32_t>(total));
}

// ---- compact -----------------------------------------------------------------------------------

CompactTable::CompactTable(const std::string& leaf, std::uint32_t sink_slots,
                           const StagedArrays& into)
    : leaf_(leaf),
      sinks_(sink_slots),
      into_(into),
      table_(leaf, into, "block_table", 2),
      first_slot_(leaf, into, "first_slot", 1) {}

// Of a row whose live span lies in `blocks`, its slots from first_changed on.
CompactTable::Layout CompactTable::layout(std::int64_t first_changed,
                                          std::span<const BlockId> blocks) const noexcept {
  const std::int64_t end = first_changed + length(blocks);
  std::int64_t first = std::max(first_changed, sinks_);
  while (first < end && blocks[first - first_changed] == null_block) ++first;
  if (first >= end) return {.first_slot = std::max(end, sinks_), .filled = std::min(end, sinks_)};
  return {.first_slot = first, .filled = sinks_ + end - first};
}

CompactTable::Layout CompactTable::layout(std::int64_t row, const RowDelta& delta) const noexcept {
  const std::int64_t kept = kept_slots(delta);
  const std::int64_t first = first_slot_.get(row);
  // A kept slot behind the first one of the span: the span begins where it did.
  if (kept > first) return {.first_slot = first, .filled = sinks_ + row_end(delta) - first};
  return layout(kept, changed_blocks(delta));
}

void CompactTable::check(std::int64_t row, Layout layout) const {
  require_columns(leaf_, row, layout.filled, table_.extent(1));
}

void CompactTable::write(RowPlans plans) {
  const auto batch = static_cast<std::int64_t>(plans.size());
  table_.require_extent(0, batch);
  first_slot_.require_extent(0, batch);
  for (std::int64_t i = 0; i < batch; ++i) check(i, layout(0, plans[i]));

  for (std::int64_t i = 0; i < batch; ++i) {
    const std::span<const BlockId> plan = plans[i];
    const Layout to = layout(0, plan);
    const std::int64_t at = i * table_.stride(0);
    table_.fill(at, plan.first(std::min(length(plan), sinks_)));
    if (to.first_slot < length(plan)) table_.fill(at + sinks_, plan.subspan(to.first_slot));
    table_.fill(at + to.filled, table_.extent(1) - to.filled, 0);
    first_slot_.fill(i, 1, static_cast<std::int32_t>(to.first_slot));
  }
}

void CompactTable::update(RowDeltas rows) {
  const auto batch = static_cast<std::int64_t>(rows.size());
  table_.require_extent(0, batch);
  first_slot_.require_extent(0, batch);
  require_whole_rows(leaf_, rows);
  for (std::int64_t i = 0; i < batch; ++i) check(i, layout(i, rows[i]));

  into_.reports_changes();
  for (std::int64_t i = 0; i < batch; ++i) {
    const std::span<const BlockId> blocks = changed_blocks(rows[i]);
    const std::int64_t kept = kept_slots(rows[i]);
    const std::int64_t end = row_end(rows[i]);
    const Layout to = layout(i, rows[i]);
    const std::int64_t at = i * table_.stride(0);
    if (kept < sinks_) {
      table_.put_changes(at + kept, blocks.first(std::min(end, sinks_) - kept));
    }
    const std::int64_t from = std::max(kept, to.first_slot);  // the first slot of the span to write
    if (from < end) {
      table_.put_changes(at + sinks_ + from - to.first_slot, blocks.subspan(from - kept));
    }
    clear_behind(table_, i, to.filled, rows[i]);
    first_slot_.put_change(i, static_cast<std::int32_t>(to.first_slot));
  }
}

}  // namespace kvleaf
