// Staged tables: what each format says, that a delta leaves what a full write would, that nothing
// beside the narrowed arrays is touched, and that whatever does not fit is refused before anything
// is written.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "kvleaf/leaf/leaf.h"
#include "staged_memory.h"

using namespace kvleaf;
using kvleaf::test::blocks;
using kvleaf::test::StagedMemory;
using Entries = std::vector<std::int32_t>;
using Row = std::vector<BlockId>;

namespace {

constexpr std::uint32_t page = 4;

AttentionOptions options(TableFormat table) {
  return {.layers = 1, .kv_heads = 1, .head_dim = 8, .tokens_per_page = page, .table = table};
}

std::vector<std::span<const BlockId>> plans_of(const std::vector<Row>& rows) {
  return {rows.begin(), rows.end()};
}

void write_full(const KVLeafRegion& leaf, const std::vector<Row>& rows, StagedArrays into) {
  const auto plans = plans_of(rows);
  leaf.write_staged_inputs(plans, into);
}

std::string shape_error(const std::function<void()>& write) {
  try {
    write();
  } catch (const PlanShapeError& error) {
    return error.what();
  }
  return "accepted";
}

RowDelta whole(const Row& row, std::uint32_t tokens = 1) {
  return {.new_owner = true, .blocks = row, .computed = tokens - 1, .new_tokens = 1};
}

// Requests that grow, slide, lose drafts, adopt twins and change rows, and what a planner would say
// of them. Rows have holes only in front of their span, but for the first `sinks` slots.
class History {
 public:
  History(std::uint32_t seed, std::uint32_t max_batch, std::uint32_t max_slots, std::uint32_t sinks)
      : random_(seed), max_slots_(max_slots), sinks_(sinks), rows_(max_batch) {}

  void step() {
    const std::size_t before = batch_;
    batch_ = 1 + pick(static_cast<std::uint32_t>(rows_.size()));
    const bool calm = pick(4) != 0;  // most steps are decodes of the same rows
    if (calm && before > 0) batch_ = before;
    for (std::size_t i = 0; i < batch_; ++i) {
      RowState& row = rows_[i];
      const Row written = row.slots;
      const bool was_there = i < before && !row.padding;
      const std::uint32_t what = pick(calm ? 40U : 8U);
      bool new_owner = !was_there;
      row.padding = false;
      if (what == 0) {
        row.padding = true;
      } else if (what == 1 || !was_there) {
        new_owner = true;
        row.tokens = 0;
        row.slots.clear();
        advance(row, pick(max_slots_ * page));
      } else if (what == 2) {
        row.tokens = pick(row.tokens + 1);  // rejected drafts; a later step reads what is left
        row.slots.resize((row.tokens + page - 1) / page, null_block);
        advance(row, 1);
      } else if (what == 3 && !row.slots.empty()) {
        BlockId& adopted = row.slots[pick(static_cast<std::uint32_t>(row.slots.size()))];
        if (adopted != null_block) adopted = fresh();
        advance(row, 1);
      } else if (what == 4) {
        advance(row, pick(3 * page));
      } else {
        advance(row, 1);
      }
      if (pick(3) == 0) slide(row);
      row.first_changed = 0;
      if (!new_owner && !row.padding) {
        const std::size_t shared = std::min(written.size(), row.slots.size());
        std::size_t same = 0;
        while (same < shared && written[same] == row.slots[same]) ++same;
        row.first_changed = static_cast<std::uint32_t>(same);
        if (pick(5) == 0)
          row.first_changed = pick(row.first_changed + 1);  // less exact is right too
      }
      row.new_owner = new_owner;
    }
  }

  std::uint32_t batch() const { return static_cast<std::uint32_t>(batch_); }

