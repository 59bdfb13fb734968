// The leaf contract: what a pool, a manager and a planner rely on in every kind of memory, as a
// test for a kind of your own. It needs no test framework and nothing of this project's tests:
//
//   #include <kvleaf/testing/leaf_contract.h>
//
//   const auto report = kvleaf::testing::check_leaf([] { return std::make_shared<MyLeaf>(…); });
//   assert(report.ok());                    // any framework
//   EXPECT_TRUE(report.ok()) << report;     // GoogleTest
//   INFO(report.text()); REQUIRE(report.ok());  // Catch2
//
// For doctest, <kvleaf/testing/leaf_contract_doctest.h> has macros. The leaf is driven alone, with
// arrays that are watched, and inside a real pool, manager and planner. What breaks a rule is
// reported with its numbers, the smallest sequence of calls that shows it, and the rule itself.
// A check takes well under a second for a leaf in C++. Everything follows from the seed.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "kvleaf/leaf/leaf.h"

namespace kvleaf::testing {

enum class Rule : std::uint8_t {
  memory,     // page, stride, alignment and rows fit each other
  reach,      // what fell out of reach never comes back
  reserve,    // blocks_to_reserve is never too few
  cacheable,  // follows from the writing
  shapes,     // staged shapes do not shrink as batches grow, and are large enough
  inside,     // a write stays inside its arrays
  covers,     // a full write says where every reached slot lies, and writes every entry
  delta,      // a delta leaves what a full write would have left, and reports what it changed
  rows,       // bound rows of two blocks never meet
  copies,     // bound copies move all rows of a block, one for one
  release,    // what a request held comes back, and the leaf forgets it
  resume,     // a prefix that was computed can be resumed
  refusal     // what is refused changes nothing
};
inline constexpr std::array all_rules = {Rule::memory, Rule::reach,  Rule::reserve, Rule::cacheable,
                                         Rule::shapes, Rule::inside, Rule::covers,  Rule::delta,
                                         Rule::rows,   Rule::copies, Rule::release, Rule::resume,
                                         Rule::refusal};

/// "memory", "reach", …
std::string_view name_of(Rule rule) noexcept;
/// The rule in full, as a reader of the report needs it.
std::string_view paragraph_of(Rule rule) noexcept;

struct BrokenRule {
  Rule rule = Rule::memory;
  std::string numbers;                // what was found, in one line
  std::vector<std::string> sequence;  // the smallest calls that show it, in order; may be empty
};

struct ContractReport {
  std::string leaf;                // its id; empty where none could be made
  std::vector<BrokenRule> broken;  // at most one entry per rule, in the order of `Rule`
  std::vector<std::string>
      notes;                    // what is allowed, but costs something: blocks reserved for nothing
  std::vector<Rule> unchecked;  // that could not be tried, since they rest on one that is broken

  bool ok() const noexcept { return broken.empty(); }
  bool breaks(Rule rule) const noexcept;
  /// All of it, in lines.
  std::string text() const;
};
std::ostream& operator<<(std::ostream& out, const ContractReport& report);

struct ContractOptions {
  std::uint32_t page_tokens = 16;  // of the cache, for a leaf that leaves its page to it
  /// Tokens of the longest request that is tried. 0: five times what the leaf reaches back, and 64
  /// pages for one that reaches everything; at most 65,536.
  std::uint32_t max_len = 0;
  std::uint64_t seed = 1;
  std::uint32_t histories = 24;  // sequences of forwards that deltas are tried on
  /// Given, it receives whatever the leaves wrote into, so that a leaf that keeps a pointer into an
  /// array may be destroyed after it.
  std::vector<std::shared_ptr<void>>* keep_alive = nullptr;
};

/// Makes one leaf, the same each time but a new one.
using MakeLeaf = std::function<Leaf()>;

/// Checks every rule. What a leaf throws breaks the rule that was tried. Throws InvalidArgument for
/// a factory that gives nothing, gives one leaf twice, or gives leaves that differ, and for zero
/// page_tokens or histories.
ContractReport check_leaf(const MakeLeaf& make_leaf, const ContractOptions& options = {});

}  // namespace kvleaf::testing
