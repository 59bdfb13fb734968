// The planner's arrays against an independent writer that writes all of them from the rows, the
// dirty ranges against a device's copy, and what a plan costs and survives.
#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <set>

#include "../leaf/heap_calls.h"
#include "bench.h"
#include "device.h"
#include "test_access.h"

namespace kvleaf {
namespace {
using namespace kvleaf::testing;
using Ints = std::vector<std::int32_t>;

AttentionOptions attention(std::uint32_t page, TableFormat table = TableFormat::dense,
                           std::optional<std::uint32_t> slots = {}) {
  AttentionOptions options;
  options.layers = 1;
  options.kv_heads = 1;
  options.head_dim = 2;
  options.tokens_per_page = page;
  options.slots_per_page = slots;
  options.table = table;
  return options;
}
/// A leaf that writes a table of its own and knows no deltas: the row's blocks, last slot first.
class Backwards : public KVLeafRegion {
 public:
  Backwards() : KVLeafRegion("backwards", KVCacheGroupId::full(), 64, {1, 4}) {}
  StagedInputs staged_input_shapes(std::uint32_t batch, std::uint32_t num_blocks) const override {
    return {{"backwards", {batch, num_blocks}, DType::int32}};
  }
  bool can_write_delta() const override { return false; }
  void write_staged_inputs(std::span<const std::span<const BlockId>> plans,
                           StagedArrays into) const override {
    const StagedArray& array = into.at("backwards");
    for (std::size_t i = 0; i < plans.size(); ++i) {
      auto* row = array.row<std::int32_t>(static_cast<std::int64_t>(i));
      std::fill_n(row, array.shape[1], 0);
      for (std::size_t s = 0; s < plans[i].size(); ++s)
        row[s] = static_cast<std::int32_t>(plans[i][plans[i].size() - 1 - s].value());
    }
  }
};
/// A leaf that stages something else entirely, by deltas of its own: how many slots each row has.
class Ends : public KVLeafRegion {
 public:
  Ends() : KVLeafRegion("ends", KVCacheGroupId::full(), 64, {1, 4}) {}
  StagedInputs staged_input_shapes(std::uint32_t batch, std::uint32_t) const override {
    return {{"ends", {batch}, DType::int32}};
  }
  void write_staged_inputs(std::span<const std::span<const BlockId>> plans,
                           StagedArrays into) const override {
    for (std::size_t i = 0; i < plans.size(); ++i)
      into.at("ends").row<std::int32_t>(0)[i] = static_cast<std::int32_t>(plans[i].size());
  }
  bool can_write_delta() const override { return true; }
  void write_staged_delta(std::span<const RowDelta> rows, StagedArrays into) const override {
    const StagedArray& array = into.at("ends");
    into.reports_changes();
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::size_t end =
          rows[i].padding ? 0 : rows[i].first_changed_slot + rows[i].blocks.size();
      std::int32_t& held = array.row<std::int32_t>(0)[i];
      if (held == static_cast<std::int32_t>(end)) continue;
      held = static_cast<std::int32_t>(end);
      into.changed(array, static_cast<std::int64_t>(i), 1);
    }
  }
};
StateOptions state_options(StateKernel kernel, StateTable table, std::uint32_t layers,
                           std::string group) {
  StateOptions options;
  options.layers = layers;
  options.slabs = {{"recurrent", {2}, DType::float32}};
  options.kernel = kernel;
  options.table = table;
  options.group = std::move(group);
  return options;
}

/// A device set at fixed addresses, kept up to date by the dirty ranges alone.
class Mirror {
 public:
  void upload(const StepPlan& plan, LeafId leaf, const StagedArray& array) {
    auto& memory = memory_[{leaf.value(), std::string(array.key)}];
    std::size_t bytes = size_of(array.dtype);
    for (const auto& range : plan.dirty(leaf, array.key))
      bytes = std::max<std::size_t>(bytes, range.end);
    if (memory.size() < bytes) memory.resize(bytes);
    for (const auto& range : plan.dirty(leaf, array.key)) {
      std::memcpy(memory.data() + range.begin, array.data + range.begin, range.end - range.begin);
    }
    each_visible(array, [&](std::int64_t element) {
      const auto at = static_cast<std::size_t>(element) * sizeof(std::int32_t);
      std::int32_t here = 0;  // never uploaded: zero, as the host's memory began
      if (at + sizeof here <= memory.size()) std::memcpy(&here, memory.data() + at, sizeof here);
      if (!junk_behind(plan, leaf, array, element))
        REQUIRE(here == reinterpret_cast<const std::int32_t*>(array.data)[element]);
    });
  }

