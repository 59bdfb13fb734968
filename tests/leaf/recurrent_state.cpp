// State leaves: rows and blocks, kernels in place and in/out, states inside a chunk, binding.
#include "kvleaf/leaf/recurrent_state.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "staged_memory.h"

using namespace kvleaf;
using kvleaf::test::blocks;
using kvleaf::test::StagedMemory;
using Entries = std::vector<std::int32_t>;

namespace {

StateOptions options(StateKernel kernel, StateTable table, bool in_chunk = false,
                     std::uint32_t layers = 3) {
  return {.layers = layers,
          .slabs = {{.name = "ssm", .shape = {4, 16}, .dtype = DType::float32}},
          .kernel = kernel,
          .in_chunk = in_chunk,
          .table = table};
}

RowDelta state(std::uint32_t read, std::uint32_t write, std::span<const BlockId> boundaries = {}) {
  return {
      .read_block = BlockId(read), .write_block = BlockId(write), .boundary_blocks = boundaries};
}

void write_full(const KVLeafRegion& leaf, const std::vector<std::vector<BlockId>>& rows,
                StagedArrays into) {
  const std::vector<std::span<const BlockId>> plans(rows.begin(), rows.end());
  leaf.write_staged_inputs(plans, into);
}

template <class Error>
std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

}  // namespace

TEST_CASE("N-10 a state addressed by row occupies one row per layer") {
  RecurrentStateLeaf leaf("state", options(StateKernel::in_place, StateTable::rows, false, 18));
  const std::uint64_t row = 4 * 16 * 4;
  CHECK(leaf.stride_alignment() == row);
  leaf.bind(18 * row);
  CHECK(leaf.bound_row_span(BlockId(3)) == std::vector<BoundRows>{{"ssm", 54, 72}});
  const auto copies = leaf.bound_row_copies(BlockId(3), BlockId(5));
  REQUIRE(copies.size() == 1);
  CHECK(copies[0].first == BoundRows{"ssm", 54, 72});
  CHECK(copies[0].second == BoundRows{"ssm", 90, 108});

  const StagedInputs shapes = leaf.staged_input_shapes(2, 7);
  REQUIRE(shapes.size() == 1);
  CHECK(shapes[0].key == "state_rows");
  CHECK((shapes[0].shape[0] == 18 && shapes[0].shape[1] == 2));
  StagedMemory memory(leaf, 4, 1);
  const RowDelta rows[] = {state(3, 3), {.padding = true}};
  leaf.write_staged_delta(rows, memory.narrow(2, 1));
  const Entries entries = memory.visible("state_rows");
  for (std::size_t layer = 0; layer < 18; ++layer) {
    CHECK(entries[2 * layer] == static_cast<std::int32_t>(54 + layer));
    CHECK(entries[2 * layer + 1] == -1);
  }
  CHECK(memory.written_outside() == "");
}

TEST_CASE("a padded stride moves the rows of every block but not their number") {
  RecurrentStateLeaf leaf("state", options(StateKernel::in_place, StateTable::rows));
  CHECK(leaf.bound_row_span(BlockId(2)) == std::vector<BoundRows>{{"ssm", 6, 9}});  // unpadded
  leaf.bind(5 * 256);
  CHECK(leaf.bound_row_span(BlockId(2)) == std::vector<BoundRows>{{"ssm", 10, 13}});
  leaf.bind(5 * 256);  // the same again is no change
  CHECK(refusal<InvalidArgument>([&] { leaf.bind(6 * 256); }).find("'state'") != std::string::npos);
  CHECK(leaf.bound_row_span(BlockId(2)) == std::vector<BoundRows>{{"ssm", 10, 13}});
}

TEST_CASE("G-12 a stride that is not whole rows is refused with the rows it would be") {
  RecurrentStateLeaf leaf("ssm", {.layers = 10,
                                  .slabs = {{.name = "s", .shape = {144}}},
                                  .table = StateTable::rows});  // rows of 576 bytes
  const std::string message = refusal<InvalidArgument>([&] { leaf.bind(2'279'936); });
  CHECK(message.find("'ssm'") != std::string::npos);
  CHECK(message.find("3958.2 rows") != std::string::npos);
  CHECK(refusal<InvalidArgument>([&] { leaf.bind(9 * 576); }) != "accepted");  // less than a page
  CHECK(refusal<InvalidArgument>([&] { leaf.bind(10 * 576); }) == "accepted");
}