  /// Columns that the rows need: reached slots, or held ones.
  std::uint32_t columns(bool held) const {
    std::size_t most = 1;
    for (std::size_t i = 0; i < batch_; ++i) {
      if (rows_[i].padding) continue;
      const Row& row = rows_[i].slots;
      const auto nulls = std::count(row.begin(), row.end(), null_block);
      most = std::max(most, row.size() - (held ? static_cast<std::size_t>(nulls) : 0));
    }
    return static_cast<std::uint32_t>(most);
  }

  std::vector<RowDelta> deltas(std::vector<std::uint32_t>* notes) {
    std::vector<RowDelta> deltas;
    for (std::size_t i = 0; i < batch_; ++i) {
      const RowState& row = rows_[i];
      RowDelta delta;
      delta.new_owner = row.new_owner;
      delta.padding = row.padding;
      if (!row.padding) {
        delta.first_changed_slot = row.first_changed;
        delta.blocks = std::span(row.slots).subspan(row.first_changed);
        const std::uint32_t planned = row.tokens == 0 ? 0 : 1 + pick(row.tokens);
        delta.computed = row.tokens - planned;
        delta.new_tokens = planned;
      }
      if (notes != nullptr) delta.filled_columns = &(*notes)[i];
      deltas.push_back(delta);
    }
    return deltas;
  }

  /// The same as a full write is told it; a padding row as `padding`.
  std::vector<Row> plans(const Row& padding = {}) const {
    std::vector<Row> plans;
    for (std::size_t i = 0; i < batch_; ++i) {
      plans.push_back(rows_[i].padding ? padding : rows_[i].slots);
    }
    return plans;
  }

  /// Tokens in each row's last page; 1 for padding, 0 for a row of none.
  Entries last_page_tokens() const {
    Entries tokens;
    for (std::size_t i = 0; i < batch_; ++i) {
      const RowState& row = rows_[i];
      const auto in_last = static_cast<std::int32_t>(row.tokens % page);
      tokens.push_back(row.padding       ? 1
                       : row.tokens == 0 ? 0
                       : in_last == 0    ? static_cast<std::int32_t>(page)
                                         : in_last);
    }
    return tokens;
  }

 private:
  struct RowState {
    Row slots;
    std::uint32_t tokens = 0;
    std::uint32_t first_changed = 0;
    bool padding = false;
    bool new_owner = false;
  };

  std::uint32_t pick(std::uint32_t below) { return below == 0 ? 0 : random_() % below; }
  BlockId fresh() { return BlockId(++last_block_); }
  void advance(RowState& row, std::uint32_t tokens) {
    row.tokens = std::min(row.tokens + tokens, max_slots_ * page);
    while (row.slots.size() * page < row.tokens) row.slots.push_back(fresh());
  }
  // Lets go of some slots behind the sinks and before the last.
  void slide(RowState& row) {
    const std::uint32_t size = static_cast<std::uint32_t>(row.slots.size());
    if (size <= sinks_ + 1) return;
    const std::uint32_t until = sinks_ + pick(size - sinks_);
    std::fill(row.slots.begin() + sinks_, row.slots.begin() + until, null_block);
  }

