// Geometries of every published configuration: how much work the search for one is, and that no
// usual choice of a huge block is better.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "cache/model_files.h"
#include "kvleaf/cache/model_leaves.h"
#include "kvleaf/group/block_manager.h"
#include "kvleaf/leaf/errors.h"
#include "kvleaf/pool/geometry_search.h"

namespace kvleaf {
namespace {

constexpr std::uint64_t MiB = 1 << 20;
constexpr std::uint64_t cap = 128 * MiB;  // plan_geometry's own, where no page is larger

struct ModelPages {
  std::string name;
  std::vector<PageSpec> pages;
};

/// Each model's leaves as they are, and as a small budget splits them.
const std::vector<ModelPages>& all_models() {
  static const std::vector<ModelPages> models = [] {
    std::vector<ModelPages> read;
    for (const auto& entry :
         std::filesystem::directory_iterator(test::model_file("any").parent_path())) {
      if (entry.path().extension() != ".json") continue;
      const std::string name = entry.path().stem();
      read.push_back({name, page_specs(leaves_from_config(entry.path(), {}), 16, 2048)});
      const Leaves split = leaves_from_config(entry.path(), {.budget_bytes = 16'384 * MiB});
      if (split.size() != read.back().pages.size()) {
        read.push_back({name + ", split", page_specs(split, 16, 2048)});
      }
    }
    std::sort(read.begin(), read.end(),
              [](const ModelPages& a, const ModelPages& b) { return a.name < b.name; });
    return read;
  }();
  return models;
}

TilingProblem problem_of(const std::vector<PageSpec>& pages) {
  TilingProblem problem;
  double sum = 0;
  for (const PageSpec& page : pages) sum += page.weight;
  std::map<std::pair<std::uint64_t, std::uint64_t>, PageShape> shapes;
  for (const PageSpec& page : pages) {
    REQUIRE(page.stride_alignment);
    PageShape& shape = shapes[{page.bytes_per_page, *page.stride_alignment}];
    shape.bytes = page.bytes_per_page;
    shape.alignment = *page.stride_alignment;
    shape.leaves += 1;
    shape.weight += page.weight / sum;
  }
  for (const auto& [key, shape] : shapes) problem.shapes.push_back(shape);
  problem.unit = forced_unit(problem.shapes).value();
  problem.cap = std::max(cap, problem.least_huge().value());
  problem.null_alignment = 256;
  return problem;
}

/// The stated cost of tiling the budget by huge blocks of this size; nothing where it cannot be.
std::optional<double> cost_of(std::uint64_t huge, const std::vector<PageSpec>& pages,
                              std::uint64_t budget) {
  double sum = 0, cost = 0;
  for (const PageSpec& page : pages) sum += page.weight;
  std::map<std::uint64_t, std::uint64_t> leaves_of;  // by ratio
  std::uint64_t widest = 0;
  for (const PageSpec& page : pages) {
    std::uint64_t ratio = huge / page.bytes_per_page;
    while (ratio > 0 && (huge % ratio != 0 || huge / ratio % *page.stride_alignment != 0)) --ratio;
    if (ratio == 0) return {};
    const std::uint64_t stride = huge / ratio;
    widest = std::max(widest, stride);
    ++leaves_of[ratio];
    cost += page.weight / sum * static_cast<double>(stride - page.bytes_per_page) /
            static_cast<double>(page.bytes_per_page);
  }
  const std::uint64_t null_bytes = (widest + 255) / 256 * 256;
  if (null_bytes >= budget) return {};
  const std::uint64_t count = (budget - null_bytes) / huge;
  std::uint64_t needed = 0, half_used = 0;
  for (const auto& [ratio, leaves] : leaves_of) {
    needed += (leaves + ratio - 1) / ratio;
    half_used += huge - huge / ratio;
  }
  if (count < needed) return {};
  return cost + static_cast<double>(budget - count * huge) / static_cast<double>(budget) +
         static_cast<double>(half_used) / (2.0 * static_cast<double>(budget));
}

}  // namespace

TEST_CASE("no geometry of a published model, whatever the budget, is a long search") {
  // A step is a few nanoseconds: this is far below 50 ms on any machine of these years.
  constexpr std::uint64_t most_steps = 8'000'000;
  std::uint64_t worst = 0;
  std::string worst_of;
  for (const ModelPages& model : all_models()) {
    CAPTURE(model.name);
    const TilingProblem problem = problem_of(model.pages);
    for (std::uint64_t budget = 64 * MiB; budget <= (MiB << 20); budget *= 2) {
      CAPTURE(budget);
      SearchWork work;
      if (!cheapest_tiling(problem, budget, &work)) (void)smallest_tiling(problem, &work);
      CHECK(work.steps <= most_steps);
      CHECK(work.steps > 0);
      if (work.steps > worst) worst_of = fmt::format("{} in {} MiB", model.name, budget / MiB);
      worst = std::max(worst, work.steps);
    }
  }
  MESSAGE("the longest search: ", worst, " steps, ", worst_of);
}

TEST_CASE("for every published model no usual choice of a huge block costs less") {
  for (const ModelPages& model : all_models()) {
    CAPTURE(model.name);
    const TilingProblem problem = problem_of(model.pages);
    // The least common multiple of all pages, the largest page, powers of two, and what they become
    // when rounded up to what the alignments allow.
    std::vector<std::uint64_t> choices;
    std::uint64_t of_all = 1;
    for (const PageSpec& page : model.pages) {
      of_all = of_all > cap ? of_all : std::lcm(of_all, page.bytes_per_page);
    }
    for (std::uint64_t power = MiB; power <= cap; power *= 2) choices.push_back(power);
    choices.push_back(of_all);
    choices.push_back(problem.largest_page());
    for (std::size_t i = choices.size(); i-- > 0;) {
      choices.push_back((choices[i] + problem.unit - 1) / problem.unit * problem.unit);
    }
    for (const std::uint64_t budget :
         {256 * MiB, 2'048 * MiB, 16'384 * MiB, 81'920 * MiB, MiB << 20}) {
      CAPTURE(budget);
      std::optional<Geometry> planned;
      try {
        planned = plan_geometry(budget, model.pages);
      } catch (const GeometryError& error) {
        CHECK(error.least_budget > budget);
      }
      int compared = 0;
      for (const std::uint64_t huge : choices) {
        if (huge > problem.cap) continue;
        const std::optional<double> cost = cost_of(huge, model.pages, budget);
        if (!cost) continue;
        CAPTURE(huge);
        REQUIRE(planned);  // what a usual choice can start, the plan can
        CHECK(planned->cost() <= *cost + 1e-13);
        ++compared;
      }
      if (!planned) continue;
      CHECK(compared > 0);
      const std::optional<double> own = cost_of(planned->huge_bytes(), model.pages, budget);
      REQUIRE(own);
      CHECK(planned->cost() == doctest::Approx(*own).epsilon(1e-12));
    }
  }
}

}  // namespace kvleaf