TEST_CASE("a state addressed by block has no bound rows, and any stride will do") {
  RecurrentStateLeaf leaf("state", options(StateKernel::in_place, StateTable::blocks));
  leaf.bind(1000);
  leaf.bind(1024);
  CHECK(leaf.bound_row_span(BlockId(3)).empty());
  CHECK(leaf.bound_row_copies(BlockId(3), BlockId(4)).empty());
  CHECK(leaf.stride_alignment() == 256);
  StagedMemory memory(leaf, 3, 1, 99);
  write_full(leaf, {blocks({7}), blocks({}), blocks({9})}, memory.narrow(3, 1));
  CHECK(memory.visible("state_rows") == Entries{7, -1, 9});
}

TEST_CASE("S-14 an in/out kernel reads one block and writes another") {
  const RecurrentStateLeaf leaf("state", options(StateKernel::in_out, StateTable::blocks));
  CHECK(leaf.state_kernel() == StateKernel::in_out);
  const StagedInputs shapes = leaf.staged_input_shapes(2, 1);
  REQUIRE(shapes.size() == 2);
  CHECK((shapes[0].key == "state_read_rows" && shapes[1].key == "state_write_rows"));
  StagedMemory memory(leaf, 3, 1);
  const RowDelta rows[] = {state(4, 6), state(0, 5), {.padding = true}};  // 0: zeros are readable
  leaf.write_staged_delta(rows, memory.narrow(3, 1));
  CHECK(memory.visible("state_read_rows") == Entries{4, 0, -1});
  CHECK(memory.visible("state_write_rows") == Entries{6, 5, -1});

  // Row 0 of zeroed memory looks as if it had been written already; the other layers' rows do not.
  const RecurrentStateLeaf by_row("state", options(StateKernel::in_out, StateTable::rows));
  StagedMemory zeroed(by_row, 1, 1);
  const RowDelta from_zeros[] = {state(0, 1)};
  by_row.write_staged_delta(from_zeros, zeroed.narrow(1, 1));
  CHECK(zeroed.visible("state_read_rows") == Entries{0, 1, 2});
  CHECK(zeroed.visible("state_write_rows") == Entries{3, 4, 5});

  StagedMemory full(leaf, 3, 1, 99);
  write_full(leaf, {blocks({4, 6}), blocks({0, 5}), blocks({})}, full.narrow(3, 1));
  CHECK(full.visible("state_read_rows") == Entries{4, 0, -1});
  CHECK(full.visible("state_write_rows") == Entries{6, 5, -1});
}

TEST_CASE("a kernel that emits states inside a chunk gets a row per boundary") {
  const RecurrentStateLeaf leaf("state", options(StateKernel::in_place, StateTable::blocks, true));
  CHECK(leaf.emits_in_chunk());
  CHECK(leaf.staged_input_shapes(2, 3)[1].key == "state_boundary_rows");
  StagedMemory memory(leaf, 3, 3);
  const auto wanted = blocks({0, 8});
  const RowDelta rows[] = {state(4, 4, wanted), state(5, 5), {.padding = true}};
  leaf.write_staged_delta(rows, memory.narrow(3, 3));
  CHECK(memory.visible("state_rows") == Entries{4, 5, -1});
  CHECK(memory.visible("state_boundary_rows") == Entries{-1, 8, -1, -1, -1, -1, -1, -1, -1});

  const RecurrentStateLeaf by_row("state", options(StateKernel::in_out, StateTable::rows, true, 2));
  StagedMemory wide(by_row, 2, 3);
  const RowDelta one[] = {state(1, 2, wanted)};
  by_row.write_staged_delta(one, wide.narrow(1, 2));
  CHECK(wide.visible("state_read_rows") == Entries{2, 3});
  CHECK(wide.visible("state_write_rows") == Entries{4, 5});
  CHECK(wide.visible("state_boundary_rows") == Entries{-1, 16, -1, 17});
}