  std::mt19937 random_;
  std::uint32_t max_slots_;
  std::uint32_t sinks_;  // slots
  std::size_t batch_ = 0;
  std::uint32_t last_block_ = 0;
  std::vector<RowState> rows_;
};

// Runs deltas over one memory, as a planner does, and a full write into arrays nobody has cleared.
void delta_equals_full_write(const KVLeafRegion& leaf, std::uint32_t sinks, bool with_notes,
                             std::uint32_t seed) {
  constexpr std::uint32_t max_batch = 6;
  constexpr std::uint32_t max_slots = 80;
  const bool csr = leaf.staged_input_shapes(1, 1).front().key == "indptr";
  CAPTURE(leaf.leaf_id());
  CAPTURE(with_notes);
  CAPTURE(seed);
  REQUIRE(leaf.can_write_delta());
  History history(seed, max_batch, max_slots, sinks);
  StagedMemory kept(leaf, max_batch, max_slots);
  std::vector<std::uint32_t> notes(max_batch, 0);
  for (int step = 0; step < 250; ++step) {
    CAPTURE(step);
    history.step();
    const std::uint32_t columns = history.columns(leaf.stages_live_span());
    const auto deltas = history.deltas(with_notes ? &notes : nullptr);
    leaf.write_staged_delta(deltas, kept.narrow(history.batch(), columns));
    REQUIRE(kept.written_outside() == "");
    REQUIRE(kept.reported());
    REQUIRE(kept.reports_cover_changes());

    StagedMemory fresh(leaf, max_batch, max_slots, 77);
    write_full(leaf, history.plans(csr ? Row{null_block} : Row{}),
               fresh.narrow(history.batch(), columns));
    REQUIRE(fresh.written_outside() == "");
    REQUIRE_FALSE(fresh.reported());
    if (!csr) {
      for (const StagedArray& array : kept.arrays()) {
        REQUIRE(kept.visible(array.key) == fresh.visible(array.key));
      }
      continue;
    }
    const Entries indptr = kept.visible("indptr");
    REQUIRE(indptr == fresh.visible("indptr"));
    const auto used = static_cast<std::size_t>(indptr.back());
    Entries indices = kept.visible("indices");
    Entries expected = fresh.visible("indices");
    REQUIRE(std::all_of(expected.begin() + indptr.back(), expected.end(),
                        [](std::int32_t entry) { return entry == 0; }));
    indices.resize(used);
    expected.resize(used);
    REQUIRE(indices == expected);
    REQUIRE(kept.visible("last_page_len") == history.last_page_tokens());
  }
}

}  // namespace

TEST_CASE("a dense table is the row's blocks, and 0 behind its end") {
  const KVLeafRegion leaf("bare", KVCacheGroupId::full(), 64);
  const StagedInputs shapes = leaf.staged_input_shapes(3, 5);
  REQUIRE(shapes.size() == 1);
  CHECK(shapes[0].key == "block_table");
  CHECK(shapes[0].dtype == DType::int32);
  CHECK((shapes[0].shape[0] == 3 && shapes[0].shape[1] == 5));

  StagedMemory memory(leaf, 4, 8, 99);
  write_full(leaf, {blocks({7, 8, 9}), blocks({}), blocks({0, 0, 3, 4, 5})}, memory.narrow(3, 5));
  CHECK(memory.visible("block_table") == Entries{7, 8, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 4, 5});
  CHECK(memory.written_outside() == "");
}

TEST_CASE("N-02 a row that moves up leaves nothing of the one it replaces") {
  const FullAttentionLeaf leaf("full", options(TableFormat::dense));
  StagedMemory memory(leaf, 2, 3);
  const Row first = blocks({7, 8, 9});
  const Row second = blocks({4, 5});
  const RowDelta started[] = {whole(first), whole(second)};
  leaf.write_staged_delta(started, memory.narrow(2, 3));
  CHECK(memory.visible("block_table") == Entries{7, 8, 9, 4, 5, 0});
  const RowDelta moved[] = {whole(second), RowDelta{.padding = true}};
  leaf.write_staged_delta(moved, memory.narrow(2, 3));
  CHECK(memory.visible("block_table") == Entries{4, 5, 0, 0, 0, 0});
}

TEST_CASE("W-04 a window's row shows null where it slid") {
  const SlidingWindowLeaf leaf("window", {.window = 8}, options(TableFormat::dense));
  StagedMemory memory(leaf, 1, 5);
  write_full(leaf, {blocks({0, 0, 11, 12, 13})}, memory.narrow(1, 5));
  CHECK(memory.visible("block_table") == Entries{0, 0, 11, 12, 13});
}