 private:
  template <class Visit>
  static void each_visible(const StagedArray& array, Visit&& visit) {
    const std::int64_t rows = array.shape.size() == 2 ? array.shape[0] : 1;
    const std::int64_t columns = array.shape.back();
    const std::int64_t stride = array.shape.size() == 2 ? array.strides[0] : 0;
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < columns; ++j) visit(i * stride + j);
    }
  }
  /// Entries of CSR indices behind the last row belong to nobody.
  static bool junk_behind(const StepPlan& plan, LeafId leaf, const StagedArray& array,
                          std::int64_t element) {
    return array.key == "indices" &&
           element >= plan.array(leaf, "indptr").row<std::int32_t>(0)[plan.batch()];
  }
  std::map<std::pair<std::uint32_t, std::string>, std::vector<std::byte>> memory_;
};

struct Kinds {
  Leaves leaves;
  std::uint32_t most_huge = 40;
};
Kinds all_formats() {
  Kinds kinds;
  WindowOptions compact{.window = 9, .sinks = 3, .compact = true};
  kinds.leaves = {std::make_shared<FullAttentionLeaf>("dense", attention(4)),
                  std::make_shared<FullAttentionLeaf>("csr", attention(8, TableFormat::csr, 4)),
                  std::make_shared<SlidingWindowLeaf>("compact", compact, attention(4)),
                  std::make_shared<SlidingWindowLeaf>("csr window", WindowOptions{.window = 6},
                                                      attention(4, TableFormat::csr)),
                  std::make_shared<Backwards>(),
                  std::make_shared<Ends>(),
                  std::make_shared<RecurrentStateLeaf>(
                      "rows", state_options(StateKernel::in_out, StateTable::rows, 3, "a")),
                  std::make_shared<RecurrentStateLeaf>(
                      "blocks", state_options(StateKernel::in_place, StateTable::blocks, 2, "b")),
                  std::make_shared<ScratchLeaf>("scratch", 64)};
  return kinds;
}

class Bench {
 public:
  Bench(Kinds kinds, std::uint64_t huge, std::uint32_t in_flight, bool caching = true,
        std::uint32_t max_len = 64) {
    std::vector<PageSpec> specs;
    ByHand by_hand;
    for (const Leaf& leaf : kinds.leaves) {
      specs.push_back(PageSpec::of(*leaf));
      specs.back().stride_alignment = 8;
      by_hand.ratios.push_back(leaf->leaf_id() == "blocks" ? 2 : 4);
    }
    by_hand.huge_bytes = 384;  // strides of 96 bytes: 12 rows of 8 for "rows"; 192 for "blocks"
    by_hand.huge_blocks = huge;
    ManagerOptions options;
    options.page_tokens = 4;
    options.max_len = max_len;
    options.max_step_tokens = 64;
    options.max_steps_in_flight = in_flight;
    options.enable_prefix_caching = caching;
    options.geometry = Geometry::by_hand(specs, by_hand);
    manager = std::make_unique<BlockManager>(kinds.leaves, options);
    planner = std::make_unique<StepPlanner>(*manager,
                                            PlannerOptions{.max_batch = 8, .max_step_tokens = 256});
  }
  std::unique_ptr<BlockManager> manager;
  std::unique_ptr<StepPlanner> planner;
};

Ints ints(const StagedArray& array, std::size_t row = 0) {
  const auto* first = array.row<std::int32_t>(static_cast<std::int64_t>(row));
  return Ints(first, first + array.shape.back());
}

