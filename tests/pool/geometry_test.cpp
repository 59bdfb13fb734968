// Geometries with known answers, refusals, views and geometries by hand. That the search is exact
// is tested in geometry_search_test.cpp.
#include "kvleaf/pool/geometry.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kvleaf/leaf/region.h"

namespace kvleaf {
namespace {

using u64 = std::uint64_t;
constexpr u64 kKiB = u64{1} << 10;
constexpr u64 kMiB = u64{1} << 20;
constexpr u64 kGiB = u64{1} << 30;

struct Page {
  u64 bytes;
  std::optional<u64> alignment = std::nullopt;  // none: packed
  double weight = 1.0;
};

/// Named "a", "b", …
std::vector<PageSpec> pages_of(const std::vector<Page>& pages) {
  std::vector<PageSpec> specs;
  for (const Page& page : pages) {
    PageSpec spec;
    spec.name = std::string(1, static_cast<char>('a' + specs.size()));
    spec.bytes_per_page = page.bytes;
    spec.stride_alignment = page.alignment;
    spec.weight = page.weight;
    specs.push_back(spec);
  }
  return specs;
}

Geometry plan(u64 budget, const std::vector<Page>& pages, std::optional<u64> cap = {}) {
  return plan_geometry(budget, pages_of(pages), {.max_huge_bytes = cap, .alignment = 1});
}

std::vector<u64> ratios(const Geometry& geometry) {
  std::vector<u64> all;
  for (const LeafGeometry& leaf : geometry.leaves()) all.push_back(leaf.ratio);
  return all;
}
std::vector<u64> strides(const Geometry& geometry) {
  std::vector<u64> all;
  for (const LeafGeometry& leaf : geometry.leaves()) all.push_back(leaf.page_stride);
  return all;
}
u64 unused(const Geometry& geometry) { return geometry.budget_bytes() - geometry.arena_bytes(); }

using Numbers = std::vector<u64>;

/// The refusal that planning ends in; fails the test if it does not.
GeometryError refusal(u64 budget, const std::vector<PageSpec>& pages, std::optional<u64> cap = {}) {
  try {
    plan_geometry(budget, pages, {.max_huge_bytes = cap, .alignment = 1});
  } catch (const GeometryError& error) {
    return error;
  }
  FAIL("a budget of " << budget << " B was not refused");
  return GeometryError("", 0, "");
}

bool mentions(const KVError& error, const std::string& part) {
  return std::string(error.what()).find(part) != std::string::npos;
}

TEST_CASE("G-01 pages that divide each other are tiled without padding") {
  const Geometry g = plan(120 * kGiB, {{100 * kMiB}, {10 * kMiB}});
  CHECK(g.huge_bytes() == 100 * kMiB);
  CHECK(g.huge_blocks() == 1227);
  CHECK(ratios(g) == Numbers{1, 10});
  CHECK(g.null_bytes() == 100 * kMiB);
  CHECK(unused(g) == 80 * kMiB);
  CHECK(g.cost_terms().padding == 0);

  const Geometry fp8 = plan(120 * kGiB, {{52'428'800}, {819'200}, {5'242'880}, {81'920}});
  CHECK(fp8.huge_bytes() == 50 * kMiB);
  CHECK(fp8.huge_blocks() == 2456);
  CHECK(ratios(fp8) == Numbers{1, 64, 10, 640});
  CHECK(fp8.leaf(fp8.find("d")).blocks == 1'571'840);
}

TEST_CASE("G-02 packed pages force their least common multiple, alignments avoid it") {
  const Geometry packed = plan(120 * kGiB, {{100 * kMiB}, {10 * kMiB}, {15'925'248}});
  CHECK(packed.huge_bytes() == 24'300 * kMiB);
  CHECK(packed.huge_blocks() == 5);
  CHECK(ratios(packed) == Numbers{243, 2430, 1600});

  const Geometry padded =
      plan(120 * kGiB, {{100 * kMiB, 8192, .8}, {10 * kMiB, 4096, .15}, {15'925'248, 2304, .05}},
           128 * kMiB);
  CHECK(padded.huge_bytes() == 105'062'400);
  CHECK(padded.huge_blocks() == 1225);
  CHECK(ratios(padded) == Numbers{1, 10, 6});
  CHECK(strides(padded) == Numbers{105'062'400, 10'506'240, 17'510'400});
}

TEST_CASE("G-03 a budget starts down to one huge block per leaf, and one byte less is refused") {
  const std::vector<Page> pages = {
      {3 * kMiB, 512, .5}, {648 * kKiB, 36'864, .05}, {9 * kMiB, 512 * kKiB, .45}};
  const Geometry g = plan(51 * kMiB, pages);
  CHECK(g.huge_bytes() == 9 * kMiB);
  CHECK(g.huge_blocks() == 4);
  CHECK(ratios(g) == Numbers{3, 8, 1});
  CHECK(strides(g)[1] == 1'179'648);
  CHECK(g.null_bytes() == 9 * kMiB);
  CHECK(unused(g) == 6 * kMiB);

  const Geometry least = plan(36 * kMiB, pages);
  CHECK(least.huge_blocks() == 3);
  for (const LeafGeometry& leaf : least.leaves()) CHECK(leaf.blocks >= 1);

  const GeometryError error = refusal(36 * kMiB - 1, pages_of(pages));
  CHECK(error.least_budget == 36 * kMiB);
  CHECK(error.blamed_leaf == "c");
  CHECK(mentions(error, "at least 36 MiB (least budget 37748736 B)"));
  CHECK(mentions(error, "leaf 'c' with pages of 9 MiB (9437184 B)"));
  CHECK(
      mentions(error, "a 3145728 B (aligned to 512), b 663552 B (aligned to 36864), c 9437184 B"));
}

TEST_CASE("G-04 the null block costs one page, not one huge block") {
  const Geometry g = plan(240, {{8}, {24}});
  CHECK(g.huge_bytes() == 24);
  CHECK(g.huge_blocks() == 9);
  CHECK(ratios(g) == Numbers{3, 1});
  CHECK(g.leaves()[0].blocks == 27);
  CHECK(g.leaves()[1].blocks == 9);

  const Geometry equal = plan(8 * kGiB, {{12 * kMiB}, {12 * kMiB}});
  CHECK(ratios(equal) == Numbers{1, 1});
  CHECK(equal.huge_blocks() == 681);
  CHECK(equal.page_classes() == 1);

  CHECK(plan(2 * kMiB, {{kMiB}}).huge_blocks() == 1);
  const GeometryError error = refusal(2 * kMiB - 1, pages_of({{kMiB}}));
  CHECK(error.least_budget == 2 * kMiB);
  CHECK(mentions(error, "least 2 MiB"));
}

TEST_CASE("G-05 the least budget of packed pages counts the huge blocks that they force") {
  const std::vector<Page> pages = {{8'994'816}, {4 * kMiB}};
  const Geometry g = plan(120 * kGiB, pages);
  CHECK(g.huge_bytes() == 2196 * kMiB);
  CHECK(ratios(g) == Numbers{256, 549});
  CHECK(g.huge_blocks() == 55);

  const GeometryError error = refusal(kGiB, pages_of(pages));
  CHECK(error.least_budget == 4'614'340'608);
  CHECK(mentions(error, "4614340608"));
  CHECK(error.blamed_leaf == "a");  // without it huge blocks would be 4 MiB
  CHECK(refusal(4'614'340'607, pages_of(pages)).least_budget == 4'614'340'608);
  CHECK(plan(4'614'340'608, pages).huge_blocks() == 2);
}

TEST_CASE("G-06 a huge block of many pages still has a null block of one page") {
  const Geometry g = plan(100 * kGiB, {{786'432}, {847'872}, {48'234'496}});
  CHECK(g.huge_bytes() == 414 * kMiB);
  CHECK(g.huge_blocks() == 247);
  CHECK(ratios(g) == Numbers{552, 512, 9});
  CHECK(g.null_bytes() == 46 * kMiB);
}

TEST_CASE("G-07 seven leaves with rows of their own") {
  const Geometry g = plan(100 * kGiB,
                          {{2'248'704, 576},
                           {1'105'920, 576},
                           {35'712, 576},
                           {130'560, 68},
                           {983'040, 8192},
                           {1'015'808, 4096},
                           {245'760, 2048}},
                          128 * kMiB);
  CHECK(g.huge_bytes() == 37'601'280);
  CHECK(g.huge_blocks() == 2855);
  CHECK(ratios(g) == Numbers{16, 34, 1020, 288, 34, 36, 153});
}

TEST_CASE("G-08 the null page and what is left over count") {
  const Geometry g = plan(4096, {{96, 8}, {20, 4}}, 512);
  CHECK(g.huge_bytes() == 96);
  CHECK(g.huge_blocks() == 41);
  CHECK(ratios(g) == Numbers{1, 4});
  CHECK(strides(g) == Numbers{96, 24});
  CHECK(g.null_bytes() == 96);
  CHECK(unused(g) == 64);
}

TEST_CASE("G-09 weights decide whose padding matters") {
  const auto weighted = [](double first) {
    return plan(1000, {{10, 1, first}, {7, 1, 1 - first}}, 64);
  };
  const Geometry even = weighted(.5);
  CHECK(even.huge_bytes() == 40);
  CHECK(ratios(even) == Numbers{4, 5});
  CHECK(even.huge_blocks() == 24);
  const Geometry second = weighted(.1);
  CHECK(second.huge_bytes() == 14);
  CHECK(ratios(second) == Numbers{1, 2});
  CHECK(second.huge_blocks() == 70);
  const Geometry first = weighted(.9);
  CHECK(first.huge_bytes() == 10);
  CHECK(ratios(first) == Numbers{1, 1});
  CHECK(first.huge_blocks() == 99);
}

TEST_CASE("weights count in proportion only") {
  const Geometry g = plan(1000, {{10, 1, .1}, {7, 1, .9}}, 64);
  const Geometry scaled = plan(1000, {{10, 1, 7}, {7, 1, 63}}, 64);
  CHECK(scaled.huge_bytes() == g.huge_bytes());
  CHECK(scaled.cost() == doctest::Approx(g.cost()).epsilon(1e-12));
}

TEST_CASE(
    "G-10 a leaf of next to no weight still gets the largest ratio that a huge block admits") {
  const Geometry g = plan(1'000'000, {{1000, 8, .9999}, {10, 2, .0001}}, 1000);
  CHECK(ratios(g) == Numbers{1, 100});
  CHECK(strides(g)[1] == 10);
}

TEST_CASE("G-11 views start one stride before the first huge block") {
  const Geometry g = Geometry::by_hand(pages_of({{24}, {8}}),
                                       {.huge_bytes = 24, .huge_blocks = 3, .ratios = {1, 3}});
  const LeafId wide(0), narrow(1);
  CHECK(g.leaf(wide).base_offset == 0);
  CHECK(g.leaf(narrow).base_offset == 16);
  CHECK(g.byte_range(narrow, BlockId(1)) == ByteRange{24, 32});
  CHECK(g.byte_range(narrow, BlockId(2)) == ByteRange{32, 40});
  CHECK(g.byte_range(narrow, BlockId(3)) == ByteRange{40, 48});
  CHECK(g.byte_range(narrow, BlockId(4)) == ByteRange{48, 56});
  CHECK(g.huge_block_of(narrow, BlockId(1)) == HugeBlockId(0));
  CHECK(g.huge_block_of(narrow, BlockId(3)) == HugeBlockId(0));
  CHECK(g.huge_block_of(narrow, BlockId(4)) == HugeBlockId(1));
  CHECK(g.byte_range(wide, BlockId(2)) == ByteRange{48, 72});
  CHECK(g.huge_block_of(wide, BlockId(2)) == HugeBlockId(1));
  CHECK(g.byte_range(wide, null_block) == ByteRange{0, 24});
  CHECK(g.byte_range(narrow, null_block) == ByteRange{16, 24});

  CHECK(g.byte_range(narrow, BlockId(9)) == ByteRange{88, 96});
  CHECK_THROWS_AS(g.byte_range(narrow, BlockId(10)), BlockError);
  CHECK_THROWS_AS(g.byte_range(wide, BlockId(4)), BlockError);
  CHECK_THROWS_AS(g.huge_block_of(narrow, BlockId(10)), BlockError);
  CHECK_THROWS_AS(g.huge_block_of(narrow, null_block), BlockError);
  CHECK_THROWS_AS(g.leaf(LeafId(2)), InvalidArgument);
}

/// Addressed by row, which is all that sets it apart.
class RowLeaf : public KVLeafRegion {
 public:
  using KVLeafRegion::KVLeafRegion;
  std::vector<BoundRows> bound_row_span(BlockId block) const override {
    return {{"state", block.value(), block.value() + u64{1}}};
  }
};

TEST_CASE("G-12 pages that are no whole number of rows, and pages above the cap, are refused") {
  const KVLeafRegion::Options rows{.stride_alignment = 576, .tokens_per_page = {}};
  const RowLeaf sheared("odd", KVCacheGroupId::state(), 2'279'936, rows);
  try {
    PageSpec::of(sheared);
    FAIL("a page of 3958.2 rows was taken");
  } catch (const InvalidArgument& error) {
    CHECK(mentions(error, "3958.2 rows"));
    CHECK(mentions(error, "'odd'"));
  }
  CHECK(PageSpec::of(RowLeaf("even", KVCacheGroupId::state(), 2'248'704, rows)).bytes_per_page ==
        2'248'704);
  // Padded by whole rows it may be read through a table: only rows of its own would shear.
  CHECK(PageSpec::of(KVLeafRegion("paged", KVCacheGroupId::state(), 2'279'936, rows))
            .stride_alignment == u64{576});

  try {
    Geometry::by_hand(pages_of({{2'248'704, 576}}),
                      {.huge_bytes = 2'279'936, .huge_blocks = 4, .ratios = {1}});
    FAIL("a stride of 3958.2 rows was taken");
  } catch (const GeometryError& error) {
    CHECK(mentions(error, "3958.2"));
    CHECK(error.blamed_leaf == "a");
  }

  const GeometryError error = refusal(kGiB, pages_of({{kMiB, 256}, {3 * kMiB, 256}}), 2 * kMiB);
  CHECK(error.least_budget == 0);  // no budget would do
  CHECK(error.blamed_leaf == "b");
  CHECK(mentions(error, "capped at 2 MiB"));
  CHECK(mentions(error, "leaf 'b' with pages of 3 MiB"));
}

TEST_CASE("a cap below what packed pages force is refused, naming the page that forces it") {
  const GeometryError error =
      refusal(kGiB * 1024, pages_of({{100 * kMiB}, {15'925'248}, {10 * kMiB}}), 128 * kMiB);
  CHECK(error.least_budget == 0);
  CHECK(error.blamed_leaf == "b");  // without it 100 MiB would do
  CHECK(mentions(error, "24300 MiB"));
  // At the least huge block it starts.
  CHECK(plan(1024 * kGiB, {{100 * kMiB}, {15'925'248}, {10 * kMiB}}, 24'300 * kMiB).huge_bytes() ==
        24'300 * kMiB);
}

TEST_CASE("the default cap gives way to the largest page and to what is forced") {
  CHECK(plan(8 * kGiB, {{300 * kMiB, 1}, {kMiB, kMiB}}).huge_bytes() == 300 * kMiB);
  // The largest page, and an alignment that it does not meet.
  CHECK(plan(8 * kGiB, {{300 * kMiB + 1, kMiB}}).huge_bytes() == 301 * kMiB);
  // Below it, 128 MiB holds: three pages of 43 MiB would need 129.
  for (u64 budget : {8 * kGiB, 900 * kGiB}) {
    CHECK(plan(budget, {{43 * kMiB}, {kMiB, kMiB}}).huge_bytes() <= 128 * kMiB);
  }
}

TEST_CASE("G-13 blocks of every leaf tile the huge blocks and straddle none") {
  const Geometry g = plan(64 * kMiB, {{kMiB}, {2 * kMiB}});
  CHECK(g.huge_bytes() == 2 * kMiB);
  CHECK(ratios(g) == Numbers{2, 1});
  CHECK(g.huge_blocks() == 31);

  const std::vector<Geometry> some = {
      g, plan(1000, {{5, 1}, {9, 1}}, 64), plan(4096, {{96, 8}, {20, 4}}, 512),
      Geometry::by_hand(
          pages_of({{5, 3}, {1, 1}, {24, 12}}),
          {.huge_bytes = 24, .huge_blocks = 7, .ratios = {4, 24, 1}, .alignment = 256})};
  for (const Geometry& geometry : some) {
    for (std::size_t i = 0; i < geometry.leaves().size(); ++i) {
      const LeafId leaf(static_cast<std::uint32_t>(i));
      const LeafGeometry& of = geometry.leaf(leaf);
      u64 end_of_last = geometry.null_bytes();
      for (std::uint32_t b = 1; b <= of.blocks; ++b) {
        const ByteRange range = geometry.byte_range(leaf, BlockId(b));
        const u64 huge = geometry.huge_block_of(leaf, BlockId(b)).value();
        const u64 begin = geometry.null_bytes() + huge * geometry.huge_bytes();
        REQUIRE(range.begin >= end_of_last);
        REQUIRE(range.end - range.begin == of.bytes_per_page);
        REQUIRE(range.begin >= begin);
        REQUIRE(range.end <= begin + geometry.huge_bytes());
        REQUIRE((range.begin - begin) % of.page_stride == 0);
        end_of_last = range.end;
      }
      CHECK(end_of_last <= geometry.arena_bytes());
      CHECK(geometry.huge_block_of(leaf, BlockId(static_cast<std::uint32_t>(of.blocks))).value() ==
            geometry.huge_blocks() - 1);
    }
  }
}

TEST_CASE("G-14 pages with a small common multiple share it") {
  const Geometry g = plan(kMiB, {{24'576}, {32'768}});
  CHECK(g.huge_bytes() == 98'304);
  CHECK(ratios(g) == Numbers{4, 3});
  CHECK(g.huge_blocks() == 10);

  constexpr u64 u = 64 * kKiB;
  const Geometry three = plan(8 * kGiB, {{9 * u}, {39 * u}, {5 * u}});
  CHECK(three.huge_bytes() == 585 * u);
  CHECK(ratios(three) == Numbers{65, 15, 117});
  CHECK(three.huge_blocks() == 223);
  CHECK(three.cost_terms().padding == 0);

  const Geometry two = plan(8 * kGiB, {{20 * u}, {30 * u}});
  CHECK(two.huge_bytes() == 60 * u);
  CHECK(ratios(two) == Numbers{3, 2});
  CHECK(two.huge_blocks() == 2184);
}

TEST_CASE("G-16 a split costs nothing: leaves of one ratio are one class") {
  const Geometry whole = plan(1000, {{5, 1, .5}, {9, 1, .5}}, 64);
  const Geometry split =
      plan(1000, {{5, 1, .5}, {9, 1, .5 / 3}, {9, 1, .5 / 3}, {9, 1, .5 / 3}}, 64);
  CHECK(split.huge_bytes() == 45);
  CHECK(split.huge_blocks() == 22);
  CHECK(ratios(split) == Numbers{9, 5, 5, 5});
  CHECK(split.page_classes() == 2);
  CHECK(split.leaves()[1].page_class == split.leaves()[3].page_class);
  CHECK(split.class_ratio(split.leaves()[3].page_class) == 5);
  CHECK(split.cost() == doctest::Approx(.048).epsilon(1e-12));
  CHECK(whole.cost() == doctest::Approx(.048).epsilon(1e-12));
  CHECK(whole.huge_bytes() == 45);
}

TEST_CASE("G-16 every leaf of a class gets a block, several from one huge block") {
  std::vector<Page> pages = {{24 * kKiB}};
  pages.insert(pages.end(), 23, {30 * kKiB});
  const Geometry least = plan(870 * kKiB, pages);
  CHECK(least.huge_bytes() == 120 * kKiB);
  CHECK(least.huge_blocks() == 7);
  CHECK(ratios(least)[0] == 5);
  CHECK(ratios(least)[23] == 4);
  CHECK(least.null_bytes() == 30 * kKiB);
  const GeometryError error = refusal(870 * kKiB - 1, pages_of(pages));
  CHECK(error.least_budget == 870 * kKiB);
  CHECK(error.blamed_leaf == "b");  // the first of 30 KiB
  CHECK(mentions(error, "x 30720 B (packed)"));
}

TEST_CASE("the null region is a multiple of the device alignment") {
  const Geometry g = plan_geometry(kMiB, pages_of({{1000, 8}}));  // 256 by default
  CHECK(g.null_bytes() == 1024);
  CHECK(g.leaves()[0].base_offset == 24);
  const auto aligned = [](u64 budget) {
    return plan_geometry(budget, pages_of({{1000, 8}}), {.max_huge_bytes = {}, .alignment = 4096});
  };
  CHECK(aligned(5096).null_bytes() == 4096);
  try {
    aligned(5095);
    FAIL("the null region was not counted");
  } catch (const GeometryError& error) {
    CHECK(error.least_budget == 5096);
  }
}

TEST_CASE("the cost is the sum of its three terms, computed from what the geometry shows") {
  const Geometry g =
      plan(51 * kMiB, {{3 * kMiB, 512, 2}, {648 * kKiB, 36'864, 1}, {9 * kMiB, 512, 5}});
  const auto terms = g.cost_terms();
  const double budget = static_cast<double>(g.budget_bytes());
  double padding = 0;
  const double weights[] = {2. / 8, 1. / 8, 5. / 8};
  std::vector<u64> seen;
  double half = 0;
  for (std::size_t i = 0; i < 3; ++i) {
    const LeafGeometry& leaf = g.leaves()[i];
    padding +=
        weights[i] *
        (static_cast<double>(leaf.page_stride) / static_cast<double>(leaf.bytes_per_page) - 1);
    if (std::find(seen.begin(), seen.end(), leaf.ratio) == seen.end()) {
      half += static_cast<double>(g.huge_bytes() - leaf.page_stride) / (2 * budget);
      seen.push_back(leaf.ratio);
    }
  }
  CHECK(terms.padding == doctest::Approx(padding).epsilon(1e-12));
  CHECK(terms.half_used == doctest::Approx(half).epsilon(1e-12));
  CHECK(terms.unused == doctest::Approx(static_cast<double>(g.null_bytes() + unused(g)) / budget));
  CHECK(g.cost() == terms.padding + terms.unused + terms.half_used);
}

TEST_CASE("pages of which no geometry can be made are refused, the leaf named") {
  const auto refused = [](const std::vector<PageSpec>& pages, const std::string& part) {
    const auto named = [&](const InvalidArgument& error) { CHECK(mentions(error, part)); };
    try {
      plan_geometry(kGiB, pages);
      FAIL("planned, but should name " << part);
    } catch (const InvalidArgument& error) {
      named(error);
    }
    try {
      Geometry::by_hand(
          pages,
          {.huge_bytes = 4096, .huge_blocks = 4, .ratios = std::vector<u64>(pages.size(), 1)});
      FAIL("taken by hand, but should name " << part);
    } catch (const InvalidArgument& error) {
      named(error);
    }
  };
  const std::vector<PageSpec> good = pages_of({{4096, 256}, {4096, 256}});
  CHECK_NOTHROW(plan_geometry(kGiB, good));
  const auto with = [&](auto change) {
    std::vector<PageSpec> pages = good;
    change(pages[1]);
    return pages;
  };
  refused({}, "at least one page");
  refused(with([](PageSpec& p) { p.name = "a"; }), "'a'");
  refused(with([](PageSpec& p) { p.name = ""; }), "empty name");
  refused(with([](PageSpec& p) { p.bytes_per_page = 0; }), "'b' has 0 bytes");
  refused(with([](PageSpec& p) { p.stride_alignment = 0; }), "'b' has a stride alignment of 0");
  for (double weight : {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    refused(with([&](PageSpec& p) { p.weight = weight; }), "'b' has weight");
  }
  refused(with([](PageSpec& p) {
            p.floor = 5;
            p.ceiling = 4;
          }),
          "'b' has a floor of 5");
  std::vector<PageSpec> heavy = good;
  for (PageSpec& page : heavy) page.weight = 1e308;
  refused(heavy, "no finite sum");
  CHECK_THROWS_AS(plan_geometry(kGiB, good, {.max_huge_bytes = {}, .alignment = 0}),
                  InvalidArgument);
}

TEST_CASE("floors and ceilings are carried along") {
  std::vector<PageSpec> pages = pages_of({{8}, {24}});
  pages[0].floor = 3;
  pages[1].ceiling = 5;
  const Geometry g = plan_geometry(240, pages, {.max_huge_bytes = {}, .alignment = 1});
  CHECK(g.leaves()[0].floor == 3);
  CHECK_FALSE(g.leaves()[0].ceiling.has_value());
  CHECK(g.leaves()[1].ceiling == u64{5});
}

TEST_CASE("B-05 a leaf of more than 2^31 - 1 blocks is refused at construction") {
  constexpr u64 most = (u64{1} << 31) - 1;
  CHECK(plan(most + 1, {{1, 1}}).leaves()[0].blocks == most);
  try {
    plan(most + 2, {{1, 1}});
    FAIL("2^31 blocks were planned");
  } catch (const InvalidArgument& error) {
    CHECK(mentions(error, "leaf 'a'"));
    CHECK(mentions(error, "2147483647"));
  }
  CHECK_THROWS_AS(plan(1024 * kGiB, {{1, 1}, {kMiB, 1}}), InvalidArgument);

  const auto by_hand = [](u64 huge_blocks) {
    return Geometry::by_hand(pages_of({{4, 1}, {1, 1}}),
                             {.huge_bytes = 4, .huge_blocks = huge_blocks, .ratios = {1, 4}});
  };
  CHECK(by_hand(most / 4).leaves()[1].blocks == most / 4 * 4);
  CHECK_THROWS_AS(by_hand(most / 4 + 1), InvalidArgument);
  CHECK_THROWS_AS(by_hand(std::numeric_limits<u64>::max()), InvalidArgument);
  CHECK_THROWS_AS(by_hand(8).resized(most / 4 + 1), InvalidArgument);
}

TEST_CASE("sizes near 2^64 are planned or refused, and never wrap") {
  constexpr u64 most = std::numeric_limits<u64>::max();
  constexpr u64 huge = u64{1} << 40;
  const Geometry g = plan(most, {{huge}, {3 * huge}});
  CHECK(g.huge_bytes() == 3 * huge);
  CHECK(g.huge_blocks() == (most - 3 * huge) / (3 * huge));
  CHECK(g.leaf(LeafId(0)).blocks == 3 * g.huge_blocks());
  const BlockId last(static_cast<std::uint32_t>(g.leaf(LeafId(0)).blocks));
  CHECK(g.byte_range(LeafId(0), last).end == g.arena_bytes());

  // Packed primes near 2^40: their multiple passes 2^63.
  GeometryError error = refusal(most, pages_of({{1'099'511'627'689}, {1'099'511'627'609}, {4096}}));
  CHECK(error.least_budget == 0);
  CHECK(mentions(error, "2^63"));
  // One page larger than any huge block.
  error = refusal(most, pages_of({{u64{1} << 63, 1}, {4096, 1}}));
  CHECK(error.least_budget == 0);
  CHECK(error.blamed_leaf == "a");
  // Three huge blocks of which no budget holds that many.
  error =
      refusal(most, pages_of({{u64{1} << 62}, {(u64{1} << 62) - 2, 2}, {(u64{1} << 61) - 1, 1}}));
  CHECK(error.least_budget == 0);
  CHECK(mentions(error, "2^64"));
  // One page, and one huge block, of three eighths of all there is.
  CHECK(refusal(1, pages_of({{u64{3} << 61}})).least_budget == u64{3} << 62);
  // A null region as large as half of all there is.
  const GeometryOptions far{.max_huge_bytes = {}, .alignment = u64{1} << 63};
  CHECK(plan_geometry((u64{1} << 63) + 4096, pages_of({{4096}}), far).huge_blocks() == 1);
  try {
    plan_geometry(u64{1} << 63, pages_of({{4096}}), far);
    FAIL("no byte is left for a huge block");
  } catch (const GeometryError& short_of) {
    CHECK(short_of.least_budget == (u64{1} << 63) + 4096);
  }
  CHECK(refusal(0, pages_of({{4096}})).least_budget == 8192);

  CHECK_THROWS_AS(
      Geometry::by_hand(pages_of({{huge}}),
                        {.huge_bytes = huge, .huge_blocks = most / huge, .ratios = {1}}),
      InvalidArgument);
  CHECK_THROWS_AS(
      Geometry::by_hand(pages_of({{huge}}),
                        {.huge_bytes = huge, .huge_blocks = 1, .ratios = {1}, .alignment = most}),
      InvalidArgument);
  CHECK(Geometry::by_hand(pages_of({{huge}}),
                          {.huge_bytes = huge, .huge_blocks = most / huge - 1, .ratios = {1}})
            .arena_bytes() == most / huge * huge);
}

TEST_CASE("a geometry by hand is taken as given, with its arena as the budget") {
  const Geometry g = Geometry::by_hand(
      pages_of({{10, 2}, {40}, {9, 1}}),
      {.huge_bytes = 120, .huge_blocks = 5, .ratios = {10, 3, 12}, .alignment = 64});
  CHECK(strides(g) == Numbers{12, 40, 10});
  CHECK(g.null_bytes() == 64);
  CHECK(g.arena_bytes() == 664);
  CHECK(g.budget_bytes() == 664);
  CHECK(g.leaves()[2].base_offset == 54);
  CHECK(g.leaves()[2].blocks == 60);
  CHECK(g.page_classes() == 3);
  CHECK(g.cost_terms().unused == doctest::Approx(64. / 664));
  CHECK(g.cost_terms().padding == doctest::Approx((.2 + 1. / 9) / 3));
  CHECK(g.cost_terms().half_used == doctest::Approx((108 + 80 + 110) / (2. * 664)));
  // Ratios need not be the largest, nor huge blocks be enough for all leaves at once.
  CHECK(Geometry::by_hand(pages_of({{10, 1}, {10, 1}}),
                          {.huge_bytes = 40, .huge_blocks = 1, .ratios = {1, 4}})
            .huge_blocks() == 1);
}

TEST_CASE("a geometry by hand whose ratios do not tile is refused, the leaf named") {
  const auto refused = [](const Page& page, u64 huge_bytes, u64 ratio, const std::string& part) {
    try {
      Geometry::by_hand(pages_of({{1, 1}, page}),
                        {.huge_bytes = huge_bytes, .huge_blocks = 2, .ratios = {1, ratio}});
      FAIL("taken: " << part);
    } catch (const GeometryError& error) {
      CHECK(error.blamed_leaf == "b");
      CHECK(mentions(error, part));
    }
  };
  refused({10, 1}, 100, 3, "whole number of bytes");
  refused({10, 1}, 100, 200, "whole number of bytes");
  refused({10, 1}, 100, 20, "less than the page of 10 B");
  refused({10}, 100, 5, "packed");
  refused({10, 4}, 100, 10, "2.5 times its alignment of 4 B");

  const std::vector<PageSpec> pages = pages_of({{10, 1}});
  CHECK_THROWS_AS(Geometry::by_hand(pages, {.huge_bytes = 0, .huge_blocks = 1, .ratios = {1}}),
                  InvalidArgument);
  CHECK_THROWS_AS(Geometry::by_hand(pages, {.huge_bytes = 10, .huge_blocks = 0, .ratios = {1}}),
                  InvalidArgument);
  CHECK_THROWS_AS(Geometry::by_hand(pages, {.huge_bytes = 10, .huge_blocks = 1, .ratios = {0}}),
                  InvalidArgument);
  CHECK_THROWS_AS(Geometry::by_hand(pages, {.huge_bytes = 10, .huge_blocks = 1, .ratios = {1, 1}}),
                  InvalidArgument);
  CHECK_THROWS_AS(
      Geometry::by_hand(pages, {.huge_bytes = 10, .huge_blocks = 1, .ratios = {1}, .alignment = 0}),
      InvalidArgument);
}

TEST_CASE("a resized geometry keeps the tiling") {
  const Geometry g = plan(51 * kMiB, {{3 * kMiB, 512}, {648 * kKiB, 36'864}, {9 * kMiB, 512}});
  const Geometry more = g.resized(g.huge_blocks() + 6);
  CHECK(more.huge_blocks() == g.huge_blocks() + 6);
  CHECK(more.null_bytes() == g.null_bytes());
  CHECK(more.arena_bytes() == g.arena_bytes() + 6 * g.huge_bytes());
  CHECK(more.budget_bytes() == more.arena_bytes());
  CHECK(more.cost_terms().padding == g.cost_terms().padding);
  CHECK(more.cost_terms().unused < g.cost_terms().unused);
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(more.leaves()[i].ratio == g.leaves()[i].ratio);
    CHECK(more.leaves()[i].base_offset == g.leaves()[i].base_offset);
    CHECK(more.leaves()[i].blocks == g.leaves()[i].ratio * more.huge_blocks());
  }
  CHECK(more.resized(more.huge_blocks()) == more);
  CHECK(g.resized(g.huge_blocks()) == g);
  CHECK_FALSE(more == g);
  CHECK_THROWS_AS(g.resized(0), InvalidArgument);
  CHECK_THROWS_AS(g.resized(std::numeric_limits<u64>::max()), InvalidArgument);
}

TEST_CASE("leaves are found by name") {
  const Geometry g = plan(240, {{8}, {24}});
  CHECK(g.find("b") == LeafId(1));
  try {
    g.find("c");
    FAIL("found a leaf that is not there");
  } catch (const InvalidArgument& error) {
    CHECK(mentions(error, "no leaf is named 'c'; there are a, b"));
  }
}

TEST_CASE("a leaf serves as a page") {
  const KVLeafRegion full("kv", KVCacheGroupId::full(), 4096,
                          {.stride_alignment = 512, .tokens_per_page = {}});
  const PageSpec page = PageSpec::of(full);
  CHECK(page.name == "kv");
  CHECK(page.bytes_per_page == 4096);
  CHECK(page.stride_alignment == u64{512});
  CHECK(page.weight == 1.0);
  CHECK(page.floor == 0);
  CHECK_FALSE(page.ceiling.has_value());
  CHECK_FALSE(page.one_per_request);

  const PageSpec state = PageSpec::of(KVLeafRegion("ssm", KVCacheGroupId::state(), 1000));
  CHECK_FALSE(state.stride_alignment.has_value());
  CHECK(state.one_per_request);
  CHECK_FALSE(PageSpec::of(KVLeafRegion("tmp", KVCacheGroupId::scratch(), 1000)).one_per_request);
}

}  // namespace
}  // namespace kvleaf
