// The rules that need a pool, a manager and a planner: release, resume, refusal. The leaf serves
// beside a companion that keeps every token, in an arena of blocks as large as its least stride.
#include <fmt/format.h>

#include <array>
#include <map>
#include <numeric>

#include "kvleaf/group/group.h"
#include "kvleaf/testing/parts/arrays.h"
#include "kvleaf/testing/parts/rows.h"

namespace kvleaf::testing::contract {
namespace {

constexpr LeafId tried{0};      // the leaf under test
constexpr LeafId companion{1};  // full attention
constexpr std::uint32_t most_live = 3;

Leaf make_companion(const Facts& facts) {
  return std::make_shared<KVLeafRegion>(
      facts.leaf_id + " (companion)",
      KVCacheGroupId("companion of the contract", AccessPattern::full(), Writing::append),
      facts.page, KVLeafRegion::Options{.stride_alignment = 1, .tokens_per_page = facts.page});
}

Geometry make_geometry(const Leaves& leaves, std::uint64_t stride, std::uint64_t blocks) {
  const std::vector<PageSpec> pages = {PageSpec::of(*leaves[0]), PageSpec::of(*leaves[1])};
  return Geometry::by_hand(pages,
                           {.huge_bytes = std::max<std::uint64_t>(stride, pages[1].bytes_per_page),
                            .huge_blocks = blocks,
                            .ratios = {1, 1}});
}

ManagerOptions manager_options(const Facts& facts, Geometry geometry, std::uint32_t max_len) {
  // Retention as it is by default: what must be kept of a prompt is its last boundary.
  ManagerOptions options;
  options.page_tokens = facts.page;
  options.max_len = max_len;
  options.max_step_tokens = std::max(4 * facts.page, max_len / 4);
  options.max_steps_in_flight = 1;
  options.expected_tokens = facts.page;  // so that only requests ask the leaf for more
  options.geometry = std::move(geometry);
  options.seed = 1;
  return options;
}

/// An engine in small: it knows tokens, and moves no bytes.
class Engine {
 public:
  Engine(Kit& kit, std::uint64_t blocks, std::uint32_t max_len)
      : facts_(kit.facts()),
        leaves_{kit.fresh(), make_companion(facts_)},
        manager_(leaves_,
                 manager_options(facts_, make_geometry(leaves_, facts_.least_stride(), blocks),
                                 max_len)),
        planner_(manager_,
                 {.max_batch = most_live, .max_step_tokens = manager_.options().max_step_tokens}) {}

  BlockManager& manager() { return manager_; }
  const KVLeafRegion& leaf() const { return *leaves_[0]; }

  /// Tokens of a family of prompts, equal up to any length.
  static std::vector<Token> prompt(std::uint32_t family, std::uint32_t tokens) {
    std::vector<Token> list(tokens);
    for (std::uint32_t i = 0; i < tokens; ++i)
      list[i] = static_cast<Token>(i * 31 + family * 1000003 + 7);
    return list;
  }

  Admission admit(std::uint64_t id, std::uint32_t family, std::uint32_t tokens) {
    AdmitOptions options;
    if (facts_.writing == Writing::write_once) {
      options.encoder = EncoderInput{
          .digest = fmt::format("input {}", family), .tokens = 2 * facts_.page + 1, .at = 0};
    }
    Admission admission = manager_.admit(RequestId(id), prompt(family, tokens), options);
    if (options.encoder && !admission.encoder_cached) manager_.encoder_filled(RequestId(id));
    return admission;
  }

  /// One forward of one request; false when it was refused.
  bool forward(std::uint64_t id, std::uint32_t tokens) {
    const std::array batch{StepRequest{.request = RequestId(id), .new_tokens = tokens}};
    const StepPlan& plan = planner_.plan(batch);
    const bool served = plan.refused().empty();
    if (served) {
      in_step_ = tokens;
      watch(id);
    }
    planner_.settle(plan.step());
    return served;
  }

  /// Computes what is known of a request, in steps that end where the manager asks.
  bool compute(std::uint64_t id, std::uint32_t step) {
    for (;;) {
      const std::uint32_t done = manager_.computed(RequestId(id));
      const std::uint32_t known = manager_.length(RequestId(id));
      if (done >= known) return true;
      std::uint32_t end =
          std::min(known, done + std::min(step, manager_.options().max_step_tokens));
      if (const auto stop = manager_.next_stop(RequestId(id)); stop && *stop > done)
        end = std::min(end, *stop);
      if (!forward(id, end - done)) return false;
    }
  }