TEST_CASE("a decode writes and reports the one entry that changed") {
  const FullAttentionLeaf leaf("full", options(TableFormat::dense));
  StagedMemory memory(leaf, 2, 100);
  Row long_row;
  for (std::uint32_t i = 1; i <= 90; ++i) long_row.push_back(BlockId(i));
  const Row short_row = blocks({200});
  std::uint32_t notes[] = {0, 0};
  RowDelta rows[] = {whole(long_row), whole(short_row)};
  for (int i = 0; i < 2; ++i) rows[i].filled_columns = &notes[i];
  leaf.write_staged_delta(rows, memory.narrow(2, 90));
  CHECK(memory.entries_reported() == 91);

  const Row grown = blocks({91});
  rows[0] = {.first_changed_slot = 90, .blocks = grown, .filled_columns = &notes[0]};
  rows[1] = {.first_changed_slot = 1, .filled_columns = &notes[1]};
  leaf.write_staged_delta(rows, memory.narrow(2, 91));
  CHECK(memory.entries_reported() == 1);
  leaf.write_staged_delta(std::span(rows).subspan(0, 0), memory.narrow(0, 91));
  CHECK(memory.entries_reported() == 0);

  rows[0].first_changed_slot = 91;
  rows[0].blocks = {};
  leaf.write_staged_delta(rows, memory.narrow(2, 91));
  CHECK(memory.reported());  // that nothing changed
  CHECK(memory.entries_reported() == 0);
}

TEST_CASE("only the slots that slid out and the one that grew are reported of a window's row") {
  const SlidingWindowLeaf leaf("window", {.window = 64}, options(TableFormat::dense));
  StagedMemory memory(leaf, 1, 20);
  const Row row = blocks({1, 2, 3, 4, 5, 6});
  const RowDelta start[] = {whole(row)};
  leaf.write_staged_delta(start, memory.narrow(1, 6));
  const Row slid = blocks({0, 2, 3, 4, 5, 6, 7});
  const RowDelta next[] = {{.first_changed_slot = 0, .blocks = slid}};
  leaf.write_staged_delta(next, memory.narrow(1, 7));
  CHECK(memory.entries_reported() == 2);
  CHECK(memory.visible("block_table") == Entries{0, 2, 3, 4, 5, 6, 7});
}

TEST_CASE("what a wider batch left behind a row's end is gone when it becomes visible again") {
  const FullAttentionLeaf leaf("full", options(TableFormat::dense));
  for (const bool with_notes : {false, true}) {
    CAPTURE(with_notes);
    StagedMemory memory(leaf, 2, 8);
    std::uint32_t notes[] = {0, 0};
    const auto write = [&](std::vector<RowDelta> rows, std::uint32_t columns) {
      for (std::size_t i = 0; with_notes && i < rows.size(); ++i)
        rows[i].filled_columns = &notes[i];
      leaf.write_staged_delta(rows,
                              memory.narrow(static_cast<std::uint32_t>(rows.size()), columns));
      REQUIRE(memory.written_outside() == "");
    };
    const Row deep = blocks({1, 2, 3, 4, 5, 6, 7, 8});
    const Row shallow = blocks({9, 10});
    const RowDelta same = {.first_changed_slot = 2};
    write({whole(deep), whole(deep)}, 8);
    write({whole(shallow), whole(shallow)}, 2);  // six entries of each row go out of sight
    write({same, whole(deep)}, 8);               // and come back, beside a row that needs them
    CHECK(memory.visible("block_table") ==
          Entries{9, 10, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8});
    write({same}, 2);
    write({same, whole(shallow)}, 5);  // a row that was not part of the last batch
    CHECK(memory.visible("block_table") == Entries{9, 10, 0, 0, 0, 9, 10, 0, 0, 0});
    write({same, same}, 8);
    CHECK(memory.visible("block_table") ==
          Entries{9, 10, 0, 0, 0, 0, 0, 0, 9, 10, 0, 0, 0, 0, 0, 0});
  }
}

