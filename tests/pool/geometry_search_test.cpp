// plan_geometry against brute force that shares nothing with it: ratios by trial of every number,
// costs as exact fractions, and every huge block up to the cap.
#include "kvleaf/pool/geometry_search.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kvleaf/pool/geometry.h"

namespace kvleaf {
namespace {

using u64 = std::uint64_t;
__extension__ using i128 = __int128;

struct Page {
  u64 bytes;
  std::optional<u64> alignment;  // none: packed
  u64 weight = 1;
};

std::string name_of(std::size_t page) { return "leaf" + std::to_string(page); }

std::vector<PageSpec> specs_of(const std::vector<Page>& pages) {
  std::vector<PageSpec> specs;
  for (const Page& page : pages) {
    PageSpec spec;
    spec.name = name_of(specs.size());
    spec.bytes_per_page = page.bytes;
    spec.stride_alignment = page.alignment;
    spec.weight = static_cast<double>(page.weight);
    specs.push_back(spec);
  }
  return specs;
}

std::string text_of(const std::vector<Page>& pages, u64 budget, u64 cap) {
  std::string text = "budget " + std::to_string(budget) + ", cap " + std::to_string(cap) + ":";
  for (const Page& page : pages) {
    text += " " + std::to_string(page.bytes) + "/" +
            (page.alignment ? std::to_string(*page.alignment) : "packed") + "*" +
            std::to_string(page.weight);
  }
  return text;
}

/// The largest ratio by which `huge` holds pages like this one; 0 if none.
u64 largest_ratio(u64 huge, const Page& page) {
  for (u64 ratio = huge / page.bytes; ratio >= 1; --ratio) {
    if (huge % ratio != 0) continue;
    const u64 stride = huge / ratio;
    if (page.alignment ? stride % *page.alignment == 0 : stride == page.bytes) return ratio;
  }
  return 0;
}

/// A huge block that every page admits, by the definitions of the design.
struct Candidate {
  u64 huge = 0;
  std::vector<u64> ratios;
  u64 null_bytes = 0;
  u64 needed = 0;     // huge blocks that give every leaf a block
  u64 half_used = 0;  // Σ_classes (H - stride)

