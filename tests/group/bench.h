// A manager with a geometry by hand, and a few words to drive it with: what the tests of this
// folder share. Every driving call audits.
#pragma once

#include <doctest/doctest.h>

#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "kvleaf/group/group.h"
#include "test_access.h"

namespace kvleaf::testing {

inline Leaf full(std::uint32_t page = 16, std::string name = "full") {
  return std::make_shared<KVLeafRegion>(std::move(name), KVCacheGroupId::full(), 64,
                                        KVLeafRegion::Options{1, page});
}
inline Leaf window(std::uint32_t tokens, std::uint32_t page = 16, std::uint32_t sinks = 0,
                   std::string name = "window") {
  return std::make_shared<KVLeafRegion>(std::move(name),
                                        KVCacheGroupId::sliding_window(tokens, sinks), 64,
                                        KVLeafRegion::Options{1, page});
}
inline Leaf chunk(std::uint32_t tokens, std::uint32_t page = 16) {
  return std::make_shared<KVLeafRegion>("chunk", KVCacheGroupId::chunked(tokens), 64,
                                        KVLeafRegion::Options{1, page});
}
inline Leaf scratch() { return std::make_shared<ScratchLeaf>("scratch", 64); }
inline Leaf cross(std::uint32_t page = 16) {
  return std::make_shared<KVLeafRegion>("cross", KVCacheGroupId::encoder(), 64,
                                        KVLeafRegion::Options{1, page});
}
inline Leaf state(StateKernel kernel = StateKernel::in_place, std::uint32_t rollback = 0,
                  std::string name = "state", std::optional<std::uint32_t> page = {},
                  std::string group = "state") {
  StateOptions options;
  options.layers = 1;
  options.slabs = {{"recurrent", {16}, DType::float32}};
  options.kernel = kernel;
  options.rollback = rollback;
  options.tokens_per_page = page;
  options.group = std::move(group);
  return std::make_shared<RecurrentStateLeaf>(std::move(name), options);
}

struct Setup {
  std::uint64_t huge = 64;
  std::vector<std::uint64_t> ratios;  // one per leaf; empty: 1 each
  std::uint32_t page = 16;
  std::uint32_t max_len = 1 << 16;
  std::uint32_t max_step = 8192;
  std::uint32_t in_flight = 2;
  Retention retention = Retention::dense();
  bool caching = true;
  EvictionOrder eviction = EvictionOrder::value;
};

/// Distinct tokens: those of prompt `k` never meet those of another.
inline std::vector<Token> prompt(std::uint32_t length, std::uint32_t k = 0) {
  std::vector<Token> tokens(length);
  std::iota(tokens.begin(), tokens.end(), static_cast<Token>(k * 1'000'000));
  return tokens;
}
/// Shares the first `shared` tokens with `with`, then differs.
inline std::vector<Token> sharing(const std::vector<Token>& with, std::uint32_t shared,
                                  std::uint32_t length, std::uint32_t k) {
  std::vector<Token> tokens = prompt(length, k);
  std::copy(with.begin(), with.begin() + shared, tokens.begin());
  return tokens;
}

class ManagerBench {
 public:
  explicit ManagerBench(Leaves leaves, Setup setup = {}) : setup_(setup) {
    std::vector<std::uint64_t> ratios = setup.ratios;
    if (ratios.empty()) ratios.assign(leaves.size(), 1);
    std::uint64_t huge_bytes = 1;
    for (const std::uint64_t ratio : ratios) huge_bytes = std::lcm(huge_bytes, ratio);
    huge_bytes *= 256;
    std::vector<PageSpec> specs;
    for (const Leaf& leaf : leaves) {
      PageSpec spec = PageSpec::of(*leaf);
      if (spec.stride_alignment) spec.stride_alignment = 1;
      specs.push_back(spec);
    }
    ManagerOptions options;
    options.page_tokens = setup.page;
    options.max_len = setup.max_len;
    options.max_step_tokens = setup.max_step;
    options.max_steps_in_flight = setup.in_flight;
    options.retention = setup.retention;
    options.enable_prefix_caching = setup.caching;
    options.eviction = setup.eviction;
    options.geometry = Geometry::by_hand(
        specs, {.huge_bytes = huge_bytes, .huge_blocks = setup.huge, .ratios = ratios});
    manager = std::make_unique<BlockManager>(std::move(leaves), options);
  }