TEST_CASE("a note of all ones after a full write says that any column may be filled") {
  const FullAttentionLeaf leaf("full", options(TableFormat::dense));
  StagedMemory memory(leaf, 1, 6, 55);
  write_full(leaf, {blocks({1, 2, 3, 4, 5, 6})}, memory.narrow(1, 6));
  std::uint32_t note = 0xffffffff;
  RowDelta shorter = {.first_changed_slot = 2, .filled_columns = &note};
  leaf.write_staged_delta(std::span(&shorter, 1), memory.narrow(1, 3));
  CHECK(memory.visible("block_table") == Entries{1, 2, 0});
  leaf.write_staged_delta(std::span(&shorter, 1), memory.narrow(1, 6));
  CHECK(memory.visible("block_table") == Entries{1, 2, 0, 0, 0, 0});
  CHECK(note == 2);
}

TEST_CASE("a CSR table lists every slot of each row, and the tokens of its last page") {
  const FullAttentionLeaf leaf("full", options(TableFormat::csr));
  const StagedInputs shapes = leaf.staged_input_shapes(3, 5);
  REQUIRE(shapes.size() == 3);
  CHECK((shapes[0].key == "indptr" && shapes[0].shape[0] == 4));
  CHECK((shapes[1].key == "indices" && shapes[1].shape[0] == 15));
  CHECK((shapes[2].key == "last_page_len" && shapes[2].shape[0] == 3));
  CHECK(leaf.staged_input_shapes(2, 0)[1].shape[0] == 2);  // room for a padding row's page

  StagedMemory memory(leaf, 3, 5);
  const Row first = blocks({0, 8, 9});
  const Row second = blocks({4});
  const RowDelta rows[] = {{.new_owner = true, .blocks = first, .computed = 8, .new_tokens = 2},
                           {.padding = true},
                           {.new_owner = true, .blocks = second, .computed = 0, .new_tokens = 4}};
  leaf.write_staged_delta(rows, memory.narrow(3, 3));
  CHECK(memory.visible("indptr") == Entries{0, 3, 4, 5});
  CHECK(memory.visible("indices") == Entries{0, 8, 9, 0, 4, 0, 0, 0, 0});
  CHECK(memory.visible("last_page_len") == Entries{2, 1, 4});

  StagedMemory full(leaf, 3, 5, 99);
  write_full(leaf, {first, {}, second}, full.narrow(3, 3));
  CHECK(full.visible("indptr") == Entries{0, 3, 3, 4});
  CHECK(full.visible("indices") == Entries{0, 8, 9, 4, 0, 0, 0, 0, 0});
  CHECK(full.visible("last_page_len") == Entries{4, 0, 4});
}

TEST_CASE("a CSR row that grows shifts those behind it, and one that shrinks pulls them up") {
  const FullAttentionLeaf leaf("full", options(TableFormat::csr));
  StagedMemory memory(leaf, 3, 4);
  const Row a = blocks({1, 2, 3});
  const Row b = blocks({4, 5});
  const Row c = blocks({6, 7, 8});
  const RowDelta start[] = {whole(a, 12), whole(b, 8), whole(c, 12)};
  leaf.write_staged_delta(start, memory.narrow(3, 4));
  const Row grown = blocks({9});
  const RowDelta next[] = {
      {.first_changed_slot = 1, .computed = 3, .new_tokens = 1},
      {.first_changed_slot = 2, .blocks = grown, .computed = 8, .new_tokens = 1},
      {.first_changed_slot = 3, .computed = 11, .new_tokens = 1}};
  leaf.write_staged_delta(next, memory.narrow(3, 4));
  CHECK(memory.visible("indptr") == Entries{0, 1, 4, 7});
  Entries used = memory.visible("indices");
  used.resize(7);
  CHECK(used == Entries{1, 4, 5, 9, 6, 7, 8});
  CHECK(memory.visible("last_page_len") == Entries{4, 1, 4});
}