  bool admissible(u64 budget) const {
    return budget >= null_bytes && (budget - null_bytes) / huge >= needed;
  }
  u64 unused(u64 budget) const { return budget - (budget - null_bytes) / huge * huge; }
  double cost(const std::vector<Page>& pages, u64 budget) const {
    double weights = 0, padding = 0;
    for (const Page& page : pages) weights += static_cast<double>(page.weight);
    for (std::size_t i = 0; i < pages.size(); ++i) {
      const u64 more = huge / ratios[i] - pages[i].bytes;
      padding += static_cast<double>(pages[i].weight) / weights * static_cast<double>(more) /
                 static_cast<double>(pages[i].bytes);
    }
    return padding + (static_cast<double>(unused(budget)) + static_cast<double>(half_used) / 2) /
                         static_cast<double>(budget);
  }
  /// The cost times 2 · budget · Σ weights · Π bytes: a whole number.
  i128 exact_cost(const std::vector<Page>& pages, u64 budget) const {
    i128 weights = 0, bytes = 1;
    for (const Page& page : pages) {
      weights += page.weight;
      bytes *= page.bytes;
    }
    i128 cost = (2 * i128(unused(budget)) + half_used) * weights * bytes;
    for (std::size_t i = 0; i < pages.size(); ++i) {
      const i128 more = huge / ratios[i] - pages[i].bytes;
      cost += 2 * i128(budget) * pages[i].weight * more * (bytes / pages[i].bytes);
    }
    return cost;
  }
};

std::optional<Candidate> candidate(u64 huge, const std::vector<Page>& pages, u64 alignment) {
  Candidate c;
  c.huge = huge;
  u64 widest = 0;
  std::map<u64, u64> leaves_of_class;
  for (const Page& page : pages) {
    const u64 ratio = largest_ratio(huge, page);
    if (ratio == 0) return std::nullopt;
    c.ratios.push_back(ratio);
    widest = std::max(widest, huge / ratio);
    ++leaves_of_class[ratio];
  }
  c.null_bytes = (widest + alignment - 1) / alignment * alignment;
  for (const auto& [ratio, leaves] : leaves_of_class) {
    c.needed += (leaves + ratio - 1) / ratio;
    c.half_used += huge - huge / ratio;
  }
  return c;
}

/// Every candidate up to the cap, smallest first. `step`: a number that all are known to be
/// multiples of, to save time.
std::vector<Candidate> domain(const std::vector<Page>& pages, u64 cap, u64 alignment,
                              u64 step = 1) {
  std::vector<Candidate> all;
  for (u64 huge = step; huge <= cap; huge += step) {
    if (std::optional<Candidate> c = candidate(huge, pages, alignment)) all.push_back(*c);
  }
  return all;
}

/// The least budget in which any candidate gives every leaf a block; 0 if there is no candidate.
u64 least_budget(const std::vector<Candidate>& all) {
  u64 least = 0;
  for (const Candidate& c : all) {
    const u64 bytes = c.null_bytes + c.needed * c.huge;
    if (least == 0 || bytes < least) least = bytes;
  }
  return least;
}

/// Whether the plan is the exact minimum: of equal cost the smallest huge block.
void check_against(const std::vector<Candidate>& all, const std::vector<Page>& pages,
                   const std::vector<PageSpec>& specs, u64 budget, u64 cap, u64 alignment) {
  const Candidate* best = nullptr;
  i128 best_cost = 0;
  for (const Candidate& c : all) {
    if (!c.admissible(budget)) continue;
    const i128 cost = c.exact_cost(pages, budget);
    if (best == nullptr || cost < best_cost) {
      best = &c;
      best_cost = cost;
    }
  }
  INFO(text_of(pages, budget, cap));
  try {
    const Geometry g =
        plan_geometry(budget, specs, {.max_huge_bytes = cap, .alignment = alignment});
    REQUIRE(best != nullptr);
    REQUIRE(g.huge_bytes() == best->huge);
    REQUIRE(g.null_bytes() == best->null_bytes);
    REQUIRE(g.huge_blocks() == (budget - best->null_bytes) / best->huge);
    for (std::size_t i = 0; i < pages.size(); ++i) REQUIRE(g.leaves()[i].ratio == best->ratios[i]);
    REQUIRE(g.cost() == doctest::Approx(best->cost(pages, budget)).epsilon(1e-12));
  } catch (const GeometryError& error) {
    REQUIRE(best == nullptr);
    REQUIRE(error.least_budget == least_budget(all));
  }
}

TEST_CASE(
    "G-15 the search finds what brute force finds, for all pairs of small pages and budgets") {
  std::vector<Page> kinds;
  for (u64 bytes = 1; bytes <= 12; ++bytes) {
    for (u64 alignment = 1; alignment <= 4; ++alignment) kinds.push_back({bytes, alignment});
    kinds.push_back({bytes, std::nullopt});
  }
  constexpr u64 cap = 48;
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    for (std::size_t j = i; j < kinds.size(); ++j) {
      const std::vector<Page> pages = {kinds[i], kinds[j]};
      const std::vector<PageSpec> specs = specs_of(pages);
      const std::vector<Candidate> all = domain(pages, cap, 1);
      for (u64 budget = 1; budget <= 200; ++budget) {
        check_against(all, pages, specs, budget, cap, 1);
      }
    }
  }
}

TEST_CASE("the search finds what brute force finds, for random leaves, weights and alignments") {
  std::mt19937_64 random(1);
  const auto below = [&](u64 n) { return random() % n; };
  for (int round = 0; round < 3000; ++round) {
    std::vector<Page> pages(1 + below(5));
    // Alignments of a common factor, so that the unit is a multiple of each but not of each page.
    const u64 factor = 1 + below(4);
    for (Page& page : pages) {
      page.bytes = 1 + below(round % 2 == 0 ? 60 : 200);
      page.weight = 1 + below(below(2) == 0 ? 9 : 1000);
      if (below(5) != 0) page.alignment = factor * (1 + below(4));
      if (pages.size() > 1 && below(6) == 0) page = pages[0];  // an equal leaf: one class
    }
    const u64 cap = 1 + below(2000);
    const u64 alignment = below(2) == 0 ? 1 : 1 + below(64);
    const std::vector<PageSpec> specs = specs_of(pages);
    const std::vector<Candidate> all = domain(pages, cap, alignment);
    for (int i = 0; i < 6; ++i) {
      check_against(all, pages, specs, 1 + below(i < 2 ? 1000 : 100'000), cap, alignment);
    }
    // At the edge of what starts.
    if (const u64 least = least_budget(all)) {
      check_against(all, pages, specs, least, cap, alignment);
      if (least > 1) check_against(all, pages, specs, least - 1, cap, alignment);
    }
  }
}

TEST_CASE("the search finds what brute force finds where most of the domain must be skipped") {
  // Caps far above the pages: coarse walks, long segments and tight bounds all come into play.
  std::mt19937_64 random(2);
  const auto below = [&](u64 n) { return random() % n; };
  for (int round = 0; round < 8; ++round) {
    std::vector<Page> pages(2 + below(3));
    const bool wide = round % 4 == 0;  // a cap of over 5040 · 256 multiples
    for (Page& page : pages) {
      page.bytes = wide ? 20'000 + below(200'000) : 100 + below(5000);
      page.alignment = 1 + below(2);
      page.weight = 1 + below(9);
    }
    const u64 cap = wide ? 3'000'000 : 60'000;
    const std::vector<PageSpec> specs = specs_of(pages);
    const std::vector<Candidate> all = domain(pages, cap, 1);
    for (const u64 budget : {cap * 2 + below(1000), cap * 60 + below(1000), cap * 5000}) {
      check_against(all, pages, specs, budget, cap, 1);
    }
  }
}

TEST_CASE("no huge block is passed over: each can be the cheapest") {
  // Only `huge` itself, twice the heavy page, is both large enough for the light one and without
  // padding of the heavy one.
  for (u64 huge = 5002; huge < 10'000; huge += 2) {
    const std::vector<Page> pages = {{huge / 2, 1, 1'000'000'000}, {5001, 1, 1}};
    const Geometry g =
        plan_geometry(u64{1} << 40, specs_of(pages), {.max_huge_bytes = huge + huge / 2 - 1});
    REQUIRE(g.huge_bytes() == huge);
    REQUIRE(g.leaves()[0].ratio == 2);
  }
}

TEST_CASE("the least budget is that of brute force where its bounds cut the search short") {
  const auto check_least = [](const std::vector<Page>& pages, u64 cap, u64 alignment) {
    INFO(text_of(pages, 0, cap));
    const u64 least = least_budget(domain(pages, cap, alignment));
    REQUIRE(least > 0);
    try {
      plan_geometry(least - 1, specs_of(pages), {.max_huge_bytes = cap, .alignment = alignment});
      FAIL("a budget below the least was planned");
    } catch (const GeometryError& error) {
      REQUIRE(error.least_budget == least);
    }
  };
  // A larger huge block needs fewer of them: 3 of 10,000 and a null page, or 2 of 12,000 and one.
  const std::vector<Page> pages = {{10'000, 1}, {4000, 1}, {4000, 1}, {4000, 1}};
  CHECK(least_budget(domain(pages, 30'000, 1)) == 36'000);
  check_least(pages, 30'000, 1);

  std::mt19937_64 random(3);
  const auto below = [&](u64 n) { return random() % n; };
  for (int round = 0; round < 60; ++round) {
    std::vector<Page> some;
    const u64 kinds = 1 + below(4);
    for (u64 kind = 0; kind < kinds; ++kind) {
      const Page page{1000 + below(9000), 1 + below(3)};
      some.insert(some.end(), 1 + below(5), page);
    }
    check_least(some, 40'000, 1 + below(2) * 999);
  }
}

TEST_CASE("a page with very little weight is searched to the end") {
  for (const u64 weight : {u64{1'000}, u64{100'000'000}}) {
    const std::vector<Page> pages = {{1009, 1, weight}, {83, 1, 1}};
    const std::vector<Candidate> all = domain(pages, 20'000, 1);
    for (const u64 budget : {u64{30'000}, u64{400'000}, u64{50'000'000}}) {
      check_against(all, pages, specs_of(pages), budget, 20'000, 1);
    }
  }
}

// ---- page sizes of published models
// --------------------------------------------------------------- Pages of 16 tokens (64 for the
// latent of DeepSeek V3.2), bfloat16 keys, values and convolution states, float32 recurrent states;
// computed from each model's published config.json. The alignment is one token's row per layer, or
// 256 bytes for a state. Weights: roughly the bytes of 2,048 tokens, in KiB.

struct Model {
  std::string name;
  std::vector<Page> pages;
};

std::vector<Model> models() {
  return {
      {"Gemma 3 27B: full, window", {{1'310'720, 4096, 163'840}, {6'815'744, 4096, 432'640}}},
      {"gpt-oss 120B: window, full", {{589'824, 1024, 5'184}, {589'824, 1024, 73'728}}},
      {"Qwen3-Next 80B: full, state", {{393'216, 1024, 49'152}, {77'266'944, 256, 75'456}}},
      {"Qwen3-Next 80B, state in 9", {{393'216, 1024, 49'152}, {8'585'216, 256, 75'456}}},
      {"Nemotron-H 8B: full, state", {{262'144, 2048, 32'768}, {102'137'856, 256, 99'744}}},
      {"Nemotron 3 Nano: full, state", {{98'304, 512, 12'288}, {49'082'368, 256, 47'932}}},
      {"DeepSeek V3.2: latent, indexer", {{4'497'408, 1152, 140'544}, {999'424, 256, 31'232}}},
      {"Kimi Linear 48B: latent, state", {{129'024, 1152, 16'128}, {43'417'600, 256, 42'400}}},
      {"Llama 4 Scout: chunk, full", {{2'359'296, 2048, 294'912}, {786'432, 2048, 98'304}}},
      {"Jamba 1.5 Mini: full, state", {{262'144, 2048, 32'768}, {16'056'320, 256, 15'680}}},
      {"Whisper large v3: self, cross", {{2'621'440, 2560, 71'680}, {2'621'440, 2560, 240'640}}},
      {"Zamba2 2.7B: full, state", {{2'949'120, 10'240, 368'640}, {72'479'232, 256, 70'780}}},
      {"MiMo V2 Flash: full, window", {{368'640, 3072, 46'080}, {3'194'880, 6144, 28'080}}},
      {"RecurrentGemma 9B: window, state", {{196'608, 512, 24'576}, {1'064'960, 256, 1'040}}},
      {"Phi-4 mini flash: window, full, state",
       {{655'360, 2560, 20'480}, {81'920, 2560, 10'240}, {3'225'600, 256, 3'150}}},
      {"fp8 values, scales, state",
       {{52'428'800, 4096, 800}, {819'200, 128, 12}, {5'242'880, 256, 80}}},
  };
}

u64 unit_of(const std::vector<Page>& pages) {
  u64 unit = 1;
  for (const Page& page : pages) unit = std::lcm(unit, page.alignment.value_or(page.bytes));
  return unit;
}

constexpr u64 kMiB = u64{1} << 20;
constexpr u64 kGiB = u64{1} << 30;

TEST_CASE("for published models the plan is the minimum over every huge block up to 128 MiB") {
  for (const Model& model : models()) {
    const u64 unit = unit_of(model.pages);
    if (128 * kMiB / unit > 100'000) continue;  // these are searched by the other test only
    CAPTURE(model.name);
    const std::vector<Candidate> all = domain(model.pages, 128 * kMiB, 256, unit);
    for (const u64 budget : {512 * kMiB, 24 * kGiB, 1024 * kGiB}) {
      const Candidate* best = nullptr;
      for (const Candidate& c : all) {
        if (!c.admissible(budget)) continue;
        // Ascending: a later one must be cheaper by more than rounding.
        if (best == nullptr ||
            c.cost(model.pages, budget) < best->cost(model.pages, budget) - 1e-13) {
          best = &c;
        }
      }
      REQUIRE(best != nullptr);
      const Geometry g = plan_geometry(budget, specs_of(model.pages));
      CHECK(g.huge_bytes() == best->huge);
      CHECK(g.cost() == doctest::Approx(best->cost(model.pages, budget)).epsilon(1e-12));
    }
  }
}

TEST_CASE("for published models no usual choice of a huge block costs less") {
  for (const Model& model : models()) {
    CAPTURE(model.name);
    const u64 unit = unit_of(model.pages);
    u64 largest = 0, of_all = 1;
    for (const Page& page : model.pages) {
      largest = std::max(largest, page.bytes);
      of_all = std::lcm(of_all, page.bytes);
    }
    std::vector<u64> choices = {of_all, (largest + unit - 1) / unit * unit, unit};
    for (u64 power = kMiB; power <= 128 * kMiB; power *= 2) choices.push_back(power);
    for (const Page& page : model.pages) {
      for (u64 times = 1; times <= 64; ++times) choices.push_back(times * page.bytes);
    }
    for (const u64 budget : {512 * kMiB, 4 * kGiB, 80 * kGiB, 1024 * kGiB}) {
      CAPTURE(budget);
      const Geometry g = plan_geometry(budget, specs_of(model.pages));
      std::size_t compared = 0;
      for (const u64 huge : choices) {
        if (huge > 128 * kMiB) continue;
        const std::optional<Candidate> c = candidate(huge, model.pages, 256);
        if (!c || !c->admissible(budget)) continue;
        CAPTURE(huge);
        CHECK(g.cost() <= c->cost(model.pages, budget) + 1e-13);
        ++compared;
      }
      CHECK(compared > 0);
      // What the plan says of itself is true.
      const std::optional<Candidate> own = candidate(g.huge_bytes(), model.pages, 256);
      REQUIRE(own.has_value());
      CHECK(own->admissible(budget));
      CHECK(g.null_bytes() == own->null_bytes);
      for (std::size_t i = 0; i < model.pages.size(); ++i)
        CHECK(g.leaves()[i].ratio == own->ratios[i]);
    }
  }
}

TEST_CASE("for published models the least budget starts, and one byte less does not") {
  for (const Model& model : models()) {
    CAPTURE(model.name);
    const std::vector<PageSpec> specs = specs_of(model.pages);
    u64 least = 0;
    try {
      plan_geometry(1, specs);
    } catch (const GeometryError& error) {
      least = error.least_budget;
    }
    REQUIRE(least > 0);
    const Geometry g = plan_geometry(least, specs);
    CHECK(g.arena_bytes() == least);
    CHECK_THROWS_AS(plan_geometry(least - 1, specs), GeometryError);
  }
}

TEST_CASE("the unit is the least common multiple of packed pages and alignments, below 2^63") {
  const auto shape = [](u64 bytes, std::optional<u64> alignment) {
    return PageShape{bytes, alignment.value_or(bytes), !alignment, 1, 1};
  };
  CHECK(forced_unit({shape(100, 6), shape(10, {}), shape(7, 4)}) == u64{60});
  CHECK(forced_unit({shape(u64{1} << 62, {}), shape(7, 4)}) == u64{1} << 62);
  CHECK_FALSE(forced_unit({shape(u64{1} << 62, {}), shape(7, 3)}).has_value());
  CHECK_FALSE(forced_unit({shape(u64{1} << 63, {})}).has_value());
  TilingProblem problem{{shape(100, 6), shape(7, 4)}, 12, 0, 1};
  CHECK(problem.least_huge() == u64{108});
  problem.shapes[0].bytes = (u64{1} << 63) - 3;
  CHECK_FALSE(problem.least_huge().has_value());
}

}  // namespace
}  // namespace kvleaf
