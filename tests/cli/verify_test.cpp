// Verification: it passes where all is right, over every kind of leaf and table, and fails for each
// single thing that is broken.
#include "verify.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "replay.h"

using namespace kvleaf;
using namespace kvleaf::cli;

namespace {

AttentionOptions attention(std::uint32_t layers, TableFormat table = TableFormat::dense) {
  return {.layers = layers,
          .kv_heads = 2,
          .head_dim = 16,
          .value_head_dim = {},
          .dtype = DType::bfloat16,
          .tokens_per_page = 16,
          .slots_per_page = {},
          .table = table};
}

Leaf state(StateKernel kernel, StateTable table) {
  return std::make_shared<RecurrentStateLeaf>(
      "state", StateOptions{.layers = 3,
                            .slabs = {{.name = "s", .shape = {64, 16}, .dtype = DType::float32}},
                            .kernel = kernel,
                            .table = table,
                            .tokens_per_page = 16});
}

/// A model with every kind of leaf and table.
Leaves everything() {
  return {std::make_shared<FullAttentionLeaf>("full", attention(2)),
          std::make_shared<FullAttentionLeaf>("full_csr", attention(1, TableFormat::csr)),
          std::make_shared<SlidingWindowLeaf>("window", WindowOptions{.window = 70, .sinks = 5},
                                              attention(4)),
          std::make_shared<SlidingWindowLeaf>(
              "compact", WindowOptions{.window = 70, .sinks = 5, .compact = true}, attention(3)),
          std::make_shared<ChunkedAttentionLeaf>("chunk", 64, attention(1)),
          std::make_shared<LatentAttentionLeaf>(
              "latent",
              LatentOptions{.layers = 2, .width = 24, .tokens_per_page = 16, .slots_per_page = 4}),
          state(StateKernel::in_place, StateTable::blocks),
          std::make_shared<ScratchLeaf>("scratch", 1000)};
}

Leaves encoder_decoder() {
  return {std::make_shared<FullAttentionLeaf>("full", attention(2)),
          std::make_shared<CrossAttentionLeaf>("cross", attention(2))};
}

Leaves hybrid(StateKernel kernel = StateKernel::in_place, StateTable table = StateTable::blocks) {
  return {std::make_shared<FullAttentionLeaf>("full", attention(2)),
          std::make_shared<SlidingWindowLeaf>("window", WindowOptions{.window = 70}, attention(4)),
          state(kernel, table)};
}

Trace agents(std::uint64_t rows) {
  return read_trace(std::string(KVLEAF_TRACES) + "/agent_sessions.jsonl.gz", rows);
}

struct Setting {
  std::uint64_t budget = 24 << 20;  // tight for 6 live requests
  std::uint64_t rows = 120;
  std::uint32_t max_live = 6;
  std::uint32_t max_step_tokens = 512;
  VerifyOptions verify = {};
  /// After a plan of which everything will be read, before that: with the tokens computed before.
  std::function<void(Verifier&, const StepPlan&, std::uint32_t computed)> harm = {};
  bool lose_copies = false;
  bool lose_clears = false;
};

struct Outcome {
  std::string error;  // of verification; "" when it passed
  Replay replay;
  VerifyStats stats;
};

Outcome run(const Leaves& leaves, const Setting& setting) {
  const Trace trace = agents(setting.rows);
  BlockManager manager(leaves, {.budget_bytes = setting.budget,
                                .page_tokens = 16,
                                .max_len = trace.longest(),
                                .max_step_tokens = setting.max_step_tokens});
  Verifier verifier(manager, setting.verify);
  verifier.lose_copies(setting.lose_copies);
  verifier.lose_clears(setting.lose_clears);
  ReplayOptions options{.max_live = setting.max_live, .encoder_tokens = 50, .verifier = &verifier};
  if (setting.harm) {
    options.on_plan = [&](const StepPlan& plan, Check check) {
      if (check != Check::everything) return;
      const auto computed = static_cast<std::uint32_t>(plan.seq_lens()[0] - plan.cu_seqlens_q()[1]);
      setting.harm(verifier, plan, computed);
    };
  }
  Outcome outcome;
  try {
    outcome.replay = replay(trace, manager, options);
  } catch (const VerifyError& error) {
    outcome.error = error.what();
  }
  outcome.stats = verifier.stats();
  manager.audit();
  return outcome;
}

/// Entry `column` of an int32 array of the first row.
std::int32_t& entry(const StepPlan& plan, LeafId leaf, const char* key, std::int64_t column) {
  return plan.array(leaf, key).row<std::int32_t>(0)[column];
}

bool says(const std::string& error, const std::string& words) {
  return error.find(words) != std::string::npos;
}

}  // namespace