TEST_CASE("N-14 a compact table has the sinks, the live span and its first slot") {
  const SlidingWindowLeaf leaf("window", {.window = 8, .sinks = 5, .compact = true},
                               options(TableFormat::dense));
  CHECK(leaf.stages_live_span());
  const StagedInputs shapes = leaf.staged_input_shapes(2, 5);
  REQUIRE(shapes.size() == 2);
  CHECK((shapes[0].key == "block_table" && shapes[0].shape[1] == 5));
  CHECK((shapes[1].key == "first_slot" && shapes[1].shape[0] == 2));

  StagedMemory memory(leaf, 4, 6, 99);
  write_full(leaf, {blocks({1, 2, 0, 0, 0, 6, 7}), blocks({1}), blocks({1, 2, 3, 4}), blocks({})},
             memory.narrow(4, 4));
  CHECK(memory.visible("block_table") == Entries{1, 2, 6, 7, 1, 0, 0, 0, 1, 2, 3, 4, 0, 0, 0, 0});
  CHECK(memory.visible("first_slot") == Entries{5, 2, 2, 2});
}

TEST_CASE("N-14 look-ups in a compact table equal those in the long one, at any length") {
  const SlidingWindowLeaf compact(
      "window", {.window = 4096, .compact = true},
      {.layers = 1, .kv_heads = 1, .head_dim = 8, .tokens_per_page = 16});
  const AccessPattern& pattern = compact.group_id().pattern;
  constexpr std::uint32_t tokens = 20000;
  const std::uint32_t columns = compact.blocks_to_reserve(tokens / 16, 16, {.step_tokens = 1});
  CHECK(columns <= 258);
  StagedMemory memory(compact, 1, columns);
  std::uint32_t note = 0;
  std::uint32_t first_held = 0;
  Row row;
  for (std::uint32_t n = 0; n < tokens; ++n) {
    const SlotReach held = pattern.slots(n, 16);
    RowDelta delta = {.new_owner = n == 0,
                      .first_changed_slot = static_cast<std::uint32_t>(row.size()),
                      .computed = n,
                      .new_tokens = 1,
                      .filled_columns = &note};
    for (; first_held < held.tail_begin; ++first_held) {
      row[first_held] = null_block;
      delta.first_changed_slot = std::min(delta.first_changed_slot, first_held);
    }
    if (n % 16 == 0) row.push_back(BlockId(1000 + n / 16));
    delta.blocks = std::span<const BlockId>(row).subspan(delta.first_changed_slot);
    StagedArrays into = memory.narrow(1, columns);
    compact.write_staged_delta(std::span(&delta, 1), into);
    if (n % 97 != 0 && n % 16 != 0) continue;
    const std::int32_t first = memory.visible("first_slot").front();
    const Entries table = memory.visible("block_table");
    for (std::uint32_t slot = 0; slot < row.size(); ++slot) {
      const std::int32_t column = static_cast<std::int32_t>(slot) - first;
      const bool there = column >= 0 && column < static_cast<std::int32_t>(table.size());
      REQUIRE((there ? table[static_cast<std::size_t>(column)] : 0) ==
              static_cast<std::int32_t>(row[slot].value()));
    }
  }
}

TEST_CASE("N-05 a delta leaves the arrays that a full write leaves, after any history") {
  const KVLeafRegion bare("bare", KVCacheGroupId::full(), 64);
  const FullAttentionLeaf dense("dense", options(TableFormat::dense));
  const FullAttentionLeaf csr("csr", options(TableFormat::csr));
  const SlidingWindowLeaf csr_window("csr window", {.window = 9}, options(TableFormat::csr));
  const SlidingWindowLeaf compact("compact", {.window = 9, .compact = true},
                                  options(TableFormat::dense));
  const SlidingWindowLeaf sinks("compact, sinks", {.window = 9, .sinks = 4, .compact = true},
                                options(TableFormat::dense));
  for (std::uint32_t seed = 0; seed < 12; ++seed) {
    for (const KVLeafRegion* leaf :
         {&bare, static_cast<const KVLeafRegion*>(&dense), static_cast<const KVLeafRegion*>(&csr),
          static_cast<const KVLeafRegion*>(&csr_window), static_cast<const KVLeafRegion*>(&compact),
          static_cast<const KVLeafRegion*>(&sinks)}) {
      delta_equals_full_write(*leaf, leaf == &sinks ? 1 : 0, seed % 2 == 0, seed);
    }
  }
}