/// Every array of the plan, written from the rows by this test alone.
void check_arrays(Bench& bench, const StepPlan& plan) {
  auto& core = BlockManagerTestAccess::impl(*bench.manager);
  const std::size_t live = plan.rows().size();
  for (std::uint32_t l = 0; l < bench.manager->leaves().size(); ++l) {
    const LeafId leaf{l};
    const std::string& id = bench.manager->leaves()[l]->leaf_id();
    const std::uint32_t P = bench.manager->tokens_per_page(leaf);
    std::int32_t next = 0;
    for (std::size_t i = 0; i < plan.batch(); ++i) {
      std::vector<BlockId> blocks;
      if (i < live && id != "rows" && id != "blocks" && id != "scratch") {
        const auto row = bench.manager->blocks(plan.rows()[i], leaf);
        blocks.assign(row.begin(), row.end());
      }
      const auto tokens = static_cast<std::uint32_t>(plan.seq_lens()[i]);
      if (id == "dense" || id == "backwards") {
        Ints expected(static_cast<std::size_t>(
                          plan.array(leaf, id == "dense" ? "block_table" : "backwards").shape[1]),
                      0);
        REQUIRE(blocks.size() <= expected.size());
        for (std::size_t s = 0; s < blocks.size(); ++s) {
          expected[s] =
              static_cast<std::int32_t>(blocks[id == "dense" ? s : blocks.size() - 1 - s].value());
        }
        REQUIRE(ints(plan.array(leaf, id == "dense" ? "block_table" : "backwards"), i) == expected);
      } else if (id == "ends") {
        REQUIRE(ints(plan.array(leaf, "ends"))[i] == static_cast<std::int32_t>(blocks.size()));
      } else if (id == "csr" || id == "csr window") {
        if (i >= live) blocks = {null_block};
        const Ints indptr = ints(plan.array(leaf, "indptr"));
        const Ints indices = ints(plan.array(leaf, "indices"));
        REQUIRE(indptr[i] == next);
        for (const BlockId block : blocks)
          REQUIRE(indices[static_cast<std::size_t>(next++)] ==
                  static_cast<std::int32_t>(block.value()));
        REQUIRE(indptr[i + 1] == next);
        REQUIRE(ints(plan.array(leaf, "last_page_len"))[i] ==
                static_cast<std::int32_t>((tokens - 1) % P + 1));
      } else if (id == "compact") {
        const Ints table = ints(plan.array(leaf, "block_table"), i);
        const std::int32_t first = ints(plan.array(leaf, "first_slot"))[i];
        const std::uint32_t sinks = 1;  // ⌈3 / 4⌉
        // A look-up of any slot equals the long table; what lies before the span is null there.
        for (std::uint32_t s = 0; s < blocks.size(); ++s) {
          std::int32_t found = 0;
          if (s < sinks) {
            found = table[s];
          } else if (static_cast<std::int32_t>(s) >= first) {
            found = table[sinks + s - static_cast<std::uint32_t>(first)];
          }
          REQUIRE(found == static_cast<std::int32_t>(blocks[s].value()));
        }
        for (std::size_t c = 0; c < table.size(); ++c) {
          const std::int64_t slot = c < sinks ? static_cast<std::int64_t>(c)
                                              : first + static_cast<std::int64_t>(c) - sinks;
          if (slot >= static_cast<std::int64_t>(blocks.size())) REQUIRE(table[c] == 0);
        }
      } else if (id == "scratch") {
        REQUIRE(ints(plan.array(leaf, "block_table"), i)[0] ==
                (i < live ? static_cast<std::int32_t>(
                                bench.manager->live_block(plan.rows()[i], leaf)->value())
                          : 0));
      } else if (id == "blocks") {
        REQUIRE(ints(plan.array(leaf, "state_rows"))[i] ==
                (i < live ? static_cast<std::int32_t>(
                                bench.manager->live_block(plan.rows()[i], leaf)->value())
                          : -1));
      } else if (id == "rows") {
        const std::uint64_t rows_per_block = 96 / 8;
        std::optional<BlockId> read;
        std::optional<BlockId> write;
        if (i < live) {
          write = bench.manager->live_block(plan.rows()[i], leaf);
          const State& state = core.get(plan.rows()[i]).states[core.info_[l].kind_index];
          read = state.source && state.source_step == plan.step().value() ? *state.source : *write;
        }
        for (std::int64_t layer = 0; layer < 3; ++layer) {
          const auto entry = [&](const std::optional<BlockId>& block) {
            return block ? static_cast<std::int32_t>(block->value() * rows_per_block +
                                                     static_cast<std::uint64_t>(layer))
                         : -1;
          };
          REQUIRE(ints(plan.array(leaf, "state_write_rows"), static_cast<std::size_t>(layer))[i] ==
                  entry(write));
          REQUIRE(ints(plan.array(leaf, "state_read_rows"), static_cast<std::size_t>(layer))[i] ==
                  entry(read));
        }
      }
      const auto mapping = plan.slot_mapping(leaf);
      if (mapping.empty()) continue;
      const std::uint32_t slots = bench.manager->leaves()[l]->slots_per_page(P);
      const auto begin = static_cast<std::uint32_t>(plan.cu_seqlens_q()[i]);
      const auto end = static_cast<std::uint32_t>(plan.cu_seqlens_q()[i + 1]);
      for (std::uint32_t q = begin; q < end; ++q) {
        const std::uint32_t t = tokens - (end - q);
        const std::int64_t expected =
            i < live ? std::int64_t{blocks[t / P].value()} * slots + t % P / (P / slots) : -1;
        REQUIRE(mapping[q] == expected);
      }
    }
  }
}