TEST_CASE(
    "every kind of leaf and table serves a trace in a tight pool, and all bytes are as expected") {
  const Outcome outcome = run(everything(), {});
  CHECK(outcome.error == "");
  CHECK(outcome.replay.requests.size() == 120);
  CHECK(outcome.replay.hit_tokens > 0);
  CHECK(outcome.stats.factor == 1);
  CHECK(outcome.stats.copies > 0);
  CHECK(outcome.stats.clears > 0);
  // Every entry is read at least once after it was written.
  CHECK(outcome.stats.entries_checked > outcome.stats.entries_written);
}

TEST_CASE("states addressed by row and read-and-write kernels are verified as well") {
  for (const StateKernel kernel : {StateKernel::in_place, StateKernel::in_out}) {
    for (const StateTable table : {StateTable::blocks, StateTable::rows}) {
      const Outcome outcome = run(hybrid(kernel, table), {});
      CHECK(outcome.error == "");
      CHECK(outcome.replay.hit_tokens > 0);
    }
  }
}

TEST_CASE("where the arena would not fit, all leaves' bytes are divided by one factor") {
  const Leaves leaves = hybrid();
  const Outcome real = run(leaves, {});
  for (const std::uint64_t most :
       {std::uint64_t{16} << 20, std::uint64_t{2} << 20, std::uint64_t{1} << 20}) {
    Setting setting;
    setting.verify.most_arena_bytes = most;
    const Outcome small = run(leaves, setting);
    CHECK(small.error == "");
    CHECK(small.stats.factor > 1);
    CHECK(small.stats.arena_bytes <= most);
    CHECK(small.stats.entries_checked == real.stats.entries_checked);
    CHECK(small.stats.copies == real.stats.copies);
    CHECK(small.replay.hit_tokens == real.replay.hit_tokens);
  }
  Setting slow;  // fits, but would take long
  slow.verify = {.most_written_bytes = 1 << 20, .tokens = 100000, .steps = 100};
  const Outcome quick = run(leaves, slow);
  CHECK(quick.error == "");
  CHECK(quick.stats.factor > 1);
  Setting none;
  none.verify.most_arena_bytes = 1000;
  CHECK_THROWS_WITH_AS(run(leaves, none), doctest::Contains("a smaller --budget would be accepted"),
                       KVError);
}

TEST_CASE("one wrong table entry is found, whichever leaf's") {
  const Leaves leaves = everything();
  struct Table {
    std::uint32_t leaf;
    const char* name;
    const char* key;
    std::int64_t column;
  };
  for (const Table& table : {Table{0, "full", "block_table", 3},
                             {1, "full_csr", "indices", 2},
                             {2, "window", "block_table", 0},
                             {3, "compact", "block_table", 1},
                             {3, "compact", "first_slot", 0},
                             {5, "latent", "block_table", 2},
                             {6, "state", "state_rows", 0},
                             {7, "scratch", "block_table", 0}}) {
    CAPTURE(table.name);
    CAPTURE(table.key);
    bool harmed = false;
    Setting setting;
    setting.harm = [&](Verifier& verifier, const StepPlan& plan, std::uint32_t computed) {
      // Late, so that the pool has been full for long; not at a request's first step, where a
      // scratch is not read yet.
      if (harmed || plan.step().value() < 150 || computed < 700 || plan.num_tokens() > 300) return;
      std::int32_t& at = entry(plan, LeafId{table.leaf}, table.key, table.column);
      const auto blocks =
          static_cast<std::int32_t>(verifier.arena().geometry().leaf(LeafId{table.leaf}).blocks);
      at = at == blocks ? at - 1 : at + 1;
      harmed = true;
    };
    const Outcome outcome = run(leaves, setting);
    REQUIRE(harmed);
    CHECK(says(outcome.error, fmt::format("leaf '{}'", table.name)));
  }
}

