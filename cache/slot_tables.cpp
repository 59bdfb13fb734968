#include "kvleaf/cache/slot_tables.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

namespace kvleaf {
namespace {

constexpr std::string_view table_key = "block_table";

}  // namespace

SlotTables::SlotTables(const CacheLayout& layout, CacheMemory& memory, const BlockManager& manager)
    : memory_(memory), manager_(manager) {
  const KVCacheConfig& config = layout.config;
  memory_.tables.resize(layout.leaves.size());
  std::vector<bool> made(layout.leaves.size(), false);
  for (const LayerPlaces& layer : layout.layers) {
    for (const EntryPlace& place : layer.entries) {
      if (made[place.leaf]) continue;
      made[place.leaf] = true;
      Table table;
      table.leaf = LeafId{place.leaf};
      table.tokens_per_page = manager_.tokens_per_page(table.leaf);
      table.encoder = place.encoder;
      table.columns =
          pages_for(place.encoder ? config.max_encoder_len : config.max_len, table.tokens_per_page);
      table.filled.assign(config.max_seqs, 0);
      memory_.tables[place.leaf].assign(std::size_t{config.max_seqs} * table.columns, 0);
      tables_.push_back(std::move(table));
    }
  }
  quiet_until_.assign(config.max_seqs, 0);
  rewritten_.assign(config.max_seqs, 0);
  loud_.reserve(config.max_seqs);
}

void SlotTables::rewrite(std::size_t slot, RequestId request) {
  for (Table& table : tables_) {
    const std::span<const BlockId> blocks = manager_.blocks(request, table.leaf);
    std::int32_t* to = row(table, slot);
    const auto held = static_cast<std::uint32_t>(blocks.size());
    if (held > 0) std::memcpy(to, blocks.data(), held * sizeof(std::int32_t));
    std::fill(to + held, to + std::max(held, table.filled[slot]), 0);
    table.filled[slot] = held;
  }
  quiet_until_[slot] = 0;
  rewritten_[slot] = 1;
}

void SlotTables::clear(std::size_t slot) {
  for (Table& table : tables_) {
    std::int32_t* to = row(table, slot);
    std::fill(to, to + table.filled[slot], 0);
    table.filled[slot] = 0;
  }
  quiet_until_[slot] = 0;
  rewritten_[slot] = 1;
}

void SlotTables::find_loud(std::span<const std::int32_t> slots, std::span<const std::int32_t> ends,
                           std::span<const std::int32_t> before) {
  const bool same = std::ranges::equal(slots, before);
  loud_.clear();
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const auto slot = static_cast<std::uint32_t>(slots[i]);
    const bool grows = static_cast<std::uint32_t>(ends[i]) > quiet_until_[slot];
    if (same && !grows) continue;  // most of decoding
    const bool stays = i < before.size() && before[i] == slots[i];
    if (!grows && stays) continue;
    loud_.push_back({static_cast<std::uint32_t>(i), slot, stays && rewritten_[slot] == 0});
  }
}

void SlotTables::copy_changes(const Table& table, std::span<const ByteRange> ranges,
                              const StagedArray& staged, std::span<const std::int32_t> slots) {
  const auto* from = reinterpret_cast<const std::int32_t*>(staged.data);
  const auto stride = static_cast<std::uint64_t>(staged.strides[0]);
  for (const ByteRange& range : ranges) {
    std::uint64_t element = range.begin / sizeof(std::int32_t);
    const std::uint64_t end = range.end / sizeof(std::int32_t);
    while (element < end) {  // it may span rows
      const std::uint64_t i = element / stride;
      const std::uint64_t column = element % stride;
      const std::uint64_t stop = std::min(end, (i + 1) * stride);
      if (i < slots.size() && column < table.columns) {
        const std::uint64_t count = std::min(stop - element, table.columns - column);
        std::memcpy(row(table, static_cast<std::size_t>(slots[i])) + column, from + element,
                    count * sizeof(std::int32_t));
      }
      element = stop;
    }
  }
}

void SlotTables::update(const StepPlan& plan, std::span<const std::int32_t> slots,
                        std::span<const std::int32_t> ends, std::span<const std::int32_t> before) {
  find_loud(slots, ends, before);
  for (const Loud& loud : loud_)
    quiet_until_[loud.slot] = std::numeric_limits<std::uint32_t>::max();
  for (Table& table : tables_) {
    if (table.encoder) continue;
    const StagedArray& staged = plan.array(table.leaf, table_key);
    copy_changes(table, plan.dirty(table.leaf, table_key), staged, slots);
    for (const Loud& loud : loud_) {
      const std::uint32_t held =
          pages_for(static_cast<std::uint32_t>(ends[loud.row]), table.tokens_per_page);
      std::uint32_t& filled = table.filled[loud.slot];
      std::int32_t* to = row(table, loud.slot);
      // What is new to a row may have lain in the planner's array before, and is then not reported.
      const std::uint32_t known = loud.stays ? std::min(held, filled) : 0;
      if (known < held)
        std::memcpy(to + known, staged.row<std::int32_t>(loud.row) + known,
                    (held - known) * sizeof(std::int32_t));
      if (held < filled) std::fill(to + held, to + filled, 0);
      filled = held;
      const std::uint64_t until = std::uint64_t{held} * table.tokens_per_page;
      quiet_until_[loud.slot] =
          static_cast<std::uint32_t>(std::min<std::uint64_t>(quiet_until_[loud.slot], until));
    }
  }
  for (const Loud& loud : loud_) rewritten_[loud.slot] = 0;
}

}  // namespace kvleaf