  /// More blocks held than blocks_to_reserve says, of the request whose step is in flight.
  const std::optional<std::string>& held_too_many() const noexcept { return too_many_; }
  /// Blocks that were ever seen in a request's slots.
  const std::map<std::uint32_t, BlockId>& seen(std::uint64_t id) { return seen_[id]; }

 private:
  void watch(std::uint64_t id) {
    if (!facts_.of_text()) return;
    const std::span<const BlockId> blocks = manager_.blocks(RequestId(id), tried);
    std::uint32_t held = 0;
    for (std::uint32_t slot = 0; slot < blocks.size(); ++slot) {
      if (blocks[slot] == null_block) continue;
      ++held;
      seen_[id].insert_or_assign(slot, blocks[slot]);
    }
    const std::uint32_t most =
        leaf().blocks_to_reserve(static_cast<std::uint32_t>(blocks.size()), facts_.page,
                                 {.enable_prefix_caching = false, .step_tokens = in_step_});
    if (held <= most || too_many_) return;
    too_many_ = fmt::format(
        "a request holds {} blocks in a step of {} tokens, but blocks_to_reserve({}, "
        "step_tokens={}) is {}",
        held, in_step_, blocks.size(), in_step_, most);
  }

  const Facts& facts_;
  Leaves leaves_;
  BlockManager manager_;
  StepPlanner planner_;
  std::uint32_t in_step_ = 1;
  std::optional<std::string> too_many_;
  std::map<std::uint64_t, std::map<std::uint32_t, BlockId>> seen_;
};

std::uint64_t ample(const Facts& facts, std::uint32_t max_len) {
  return std::uint64_t{most_live + 3} *
         (2 * pages_of(max_len, facts.page) + 16 + 2 * facts.rollback);
}

std::uint32_t serving_len(const Facts& facts) { return std::max(facts.some_len, 6 * facts.page); }

/// What a leaf answers now: figures, shapes, and the bytes it stages for one batch.
std::vector<std::string> answers(Kit& kit, const KVLeafRegion& leaf) {
  const Facts& facts = kit.facts();
  std::vector<std::string> list;
  list.push_back(fmt::format("cacheable() = {}, rollback() = {}, slots_per_page({}) = {}",
                             leaf.cacheable(), leaf.rollback(), facts.page,
                             leaf.slots_per_page(facts.page)));
  for (const std::uint32_t slots : {1u, 3u, 8u}) {
    for (const bool caching : {false, true}) {
      for (const std::uint32_t step : {1u, facts.page}) {
        list.push_back(fmt::format(
            "blocks_to_reserve({}, enable_prefix_caching={}, step_tokens={}) = {}", slots, caching,
            step,
            leaf.blocks_to_reserve(slots, facts.page,
                                   {.enable_prefix_caching = caching, .step_tokens = step})));
      }
    }
  }
  for (const std::uint32_t rows : {1u, 3u}) {
    for (const std::uint32_t blocks : {1u, 4u}) {
      std::string shapes = fmt::format("staged_input_shapes({}, {}) =", rows, blocks);
      for (const StagedInput& input : leaf.staged_input_shapes(rows, blocks)) {
        shapes += fmt::format(" '{}'", input.key);
        for (const std::int64_t extent : input.shape) shapes += fmt::format(" {}", extent);
      }
      list.push_back(std::move(shapes));
    }
  }
  Batch batch(facts);
  batch.set_rows(2);
  batch.start(0, 0, 2 * facts.page);
  batch.start(1, facts.page, facts.page);
  const StagedInputs shapes = leaf.staged_input_shapes(2, batch.num_blocks());
  for (const bool delta : {false, true}) {
    if (delta && !facts.writes_delta) continue;
    auto arrays = std::make_shared<Arrays>(shapes);
    kit.keep(arrays);
    if (delta) {
      leaf.write_staged_delta(batch.fresh_deltas(), arrays->narrow(shapes));
    } else {
      leaf.write_staged_inputs(batch.plans(), arrays->narrow(shapes));
    }
    std::string bytes = delta ? "write_staged_delta of new rows: " : "write_staged_inputs: ";
    for (const std::byte b : arrays->visible())
      bytes += fmt::format("{:02x}", static_cast<unsigned>(b));
    list.push_back(std::move(bytes));
  }
  return list;
}

/// The first line that differs, as "was … and is …".
std::optional<std::string> changed(const std::vector<std::string>& before,
                                   const std::vector<std::string>& after) {
  for (std::size_t i = 0; i < std::min(before.size(), after.size()); ++i) {
    if (before[i] == after[i]) continue;
    std::size_t same = 0;
    while (same < before[i].size() && same < after[i].size() && before[i][same] == after[i][same])
      ++same;
    if (before[i].size() < 160)
      return fmt::format("it answers {}, and before {}", after[i], before[i]);
    return fmt::format("{}byte {} of the arrays is other than before",
                       before[i].substr(0, before[i].find(": ") + 2),
                       (same - before[i].find(": ") - 2) / 2);
  }
  return {};
}

// ---- release
// -----------------------------------------------------------------------------------------

struct Op {
  enum class Kind : std::uint8_t {
    admit,
    grow,
    fork,
    preempt,
    release,
    drop,
    reset
  } kind = Kind::admit;
  std::uint32_t who = 0;     // of the live ones
  std::uint32_t tokens = 1;  // of the prompt, or more
  std::uint32_t family = 0;
};

class Lives {
 public:
  explicit Lives(Kit& kit) : kit_(kit), facts_(kit.facts()) {}