TEST_CASE(
    "N-05 N-02 N-09 random steps in every table format equal a full rewrite; dirty ranges keep a "
    "device set right") {
  for (std::uint64_t seed = 1; seed <= 25; ++seed) {
    Random random(seed);
    Bench bench(all_formats(), random.between(40, 90), random.between(1, 3), random.one_in(2));
    Mirror mirror;
    std::uint64_t next_id = 1;
    std::vector<RequestId> live;
    std::deque<StepId> flights;
    for (int step = 0; step < 160; ++step) {
      if (live.size() < 8 && random.one_in(2)) {
        const RequestId id{next_id++};
        try {
          bench.manager->admit(id, prompt(random.between(1, 40), random.below(3)));
          live.push_back(id);
        } catch (const PoolExhausted&) {
        }
      }
      if (!live.empty() && random.one_in(6)) {
        std::swap(live[random.below(live.size())], live.back());
        random.one_in(2) ? bench.manager->release(live.back())
                         : bench.manager->preempt(live.back());
        live.pop_back();
      }
      if (!live.empty() && live.size() < 8 && random.one_in(8)) {
        try {
          bench.manager->fork(live.front(), RequestId{next_id});
          live.push_back(RequestId{next_id++});
        } catch (const KVError&) {
        }
      }
      if (flights.size() == bench.manager->options().max_steps_in_flight ||
          (!flights.empty() && random.one_in(3))) {
        bench.planner->settle(flights.front());
        flights.pop_front();
      }
      if (!flights.empty() && random.one_in(10)) {
        bench.planner->abandon(flights.back());
        flights.pop_back();
      }
      if (flights.size() == bench.manager->options().max_steps_in_flight) continue;
      std::vector<StepRequest> batch;
      for (const RequestId id : live) {
        const std::uint32_t planned = bench.manager->planned(id);
        if (random.one_in(4) || planned == 64) continue;
        const std::uint32_t known = bench.manager->length(id);
        const std::uint32_t most = planned < known ? known - planned : std::min(64 - planned, 2u);
        batch.push_back({id, random.between(1, most)});
      }
      if (random.one_in(3) && batch.size() > 1) std::swap(batch.front(), batch.back());
      std::optional<std::uint32_t> pad;
      if (random.one_in(2)) pad = random.between(0, 8);
      const StepPlan& plan = bench.planner->plan(batch, pad);
      flights.push_back(plan.step());
      check_arrays(bench, plan);
      for (std::uint32_t l = 0; l < bench.manager->leaves().size(); ++l) {
        for (const StagedArray& array : plan.arrays(LeafId{l}))
          mirror.upload(plan, LeafId{l}, array);
      }
      bench.manager->audit();
    }
  }
}

