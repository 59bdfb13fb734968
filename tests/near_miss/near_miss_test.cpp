// The leaf contract is shown to bite: each rule finds the leaf that breaks it, and nothing else of
// it; and leaves that break nothing pass.
#include "near_miss/near_misses.h"

#include <doctest/doctest.h>

#include <chrono>

namespace kvleaf::test {
namespace {

using testing::check_leaf;
using testing::ContractReport;

TEST_CASE("each near miss breaks its rule and no other, within two seconds") {
  for (const NearMiss& miss : near_misses()) {
    CAPTURE(miss.name);
    const auto begin = std::chrono::steady_clock::now();
    const ContractReport report = check_leaf(miss.make);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    INFO(report.text());
    REQUIRE(report.broken.size() == 1);
    CHECK(testing::name_of(report.broken[0].rule) == testing::name_of(miss.rule));
    CHECK_FALSE(report.broken[0].numbers.empty());
    CHECK(took.count() < 2.0);
  }
}

TEST_CASE("every rule has a near miss") {
  const std::vector<NearMiss> misses = near_misses();
  for (const Rule rule : testing::all_rules) {
    CAPTURE(testing::name_of(rule));
    CHECK(std::ranges::any_of(misses, [&](const NearMiss& miss) { return miss.rule == rule; }));
    CHECK(testing::paragraph_of(rule).size() > 80);
  }
}

TEST_CASE("what near misses are made of breaks nothing") {
  for (const MakeLeaf& make : {MakeLeaf([] { return std::make_shared<Plain>(); }),
                               MakeLeaf([] { return std::make_shared<OwnTable>(); }),
                               MakeLeaf([] { return std::make_shared<OwnDelta>(); }),
                               MakeLeaf([] { return std::make_shared<ByRow>(); })}) {
    const ContractReport report = check_leaf(make);
    CHECK_MESSAGE(report.ok(), report.text());
    CHECK(report.unchecked.empty());
    CHECK(report.notes.empty());
  }
}

std::string shown(const MakeLeaf& make) { return check_leaf(make).text(); }
bool has(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

TEST_CASE("a failure is told with its numbers, the smallest sequence, and the rule's paragraph") {
  const std::string reserve = shown([] { return std::make_shared<ReservesOneTooFew>(); });
  CAPTURE(reserve);
  CHECK(has(reserve,
            "blocks_to_reserve(4, step_tokens=1) is 3, but 4 blocks are held with 48 tokens"));
  CHECK(has(reserve, testing::paragraph_of(Rule::reserve)));

  const std::string back = shown(comes_back);
  CAPTURE(back);
  CHECK(has(back,
            "tail_begin(99) is 49, but tail_begin(98) was 58: tokens 49 to 57 were let go and come "
            "back"));

  const std::string shear = shown([] { return std::make_shared<RowsShear>(); });
  CAPTURE(shear);
  CHECK(has(shear,
            "rows of 96 bytes shear at a stride of 512, which alignment 128 admits: block 1 begins "
            "at byte "
            "384 by its rows and at byte 512 by the stride"));
}

TEST_CASE("a history is shrunk to the forwards that matter") {
  const ContractReport report = check_leaf([] { return std::make_shared<StaleTail>(); });
  REQUIRE(report.breaks(Rule::delta));
  INFO(report.text());
  // A row of two pages, rewound into the first beside a longer one: a table of one column hides it.
  REQUIRE(report.broken[0].sequence.size() == 2);
  CHECK(has(report.broken[0].sequence[0],
            "row 0: a new request, 0 computed + 17 new tokens, blocks 1 2"));
  CHECK(has(report.broken[0].sequence[1], "row 0: goes on, 1 computed + 1 new tokens"));
}

TEST_CASE("the lives of requests are shrunk to those that matter") {
  const ContractReport report = check_leaf([] { return std::make_shared<NeverForgets>(); });
  REQUIRE(report.breaks(Rule::release));
  INFO(report.text());
  // One request of two pages is enough: its second block is the second that the leaf ever saw.
  REQUIRE(report.broken[0].sequence.size() == 4);
  CHECK(has(report.broken[0].sequence[0], "admit 1 with"));
  CHECK(has(report.broken[0].sequence[1], "release 1"));
  CHECK(has(report.broken[0].sequence[2], "reset the cache"));
}

TEST_CASE("blocks that are reserved for nothing are noted with the slack") {
  class Generous : public Plain {
    std::uint32_t blocks_to_reserve(std::uint32_t num_blocks, std::uint32_t page,
                                    ReserveOptions options) const override {
      return Plain::blocks_to_reserve(num_blocks, page, options) + 3;
    }
  };
  const ContractReport report = check_leaf([] { return std::make_shared<Generous>(); });
  CHECK_MESSAGE(report.ok(), report.text());
  REQUIRE(report.notes.size() == 1);
  CHECK(has(report.notes[0], "3 lie idle"));
}

TEST_CASE("what a leaf throws breaks the rule that was tried") {
  class Throws : public OwnTable {
    void write_staged_inputs(std::span<const std::span<const BlockId>>,
                             StagedArrays) const override {
      throw std::runtime_error("not today");
    }
  };
  const ContractReport report = check_leaf([] { return std::make_shared<Throws>(); });
  REQUIRE(report.breaks(Rule::shapes));
  CHECK(has(report.text(), "not today"));
  CHECK(has(report.text(), "not tried, since they rest on what is broken: inside, covers, delta"));
}

TEST_CASE("a factory that gives nothing, one leaf twice, or unequal leaves is refused") {
  CHECK_THROWS_AS(check_leaf([] { return Leaf(); }), InvalidArgument);
  const Leaf one = std::make_shared<Plain>();
  CHECK_THROWS_AS(check_leaf([&] { return one; }), InvalidArgument);
  std::uint32_t page = 8;
  CHECK_THROWS_AS(
      check_leaf([&] { return std::make_shared<Plain>(KVCacheGroupId::full(), page *= 2); }),
      InvalidArgument);
  CHECK_THROWS_AS(check_leaf([calls = 0]() mutable -> Leaf {
                    if (++calls > 5) throw std::out_of_range("no more");
                    return std::make_shared<Plain>();
                  }),
                  std::out_of_range);
  CHECK_THROWS_AS(check_leaf(MakeLeaf()), InvalidArgument);
  CHECK_THROWS_AS(check_leaf([] { return std::make_shared<Plain>(); }, {.page_tokens = 0}),
                  InvalidArgument);
}

}  // namespace
}  // namespace kvleaf::test