TEST_CASE("scratch stages one column whatever the text's length") {
  const ScratchLeaf leaf("scratch", 64);
  CHECK(leaf.staged_input_shapes(3, 1000)[0].shape[1] == 1);
  CHECK(leaf.can_write_delta());
  StagedMemory memory(leaf, 2, 1000);
  const Row mine = blocks({5});
  const RowDelta rows[] = {whole(mine), {.padding = true}};
  leaf.write_staged_delta(rows, memory.narrow(2, 1000));
  CHECK(memory.visible("block_table") == Entries{5, 0});
}

TEST_CASE("an encoder's CSR row counts the encoder's tokens") {
  const CrossAttentionLeaf leaf("cross", options(TableFormat::csr));
  StagedMemory memory(leaf, 1, 3);
  const Row row = blocks({1, 2, 3});
  const RowDelta delta[] = {{.new_owner = true, .blocks = row, .computed = 9}};
  leaf.write_staged_delta(delta, memory.narrow(1, 3));
  CHECK(memory.visible("last_page_len") == Entries{1});
}

TEST_CASE("shapes do not shrink as batch or blocks grow") {
  const FullAttentionLeaf dense("dense", options(TableFormat::dense));
  const FullAttentionLeaf csr("csr", options(TableFormat::csr));
  const SlidingWindowLeaf compact("compact", {.window = 9, .compact = true},
                                  options(TableFormat::dense));
  const ScratchLeaf scratch("scratch", 64);
  const KVLeafRegion* leaves[] = {&dense, &csr, &compact, &scratch};
  for (const KVLeafRegion* leaf : leaves) {
    for (std::uint32_t batch = 0; batch < 4; ++batch) {
      for (std::uint32_t columns = 0; columns < 4; ++columns) {
        const StagedInputs small = leaf->staged_input_shapes(batch, columns);
        const StagedInputs large = leaf->staged_input_shapes(batch + 1, columns + 1);
        REQUIRE(small.size() == large.size());
        for (std::size_t i = 0; i < small.size(); ++i) {
          CHECK(small[i].key == large[i].key);
          for (std::size_t d = 0; d < small[i].shape.size(); ++d) {
            CHECK(small[i].shape[d] <= large[i].shape[d]);
          }
        }
      }
    }
  }
}

TEST_CASE("a kind derived from a shipped one is written whole unless it says otherwise") {
  struct Derived : FullAttentionLeaf {
    using FullAttentionLeaf::FullAttentionLeaf;
  };
  CHECK(FullAttentionLeaf("full", options(TableFormat::dense)).can_write_delta());
  CHECK_FALSE(Derived("derived", options(TableFormat::dense)).can_write_delta());
  CHECK(Derived("derived", options(TableFormat::csr)).can_write_delta());  // has no other way
  struct Bare : KVLeafRegion {
    Bare() : KVLeafRegion("bare", KVCacheGroupId::full(), 64) {}
  };
  CHECK_FALSE(Bare().can_write_delta());
}

