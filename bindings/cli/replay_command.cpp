// kvleaf replay TRACE --model CONFIG.json: what a trace of requests makes of a budget of memory.
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "arguments.h"
#include "commands.h"
#include "leaf_module.h"
#include "progress.h"
#include "replay.h"
#include "replay_report.h"
#include "trace.h"
#include "verify.h"

namespace kvleaf::cli {
namespace {

struct ReplayArguments {
  std::string trace;  // file
  ModelArguments model;
  std::uint64_t budget = std::uint64_t{64} << 30;
  std::optional<std::uint32_t> max_len;
  std::uint32_t max_live = 64;
  std::uint32_t max_step_tokens = 8192;
  std::optional<std::uint32_t> limit;
  std::string retention = "tail";
  std::string eviction = "value";
  bool verify = false;
  bool bound = false;
  bool json = false;
  std::string report;       // file; "": none
  std::string leaf_module;  // file; "": the model's own leaves
};

Retention parse_retention(const std::string& text) {
  if (text == "tail") return Retention::tail();
  if (text == "dense") return Retention::dense();
  if (text == "spaced") return Retention::spaced();
  std::uint32_t tokens = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), tokens);
  if (error != std::errc{} || end != text.data() + text.size() || tokens == 0) {
    throw InvalidArgument(fmt::format(
        "--retention is \"{}\"; expected tail, dense, spaced or a number of tokens", text));
  }
  return Retention::every(tokens);
}

EvictionOrder parse_eviction(const std::string& text) {
  if (text == "value") return EvictionOrder::value;
  if (text == "lru") return EvictionOrder::lru;
  throw InvalidArgument(fmt::format("--eviction is \"{}\"; expected value or lru", text));
}

/// Opened before the run, so that a path that cannot be written is found out at once.
class ReportFile {
 public:
  explicit ReportFile(const std::string& path) : path_(path) {
    if (path.empty()) return;
    file_.reset(std::fopen(path.c_str(), "wb"));
    if (!file_) {
      throw InvalidArgument(
          fmt::format("--report {}: {}; a file that can be written would be accepted", path,
                      std::strerror(errno)));
    }
  }
  bool wanted() const noexcept { return file_ != nullptr; }
  void write(const std::string& page) {
    const bool written = std::fwrite(page.data(), 1, page.size(), file_.get()) == page.size();
    if (std::fclose(file_.release()) != 0 || !written) {
      throw KVError(fmt::format("{}: cannot be written: {}", path_, std::strerror(errno)));
    }
  }

 private:
  struct Close {
    void operator()(std::FILE* file) const noexcept { std::fclose(file); }
  };
  std::string path_;
  std::unique_ptr<std::FILE, Close> file_;
};

ManagerOptions manager_options(const ReplayArguments& arguments, const Trace& trace) {
  ManagerOptions options;
  options.budget_bytes = arguments.budget;
  options.page_tokens = arguments.model.leaves.tokens_per_page;
  options.max_len = arguments.max_len.value_or(std::max(trace.longest(), 1U));
  options.max_step_tokens = arguments.max_step_tokens;
  options.expected_tokens = arguments.model.leaves.expected_tokens;
  options.retention = parse_retention(arguments.retention);
  options.eviction = parse_eviction(arguments.eviction);
  return options;
}

VerifyOptions verify_options(const Trace& trace, const ReplayOptions& options,
                             const ManagerOptions& how) {
  VerifyOptions verify;
  verify.most_arena_bytes = available_memory() / 2;
  // Where states are kept, a prompt's steps end at the boundaries that are kept of it.
  std::uint32_t boundary = how.max_step_tokens;
  std::uint64_t others = 3;  // its last one, its end, and its answer
  if (how.retention.kind == Retention::Kind::dense) boundary = how.page_tokens;
  if (how.retention.kind == Retention::Kind::every) boundary = how.retention.tokens;
  if (how.retention.kind == Retention::Kind::spaced) others += 20;
  for (const TraceRow& row : trace.rows) {
    const std::uint64_t tokens = std::uint64_t{row.input_length} + row.output_length;
    verify.tokens += tokens;
    verify.steps += others + tokens / std::min(boundary, how.max_step_tokens);
  }
  verify.encoder_tokens = trace.rows.size() * options.encoder_tokens.value_or(0);
  return verify;
}