TEST_CASE("an entry that is null, or beyond the last block, is named as such") {
  for (const std::int32_t wrong : {0, -1, 1 << 30}) {
    bool harmed = false;
    Setting setting;
    setting.harm = [&](Verifier&, const StepPlan& plan, std::uint32_t computed) {
      if (harmed || plan.step().value() < 50 || computed < 100) return;
      entry(plan, LeafId{0}, "block_table", 4) = wrong;
      harmed = true;
    };
    const Outcome outcome = run(hybrid(), setting);
    REQUIRE(harmed);
    CHECK(says(outcome.error, "leaf 'full'"));
    CHECK(says(outcome.error, fmt::format("is block {}", wrong)));
  }
}

TEST_CASE("one wrong slot mapping entry is found") {
  bool harmed = false;
  Setting setting;
  setting.harm = [&](Verifier&, const StepPlan& plan, std::uint32_t computed) {
    const auto mapping = plan.slot_mapping(LeafId{1});
    if (harmed || computed < 100 || mapping.size() < 4) return;
    auto* entries = const_cast<std::int64_t*>(mapping.data());
    std::swap(entries[1], entries[2]);
    harmed = true;
  };
  const Outcome outcome = run(hybrid(), setting);
  REQUIRE(harmed);
  CHECK(says(outcome.error, "leaf 'window'"));
  CHECK(says(outcome.error, "slot_mapping writes token"));
}

TEST_CASE("wrong lengths are found") {
  bool harmed = false;
  Setting setting;
  setting.harm = [&](Verifier&, const StepPlan& plan, std::uint32_t computed) {
    if (harmed || computed < 100) return;
    ++const_cast<std::int32_t*>(plan.seq_lens().data())[0];
    harmed = true;
  };
  CHECK(says(run(hybrid(), setting).error, "seq_lens"));
}

TEST_CASE("lost copies and lost clears are found") {
  Setting copies;
  copies.lose_copies = true;
  const Outcome no_copies = run(hybrid(), copies);
  CHECK(says(no_copies.error, "leaf 'state'"));
  CHECK(says(no_copies.error, "expected"));
  Setting clears;
  clears.lose_clears = true;
  const Outcome no_clears = run(hybrid(), clears);
  CHECK(says(no_clears.error, "leaf 'state'"));
  CHECK(says(no_clears.error, "is not zero"));
}

namespace {

/// One manager, and a verifier that may be told other tokens than the manager.
struct Pair {
  Leaves leaves = hybrid();
  BlockManager manager{leaves, {.budget_bytes = 24 << 20, .page_tokens = 16, .max_len = 1000}};
  StepPlanner planner{manager, {.max_batch = 1, .max_step_tokens = 1000}};
  Verifier verifier{manager, {}};
  std::vector<Token> tokens = std::vector<Token>(200, 7);

  /// Computes the prompt and returns the hit; the request stays live.
  std::uint32_t serve(RequestId request, std::span<const Token> told) {
    const Admission admission = manager.admit(request, tokens);
    verifier.admit(request, told, admission.hit_tokens);
    for (std::uint32_t done = admission.hit_tokens; done < tokens.size();) {
      std::uint32_t end = static_cast<std::uint32_t>(tokens.size());
      if (const auto stop = manager.next_stop(request); stop && *stop > done)
        end = std::min(end, *stop);
      const std::array batch{StepRequest{request, end - done}};
      const StepPlan& plan = planner.plan(batch);
      verifier.run(plan, Check::everything);
      planner.settle(plan.step());
      done = end;
    }
    return admission.hit_tokens;
  }
  void release(RequestId request) {
    verifier.release(request);
    manager.release(request);
  }
};

}  // namespace

TEST_CASE("a hit on pages of other tokens is found") {
  // A manager that matched too much, seen from the verifier: it is told that a token is another
  // one.
  for (const std::uint32_t changed : {200U, 191U, 40U, 0U}) {
    Pair pair;
    CHECK(pair.serve(RequestId{1}, pair.tokens) == 0);
    pair.release(RequestId{1});
    std::vector<Token> others = pair.tokens;
    if (changed < others.size()) ++others[changed];
    if (changed == 200) {
      CHECK(pair.serve(RequestId{2}, others) == 192);
    } else {
      CHECK_THROWS_WITH_AS(pair.serve(RequestId{2}, others), doctest::Contains("request 2, leaf '"),
                           VerifyError);
    }
  }
}