  Admission admit(std::uint64_t id, const std::vector<Token>& tokens,
                  const AdmitOptions& options = {}) {
    const Admission admission = manager->admit(RequestId{id}, tokens, options);
    manager->audit();
    return admission;
  }
  StepId begin(std::uint64_t id, std::uint32_t tokens) {
    const StepRequest row{RequestId{id}, tokens};
    const Step& step = manager->begin_step({&row, 1});
    REQUIRE_MESSAGE(step.refused.empty(), step.refused.front().why);
    manager->audit();
    return step.id;
  }
  bool fits(std::uint64_t id, std::uint32_t tokens) {  // one settled step, or a refusal
    const StepRequest row{RequestId{id}, tokens};
    const Step& step = manager->begin_step({&row, 1});
    const bool served = step.refused.empty();
    settle(step.id);
    return served;
  }
  void settle(StepId step, std::vector<Kept> kept = {}) {
    manager->settle(step, kept);
    manager->audit();
  }
  void step(std::uint64_t id, std::uint32_t tokens) { settle(begin(id, tokens)); }
  /// Computes what is known and not computed, stopping where the manager says.
  void run(std::uint64_t id, std::uint32_t most = 1 << 20) {
    while (manager->planned(RequestId{id}) < manager->length(RequestId{id})) {
      const std::uint32_t at = manager->planned(RequestId{id});
      std::uint32_t end =
          std::min({manager->length(RequestId{id}), at + most, at + setup_.max_step});
      if (const auto stop = manager->next_stop(RequestId{id})) end = std::min(end, *stop);
      step(id, end - at);
    }
  }
  void decode(std::uint64_t id, std::uint32_t count) {
    for (std::uint32_t i = 0; i < count; ++i) {
      append(id, {next_token_++});
      step(id, 1);
    }
  }
  void append(std::uint64_t id, const std::vector<Token>& tokens) {
    manager->append(RequestId{id}, tokens);
  }
  void release(std::uint64_t id, Prefix prefix = Prefix::keep) {
    manager->release(RequestId{id}, prefix);
    manager->audit();
  }
  /// Admit, compute, release: what a request leaves behind, and what it hit.
  std::uint32_t serve(const std::vector<Token>& tokens, std::uint64_t id = 900,
                      const AdmitOptions& options = {}) {
    const Admission admission = admit(id, tokens, options);
    run(id);
    release(id);
    return admission.hit_tokens;
  }
  std::uint32_t hit(const std::vector<Token>& tokens, const AdmitOptions& options = {}) const {
    return manager->probe(tokens, options).hit_tokens;
  }
  /// Slots of these tokens that are findable, as "1101".
  std::string findable(const std::vector<Token>& tokens, std::uint32_t leaf = 0) const {
    std::string slots;
    for (const bool found : testing::findable(*manager, tokens, LeafId{leaf}))
      slots += found ? '1' : '0';
    return slots;
  }
  std::vector<std::uint32_t> row(std::uint64_t id, std::uint32_t leaf = 0) const {
    std::vector<std::uint32_t> blocks;
    for (const BlockId block : manager->blocks(RequestId{id}, LeafId{leaf}))
      blocks.push_back(block.value());
    return blocks;
  }
  std::vector<std::uint32_t> slots_held(std::uint64_t id, std::uint32_t leaf = 0) const {
    std::vector<std::uint32_t> slots;
    const auto blocks = row(id, leaf);
    for (std::uint32_t i = 0; i < blocks.size(); ++i) {
      if (blocks[i] != 0) slots.push_back(i);
    }
    return slots;
  }
  std::uint64_t live(std::uint32_t leaf = 0) const { return manager->pool().live(LeafId{leaf}); }
  std::uint64_t cached(std::uint32_t leaf = 0) const {
    return manager->pool().cached(LeafId{leaf});
  }
  std::uint64_t lost(const Admission& admission, std::string_view group) const {
    for (const GroupLoss& loss : admission.lost) {
      if (loss.group == group) return loss.tokens;
    }
    return 0;
  }
  BlockManager* operator->() { return manager.get(); }

  std::unique_ptr<BlockManager> manager;

 private:
  Setup setup_;
  Token next_token_ = 1'500'000'000;
};

}  // namespace kvleaf::testing