  std::optional<Finding> run(const std::vector<Op>& ops) {
    const std::uint32_t max_len = serving_len(facts_);
    auto engine = std::make_shared<Engine>(kit_, ample(facts_, max_len), max_len);
    kit_.keep(engine);
    BlockManager& manager = engine->manager();
    std::vector<std::uint64_t> live;
    std::uint64_t next = 1;
    std::vector<std::string> lines;
    const auto finding = [&](Rule rule, std::string numbers) {
      return Finding{rule, std::move(numbers), lines};
    };
    const auto leave = [&](std::uint64_t id, Prefix prefix) {
      lines.push_back(
          fmt::format("release {}{}", id, prefix == Prefix::drop ? ", keep nothing" : ""));
      manager.release(RequestId(id), prefix);
      std::erase(live, id);
    };
    for (const Op& op : ops) {
      const std::uint64_t id = live.empty() ? 0 : live[op.who % live.size()];
      switch (op.kind) {
        case Op::Kind::admit: {
          if (live.size() == most_live) leave(live.front(), Prefix::keep);
          const std::uint32_t tokens = std::min(op.tokens, max_len);
          lines.push_back(fmt::format("admit {} with {} tokens of text {}, and compute them", next,
                                      tokens, op.family));
          engine->admit(next, op.family, tokens);
          live.push_back(next);
          engine->compute(next++, 2 * facts_.page + 1);
          break;
        }
        case Op::Kind::grow: {
          if (id == 0) break;
          const std::uint32_t room = max_len - manager.length(RequestId(id));
          const std::uint32_t tokens = std::min(op.tokens, room);
          if (tokens == 0) break;
          lines.push_back(
              fmt::format("append {} tokens to {}, and compute them one by one", tokens, id));
          manager.append(RequestId(id), Engine::prompt(op.family + 17, tokens));
          engine->compute(id, 1);
          break;
        }
        case Op::Kind::fork:
          if (id == 0 || live.size() == most_live) break;
          lines.push_back(fmt::format("fork {} to {}", id, next));
          manager.fork(RequestId(id), RequestId(next));
          live.push_back(next++);
          break;
        case Op::Kind::preempt:
          if (id == 0) break;
          lines.push_back(fmt::format("preempt {}", id));
          manager.preempt(RequestId(id));
          std::erase(live, id);
          break;
        case Op::Kind::release:
          if (id != 0) leave(id, Prefix::keep);
          break;
        case Op::Kind::drop:
          if (id != 0) leave(id, Prefix::drop);
          break;
        case Op::Kind::reset:
          lines.push_back("reset the cache");
          manager.reset_cache();
          break;
      }
      manager.audit();
      if (engine->held_too_many()) return finding(Rule::reserve, *engine->held_too_many());
    }
    while (!live.empty()) leave(live.front(), Prefix::keep);
    lines.push_back("reset the cache");
    manager.reset_cache();
    manager.audit();
    const PoolStats stats = manager.stats().pool;
    const LeafStats& of_leaf = stats.leaves[tried.value()];
    if (of_leaf.live != 0 || of_leaf.cached != 0 || stats.empty != stats.huge_blocks) {
      return finding(
          Rule::release,
          fmt::format("nothing is live, and the pool holds {} live and {} cached blocks of "
                      "the leaf; {} of {} huge blocks are empty",
                      of_leaf.live, of_leaf.cached, stats.empty, stats.huge_blocks));
    }
    const auto why = changed(answers(kit_, *kit_.bound()), answers(kit_, engine->leaf()));
    if (why) {
      lines.push_back("ask the leaf what a fresh one is asked");
      return finding(
          Rule::release,
          fmt::format("everything was released, and the leaf is not as a fresh one: {}", *why));
    }
    return {};
  }

