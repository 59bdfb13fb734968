// One leaf per rule of the contract that breaks this rule and no other, and is right in all else.
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kvleaf/leaf/leaf.h"
#include "kvleaf/testing/leaf_contract.h"

namespace kvleaf::test {

using testing::MakeLeaf;
using testing::Rule;

inline KVLeafRegion::Options pages_of(std::uint32_t tokens, std::uint64_t alignment = 64) {
  return {.stride_alignment = alignment, .tokens_per_page = tokens};
}

/// Keys and values of full attention, with its own page and a dense table.
class Plain : public KVLeafRegion {
 public:
  explicit Plain(KVCacheGroupId group = KVCacheGroupId::full(), std::uint32_t page = 16)
      : KVLeafRegion("near miss", std::move(group), 1024, pages_of(page)) {}
};

// ---- memory
// ------------------------------------------------------------------------------------------

/// Addressed by rows of 96 bytes, 4 to a block, whatever the stride: a padded one shears them.
class RowsShear : public KVLeafRegion {
 public:
  RowsShear() : KVLeafRegion("near miss", KVCacheGroupId::state(), 4 * 96, pages_of(16, 128)) {}
  std::vector<BoundRows> bound_row_span(BlockId block) const override {
    return {{"state", block.value() * 4ull, block.value() * 4ull + 4}};
  }
  std::vector<std::pair<BoundRows, BoundRows>> bound_row_copies(BlockId src,
                                                                BlockId dst) const override {
    return {{bound_row_span(src).front(), bound_row_span(dst).front()}};
  }
};
/// Says that its stride may be padded, and cannot work with one that is.
class RefusesPadding : public Plain {
 public:
  void bind(std::uint64_t stride) override {
    if (stride != bytes_per_page()) throw InvalidArgument("pages must be packed");
  }
};
/// 5 entries in a page of 16 tokens.
class UnevenEntries : public Plain {
 public:
  std::uint32_t slots_per_page(std::uint32_t) const override { return 5; }
};

// ---- reach
// -------------------------------------------------------------------------------------------

inline KVCacheGroupId custom(AccessPattern::TailBegin tail, std::uint32_t head = 0) {
  return {"custom", AccessPattern::custom({.head = head, .tail_begin = std::move(tail)}),
          Writing::append};
}
/// A window that widens every 100 tokens.
inline Leaf comes_back() {
  return std::make_shared<Plain>(custom([](std::uint32_t n) {
    const std::uint32_t window = n % 100 == 99 ? 50 : 40;
    return n < window ? 0 : n - window;
  }));
}
/// Counts the token that is being computed as one of those before it.
inline Leaf begins_behind_its_end() {
  return std::make_shared<Plain>(custom([](std::uint32_t n) {
    return n < 32 ? 0 : n < 200 ? n - 31 : n + 1;
  }));
}
/// Slides on from where it was asked last, and knows no window after a jump.
inline Leaf no_function() {
  return std::make_shared<Plain>(
      custom([last = std::make_shared<std::uint32_t>(0)](std::uint32_t n) {
        const bool slides = n == *last + 1;
        *last = n;
        return slides && n > 64 ? n - 64 : slides || n == 0 ? 0 : n;
      }));
}

// ---- reserve
// -----------------------------------------------------------------------------------------

/// Forgets that a window's first page may be partly outside it.
class ReservesOneTooFew : public SlidingWindowLeaf {
 public:
  ReservesOneTooFew()
      : SlidingWindowLeaf("near miss", {.window = 48},
                          {.layers = 1, .kv_heads = 1, .head_dim = 8, .tokens_per_page = 16}) {}
  std::uint32_t blocks_to_reserve(std::uint32_t num_blocks, std::uint32_t page,
                                  ReserveOptions options) const override {
    return std::min(num_blocks, (48 + options.step_tokens - 1 + page - 1) / page);
  }
};

// ---- cacheable
// ---------------------------------------------------------------------------------------

class NotCacheable : public Plain {
 public:
  bool cacheable() const override { return false; }
};

// ---- shapes
// ------------------------------------------------------------------------------------------

/// Narrower tables for large batches: "they would not fit otherwise".
class ShrinksWithTheBatch : public Plain {
 public:
  StagedInputs staged_input_shapes(std::uint32_t batch, std::uint32_t num_blocks) const override {
    return {StagedInput{"block_table",
                        {batch, batch > 3 ? std::max(num_blocks, 64u) : std::max(num_blocks, 65u)},
                        DType::int32}};
  }
};
/// One column less than a row has slots.
class TooNarrow : public Plain {
 public:
  StagedInputs staged_input_shapes(std::uint32_t batch, std::uint32_t num_blocks) const override {
    return {StagedInput{"block_table", {batch, std::max(num_blocks, 2u) - 1}, DType::int32}};
  }
};

// ---- inside, covers
// ----------------------------------------------------------------------------------

/// What kinds of their own arrays share: "blocks" int32 [batch, columns].
class OwnTable : public Plain {
 public:
  using Plain::Plain;
  StagedInputs staged_input_shapes(std::uint32_t batch, std::uint32_t num_blocks) const override {
    return {StagedInput{"blocks", {batch, num_blocks}, DType::int32}};
  }
  void write_staged_inputs(std::span<const std::span<const BlockId>> plans,
                           StagedArrays into) const override {
    const StagedArray& table = into.at("blocks");
    for (std::size_t i = 0; i < plans.size(); ++i) {
      std::int32_t* row = table.row<std::int32_t>(static_cast<std::int64_t>(i));
      for (std::int64_t c = 0; c < table.shape[1]; ++c) {
        const bool reached = c < static_cast<std::int64_t>(plans[i].size());
        row[c] = reached ? entry(plans[i], static_cast<std::size_t>(c)) : 0;
      }
    }
  }
  virtual std::int32_t entry(std::span<const BlockId> plan, std::size_t slot) const {
    return static_cast<std::int32_t>(plan[slot].value());
  }
};
/// Ends each row with a -1 that no shape has room for.
class WritesATerminator : public OwnTable {
 public:
  void write_staged_inputs(std::span<const std::span<const BlockId>> plans,
                           StagedArrays into) const override {
    OwnTable::write_staged_inputs(plans, into);
    const StagedArray& table = into.at("blocks");
    for (std::size_t i = 0; i < plans.size(); ++i) {
      std::int32_t* row = table.row<std::int32_t>(static_cast<std::int64_t>(i));
      row[plans[i].size()] = plans[i].size() < static_cast<std::size_t>(table.shape[1]) ? 0 : -1;
    }
  }
};
/// Repeats the first page in the second's place once a row has more than two.
class LosesASlot : public OwnTable {
 public:
  std::int32_t entry(std::span<const BlockId> plan, std::size_t slot) const override {
    return OwnTable::entry(plan, slot == 1 && plan.size() > 2 ? 0 : slot);
  }
};
/// Leaves what lies behind a row's end as it was.
class LeavesTheRest : public OwnTable {
 public:
  void write_staged_inputs(std::span<const std::span<const BlockId>> plans,
                           StagedArrays into) const override {
    const StagedArray& table = into.at("blocks");
    for (std::size_t i = 0; i < plans.size(); ++i) {
      std::int32_t* row = table.row<std::int32_t>(static_cast<std::int64_t>(i));
      for (std::size_t c = 0; c < plans[i].size(); ++c) row[c] = entry(plans[i], c);
    }
  }
};

// ---- delta
// -------------------------------------------------------------------------------------------

class OwnDelta : public OwnTable {
 public:
  using OwnTable::OwnTable;
  bool can_write_delta() const override { return true; }
  void write_staged_delta(std::span<const RowDelta> rows, StagedArrays into) const override {
    const StagedArray& table = into.at("blocks");
    for (std::size_t i = 0; i < rows.size(); ++i) {
      std::int32_t* row = table.row<std::int32_t>(static_cast<std::int64_t>(i));
      const std::size_t first = rows[i].padding ? 0 : rows[i].first_changed_slot;
      const std::size_t end = rows[i].padding ? 0 : first + rows[i].blocks.size();
      for (std::size_t c = first; c < end; ++c)
        row[c] = static_cast<std::int32_t>(rows[i].blocks[c - first].value());
      if (clears(rows[i])) std::fill(row + end, row + table.shape[1], 0);
    }
    report(rows, into);
  }
  virtual bool clears(const RowDelta&) const { return true; }
  virtual void report(std::span<const RowDelta>, StagedArrays) const {}
};
/// Clears behind a row only where its owner changed: one that was rewound leaves its last blocks.
class StaleTail : public OwnDelta {
 public:
  bool clears(const RowDelta& row) const override { return row.new_owner || row.padding; }
};
/// Reports what it wrote, and not what it cleared.
class ForgetsToReport : public OwnDelta {
 public:
  void report(std::span<const RowDelta> rows, StagedArrays into) const override {
    into.reports_changes();
    const StagedArray& table = into.at("blocks");
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const auto at = static_cast<std::int64_t>(i) * table.strides[0] + rows[i].first_changed_slot;
      if (!rows[i].padding && !rows[i].blocks.empty())
        into.changed(table, at, static_cast<std::int64_t>(rows[i].blocks.size()));
    }
  }
};

