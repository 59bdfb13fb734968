#include "replay_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>

#include "numbers.h"
#include "table.h"

namespace kvleaf::cli {
namespace {

using nlohmann::json;

/// With so many decimals.
double rounded(double value, int decimals) {
  const double scale = std::pow(10, decimals);
  return std::round(value * scale) / scale;
}

json to_json(const LeafBytes& bytes) {
  return {{"live", std::llround(bytes.live)},
          {"cached", std::llround(bytes.cached)},
          {"clean", std::llround(bytes.clean)},
          {"padding", std::llround(bytes.padding)}};
}

json to_json(const Bound& bound) {
  return {{"cache_pages", bound.pages ? json(*bound.pages) : json()},
          {"cache_tokens", bound.pages ? json(bound.tokens()) : json()},
          {"lru_hit_pct", rounded(bound.lru_pct(), 6)},
          {"lru_hit_tokens", bound.lru_hit_tokens},
          {"optimum_hit_pct", rounded(bound.optimum_pct(), 6)},
          {"optimum_hit_tokens", bound.optimum_hit_tokens}};
}

json to_json(const VerifyStats& stats) {
  return {{"scaled_down_by", stats.factor},
          {"arena_bytes", stats.arena_bytes},
          {"entries_written", stats.entries_written},
          {"bytes_written", stats.bytes_written},
          {"entries_checked", stats.entries_checked},
          {"bytes_checked", stats.bytes_checked},
          {"copies", stats.copies},
          {"clears", stats.clears}};
}

/// "a, b and c".
std::string listed(const std::vector<std::string>& words) {
  if (words.empty()) return "none";
  if (words.size() == 1) return words.front();
  return fmt::format("{} and {}", fmt::join(words.begin(), words.end() - 1, ", "), words.back());
}

std::string lost_by_group(const Replay& replay) {
  std::vector<std::string> words;
  for (const GroupStats& group : replay.groups) {
    if (group.lost_tokens == 0) continue;
    words.push_back(fmt::format("{} {} tokens", group.group, grouped(group.lost_tokens)));
  }
  return listed(words);
}

std::string name_of(const std::string& file) {
  return std::filesystem::path(file).filename().string();
}

/// A replay moves no numbers through the model, so it may go past the model's own positions.
std::string beyond_model(const ReplaySubject& subject) {
  if (subject.model_max_len.value_or(subject.max_len) >= subject.max_len) return "";
  return fmt::format(" (the model is made for {})", grouped(*subject.model_max_len));
}

std::string shape_of(const ReplaySubject& subject) {
  return subject.block_tokens == 0 ? "lengths only, nothing shared"
                                   : fmt::format("ids of {} tokens", subject.block_tokens);
}

std::string verified(const VerifyStats& stats) {
  std::string text = fmt::format(
      "{} entries ({}) written, {} ({}) read back and equal; {} block copies, {} clears",
      grouped(stats.entries_written), in_bytes(static_cast<double>(stats.bytes_written)),
      grouped(stats.entries_checked), in_bytes(static_cast<double>(stats.bytes_checked)),
      grouped(stats.copies), grouped(stats.clears));
  text += stats.factor == 1
              ? "; real page sizes"
              : fmt::format("; bytes per token scaled down 1:{}, arena {}", grouped(stats.factor),
                            in_bytes(static_cast<double>(stats.arena_bytes)));
  return text;
}

std::string leaf_table(const Replay& replay) {
  Table table({{"bytes: peak (mean)", Table::Align::left},
               {"live"},
               {"cached"},
               {"clean"},
               {"padding"},
               {"blocks"},
               {"lost tokens"}});
  for (const LeafReport& leaf : replay.leaves) {
    std::vector<std::string> cells = {leaf.id};
    for (const auto figure :
         {&LeafBytes::live, &LeafBytes::cached, &LeafBytes::clean, &LeafBytes::padding}) {
      cells.push_back(
          fmt::format("{} ({})", in_bytes(leaf.peak.*figure), in_bytes(leaf.mean.*figure)));
    }
    cells.push_back(grouped(leaf.blocks));
    cells.push_back(grouped(leaf.lost_tokens));
    table.row(std::move(cells));
  }
  return table.text();
}

}  // namespace

json to_json(const Replay& replay, const ReplaySubject& subject) {
  json report = {
      {"trace", subject.trace},
      {"model", subject.model},
      {"model_type", subject.model_type},
      {"budget_bytes", subject.budget_bytes},
      {"page_tokens", subject.page_tokens},
      {"max_len", subject.max_len},
      {"max_live", subject.max_live},
      {"max_step_tokens", subject.max_step_tokens},
      {"retention", subject.retention},
      {"eviction", subject.eviction},
      {"arena_bytes", subject.arena_bytes},
      {"huge_bytes", subject.huge_bytes},
      {"huge_blocks", subject.huge_blocks},
      {"empty_prompts", subject.empty_prompts},
      {"requests", replay.requests.size()},
      {"prompt_tokens", replay.prompt_tokens},
      {"hit_tokens", replay.hit_tokens},
      {"hit_pct", rounded(replay.hit_pct(), 6)},
      {"computed_tokens", replay.computed_tokens},
      {"refused", replay.refused},
      {"growth_refused", replay.growth_refused},
      {"preemptions", replay.preemptions},
      {"us_per_request", rounded(replay.us_per_request(), 3)},
      {"peak_bytes", std::llround(replay.peak_bytes)},
      {"mean_bytes", std::llround(replay.mean_bytes)},
      {"wall_seconds", rounded(replay.wall_seconds, 6)},
      {"step_us",
       {{"count", replay.step_us.size()},
        {"median", rounded(replay.step_quantile(0.5), 3)},
        {"p99", rounded(replay.step_quantile(0.99), 3)},
        {"max", rounded(replay.step_quantile(1), 3)}}},
  };
  report["refusals"] = json::array();
  for (const RefusalReport& refusal : replay.refusals) {
    report["refusals"].push_back({{"reason", refusal.reason},
                                  {"count", refusal.count},
                                  {"first_row", refusal.row},
                                  {"example", refusal.example}});
  }
  report["groups"] = json::object();
  for (const GroupStats& group : replay.groups) {
    report["groups"][group.group] = {{"lost_tokens", group.lost_tokens}};
  }
  report["leaves"] = json::object();
  for (const LeafReport& leaf : replay.leaves) {
    json entry = to_json(leaf.at_peak);
    entry["blocks"] = leaf.blocks;
    entry["lost_tokens"] = leaf.lost_tokens;
    entry["group"] = leaf.group;
    entry["peak"] = to_json(leaf.peak);
    entry["mean"] = to_json(leaf.mean);
    report["leaves"][leaf.id] = std::move(entry);
  }
  if (subject.bound) report["bound"] = to_json(*subject.bound);
  if (subject.verified) report["verify"] = to_json(*subject.verified);
  return report;
}

std::string to_text(const Replay& replay, const ReplaySubject& subject) {
  std::string text;
  const auto line = [&](std::string_view name, const std::string& what) {
    fmt::format_to(std::back_inserter(text), "{:<12} {}\n", name, what);
  };
  fmt::format_to(std::back_inserter(text), "{} over {} ({})\n", name_of(subject.trace),
                 name_of(subject.model), subject.model_type);
  line("requests",
       fmt::format("{}, {} prompt tokens; {}{}", grouped(replay.requests.size()),
                   grouped(replay.prompt_tokens), shape_of(subject),
                   subject.empty_prompts == 0 ? ""
                                              : fmt::format("; {} empty prompts left out",
                                                            grouped(subject.empty_prompts))));
  line("served with",
       fmt::format("{}, pages of {} tokens, max_len {}{}, at most {} live, steps of {} "
                   "tokens, retention {}, eviction by {}",
                   in_bytes(static_cast<double>(subject.budget_bytes)), subject.page_tokens,
                   grouped(subject.max_len), beyond_model(subject), subject.max_live,
                   grouped(subject.max_step_tokens), subject.retention, subject.eviction));
  line("reused", fmt::format("{:.2f} % ({} tokens); lost to: {}", replay.hit_pct(),
                             grouped(replay.hit_tokens), lost_by_group(replay)));
  if (subject.bound) {
    line("bound",
         fmt::format(
             "LRU {:.2f} %, offline optimum {:.2f} %: prompts alone, in a cache of {}",
             subject.bound->lru_pct(), subject.bound->optimum_pct(),
             subject.bound->pages ? grouped(subject.bound->tokens()) + " tokens" : "any size"));
  }
  line("refused", fmt::format("{} requests, {} answers; {} preemptions", grouped(replay.refused),
                              grouped(replay.growth_refused), grouped(replay.preemptions)));
  for (const RefusalReport& refusal : replay.refusals) {
    line("", fmt::format("{} × {}; the first: row {}: {}", grouped(refusal.count), refusal.reason,
                         refusal.row, refusal.example));
  }
  line("memory", fmt::format("peak {}, mean {} live, cached or padding, of {} huge blocks of {}",
                             in_bytes(replay.peak_bytes), in_bytes(replay.mean_bytes),
                             grouped(subject.huge_blocks),
                             in_bytes(static_cast<double>(subject.huge_bytes))));
  text += '\n' + leaf_table(replay) + '\n';
  line("steps",
       fmt::format("{}; plan and settle: median {}, p99 {}, max {}", grouped(replay.step_us.size()),
                   in_microseconds(replay.step_quantile(0.5)),
                   in_microseconds(replay.step_quantile(0.99)),
                   in_microseconds(replay.step_quantile(1))));
  line("time",
       fmt::format("{} per request in the manager and planner; {:.2f} s in all, with token ids{}",
                   in_microseconds(replay.us_per_request()), replay.wall_seconds,
                   subject.verified ? " and verification" : ""));
  if (subject.verified) line("verified", verified(*subject.verified));
  return text;
}

}  // namespace kvleaf::cli