 private:
  Kit& kit_;
  const Facts& facts_;
};

}  // namespace

void check_release(Kit& kit) {
  const Facts& facts = kit.facts();
  const std::uint32_t max_len = serving_len(facts);
  Lives lives(kit);
  for (std::uint32_t i = 0; i < 6; ++i) {
    Dice dice(kit.options().seed * 1000 + i);
    std::vector<Op> ops;
    const std::uint32_t length = 4 + dice.below(10);
    for (std::uint32_t o = 0; o < length; ++o) {
      constexpr std::array kinds = {
          Op::Kind::admit, Op::Kind::admit, Op::Kind::admit,   Op::Kind::grow,    Op::Kind::grow,
          Op::Kind::fork,  Op::Kind::drop,  Op::Kind::preempt, Op::Kind::release, Op::Kind::reset};
      Op op;
      op.kind = o == 0 ? Op::Kind::admit : kinds[dice.below(kinds.size())];
      op.who = dice.below(most_live);
      op.tokens = 1 + dice.below(op.kind == Op::Kind::admit ? max_len : 2 * facts.page);
      op.family = dice.below(2);
      ops.push_back(op);
    }
    const std::optional<Finding> finding = lives.run(ops);
    if (!finding) continue;
    const Finding least = shrunk(
        ops, *finding, [&](const std::vector<Op>& fewer) { return lives.run(fewer); },
        [&](const Op& op) {
          std::vector<Op> variants;
          for (const std::uint32_t tokens :
               {1u, facts.page, op.tokens / 2, op.tokens - std::min(op.tokens, facts.page),
                op.tokens - 1}) {
            if (tokens == 0 || tokens >= op.tokens) continue;
            variants.push_back(op);
            variants.back().tokens = tokens;
          }
          return variants;
        });
    return kit.found(least.rule, least.numbers, least.sequence);
  }
}

void check_resume(Kit& kit) {
  const Facts& facts = kit.facts();
  const std::uint32_t page = facts.page;
  std::vector<std::uint32_t> lengths = {1, page, page + 1, 2 * page + 1, 3 * page};
  for (std::uint32_t pages = 4; pages * page <= serving_len(facts); pages *= 2)
    lengths.push_back(pages * page + 1);
  lengths.push_back(serving_len(facts));
  std::erase_if(lengths,
                [&](std::uint32_t tokens) { return tokens == 0 || tokens > serving_len(facts); });
  std::ranges::sort(lengths);
  for (const std::uint32_t tokens : lengths) {
    auto engine =
        std::make_shared<Engine>(kit, ample(facts, serving_len(facts)), serving_len(facts));
    kit.keep(engine);
    BlockManager& manager = engine->manager();
    std::vector<std::string> lines = {
        fmt::format("admit 1 with {} tokens", tokens),
        fmt::format("compute them in steps of {} and where next_stop asks", 2 * page),
        "release 1, keep its prefix", "admit 2 with the same tokens"};
    engine->admit(1, 0, tokens);
    engine->compute(1, 2 * page);
    manager.release(RequestId(1));
    const Admission admission = engine->admit(2, 0, tokens);
    const std::uint32_t expected = (tokens - 1) / page * page;
    if (admission.hit_tokens != expected) {
      std::string lost;
      for (const GroupLoss& loss : admission.lost) {
        lost += fmt::format("; group '{}' lost {} tokens", loss.group, loss.tokens);
      }
      return kit.found(
          Rule::resume,
          fmt::format(
              "{} of {} tokens are resumed where {} were computed and nothing was evicted{}{}",
              admission.hit_tokens, tokens, expected, lost,
              admission.reason.empty() ? "" : ": " + admission.reason),
          lines);
    }
    if (facts.writing == Writing::write_once && !admission.encoder_cached) {
      return kit.found(Rule::resume,
                       "the encoder's pages must be written again, although nothing was evicted",
                       lines);
    }
    lines.push_back(fmt::format("compute the last {} tokens", tokens - expected));
    engine->compute(2, page);
    if (facts.of_text() && expected > 0) {
      // The blocks are those that hold it, slot by slot.
      const SlotReach reach = facts.reach(expected);
      for (const auto& [slot, block] : engine->seen(2)) {
        if (slot >= expected / page || !reach.contains(slot)) continue;
        const auto first = engine->seen(1).find(slot);
        if (first != engine->seen(1).end() && first->second == block) continue;
        return kit.found(
            Rule::resume,
            fmt::format("slot {} is resumed on block {}, and was computed on {}", slot,
                        block.value(), first == engine->seen(1).end() ? 0 : first->second.value()),
            lines);
      }
    }
    if (engine->held_too_many()) kit.found(Rule::reserve, *engine->held_too_many(), lines);
    manager.audit();
  }
}

void check_refusal(Kit& kit) {
  const Facts& facts = kit.facts();
  const std::uint32_t page = facts.page;
  const std::uint32_t long_len = std::max(facts.max_len, 8 * page);
  // Room for one request of two pages, and for little else.
  const std::uint32_t small = 2 * page;
  const std::uint64_t encoder = facts.writing == Writing::write_once ? 3 : 0;
  const std::uint64_t figure = kit.bound()->blocks_to_reserve(
      2, page, {.enable_prefix_caching = true, .step_tokens = small});
  const std::uint64_t blocks = figure + encoder + 2 + 2;
  auto engine = std::make_shared<Engine>(kit, blocks, long_len);
  kit.keep(engine);
  BlockManager& manager = engine->manager();
  std::vector<std::string> lines = {fmt::format(
      "admit 1 with {} tokens in a pool of {} blocks, and compute them", small, blocks)};
  engine->admit(1, 0, small);
  if (!engine->compute(1, page)) {
    return kit.found(
        Rule::refusal,
        fmt::format("a request of {} tokens does not fit a pool of {} blocks", small, blocks),
        lines);
  }
  const auto state = [&] {
    std::vector<std::string> list = answers(kit, engine->leaf());
    const PoolStats stats = manager.stats().pool;
    list.push_back(fmt::format(
        "pool: {} live, {} cached of the leaf, {} live of the companion, {} empty",
        stats.leaves[0].live, stats.leaves[0].cached, stats.leaves[1].live, stats.empty));
    list.push_back(fmt::format("request 1: {} known, {} computed", manager.length(RequestId(1)),
                               manager.computed(RequestId(1))));
    for (const LeafId id : {tried, companion}) {
      std::string row = fmt::format("request 1 in leaf {}:", id.value());
      for (const BlockId block : manager.blocks(RequestId(1), id))
        row += fmt::format(" {}", block.value());
      list.push_back(std::move(row));
    }
    return list;
  };
  const std::vector<std::string> before = state();
  const auto unchanged = [&](std::string what) {
    manager.audit();
    lines.push_back(std::move(what));
    const auto why = changed(before, state());
    if (why) kit.found(Rule::refusal, fmt::format("a refusal changed something: {}", *why), lines);
    return !why;
  };
  const auto refused = [](auto call) {
    try {
      call();
    } catch (const PoolExhausted&) {
      return true;
    }
    return false;
  };
  if (refused([&] { engine->admit(2, 1, long_len); }) &&
      !unchanged(fmt::format("admit 2 with {} tokens: refused", long_len)))
    return;
  if (manager.contains(RequestId(2))) manager.release(RequestId(2), Prefix::drop);
  // A step that does not fit: more tokens than the pool has blocks for.
  const std::uint32_t more = std::min(manager.options().max_step_tokens, long_len - small);
  manager.append(RequestId(1), Engine::prompt(3, more));
  const std::vector<std::string> appended = state();
  if (!engine->forward(1, more)) {
    manager.audit();
    lines.push_back(fmt::format("append {} tokens to 1 and plan them in one step: refused", more));
    if (const auto why = changed(appended, state())) {
      return kit.found(Rule::refusal, fmt::format("a refusal changed something: {}", *why), lines);
    }
  }
  manager.release(RequestId(1), Prefix::drop);
  manager.audit();
}

}  // namespace kvleaf::testing::contract