TEST_CASE("one flipped bit in a cached page is found by the next request that reuses it") {
  for (const std::uint32_t slot : {0U, 5U, 11U, 99U}) {
    Pair pair;
    pair.serve(RequestId{1}, pair.tokens);
    const BlockId block = pair.manager.blocks(RequestId{1}, LeafId{0})[slot == 99 ? 0 : slot];
    pair.release(RequestId{1});
    if (slot != 99) {
      pair.verifier.arena().page(LeafId{0}, block)[300] ^= std::byte{4};
      CHECK_THROWS_WITH_AS(
          pair.serve(RequestId{2}, pair.tokens),
          doctest::Contains(
              fmt::format("request 2, leaf 'full', step 3: token {} in slot {}, block {}",
                          slot * 16 + 1, slot, block.value())
                  .c_str()),
          VerifyError);
    } else {
      CHECK(pair.serve(RequestId{2}, pair.tokens) == 192);
    }
  }
}

TEST_CASE("one flipped bit in a page of a live request is found at its release at the latest") {
  for (const std::uint32_t leaf : {0U, 1U, 2U}) {
    Pair pair;
    pair.serve(RequestId{1}, pair.tokens);
    const auto live = leaf == 2 ? *pair.manager.live_block(RequestId{1}, LeafId{2})
                                : pair.manager.blocks(RequestId{1}, LeafId{leaf})[12];
    // A step that reads a sample only, so that release has to look.
    const Token next = 5;
    pair.manager.append(RequestId{1}, {&next, 1});
    pair.verifier.append(RequestId{1}, {&next, 1});
    const std::array batch{StepRequest{RequestId{1}, 1}};
    const StepPlan& plan = pair.planner.plan(batch);
    pair.verifier.run(plan, Check::sample);
    pair.planner.settle(plan.step());
    pair.verifier.arena().page(LeafId{leaf}, live)[7] ^= std::byte{128};
    CHECK_THROWS_WITH_AS(pair.release(RequestId{1}), doctest::Contains("request 1, leaf '"),
                         VerifyError);
  }
}

TEST_CASE("an encoder's pages are filled once, and read by every step") {
  const Outcome right = run(encoder_decoder(), {.rows = 40});
  CHECK(right.error == "");
  CHECK(right.replay.hit_tokens == 0);  // no two requests have the same input
  CHECK(right.replay.requests.size() == 40);
  bool harmed = false;
  Setting setting{.rows = 40};
  setting.harm = [&](Verifier&, const StepPlan& plan, std::uint32_t computed) {
    if (harmed || computed < 100) return;
    std::swap(entry(plan, LeafId{1}, "block_table", 1), entry(plan, LeafId{1}, "block_table", 2));
    harmed = true;
  };
  const Outcome wrong = run(encoder_decoder(), setting);
  REQUIRE(harmed);
  CHECK(says(wrong.error, "leaf 'cross'"));
}

TEST_CASE("two requests in one block are found") {
  // The second row of a batch is given the first row's newest block.
  const Leaves leaves = {std::make_shared<FullAttentionLeaf>("full", attention(2))};
  BlockManager manager(leaves, {.budget_bytes = 8 << 20, .page_tokens = 16, .max_len = 1000});
  StepPlanner planner(manager, {.max_batch = 2, .max_step_tokens = 1000});
  Verifier verifier(manager, {});
  const std::vector<Token> a(20, 1), b(20, 2);
  for (const auto& [id, tokens] : {std::pair{1, &a}, {2, &b}}) {
    const Admission admission = manager.admit(RequestId{static_cast<std::uint64_t>(id)}, *tokens);
    verifier.admit(RequestId{static_cast<std::uint64_t>(id)}, *tokens, admission.hit_tokens);
  }
  const std::array first{StepRequest{RequestId{1}, 18}, StepRequest{RequestId{2}, 18}};
  const StepPlan& prompt = planner.plan(first);
  verifier.run(prompt);
  planner.settle(prompt.step());
  const std::array second{StepRequest{RequestId{1}, 1}, StepRequest{RequestId{2}, 1}};
  const StepPlan& plan = planner.plan(second);
  const std::int32_t shared = plan.array(LeafId{0}, "block_table").row<std::int32_t>(0)[1];
  plan.array(LeafId{0}, "block_table").row<std::int32_t>(1)[1] = shared;
  const_cast<std::int64_t*>(plan.slot_mapping(LeafId{0}).data())[1] = shared * 16 + 2;
  CHECK_THROWS_WITH_AS(verifier.run(plan), doctest::Contains("request 2, leaf 'full'"),
                       VerifyError);
}
