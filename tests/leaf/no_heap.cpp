// A planner calls leaves in every step, so a delta allocates nothing.
#include <doctest/doctest.h>

#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "heap_calls.h"
#include "kvleaf/leaf/leaf.h"
#include "staged_memory.h"

using namespace kvleaf;
using kvleaf::test::blocks;
using kvleaf::test::heap_calls;
using kvleaf::test::StagedMemory;

TEST_CASE("shapes, reach and deltas of every format allocate nothing") {
  const AttentionOptions dense = {.layers = 1, .kv_heads = 1, .head_dim = 8, .tokens_per_page = 16};
  AttentionOptions csr = dense;
  csr.table = TableFormat::csr;
  const StateOptions by_row = {.layers = 3,
                               .slabs = {{.name = "ssm", .shape = {64}}},
                               .kernel = StateKernel::in_out,
                               .in_chunk = true,
                               .table = StateTable::rows};
  const Leaves leaves = {
      std::make_shared<FullAttentionLeaf>("dense", dense),
      std::make_shared<FullAttentionLeaf>("csr", csr),
      std::make_shared<SlidingWindowLeaf>(
          "compact", WindowOptions{.window = 32, .sinks = 4, .compact = true}, dense),
      std::make_shared<RecurrentStateLeaf>("state", by_row),
      std::make_shared<ScratchLeaf>("scratch", 64)};
  for (const Leaf& leaf : leaves) {
    CAPTURE(leaf->leaf_id());
    StagedMemory memory(*leaf, 2, 4);
    const auto row = blocks({1});
    const RowDelta rows[] = {{.new_owner = true,
                              .blocks = row,
                              .new_tokens = 1,
                              .read_block = BlockId(1),
                              .write_block = BlockId(2)},
                             {.padding = true}};
    const StagedArrays into = memory.narrow(2, 4);
    const std::uint64_t before = heap_calls();
    leaf->write_staged_delta(rows, into);
    const StagedInputs shapes = leaf->staged_input_shapes(2, 4);
    const std::uint32_t reserved = leaf->blocks_to_reserve(4, 16, {.step_tokens = 8});
    const std::uint32_t held = leaf->group_id().pattern.slots(40, 16).count();
    const std::uint64_t calls = heap_calls() - before;
    CHECK(calls == 0);
    CHECK(reserved >= 1);
    CHECK(held <= 4);
    CHECK(shapes.size() == memory.arrays().size());
  }
  const std::uint64_t before = heap_calls();
  ::operator delete(::operator new(16));  // a plain new may be elided
  CHECK(heap_calls() == before + 1);      // so the count above would have shown one
}
