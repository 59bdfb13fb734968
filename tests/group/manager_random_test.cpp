// Random operations on whole managers: many requests, forks, rewinds, preemptions, steps in flight
// and failed ones, in pools so small that eviction and refusal never stop.
//
// KVLEAF_RANDOM_RUNS: runs per mix (default 40); KVLEAF_RANDOM_SEED: first seed; KVLEAF_RANDOM_MIX:
// only mixes whose name contains it. A failure prints its seed and operations.
#include <doctest/doctest.h>

#include <cstdlib>

#include "world.h"

namespace kvleaf {
namespace {
using namespace kvleaf::testing;

constexpr std::uint32_t operations = 300;

Leaf text(std::string name, KVCacheGroupId group, std::uint32_t page = 4) {
  return std::make_shared<KVLeafRegion>(std::move(name), std::move(group), std::uint64_t{page} * 8,
                                        KVLeafRegion::Options{8, page});
}
Leaf full(std::uint32_t page = 4, std::string name = "full") {
  return text(std::move(name), KVCacheGroupId::full(), page);
}
Leaf window(std::uint32_t tokens, std::uint32_t sinks = 0, std::uint32_t page = 4,
            std::string name = "window") {
  return text(std::move(name), KVCacheGroupId::sliding_window(tokens, sinks), page);
}
Leaf chunk(std::uint32_t tokens, std::uint32_t page = 4) {
  return text("chunk", KVCacheGroupId::chunked(tokens), page);
}
Leaf encoder(std::string name = "cross") {
  return text(std::move(name), KVCacheGroupId::encoder());
}
Leaf scratch() { return std::make_shared<ScratchLeaf>("scratch", 8); }
Leaf state(StateKernel kernel, std::uint32_t rollback = 0, std::string name = "state",
           std::optional<std::uint32_t> page = {}, std::string group = "state",
           bool in_chunk = false) {
  StateOptions options;
  options.in_chunk = in_chunk;
  options.layers = 1;
  options.slabs = {{"recurrent", {2}, DType::float32}};
  options.kernel = kernel;
  options.rollback = rollback;
  options.tokens_per_page = page;
  options.group = std::move(group);
  return std::make_shared<RecurrentStateLeaf>(std::move(name), options);
}
Leaf custom(std::uint32_t head, std::uint32_t ahead, AccessPattern::TailBegin tail_begin,
            std::string name = "custom") {
  return text(name,
              KVCacheGroupId(name, AccessPattern::custom({head, std::move(tail_begin), ahead}),
                             Writing::append));
}

std::vector<Mix> mixes() {
  const StateKernel in_place = StateKernel::in_place;
  const StateKernel in_out = StateKernel::in_out;
  const auto stairs = [](std::uint32_t n) { return n < 12 ? 0 : (n - 7) / 5 * 5; };
  const auto all = [](std::uint32_t) { return 0u; };
  const auto last_six = [](std::uint32_t n) { return n < 6 ? 0 : n - 6; };
  return {
      {"full", {full()}},
      {"full dense", {full()}, 4, 64, 32, 6, 30, 3, Retention::dense()},
      {"full, no caching", {full(), window(6)}, 4, 64, 32, 6, 30, 3, Retention::tail(), false},
      {"full and window", {full(), window(7)}},
      {"full and window spaced", {full(), window(7)}, 4, 64, 32, 6, 30, 3, Retention::spaced()},
      {"window with sinks, chunk", {window(6, 3), chunk(6)}},
      {"page of 1", {full(1), window(3, 0, 1)}, 1, 40, 20, 12, 60},
      {"pages of 4 and 8", {full(4, "short"), full(8, "long"), window(5, 0, 8)}},
      {"values and scales", {full(4, "values"), full(4, "scales"), window(9)}},
      {"full and state in place", {full(), state(in_place)}},
      {"full and state in place dense",
       {full(), state(in_place)},
       4,
       64,
       32,
       6,
       30,
       3,
       Retention::dense()},
      {"full and state in out", {full(), state(in_out)}},
      {"full and state in out every 8",
       {full(), state(in_out)},
       4,
       64,
       32,
       6,
       30,
       3,
       Retention::every(8)},
      {"full, two states, scratch",
       {full(), state(in_place, 0, "conv"), state(in_out, 0, "ssm", 8, "ssm"), scratch()}},
      {"full and state in chunks", {full(), state(in_place, 0, "state", {}, "state", true)}},
      {"full and states in chunks dense",
       {full(), state(in_out, 0, "conv", {}, "conv", true),
        state(in_place, 0, "ssm", 8, "ssm", true)},
       4,
       64,
       32,
       8,
       40,
       3,
       Retention::dense()},
      {"window and state in chunks, rollback",
       {window(8), state(in_out, 2, "state", {}, "state", true)},
       4,
       64,
       32,
       6,
       30,
       3,
       Retention::every(8)},
      {"full, a state in chunks and one that is not",
       {full(), state(in_place, 0, "conv", {}, "conv", true), state(in_out, 0, "ssm", {}, "ssm")}},
      {"state alone", {state(in_place)}, 4, 64, 32, 1, 5},
      {"window and state spaced",
       {window(8), state(in_out)},
       4,
       64,
       32,
       6,
       30,
       3,
       Retention::spaced()},
      {"full and state in place, rollback", {full(), state(in_place, 2)}},
      {"full and state in out, rollback", {full(), state(in_out, 3)}},
      {"encoder", {full(), encoder()}},
      {"window, two encoder leaves", {window(9), encoder("k"), encoder("v")}},
      {"custom", {custom(5, 0, stairs), full()}},
      {"ahead", {full(), custom(0, 1, all, "draft")}},
      {"ahead in a window", {custom(0, 1, last_six, "draft"), window(9)}},
  };
}

std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

TEST_CASE("random operations: every audit holds, and every byte that is read is right") {
  const std::uint64_t runs = from_environment("KVLEAF_RANDOM_RUNS", 40);
  const std::uint64_t first = from_environment("KVLEAF_RANDOM_SEED", 1);
  const std::uint32_t length =
      static_cast<std::uint32_t>(from_environment("KVLEAF_RANDOM_OPERATIONS", operations));
  const char* only = std::getenv("KVLEAF_RANDOM_MIX");
  for (const Mix& mix : mixes()) {
    if (only != nullptr && mix.name.find(only) == std::string::npos) continue;
    std::uint64_t hits = 0, checked = 0, refused = 0, failed = 0, emitted = 0;
    bool good = true;
    for (std::uint64_t seed = first; seed < first + runs && good; ++seed) {
      std::string error;
      try {
        World world(mix, seed);
        world.run(length);
        world.end();
        hits += world.hit_tokens;
        checked += world.checked_words;
        refused += world.refused;
        failed += world.failed_steps;
        emitted += world.emitted_states;
      } catch (const std::exception& e) {
        error = e.what();
      }
      if (error.empty()) continue;
      good = false;
      std::vector<std::string> log;  // once more, with words
      try {
        World world(mix, seed, &log);
        world.run(length);
        world.end();
      } catch (const std::exception&) {
      }
      std::string operations_done;
      for (const std::string& line : log) operations_done += line + "\n";
      FAIL_CHECK(fmt::format("mix '{}', seed {}:\n{}{}", mix.name, seed, operations_done, error));
    }
    if (!good || runs < 20) continue;
    INFO(mix.name);  // the run was worth something
    CHECK(checked > runs * 100);
    CHECK(refused > 0);
    CHECK(failed > 0);
    if (mix.caching) CHECK(hits > 0);
    // All cached states at a boundary are published, or none.
    const bool emits = mix.name.find("in chunks") != std::string::npos &&
                       mix.name.find("one that is not") == std::string::npos;
    CHECK((emitted > 0) == emits);
  }
}

}  // namespace
}  // namespace kvleaf