TEST_CASE("N-01 columns are those of the longest request, however large the pool") {
  ManagerBench bench({std::make_shared<KVLeafRegion>("full", KVCacheGroupId::full(), 64,
                                                     KVLeafRegion::Options{1, 128})},
                     {.huge = 100'000, .page = 128, .max_len = 4096});
  StepPlanner planner(*bench.manager, {.max_batch = 4, .max_step_tokens = 4096});
  bench.admit(1, prompt(4096));
  const StepRequest row{RequestId{1}, 4096};
  CHECK(planner.plan({&row, 1}).array(LeafId{0}, "block_table").shape[1] == 32);
}

TEST_CASE("columns rounded up hold null blocks behind the last slot, for kernels that read ahead") {
  ManagerBench bench({full(4), window(6, 4)}, {.page = 4, .max_len = 36});
  CHECK_THROWS_AS(
      StepPlanner(*bench.manager, {.max_batch = 4, .max_step_tokens = 64, .column_multiple = 0}),
      PlanShapeError);
  StepPlanner planner(*bench.manager,
                      {.max_batch = 4, .max_step_tokens = 64, .column_multiple = 8});
  const auto plan_one = [&](std::uint64_t id, std::uint32_t tokens) {
    const StepRequest row{RequestId{id}, tokens};
    const StepPlan& plan = planner.plan({&row, 1}, 2);
    for (std::uint32_t leaf = 0; leaf < 2; ++leaf) {
      const StagedArray& table = plan.array(LeafId{leaf}, "block_table");
      CHECK(table.shape[1] % 8 == 0);
      CHECK(table.strides[0] == 16);  // nine columns at the most, rounded up
      Ints expected(static_cast<std::size_t>(table.shape[1]), 0);
      const auto blocks = bench.row(id, leaf);
      std::copy(blocks.begin(), blocks.end(), expected.begin());
      CHECK(ints(table) == expected);
      CHECK(ints(table, 1) == Ints(expected.size(), 0));
    }
    planner.settle(plan.step());
  };
  bench.admit(1, prompt(36));
  bench.admit(2, prompt(9, 1));
  plan_one(1, 30);
  plan_one(1, 6);  // nine slots, sixteen columns
  plan_one(2, 5);  // eight again, and the row is another's
  plan_one(2, 4);
}

TEST_CASE("a batch that cannot be planned is refused with its row named, and nothing has changed") {
  Bench bench(all_formats(), 90, 2);
  bench.manager->admit(RequestId{1}, prompt(30));
  bench.manager->admit(RequestId{2}, prompt(9, 1));
  bench.planner->settle(
      bench.planner->plan(std::vector<StepRequest>{{RequestId{1}, 17}, {RequestId{2}, 9}}).step());
  const auto state = [&] {
    std::vector<std::uint64_t> all{bench.manager->stats().steps_in_flight,
                                   bench.manager->planned(RequestId{1}),
                                   bench.manager->planned(RequestId{2})};
    for (std::uint32_t l = 0; l < bench.manager->leaves().size(); ++l) {
      all.push_back(bench.manager->pool().live(LeafId{l}));
      all.push_back(bench.manager->pool().cached(LeafId{l}));
    }
    return all;
  };
  const auto before = state();
  const auto refused = [&](const std::vector<StepRequest>& batch, const char* message,
                           std::optional<std::uint32_t> pad = {}) {
    std::string said;
    try {
      bench.planner->plan(batch, pad);
    } catch (const KVError& e) {
      said = e.what();
    }
    CAPTURE(said);
    CHECK(said.find(message) != std::string::npos);
    CHECK(state() == before);
    bench.manager->audit();
  };
  refused({{RequestId{1}, 1}, {RequestId{7}, 1}}, "row 1: request 7 is not live");
  refused({{RequestId{1}, 1}, {RequestId{2}, 1}, {RequestId{1}, 1}},
          "row 2: request 1 at 17 tokens plans 1 more: it is in the batch twice");
  refused({{RequestId{1}, 0}}, "row 0: request 1 at 17 tokens plans 0 more: at least 1 is needed");
  refused({{RequestId{2}, 1}, {RequestId{1}, 48}},
          "row 1: request 1 at 17 tokens plans 48 more: that passes max_len 64");
  refused({{RequestId{1}, 65}}, "row 0: request 1 at 17 tokens plans 65 more");
  refused(std::vector<StepRequest>(9, {RequestId{1}, 1}),
          "a batch of 9 rows; the planner was built for 8");
  refused({{RequestId{1}, 1}}, "a batch of 9 rows; the planner was built for 8", 9);
  refused({{RequestId{1}, 250}, {RequestId{2}, 7}},
          "257 tokens in one step; the planner was built for 256");
  // And it is as if nobody had asked.
  const StepPlan& plan =
      bench.planner->plan(std::vector<StepRequest>{{RequestId{2}, 1}, {RequestId{1}, 13}});
  check_arrays(bench, plan);
  bench.planner->settle(plan.step());
}

TEST_CASE("N-03 N-04 N-11 dummy rows, slot mappings and cumulative lengths") {
  ManagerBench bench({full()});
  StepPlanner planner(*bench.manager, {.max_batch = 8, .max_step_tokens = 64});
  for (std::uint64_t id = 1; id <= 3; ++id)
    bench.admit(id, prompt(24, static_cast<std::uint32_t>(id)));
  bench.step(1, 10);
  bench.step(2, 20);
  const std::vector<StepRequest> batch{{RequestId{1}, 3}, {RequestId{2}, 1}, {RequestId{3}, 4}};
  const StepPlan& plan = planner.plan(batch, 5);
  CHECK(std::ranges::equal(plan.cu_seqlens_q(), Ints{0, 3, 4, 8, 9, 10}));
  CHECK(std::ranges::equal(plan.seq_lens(), Ints{13, 21, 4, 1, 1}));
  const auto mapping = plan.slot_mapping(LeafId{0});
  CHECK(mapping[0] == std::int64_t{bench.row(1)[0]} * 16 + 10);
  CHECK(mapping[3] == std::int64_t{bench.row(2)[1]} * 16 + 4);
  CHECK(mapping[8] == -1);
  CHECK(mapping[9] == -1);
  for (std::size_t i = 3; i < 5; ++i)
    CHECK(ints(plan.array(LeafId{0}, "block_table"), i) == Ints{0, 0});
  planner.settle(plan.step());
  bench.release(1);
  const StepRequest again{RequestId{2}, 1};
  const StepPlan& padded = planner.plan({&again, 1}, 2);
  CHECK(padded.slot_mapping(LeafId{0})[1] == -1);
  CHECK(ints(padded.array(LeafId{0}, "block_table"), 1) == Ints{0, 0});
}

TEST_CASE("N-06 a decode step writes the entries that changed, at any length") {
  for (const std::uint32_t length : {1'000u, 100'000u}) {
    ManagerBench bench({full()}, {.huge = 256 * (length / 16 + 3),
                                  .max_len = 100'100,
                                  .max_step = 100'000,
                                  .caching = false});
    StepPlanner planner(*bench.manager, {.max_batch = 256, .max_step_tokens = 100'100});
    std::vector<StepRequest> batch;
    for (std::uint64_t id = 1; id <= 256; ++id) {
      const auto tokens = length + static_cast<std::uint32_t>(id % 16);
      bench.manager->admit(RequestId{id}, prompt(tokens));
      const StepRequest row{RequestId{id}, std::min(tokens, 100'000u)};
      bench.manager->settle(bench.manager->begin_step({&row, 1}).id);
      if (tokens > 100'000) {
        const StepRequest rest{RequestId{id}, tokens - 100'000};
        bench.manager->settle(bench.manager->begin_step({&rest, 1}).id);
      }
      batch.push_back({RequestId{id}, 1});
    }
    std::uint64_t written = 0;
    for (int step = 0; step < 3; ++step) {
      const StepPlan& plan = planner.plan(batch);
      written = plan.changes(LeafId{0}, "block_table").values.size();
      planner.settle(plan.step());
    }
    CHECK(written == 16);
  }
}

TEST_CASE("N-07 the one that does not fit is named, and nothing of it changed") {
  ManagerBench bench({full(4)}, {.huge = 5, .page = 4, .caching = false});
  StepPlanner planner(*bench.manager, {.max_batch = 8, .max_step_tokens = 64});
  for (std::uint64_t id = 1; id <= 3; ++id)
    bench.admit(id, prompt(4, static_cast<std::uint32_t>(id)));
  for (std::uint64_t id = 1; id <= 3; ++id) bench.step(id, 4);
  const std::vector<StepRequest> batch{{RequestId{1}, 1}, {RequestId{2}, 1}, {RequestId{3}, 1}};
  const auto before = bench.row(3);
  const StepPlan& plan = planner.plan(batch);
  REQUIRE(plan.refused().size() == 1);
  CHECK(plan.refused()[0].request == RequestId{3});
  CHECK(plan.refused()[0].why.find("full") != std::string::npos);
  CHECK(plan.rows().size() == 2);
  CHECK(bench.row(3) == before);
  CHECK(bench.manager->planned(RequestId{3}) == 4);
  bench.manager->audit();
}

TEST_CASE("N-08 plan, discard, plan again: equal arrays, equal pool") {
  Bench bench(all_formats(), 60, 2);
  bench.manager->admit(RequestId{1}, prompt(30));
  bench.manager->admit(RequestId{2}, prompt(9, 1));
  const std::vector<StepRequest> batch{{RequestId{1}, 17}, {RequestId{2}, 9}};
  const auto live = [&] {
    std::vector<std::uint64_t> counts;
    for (std::uint32_t l = 0; l < bench.manager->leaves().size(); ++l)
      counts.push_back(bench.manager->pool().live(LeafId{l}));
    return counts;
  };
  const auto before = live();
  const StepPlan& first = bench.planner->plan(batch);
  const auto held = live();
  const auto lengths = bench.planner->abandon(first.step());
  CHECK(lengths ==
        std::vector<std::pair<RequestId, std::uint32_t>>{{RequestId{1}, 0}, {RequestId{2}, 0}});
  bench.manager->audit();
  const StepPlan& second = bench.planner->plan(batch);
  CHECK(live() == held);
  check_arrays(bench, second);
  bench.planner->settle(second.step());
  bench.manager->release(RequestId{1});
  bench.manager->release(RequestId{2});
  CHECK(live() == before);
}

TEST_CASE(
    "N-10 a state addressed by row: entry (layer, row) is block times rows a stride, plus layer") {
  StateOptions options;
  options.layers = 18;
  options.slabs = {{"recurrent", {64}, DType::float32}};
  options.table = StateTable::rows;
  const auto leaf = std::make_shared<RecurrentStateLeaf>("state", options);
  leaf->bind(18 * 256);
  const auto rows = leaf->bound_row_span(BlockId{3});
  REQUIRE(rows.size() == 1);
  CHECK(rows[0].begin == 54);
  CHECK(rows[0].end == 72);
}

TEST_CASE(
    "N-12 a block that last held a state is cleared once before it holds keys, and the reverse") {
  StateOptions options;
  options.layers = 1;
  options.slabs = {{"recurrent", {16}, DType::float32}};
  // Equal strides: one page class, so that a block changes hands as it is.
  Leaves leaves = {full(4, "keys"), std::make_shared<RecurrentStateLeaf>("state", options)};
  ManagerBench bench(leaves, {.huge = 3, .page = 4, .caching = false});
  StepPlanner planner(*bench.manager, {.max_batch = 4, .max_step_tokens = 64});
  const auto fills = [](const StepPlan& plan, std::uint32_t leaf) {
    std::multiset<std::uint32_t> blocks;
    for (const ZeroFill& fill : plan.zero_fills()) {
      if (fill.leaf == LeafId{leaf}) blocks.insert(fill.block.value());
    }
    return blocks;
  };
  const auto plan_one = [&](std::uint64_t id, std::uint32_t tokens) -> const StepPlan& {
    const StepRequest row{RequestId{id}, tokens};
    const StepPlan& plan = planner.plan({&row, 1});
    REQUIRE(plan.refused().empty());
    return plan;
  };
  // Fresh memory needs no clearing for keys; a new state is cleared whoever had the block.
  bench.admit(1, prompt(8));
  const StepPlan& first = plan_one(1, 8);
  const std::uint32_t state = bench.manager->live_block(RequestId{1}, LeafId{1})->value();
  CHECK(fills(first, 0).empty());
  CHECK(fills(first, 1) == std::multiset{state});
  planner.settle(first.step());
  const auto keys = bench.row(1, 0);
  bench.release(1);
  // All three blocks change hands at some time: those of foreign bytes are listed, and only they.
  std::map<std::uint32_t, std::uint32_t> holder{{state, 1}, {keys[0], 0}, {keys[1], 0}};
  bool from_state = false, from_keys = false;
  for (std::uint64_t id = 2; id < 40 && !(from_state && from_keys); ++id) {
    const std::uint32_t tokens = id % 3 == 0 ? 8 : 4;  // one page or two, so that blocks take turns
    bench.admit(id, prompt(tokens, static_cast<std::uint32_t>(id)));
    const StepPlan& plan = plan_one(id, tokens - 1);
    std::multiset<std::uint32_t> foreign;
    for (const std::uint32_t block : bench.row(id, 0)) {
      if (holder.at(block) != 0) foreign.insert(block);
      from_state = from_state || holder.at(block) == 1;
      holder[block] = 0;
    }
    const std::uint32_t live = bench.manager->live_block(RequestId{id}, LeafId{1})->value();
    from_keys = from_keys || holder.at(live) == 0;
    holder[live] = 1;
    CHECK(fills(plan, 0) == foreign);
    CHECK(fills(plan, 1) == std::multiset{live});
    planner.settle(plan.step());
    const StepPlan& next = plan_one(id, 1);  // in the same page
    CHECK(next.zero_fills().empty());
    planner.settle(next.step());
    bench.release(id);
  }
  CHECK(from_state);
  CHECK(from_keys);
}

TEST_CASE("N-13 plans lie at the same addresses in turn, call no heap, and know their bounds") {
  Bench bench(all_formats(), 600, 2, true, 4000);
  for (std::uint64_t id = 1; id <= 4; ++id)
    bench.manager->admit(RequestId{id}, prompt(8, static_cast<std::uint32_t>(id)));
  std::vector<StepRequest> batch;
  for (std::uint64_t id = 1; id <= 4; ++id) batch.push_back({RequestId{id}, 8});
  bench.planner->settle(bench.planner->plan(batch).step());
  for (StepRequest& row : batch) row.new_tokens = 1;
  std::set<const std::byte*> addresses;
  const auto step = [&] {
    const StepPlan& plan = bench.planner->plan(batch, 6);
    REQUIRE(plan.refused().empty());
    addresses.insert(plan.array(LeafId{0}, "block_table").data);
    bench.planner->settle(plan.step());
  };
  for (int i = 0; i < 100; ++i) step();
  addresses.clear();
  for (int i = 0; i < 4; ++i) step();
  const std::uint64_t calls = test::heap_calls();
  for (int i = 0; i < 1; ++i) step();
  CHECK(test::heap_calls() == calls);
  std::uint64_t total = 0;
  for (int i = 0; i < 100; ++i) {
    const std::uint64_t before = test::heap_calls();
    step();
    total += test::heap_calls() - before;
  }
  CHECK(total == 0);
  CHECK(addresses.size() == 2);
  const StepRequest wide{RequestId{1}, 65};
  CHECK_THROWS_AS(bench.planner->plan({&wide, 1}), KVError);
  CHECK_THROWS_AS(bench.planner->plan(batch, 9), PlanShapeError);
  bench.manager->audit();
}

TEST_CASE("N-14 a compact table stays as wide as the window") {
  WindowOptions window{.window = 4096, .compact = true};
  ManagerBench bench({std::make_shared<SlidingWindowLeaf>("window", window, attention(16))},
                     {.huge = 9000, .max_len = 200'000, .max_step = 1024, .caching = false});
  StepPlanner planner(*bench.manager, {.max_batch = 2, .max_step_tokens = 1024});
  bench.admit(1, prompt(100'000));
  while (bench.manager->planned(RequestId{1}) < 99'000) {
    const StepRequest row{RequestId{1}, 1000};
    const StepPlan& plan = planner.plan({&row, 1});
    planner.settle(plan.step());
  }
  for (int i = 0; i < 20; ++i) {
    const StepRequest row{RequestId{1}, 1};
    const StepPlan& plan = planner.plan({&row, 1});
    CHECK(plan.array(LeafId{0}, "block_table").shape[1] <= 258);
    planner.settle(plan.step());
  }
}

TEST_CASE("B-03 a leaf that throws while it writes: no step was begun, and the manager goes on") {
  struct Throws : KVLeafRegion {
    Throws() : KVLeafRegion("throws", KVCacheGroupId::full(), 64, {1, 4}) {}
    bool can_write_delta() const override { return false; }
    void write_staged_inputs(std::span<const std::span<const BlockId>> plans,
                             StagedArrays into) const override {
      if (angry) throw std::runtime_error("from the leaf");
      KVLeafRegion::write_staged_inputs(plans, into);
    }
    mutable bool angry = false;
  };
  const auto leaf = std::make_shared<Throws>();
  ManagerBench bench({full(4), leaf, state(), scratch()}, {.page = 4});
  StepPlanner planner(*bench.manager, {.max_batch = 4, .max_step_tokens = 64});
  bench.admit(1, prompt(21));
  const StepRequest chunk{RequestId{1}, 10};
  for (int i = 0; i < 2; ++i) {
    planner.settle(planner.plan({&chunk, 1}).step());
    const auto live = bench.live(0) + bench.live(1) + bench.live(2) + bench.live(3);
    const std::uint32_t planned = bench.manager->planned(RequestId{1});
    const StepRequest one{RequestId{1}, 1};
    leaf->angry = true;
    CHECK_THROWS_WITH_AS(planner.plan({&one, 1}), "from the leaf", std::runtime_error);
    leaf->angry = false;
    bench.manager->audit();
    CHECK(bench.manager->stats().steps_in_flight == 0);
    CHECK(bench.manager->planned(RequestId{1}) == planned);
    CHECK(bench.live(0) + bench.live(1) + bench.live(2) + bench.live(3) <=
          live + 1);  // scratch may stay
    const StepPlan& plan = planner.plan({&one, 1});
    const Ints table = ints(plan.array(LeafId{0}, "block_table"));
    const auto row = bench.row(1, 0);
    CHECK(std::ranges::equal(table, row, [](std::int32_t a, std::uint32_t b) {
      return static_cast<std::uint32_t>(a) == b;
    }));
    planner.settle(plan.step());
    bench.manager->rewind(RequestId{1},
                          planned > 8 ? bench.manager->computed(RequestId{1}) : planned);
  }
}

}  // namespace
}  // namespace kvleaf
