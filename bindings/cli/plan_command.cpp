// kvleaf plan CONFIG.json --budget SIZE: how a budget of memory would be shared by the model's
// leaves.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "arguments.h"
#include "commands.h"
#include "kvleaf/group/block_manager.h"
#include "model_text.h"
#include "numbers.h"
#include "table.h"

namespace kvleaf::cli {
namespace {

struct PlanArguments {
  ModelArguments model;
  std::uint64_t budget = 0;
  std::optional<std::uint32_t> max_len;
  bool json = false;
};

/// What would be served: the manager itself is asked, so that what is printed is what it does.
struct Plan {
  ModelLeaves model;
  Geometry geometry;
  std::uint32_t max_len = 0;
  std::uint32_t longest_request = 0;
  std::uint64_t metadata_bytes = 0;       // of the manager: pool, prefix tree, rows
  std::uint64_t pool_metadata_bytes = 0;  // of the pool alone
  /// Of the pool, per smallest page that the arena could hold.
  double metadata_per_page() const {
    std::uint64_t pages = 1;
    for (const LeafGeometry& leaf : geometry.leaves()) pages = std::max(pages, leaf.blocks);
    return static_cast<double>(pool_metadata_bytes) / static_cast<double>(pages);
  }
};

Plan make_plan(const PlanArguments& arguments) {
  ModelLeaves model = arguments.model.load();
  ManagerOptions options;
  options.budget_bytes = arguments.budget;
  options.page_tokens = arguments.model.leaves.tokens_per_page;
  options.max_len = arguments.max_len.value_or(model.config.max_len.value_or(usual_max_len));
  options.expected_tokens = arguments.model.leaves.expected_tokens;
  const BlockManager manager(model.leaves, options);
  Geometry geometry = manager.geometry();
  return {.model = std::move(model),
          .geometry = std::move(geometry),
          .max_len = options.max_len,
          .longest_request = manager.longest_request(),
          .metadata_bytes = manager.stats().metadata_bytes,
          .pool_metadata_bytes = manager.pool().metadata_bytes()};
}

/// A refusal says whose pages do not fit in what.
Plan checked_plan(const PlanArguments& arguments) {
  try {
    return make_plan(arguments);
  } catch (const GeometryError& error) {
    throw GeometryError(fmt::format("{}: --budget {}: {}", arguments.model.config,
                                    grouped(arguments.budget), error.what()),
                        error.least_budget, error.blamed_leaf);
  }
}

void print_json(const Plan& plan, const PlanArguments& arguments) {
  const Geometry& geometry = plan.geometry;
  const Geometry::CostTerms terms = geometry.cost_terms();
  nlohmann::ordered_json out = model_json(plan.model, arguments.model);
  out["budget_bytes"] = arguments.budget;
  out["arena_bytes"] = geometry.arena_bytes();
  out["null_bytes"] = geometry.null_bytes();
  out["huge_bytes"] = geometry.huge_bytes();
  out["huge_blocks"] = geometry.huge_blocks();
  out["cost"] = geometry.cost();
  out["cost_terms"] = {
      {"padding", terms.padding}, {"unused", terms.unused}, {"half_used", terms.half_used}};
  out["max_len"] = plan.max_len;
  out["longest_request"] = plan.longest_request;
  out["metadata_bytes"] = plan.metadata_bytes;
  out["pool_metadata_bytes"] = plan.pool_metadata_bytes;
  out["pool_metadata_bytes_per_page"] = plan.metadata_per_page();
  out["leaves"] = nlohmann::ordered_json::array();
  for (std::size_t i = 0; i < plan.model.leaves.size(); ++i) {
    const KVLeafRegion& leaf = *plan.model.leaves[i];
    const LeafGeometry& view = geometry.leaves()[i];
    out["leaves"].push_back({{"id", leaf.leaf_id()},
                             {"group", leaf.group_id().name},
                             {"layers", leaf.layers()},
                             {"bytes_per_page", view.bytes_per_page},
                             {"page_stride", view.page_stride},
                             {"ratio", view.ratio},
                             {"blocks", view.blocks}});
  }
  out["splits"] = nlohmann::ordered_json::array();
  for (const StateSplit& split : plan.model.splits) {
    nlohmann::ordered_json candidates = nlohmann::ordered_json::array();
    for (const StateSplit::Candidate& candidate : split.candidates) {
      candidates.push_back({{"parts", candidate.parts}, {"cost", nullptr}});
      if (candidate.fits) candidates.back()["cost"] = candidate.cost;
    }
    out["splits"].push_back({{"leaf", split.leaf},
                             {"layers", split.layers},
                             {"parts", split.parts},
                             {"candidates", std::move(candidates)}});
  }
  fmt::print("{}\n", out.dump(2));
}

/// "state: 36 layers in 3 leaves of 12. Cost 0.0123 in 3, …"
std::string split_text(const StateSplit& split) {
  std::string text =
      split.parts == 1
          ? fmt::format("{} is one leaf of {} layers: no division costs less.", split.leaf,
                        split.layers)
          : fmt::format("{} is split into {} leaves of {} layers: the pool then costs least.",
                        split.leaf, split.parts, split.layers / split.parts);
  text += "\n  cost by number of leaves:";
  for (const StateSplit::Candidate& candidate : split.candidates) {
    text += candidate.fits ? fmt::format("  {}: {:.4f}", candidate.parts, candidate.cost)
                           : fmt::format("  {}: does not fit", candidate.parts);
  }
  return text + "\n";
}

void print_text(const Plan& plan, const PlanArguments& arguments) {
  using enum Table::Align;
  const Geometry& geometry = plan.geometry;
  const Geometry::CostTerms terms = geometry.cost_terms();
  fmt::print("{}\n", model_text(plan.model, arguments.model));
  fmt::print("arena     {} of {}: a null region of {} and {} huge blocks of {} ({} bytes)\n",
             in_bytes(static_cast<double>(geometry.arena_bytes())),
             in_bytes(static_cast<double>(arguments.budget)),
             in_bytes(static_cast<double>(geometry.null_bytes())), grouped(geometry.huge_blocks()),
             in_bytes(static_cast<double>(geometry.huge_bytes())), grouped(geometry.huge_bytes()));
  fmt::print("cost      {:.4f}: padding {:.4f}, unused {:.4f}, half-used huge blocks {:.4f}\n",
             geometry.cost(), terms.padding, terms.unused, terms.half_used);
  fmt::print("longest   {} tokens in an empty pool (max_len {}{})\n", grouped(plan.longest_request),
             grouped(plan.max_len),
             arguments.max_len           ? ""
             : plan.model.config.max_len ? ", the model's"
                                         : ", the model does not say: --max-len does");
  fmt::print("metadata  {}; of the pool {}, {:.1f} bytes per smallest page\n\n",
             in_bytes(static_cast<double>(plan.metadata_bytes)),
             in_bytes(static_cast<double>(plan.pool_metadata_bytes)), plan.metadata_per_page());

  Table table({{"leaf", left},
               {"group", left},
               {"layers"},
               {"page bytes"},
               {"stride"},
               {"padding"},
               {"per huge block"},
               {"blocks"}});
  for (std::size_t i = 0; i < plan.model.leaves.size(); ++i) {
    const KVLeafRegion& leaf = *plan.model.leaves[i];
    const LeafGeometry& view = geometry.leaves()[i];
    table.row({leaf.leaf_id(), leaf.group_id().name, grouped(leaf.layers()),
               grouped(view.bytes_per_page), grouped(view.page_stride),
               fmt::format("{:.2f} %",
                           per_cent(view.page_stride - view.bytes_per_page, view.page_stride)),
               grouped(view.ratio), grouped(view.blocks)});
  }
  fmt::print("{}", table.text());
  for (const StateSplit& split : plan.model.splits) fmt::print("\n{}", split_text(split));
}

}  // namespace

Command add_plan(CLI::App& root) {
  CLI::App* app =
      root.add_subcommand("plan", "how a budget of memory would be shared by a model's leaves");
  const auto arguments = std::make_shared<PlanArguments>();
  arguments->model.add_to(*app);
  add_size(*app, "--budget", arguments->budget, "bytes of the arena, as 16GiB")->required();
  add_count(*app, "--max-len", arguments->max_len, "tokens of the longest request [the model's]");
  app->add_flag("--json", arguments->json, "print one JSON object and nothing else");
  return {app, [arguments] {
            arguments->model.leaves.budget_bytes = arguments->budget;
            const Plan plan = checked_plan(*arguments);
            arguments->json ? print_json(plan, *arguments) : print_text(plan, *arguments);
          }};
}

}  // namespace kvleaf::cli
