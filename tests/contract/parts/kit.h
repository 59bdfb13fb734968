// What the rules of the contract share: leaves fresh from the factory, what was found, and the rows
// of a batch as a manager would hold them. Internal to the kit.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvleaf/testing/leaf_contract.h"

namespace kvleaf::testing::contract {

/// Numbers that follow from a seed.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull + 1) {}
  /// 0 … end - 1; 0 for an end of 0.
  std::uint32_t below(std::uint64_t end) noexcept {
    state_ += 0x9E3779B97F4A7C15ull;
    std::uint64_t x = state_;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    x ^= x >> 31;
    return end == 0 ? 0 : static_cast<std::uint32_t>(x % end);
  }
  bool one_in(std::uint32_t n) noexcept { return below(n) == 0; }

 private:
  std::uint64_t state_;
};

inline std::uint32_t pages_of(std::uint64_t tokens, std::uint32_t page) noexcept {
  return static_cast<std::uint32_t>((tokens + page - 1) / page);
}

/// What a leaf declares, read once.
struct Facts {
  std::string leaf_id;
  std::uint64_t bytes = 0;
  std::optional<std::uint64_t> alignment;
  Writing writing = Writing::append;
  AccessPattern pattern = AccessPattern::full();
  std::uint32_t page = 0;     // tokens
  std::uint32_t max_len = 0;  // tokens
  /// Tokens after which the leaf has let go of a few pages, and no more than max_len: long enough
  /// to show what a row does.
  std::uint32_t some_len = 0;
  std::uint32_t rollback = 0;
  bool live_span = false;
  bool writes_delta = false;
  bool in_out = false;
  bool in_chunk = false;
  std::vector<std::uint32_t> tail;  // tail_begin(0 … max_len); empty unless of the text

  bool of_text() const noexcept { return writing == Writing::append; }
  bool is_state() const noexcept { return writing == Writing::in_place; }
  /// The least stride that the alignment admits.
  std::uint64_t least_stride() const noexcept {
    return alignment ? (bytes + *alignment - 1) / *alignment * *alignment : bytes;
  }
  SlotReach reach(std::uint32_t n) const noexcept {
    const std::uint32_t begin = tail[std::min<std::size_t>(n, tail.size() - 1)] / page;
    return {std::min(pages_of(std::min(pattern.head(), n), page), begin), begin, pages_of(n, page)};
  }
};

class Kit {
 public:
  Kit(const MakeLeaf& make_leaf, const ContractOptions& options);

  const Facts& facts() const noexcept { return facts_; }
  const ContractOptions& options() const noexcept { return options_; }

  /// A new leaf, not bound to any stride. Alive until the kit is gone.
  Leaf fresh();
  /// The same, bound to the least stride.
  Leaf bound();
  void keep(std::shared_ptr<void> thing) { keep_->push_back(std::move(thing)); }

  /// Only the first finding of a rule counts: checks try the smallest cases first.
  void found(Rule rule, std::string numbers, std::vector<std::string> sequence = {});
  void note(std::string text);
  bool broken(Rule rule) const noexcept { return report_.breaks(rule); }

  /// Runs one rule's check; what it throws breaks the rule. Where a rule that it rests on is
  /// broken, it is left out.
  template <class Check>
  void run(Rule rule, std::initializer_list<Rule> rests_on, Check check) {
    if (std::ranges::any_of(rests_on, [&](Rule base) { return broken(base); })) {
      report_.unchecked.push_back(rule);
      return;
    }
    try {
      check(*this);
    } catch (const std::exception& error) {
      if (factory_failed_) throw;
      found(rule, std::string("it throws: ") + error.what());
    }
  }

  ContractReport finish();

 private:
  Leaf make();
  void read_facts(const KVLeafRegion& leaf);
  void read_tail(const KVLeafRegion& leaf);

  const MakeLeaf& make_leaf_;
  ContractOptions options_;
  std::vector<std::shared_ptr<void>> kept_here_;
  std::vector<Leaf> made_;
  std::vector<std::shared_ptr<void>>* keep_;
  Facts facts_;
  ContractReport report_;
  bool factory_failed_ = false;  // what it threw is the caller's, and breaks no rule
};

// ---- the rules, one file each
// ----------------------------------------------------------------------

void check_memory(Kit& kit);     // declarations.cpp
void check_reach(Kit& kit);      // declarations.cpp
void check_reserve(Kit& kit);    // declarations.cpp
void check_cacheable(Kit& kit);  // declarations.cpp
void check_rows(Kit& kit);       // declarations.cpp
void check_copies(Kit& kit);     // declarations.cpp
void check_shapes(Kit& kit);     // writing.cpp
void check_inside(Kit& kit);     // writing.cpp
void check_covers(Kit& kit);     // writing.cpp
void check_delta(Kit& kit);      // writing.cpp
void check_release(Kit& kit);    // serving.cpp
void check_resume(Kit& kit);     // serving.cpp
void check_refusal(Kit& kit);    // serving.cpp

// ---- shrinking
// ---------------------------------------------------------------------------------------

struct Finding {
  Rule rule;
  std::string numbers;
  std::vector<std::string> sequence;
};

/// Fewer operations, then simpler ones, that still show the same rule broken; what is found last.
///   fails(ops)     nothing, or the finding
///   simpler(op)    variants of an operation, the simplest first
template <class Op, class Fails, class Simpler>
Finding shrunk(std::vector<Op> ops, Finding finding, Fails fails, Simpler simpler) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::milliseconds(700);
  const auto still = [&](const std::vector<Op>& fewer) {
    std::optional<Finding> now = fails(fewer);
    if (!now || now->rule != finding.rule) return false;
    finding = std::move(*now);
    return true;
  };
  for (std::size_t size = ops.size(); size > 0 && Clock::now() < deadline; size /= 2) {
    for (std::size_t at = 0; at < ops.size() && Clock::now() < deadline;) {
      std::vector<Op> fewer = ops;
      const auto end = std::min(at + size, fewer.size());
      fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(at),
                  fewer.begin() + static_cast<std::ptrdiff_t>(end));
      if (still(fewer)) {
        ops = std::move(fewer);
      } else {
        at += size;
      }
    }
  }
  for (std::size_t i = 0; i < ops.size(); ++i) {
    for (bool again = true; again && Clock::now() < deadline;) {
      again = false;
      for (const Op& variant : simpler(ops[i])) {
        std::vector<Op> fewer = ops;
        fewer[i] = variant;
        if (Clock::now() >= deadline || !still(fewer)) continue;
        ops = std::move(fewer);
        again = true;
        break;
      }
    }
  }
  return finding;
}

}  // namespace kvleaf::testing::contract