// ---- rows, copies
// ------------------------------------------------------------------------------------

/// A state of 4 rows of 128 bytes, right whatever the stride.
class ByRow : public KVLeafRegion {
 public:
  ByRow() : KVLeafRegion("near miss", KVCacheGroupId::state(), 4 * 128, pages_of(16, 128)) {}
  void bind(std::uint64_t stride) override { rows_ = stride / 128; }
  std::vector<BoundRows> bound_row_span(BlockId block) const override {
    const std::uint64_t begin = index(block) * rows_;
    return {{"state", begin, begin + 4}};
  }
  std::vector<std::pair<BoundRows, BoundRows>> bound_row_copies(BlockId src,
                                                                BlockId dst) const override {
    return {{bound_row_span(src).front(), bound_row_span(dst).front()}};
  }
  virtual std::uint64_t index(BlockId block) const { return block.value(); }

 private:
  std::uint64_t rows_ = 4;
};
/// Its view has room for 7 blocks; the eighth lies on the null block again.
class WrapsAround : public ByRow {
 public:
  std::uint64_t index(BlockId block) const override { return block.value() % 8; }
};
/// Copies all rows but the last.
class LosesARow : public ByRow {
 public:
  std::vector<std::pair<BoundRows, BoundRows>> bound_row_copies(BlockId src,
                                                                BlockId dst) const override {
    auto copies = ByRow::bound_row_copies(src, dst);
    --copies[0].first.end;
    --copies[0].second.end;
    return copies;
  }
};
/// Copies to one row more than it copies from.
class UnequalCopies : public ByRow {
 public:
  std::vector<std::pair<BoundRows, BoundRows>> bound_row_copies(BlockId src,
                                                                BlockId dst) const override {
    auto copies = ByRow::bound_row_copies(src, dst);
    --copies[0].first.end;
    return copies;
  }
};

