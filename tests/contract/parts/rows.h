// The rows of a batch as a manager and a planner would hold and describe them: which slots of a row
// have a block, and what changed since the last forward. Internal to the kit.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvleaf/leaf/staged.h"
#include "kvleaf/testing/parts/kit.h"

namespace kvleaf::testing::contract {

/// One batch row. A default one is padding.
struct BatchRow {
  bool padding = true;
  bool new_owner = false;      // of this forward
  std::uint32_t computed = 0;  // tokens before the forward
  std::uint32_t planned = 0;   // tokens after it
  /// What a full write is given: blocks in slot order, or a state's blocks and boundaries.
  std::vector<BlockId> plan;
  std::uint32_t first_changed = 0;   // slot
  std::uint32_t filled_columns = 0;  // the leaf's note
  std::vector<BlockId> boundaries;   // states emitted inside the forward
  BlockId read = null_block;         // states and scratch
  BlockId write = null_block;

  std::string text(const Facts& facts) const;
};

class Batch {
 public:
  static constexpr std::uint32_t most_rows = 4;

  explicit Batch(const Facts& facts) : facts_(facts) {}

  // Each describes one row of the next forward.
  /// A request with `computed` tokens that computes `count` more; for an encoder, of that many.
  void start(std::uint32_t row, std::uint32_t computed, std::uint32_t count);
  /// The same request goes on; starts one where there is none.
  void extend(std::uint32_t row, std::uint32_t count);
  /// The same request, rewound as far as its reach is still held, goes on.
  void rewind(std::uint32_t row, std::uint32_t tokens, std::uint32_t count);
  void pad(std::uint32_t row);
  /// Drafts and twins: another block in a slot that has one.
  void exchange(std::uint32_t row, std::uint32_t slot);
  /// A first_changed that is less exact than it could be.
  void blur(std::uint32_t row, std::uint32_t slots);
  /// Rows of the next forward; those behind it have no owner any more.
  void set_rows(std::uint32_t rows);

  std::uint32_t rows() const noexcept { return static_cast<std::uint32_t>(rows_.size()); }
  BatchRow& row(std::uint32_t index) { return rows_[index]; }
  const BatchRow& row(std::uint32_t index) const { return rows_[index]; }

  /// What a planner passes as num_blocks.
  std::uint32_t num_blocks() const;
  std::vector<std::span<const BlockId>> plans() const;
  /// For a delta: as they are, or as if every row were new.
  std::vector<RowDelta> deltas();
  std::vector<RowDelta> fresh_deltas() const;
  /// A full write knows all that a delta knows: no padding, no partly filled page.
  bool plans_say_all() const;

 private:
  void fill_text(BatchRow& row, std::uint32_t kept_slots);
  RowDelta describe(const BatchRow& row) const;
  BlockId next_block() { return BlockId(++last_block_); }

  const Facts& facts_;
  std::vector<BatchRow> rows_;
  std::uint32_t last_block_ = 0;
};

/// num_blocks at the widest for rows of up to `tokens` tokens, `step` of them in one forward.
std::uint32_t widest_blocks(const Facts& facts, const KVLeafRegion& leaf, std::uint32_t tokens,
                            std::uint32_t step);

}  // namespace kvleaf::testing::contract