void run(const ReplayArguments& arguments) {
  const Trace trace = read_trace(arguments.trace, arguments.limit.value_or(UINT32_MAX));
  const ManagerOptions how = manager_options(arguments, trace);
  ReportFile report(arguments.report);
  LeavesOptions leaves = arguments.model.leaves;
  leaves.budget_bytes = arguments.budget;
  ModelLeaves model = model_from_config(arguments.model.config, leaves);
  if (!arguments.leaf_module.empty())
    model.leaves = module_leaves(arguments.leaf_module, model.leaves, how.page_tokens);
  BlockManager manager(model.leaves, how);

  ReplayOptions options{.max_live = arguments.max_live,
                        .encoder_tokens = model.config.encoder_tokens};
  std::optional<Verifier> verifier;
  if (arguments.verify) {
    verifier.emplace(manager, verify_options(trace, options, how));
    options.verifier = &*verifier;
  }
  Progress progress({.unit = "requests",
                     .total = trace.rows.size(),
                     .style = arguments.json ? ProgressStyle::none : progress_style(stderr)});
  options.on_request = [&](std::uint64_t requests) { progress.reach(requests); };
  const Replay result = replay(trace, manager, options);
  progress.finish();

  ReplaySubject subject{.trace = arguments.trace,
                        .model = arguments.model.config,
                        .model_type = model.config.model_type,
                        .budget_bytes = arguments.budget,
                        .page_tokens = how.page_tokens,
                        .max_len = how.max_len,
                        .model_max_len = model.config.max_len,
                        .max_live = arguments.max_live,
                        .max_step_tokens = how.max_step_tokens,
                        .retention = arguments.retention,
                        .eviction = arguments.eviction,
                        .block_tokens = trace.block_tokens,
                        .empty_prompts = trace.empty_prompts,
                        .arena_bytes = manager.geometry().arena_bytes(),
                        .huge_bytes = manager.geometry().huge_bytes(),
                        .huge_blocks = manager.geometry().huge_blocks(),
                        .verified = {},
                        .bound = {}};
  if (verifier) subject.verified = verifier->stats();
  if (arguments.bound) subject.bound = bound(trace, how.page_tokens, prefix_pages(manager));
  if (report.wanted()) report.write(to_html(result, subject));
  fmt::print("{}",
             arguments.json ? to_json(result, subject).dump(2) + '\n' : to_text(result, subject));
}

}  // namespace

Command add_replay(CLI::App& root) {
  CLI::App* app = root.add_subcommand(
      "replay", "serve a trace of requests with a model's cache, and report what was reused");
  const auto arguments = std::make_shared<ReplayArguments>();
  app->add_option(
         "TRACE", arguments->trace,
         "JSON lines (input_length, output_length, hash_ids) or CSV of lengths, gzip or not")
      ->required()
      ->type_name("FILE");
  arguments->model.add_to(*app, "--model");
  add_size(*app, "--budget", arguments->budget, "bytes of the arena [64GiB]");
  add_count(*app, "--max-len", arguments->max_len, "tokens of the longest request [the trace's]");
  add_count(*app, "--max-live", arguments->max_live, "requests that are live at once", 1U << 20);
  add_count(*app, "--max-step-tokens", arguments->max_step_tokens, "tokens of one step at most",
            1U << 24);
  add_count(*app, "--limit", arguments->limit, "only the first N requests");
  app->add_option("--retention", arguments->retention,
                  "boundaries kept in preference: tail, dense, spaced, or every N tokens [tail]")
      ->type_name("KIND");
  app->add_option("--eviction", arguments->eviction, "value or lru [value]")->type_name("ORDER");
  app->add_flag("--verify", arguments->verify,
                "move real bytes, and compare all that a forward would read");
  app->add_option(
         "--leaf-module", arguments->leaf_module,
         "leaf kinds from elsewhere, in place of or beside the model's: a shared library with "
         "KVLEAF_LEAF_MODULE(function), or a Python file (.py) with leaves(model_leaves, "
         "tokens_per_page) -> list, served by the python3 that KVLEAF_PYTHON names, that lies "
         "beside this command, or that PATH finds")
      ->type_name("FILE");
  app->add_flag("--bound", arguments->bound,
                "what LRU and an optimum that knows the future would reuse in as much memory");
  app->add_option("--report", arguments->report, "write charts to this file, as HTML")
      ->type_name("FILE");
  app->add_flag("--json", arguments->json, "print one JSON object and nothing else");
  return {app, [arguments] { run(*arguments); }};
}

}  // namespace kvleaf::cli
