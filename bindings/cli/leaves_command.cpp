// kvleaf leaves CONFIG.json: what a model keeps, leaf by leaf, and what one request of it costs.
#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "arguments.h"
#include "commands.h"
#include "model_text.h"
#include "numbers.h"
#include "table.h"

namespace kvleaf::cli {
namespace {

/// Lengths of request that are priced.
constexpr std::uint32_t short_request = 8192;
constexpr std::uint32_t long_request = 131072;

/// What one token, or one request whatever its length, takes of a leaf.
struct UnitCost {
  double bytes = 0;
  std::string_view per;  // "token", "encoder token", "request"
};

UnitCost unit_cost(const KVLeafRegion& leaf) {
  const double page = static_cast<double>(leaf.bytes_per_page());
  const double tokens = leaf.tokens_per_page().value_or(1);
  switch (leaf.group_id().writing) {
    case Writing::append: return {page / tokens, "token"};
    case Writing::write_once: return {page / tokens, "encoder token"};
    case Writing::in_place:
    case Writing::exclusive: break;
  }
  return {page, "request"};
}

/// Bytes of one request's blocks, with its encoder's tokens, computed a token at a time.
std::uint64_t request_bytes(const KVLeafRegion& leaf, std::uint32_t tokens,
                            const ModelLeaves& model) {
  const bool of_encoder = leaf.group_id().pattern.domain() == AccessPattern::Domain::encoder;
  const std::uint32_t page = leaf.tokens_per_page().value_or(1);
  const std::uint32_t covered = of_encoder ? model.config.encoder_tokens.value_or(0) : tokens;
  const std::uint32_t slots = (covered + page - 1) / page;
  return std::uint64_t{leaf.blocks_to_reserve(slots, page, {})} * leaf.bytes_per_page();
}

void print_json(const ModelLeaves& model, const ModelArguments& arguments) {
  nlohmann::ordered_json out = model_json(model, arguments);
  std::uint64_t short_total = 0, long_total = 0;
  out["leaves"] = nlohmann::ordered_json::array();
  for (std::size_t i = 0; i < model.leaves.size(); ++i) {
    const KVLeafRegion& leaf = *model.leaves[i];
    const UnitCost unit = unit_cost(leaf);
    const std::uint64_t of_short = request_bytes(leaf, short_request, model);
    const std::uint64_t of_long = request_bytes(leaf, long_request, model);
    short_total += of_short;
    long_total += of_long;
    nlohmann::ordered_json entry = {
        {"id", leaf.leaf_id()},
        {"group", leaf.group_id().name},
        {"pattern", leaf.group_id().pattern.to_string()},
        {"writing", name_of(leaf.group_id().writing)},
        {"layers", leaf.layers()},
        {"model_layers", model.layers_of[i]},
        {"tokens_per_page", leaf.tokens_per_page().value_or(0)},
        {"bytes_per_page", leaf.bytes_per_page()},
        {"stride_alignment", nullptr},
        {"bytes", unit.bytes},
        {"per", unit.per},
        {"bytes_8k", of_short},
        {"bytes_128k", of_long},
    };
    if (leaf.stride_alignment()) entry["stride_alignment"] = *leaf.stride_alignment();
    out["leaves"].push_back(std::move(entry));
  }
  out["bytes_8k"] = short_total;
  out["bytes_128k"] = long_total;
  fmt::print("{}\n", out.dump(2));
}

void print_text(const ModelLeaves& model, const ModelArguments& arguments) {
  using enum Table::Align;
  Table table({{"leaf", left},
               {"group", left},
               {"layers"},
               {"page tokens"},
               {"page bytes"},
               {"bytes"},
               {"per", left},
               {"8k request"},
               {"128k request"}});
  std::uint64_t short_total = 0, long_total = 0;
  for (const Leaf& leaf : model.leaves) {
    const UnitCost unit = unit_cost(*leaf);
    const std::uint64_t of_short = request_bytes(*leaf, short_request, model);
    const std::uint64_t of_long = request_bytes(*leaf, long_request, model);
    short_total += of_short;
    long_total += of_long;
    table.row({leaf->leaf_id(), leaf->group_id().name, grouped(leaf->layers()),
               grouped(leaf->tokens_per_page().value_or(0)), grouped(leaf->bytes_per_page()),
               grouped(static_cast<std::uint64_t>(unit.bytes)), std::string(unit.per),
               in_bytes(static_cast<double>(of_short)), in_bytes(static_cast<double>(of_long))});
  }
  table.row({"all", "", "", "", "", "", "", in_bytes(static_cast<double>(short_total)),
             in_bytes(static_cast<double>(long_total))});
  fmt::print("{}\n{}", model_text(model, arguments), table.text());
  if (const auto max_len = model.config.max_len; max_len && *max_len < long_request)
    fmt::print("\nThe model has {} positions: longer requests are priced, not served.\n",
               grouped(*max_len));
}

}  // namespace

Command add_leaves(CLI::App& root) {
  CLI::App* app =
      root.add_subcommand("leaves", "what a model keeps, leaf by leaf, and what requests cost");
  const auto arguments = std::make_shared<ModelArguments>();
  const auto json = std::make_shared<bool>(false);
  arguments->add_to(*app);
  app->add_flag("--json", *json, "print one JSON object and nothing else");
  return {app, [arguments, json] {
            const ModelLeaves model = arguments->load();
            *json ? print_json(model, *arguments) : print_text(model, *arguments);
          }};
}

}  // namespace kvleaf::cli