TEST_CASE("what does not fit is refused before anything is written, and the leaf is named") {
  const FullAttentionLeaf dense("dense", options(TableFormat::dense));
  const FullAttentionLeaf csr("csr", options(TableFormat::csr));
  const SlidingWindowLeaf compact("compact", {.window = 9, .compact = true},
                                  options(TableFormat::dense));
  const Row one = blocks({1});
  const Row three = blocks({1, 2, 3});
  const Row five = blocks({1, 2, 3, 4, 5});
  for (const KVLeafRegion* leaf :
       {static_cast<const KVLeafRegion*>(&dense), static_cast<const KVLeafRegion*>(&csr),
        static_cast<const KVLeafRegion*>(&compact)}) {
    CAPTURE(leaf->leaf_id());
    StagedMemory memory(*leaf, 3, 4, 42);
    const auto refused = [&](const std::function<void(StagedArrays)>& write, std::uint32_t batch,
                             std::uint32_t columns) {
      StagedArrays into = memory.narrow(batch, columns);
      const std::string message = shape_error([&] { write(into); });
      CAPTURE(message);
      CHECK(message.find("'" + leaf->leaf_id() + "'") != std::string::npos);
      CHECK(memory.unchanged());
      CHECK_FALSE(memory.reported());
    };
    const auto full = [&](std::vector<Row> rows) {
      return [leaf, rows](StagedArrays into) { write_full(*leaf, rows, into); };
    };
    const auto delta = [&](std::vector<RowDelta> rows) {
      return [leaf, rows](StagedArrays into) { leaf->write_staged_delta(rows, into); };
    };
    refused(full({one, five}), 2, 2);  // too deep
    refused(delta({whole(one), whole(five)}), 2, 2);
    refused(full({one, one, one}), 2, 2);  // more rows than the batch
    refused(delta({whole(one)}), 2, 2);    // fewer
    RowDelta partial = whole(three);
    partial.first_changed_slot = 1;
    refused(delta({partial}), 1, 4);  // a new owner, but not all of its row
  }
}

TEST_CASE("a CSR row that keeps more than it had is refused") {
  const FullAttentionLeaf leaf("csr", options(TableFormat::csr));
  StagedMemory memory(leaf, 2, 4);
  const Row two = blocks({1, 2});
  const RowDelta start[] = {whole(two), whole(two)};
  leaf.write_staged_delta(start, memory.narrow(2, 4));
  const RowDelta next[] = {{.first_changed_slot = 2}, {.first_changed_slot = 3}};
  StagedArrays into = memory.narrow(2, 4);
  CHECK(shape_error([&] { leaf.write_staged_delta(next, into); }).find("row 1 keeps 3 slots") !=
        std::string::npos);
  CHECK(memory.unchanged());
}

TEST_CASE("an array that is absent, of another type or rank, or strided is refused by name") {
  const FullAttentionLeaf leaf("full", options(TableFormat::dense));
  StagedMemory memory(leaf, 2, 4);
  const auto attempt = [&](const std::function<void(StagedArray&)>& spoil) {
    memory.narrow(2, 4);
    spoil(memory.arrays().front());
    StagedArrays into(memory.arrays());
    return shape_error([&] { write_full(leaf, {blocks({1}), blocks({2})}, into); });
  };
  CHECK(attempt([](StagedArray&) {}) == "accepted");
  CHECK(attempt([](StagedArray& a) { a.key = "tables"; }).find("block_table") != std::string::npos);
  CHECK(attempt([](StagedArray& a) { a.dtype = DType::int64; }).find("int64") != std::string::npos);
  CHECK(attempt([](StagedArray& a) { a.shape.pop_back(); }).find("1 dimensions") !=
        std::string::npos);
  CHECK(attempt([](StagedArray& a) { a.strides[1] = 2; }).find("stride of 2") != std::string::npos);

  memory.narrow(2, 4);
  StagedArrays into(memory.arrays());
  CHECK(into.find("block_table") != nullptr);
  CHECK(into.find("indices") == nullptr);
  CHECK(shape_error([&] { (void)into.at("indices"); }).find("there are: block_table") !=
        std::string::npos);
  CHECK(into.at("block_table").row<std::int32_t>(1) ==
        into.at("block_table").row<std::int32_t>(0) + 4);
  CHECK(shape_error([&] { (void)into.at("block_table").row<std::int64_t>(0); }).find("8 bytes") !=
        std::string::npos);
}