// ---- release, resume, refusal
// ------------------------------------------------------------------------

/// Numbers blocks in the order it first saw them, and never forgets one.
class NeverForgets : public OwnTable {
 public:
  std::int32_t entry(std::span<const BlockId> plan, std::size_t slot) const override {
    if (plan[slot] == null_block) return 0;
    return numbers_.try_emplace(plan[slot], static_cast<std::int32_t>(numbers_.size()) + 1)
        .first->second;
  }

 private:
  mutable std::map<BlockId, std::int32_t> numbers_;
};
/// A state that claims to need all checkpoints before it: no request has them all.
class NeedsEveryCheckpoint : public Plain {
 public:
  NeedsEveryCheckpoint() : Plain({"state", AccessPattern::window(40), Writing::in_place}) {}
};
/// Grows cautious once it was asked for 40 slots, whether they were granted or not.
class RemembersWhatWasRefused : public Plain {
 public:
  std::uint32_t blocks_to_reserve(std::uint32_t num_blocks, std::uint32_t page,
                                  ReserveOptions options) const override {
    most_ = std::max(most_, num_blocks);
    return Plain::blocks_to_reserve(num_blocks, page, options) + (most_ >= 40 ? 1 : 0);
  }

 private:
  mutable std::uint32_t most_ = 0;
};

struct NearMiss {
  std::string name;
  Rule rule;
  MakeLeaf make;
};

template <class L>
NearMiss near_miss(std::string name, Rule rule) {
  return {std::move(name), rule, [] { return std::make_shared<L>(); }};
}

inline std::vector<NearMiss> near_misses() {
  return {near_miss<RowsShear>("rows shear under padding", Rule::memory),
          near_miss<RefusesPadding>("refuses a stride that it admits", Rule::memory),
          near_miss<UnevenEntries>("entries that do not divide a page", Rule::memory),
          {"a slot comes back", Rule::reach, comes_back},
          {"a tail begins behind its end", Rule::reach, begins_behind_its_end},
          {"a tail that is no function of n", Rule::reach, no_function},
          near_miss<ReservesOneTooFew>("reserves one too few", Rule::reserve),
          near_miss<NotCacheable>("not cached although its group is", Rule::cacheable),
          near_miss<ShrinksWithTheBatch>("shapes shrink as the batch grows", Rule::shapes),
          near_miss<TooNarrow>("shapes too narrow for the batch", Rule::shapes),
          near_miss<WritesATerminator>("writes behind its array", Rule::inside),
          near_miss<LosesASlot>("a slot is not in the table", Rule::covers),
          near_miss<LeavesTheRest>("entries are left as they were", Rule::covers),
          near_miss<StaleTail>("a rewound row keeps its tail", Rule::delta),
          near_miss<ForgetsToReport>("a change is not reported", Rule::delta),
          near_miss<WrapsAround>("two blocks share rows", Rule::rows),
          near_miss<LosesARow>("a row is not copied", Rule::copies),
          near_miss<UnequalCopies>("copies of unequal length", Rule::copies),
          near_miss<NeverForgets>("remembers blocks of requests that ended", Rule::release),
          near_miss<NeedsEveryCheckpoint>("cannot be resumed", Rule::resume),
          near_miss<RemembersWhatWasRefused>("a refusal changes its figures", Rule::refusal)};
}

}  // namespace kvleaf::test