TEST_CASE("states: a delta leaves the arrays that a full write leaves, after any history") {
  for (const StateKernel kernel : {StateKernel::in_place, StateKernel::in_out}) {
    for (const StateTable table : {StateTable::blocks, StateTable::rows}) {
      for (const std::uint32_t layers : {1U, 3U}) {
        for (const bool in_chunk : {false, true}) {
          RecurrentStateLeaf leaf("state", options(kernel, table, in_chunk, layers));
          leaf.bind(256 * (layers + 2));
          std::mt19937 random(layers);
          StagedMemory kept(leaf, 5, 4);
          std::vector<std::vector<BlockId>> last(5);  // read, write, boundaries; empty: padding
          for (int step = 0; step < 300; ++step) {
            const std::uint32_t batch = 1 + random() % 5;
            const std::uint32_t columns = 1 + random() % 4;
            std::vector<RowDelta> rows(batch);
            std::vector<std::vector<BlockId>> plans(batch);
            for (std::uint32_t i = 0; i < batch; ++i) {
              if (random() % 3 == 0) {
                last[i] = blocks({static_cast<std::uint32_t>(random() % 50),
                                  static_cast<std::uint32_t>(1 + random() % 50)});
                for (std::uint32_t j = random() % (columns + 1); in_chunk && j > 0; --j) {
                  last[i].push_back(BlockId(random() % 3 == 0 ? 0 : 60 + random() % 9));
                }
                if (random() % 4 == 0) last[i].clear();
              }
              if (last[i].size() > 2 + columns) last[i].resize(2 + columns, null_block);
              rows[i].padding = last[i].empty();
              if (last[i].empty()) continue;
              const bool in_place = kernel == StateKernel::in_place;
              rows[i].read_block = last[i][in_place ? 1 : 0];
              rows[i].write_block = last[i][1];
              rows[i].boundary_blocks = std::span<const BlockId>(last[i]).subspan(2);
              plans[i].assign(last[i].begin() + (in_place ? 1 : 0), last[i].end());
            }
            leaf.write_staged_delta(rows, kept.narrow(batch, columns));
            REQUIRE(kept.written_outside() == "");
            REQUIRE(kept.reported());
            REQUIRE(kept.reports_cover_changes());
            StagedMemory fresh(leaf, 5, 4, step % 2 == 0 ? 7 : -1);
            write_full(leaf, plans, fresh.narrow(batch, columns));
            REQUIRE(fresh.written_outside() == "");
            for (const StagedArray& array : kept.arrays()) {
              REQUIRE(kept.visible(array.key) == fresh.visible(array.key));
            }
            leaf.write_staged_delta(rows, kept.narrow(batch, columns));
            REQUIRE(kept.entries_reported() == 0);  // nothing changed, and that is said
          }
        }
      }
    }
  }
}

TEST_CASE("a state's row that cannot be written is refused before anything is") {
  const RecurrentStateLeaf in_place("ssm",
                                    options(StateKernel::in_place, StateTable::blocks, true));
  const RecurrentStateLeaf in_out("ssm", options(StateKernel::in_out, StateTable::blocks));
  RecurrentStateLeaf by_row("ssm", options(StateKernel::in_place, StateTable::rows));
  by_row.bind(256 * 1024);
  const auto refused = [](const RecurrentStateLeaf& leaf, std::uint32_t batch,
                          const std::function<void(StagedArrays)>& write) {
    StagedMemory memory(leaf, 2, 2, 42);
    StagedArrays into = memory.narrow(batch, 2);
    const std::string message = refusal<PlanShapeError>([&] { write(into); });
    CAPTURE(message);
    CHECK(message.find("'ssm'") != std::string::npos);
    CHECK(memory.unchanged());
    CHECK_FALSE(memory.reported());
  };
  const auto full = [](const RecurrentStateLeaf& leaf, std::vector<std::vector<BlockId>> rows) {
    return [&leaf, rows](StagedArrays into) { write_full(leaf, rows, into); };
  };
  const auto delta = [](const RecurrentStateLeaf& leaf, std::vector<RowDelta> rows) {
    return [&leaf, rows](StagedArrays into) { leaf.write_staged_delta(rows, into); };
  };
  const auto three = blocks({7, 8, 9});
  refused(in_out, 2, full(in_out, {blocks({1, 2}), blocks({1})}));
  refused(in_out, 2, full(in_out, {blocks({1, 2}), blocks({1, 2, 3})}));
  refused(in_place, 2, full(in_place, {blocks({1}), blocks({1, 7, 8, 9})}));
  refused(in_place, 2, delta(in_place, {state(1, 1), state(2, 2, three)}));
  refused(in_place, 2, delta(in_place, {state(1, 1)}));
  refused(by_row, 2, delta(by_row, {state(1, 1), state(1U << 21, 1U << 21)}));
  StagedMemory memory(by_row, 1, 1);
  const RowDelta last[] = {state((1U << 21) - 1, (1U << 21) - 1)};
  by_row.write_staged_delta(last, memory.narrow(1, 1));
  CHECK(memory.visible("state_rows").front() == (1 << 30) - 1 + (1 << 30) - 1023);
}

TEST_CASE("a state leaf derived from elsewhere is written whole unless it says otherwise") {
  struct Derived : RecurrentStateLeaf {
    using RecurrentStateLeaf::RecurrentStateLeaf;
  };
  const StateOptions given = options(StateKernel::in_place, StateTable::blocks);
  CHECK(RecurrentStateLeaf("state", given).can_write_delta());
  CHECK_FALSE(Derived("state", given).can_write_delta());
}
