#include "replay.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <deque>

#include "numbers.h"

namespace kvleaf::cli {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t most_moments = 512;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Bytes of each leaf over the run: peaks, means, and the moment when most was used.
class MemoryMeter {
 public:
  MemoryMeter(const BlockManager& manager, Replay& replay)
      : pool_(manager.pool()), replay_(replay) {
    for (std::uint32_t i = 0; i < manager.leaves().size(); ++i) {
      const KVLeafRegion& leaf = *manager.leaves()[i];
      replay.leaves.push_back({.id = leaf.leaf_id(),
                               .group = leaf.group_id().name,
                               .blocks = manager.geometry().leaf(LeafId{i}).blocks,
                               .lost_tokens = 0,
                               .peak = {},
                               .mean = {},
                               .at_peak = {}});
    }
    now_.resize(replay.leaves.size());
  }

  void sample() {
    const PoolStats stats = pool_.stats();
    double used = 0;
    for (std::size_t i = 0; i < now_.size(); ++i) {
      const auto bytes = static_cast<double>(pool_.geometry().leaves()[i].bytes_per_page);
      const LeafStats& leaf = stats.leaves[i];
      now_[i] = {.live = static_cast<double>(leaf.live) * bytes,
                 .cached = static_cast<double>(leaf.cached) * bytes,
                 .clean = static_cast<double>(leaf.clean) * bytes,
                 .padding = static_cast<double>(leaf.padding_bytes)};
      used += now_[i].live + now_[i].cached + now_[i].padding;
      LeafReport& report = replay_.leaves[i];
      for (const auto figure :
           {&LeafBytes::live, &LeafBytes::cached, &LeafBytes::clean, &LeafBytes::padding}) {
        report.peak.*figure = std::max(report.peak.*figure, now_[i].*figure);
        report.mean.*figure += now_[i].*figure;
      }
    }
    replay_.mean_bytes += used;
    ++samples_;
    if (used <= replay_.peak_bytes) return;
    replay_.peak_bytes = used;
    for (std::size_t i = 0; i < now_.size(); ++i) replay_.leaves[i].at_peak = now_[i];
  }

  /// Keeps a moment of every `every_`-th request, and half as many when they become too many.
  void mark(std::uint64_t request) {
    if (request % every_ != 0) return;
    replay_.moments.push_back({.request = request,
                               .prompt_tokens = replay_.prompt_tokens,
                               .hit_tokens = replay_.hit_tokens,
                               .leaves = now_});
    if (replay_.moments.size() < most_moments) return;
    every_ *= 2;
    std::erase_if(replay_.moments, [&](const Moment& m) { return m.request % every_ != 0; });
  }

  void finish() {
    if (samples_ == 0) return;
    const auto samples = static_cast<double>(samples_);
    replay_.mean_bytes /= samples;
    for (LeafReport& report : replay_.leaves) {
      for (const auto figure :
           {&LeafBytes::live, &LeafBytes::cached, &LeafBytes::clean, &LeafBytes::padding}) {
        report.mean.*figure /= samples;
      }
    }
  }

 private:
  const BlockPool& pool_;
  Replay& replay_;
  std::vector<LeafBytes> now_;
  std::uint64_t samples_ = 0;
  std::uint64_t every_ = 1;
};

class Run {
 public:
  Run(const Trace& trace, BlockManager& manager, const ReplayOptions& options)
      : trace_(trace),
        manager_(manager),
        planner_(manager, {.max_batch = 1, .max_step_tokens = manager.options().max_step_tokens}),
        options_(options),
        encoder_(has_encoder(manager.leaves())),
        memory_(manager, replay_) {
    if (encoder_ && !options.encoder_tokens) {
      throw InvalidArgument("the leaves need an encoder's input; encoder_tokens must be given");
    }
  }

  Replay run() {
    const auto start = Clock::now();
    const std::uint64_t preemptions = manager_.stats().preemptions;
    replay_.requests.reserve(trace_.rows.size());
    for (const TraceRow& row : trace_.rows) {
      if (live_.size() == options_.max_live) finish_oldest();
      replay_.prompt_tokens += row.input_length;
      RequestReport report{
          .row = row.number, .prompt = row.input_length, .hit = 0, .refused = false};
      if (serve(row, report)) {
        live_.push_back(&row);
        replay_.hit_tokens += report.hit;
      } else {
        report.refused = true;
        ++replay_.refused;
      }
      replay_.requests.push_back(report);
      memory_.mark(replay_.requests.size());
      if (options_.on_request) options_.on_request(replay_.requests.size());
    }
    while (!live_.empty()) finish_oldest();
    memory_.finish();

    const ManagerStats stats = manager_.stats();
    replay_.groups = stats.groups;
    replay_.preemptions = stats.preemptions - preemptions;
    for (LeafReport& leaf : replay_.leaves) {
      const auto group = std::ranges::find(stats.groups, leaf.group, &GroupStats::group);
      if (group != stats.groups.end()) leaf.lost_tokens = group->lost_tokens;
    }
    replay_.wall_seconds = seconds_since(start);
    return std::move(replay_);
  }

 private:
  /// Requests are known to the manager by their row in the file.
  static RequestId id_of(const TraceRow& row) { return RequestId{row.number}; }

  template <class Call>
  auto timed(Call call) {
    struct Stopwatch {
      double& seconds;
      Clock::time_point start = Clock::now();
      ~Stopwatch() { seconds += seconds_since(start); }
    } stopwatch{replay_.manager_seconds};
    return call();
  }

  void refuse(const TraceRow& row, std::string_view reason, std::string example) {
    auto found = std::ranges::find(replay_.refusals, reason, &RefusalReport::reason);
    if (found == replay_.refusals.end()) {
      replay_.refusals.push_back({.reason = std::string(reason),
                                  .count = 0,
                                  .row = row.number,
                                  .example = std::move(example)});
      found = replay_.refusals.end() - 1;
    }
    ++found->count;
  }

  bool serve(const TraceRow& row, RequestReport& report) {
    const std::uint32_t max_len = manager_.options().max_len;
    if (row.input_length > max_len) {
      refuse(row, "the prompt is longer than max_len",
             fmt::format("{} tokens; at most {} would be accepted", row.input_length, max_len));
      return false;
    }
    trace_.prompt(row, tokens_);
    const auto admission = admit(row);
    if (!admission) return false;
    report.hit = admission->hit_tokens;
    return compute_prompt(row, *admission);
  }

  std::optional<Admission> admit(const TraceRow& row) {
    AdmitOptions how;
    if (encoder_) {
      how.encoder = {
          .digest = fmt::format("row {}", row.number), .tokens = *options_.encoder_tokens, .at = 0};
    }
    for (;;) {
      try {
        Admission admission = timed([&] { return manager_.admit(id_of(row), tokens_, how); });
        if (options_.verifier != nullptr) {
          options_.verifier->admit(id_of(row), tokens_, admission.hit_tokens,
                                   how.encoder ? &*how.encoder : nullptr);
        }
        if (encoder_ && !admission.encoder_cached) {
          if (options_.verifier != nullptr) options_.verifier->fill_encoder(id_of(row));
          timed([&] { manager_.encoder_filled(id_of(row)); });
        }
        return admission;
      } catch (const PoolExhausted& refusal) {
        if (live_.empty()) {
          refuse(row, "does not fit an empty pool", refusal.what());
          return {};
        }
      }
      finish_oldest();
    }
  }

  bool compute_prompt(const TraceRow& row, const Admission& admission) {
    const RequestId request = id_of(row);
    const std::uint32_t step_tokens = manager_.options().max_step_tokens;
    std::uint32_t done = admission.hit_tokens;
    std::optional<std::uint32_t> stop = admission.next_stop;
    Check check = Check::everything;  // what the hit gave is read in full
    while (done < row.input_length) {
      std::uint32_t end =
          row.input_length - done > step_tokens ? done + step_tokens : row.input_length;
      if (stop && *stop > done) end = std::min(end, *stop);
      if (const auto refusal = step(request, end - done, check)) {
        if (live_.empty()) {
          release(request);
          refuse(row, "does not fit an empty pool", *refusal);
          return false;
        }
        finish_oldest();
        continue;
      }
      check = Check::sample;
      done = end;
      stop = timed([&] { return manager_.next_stop(request); });
    }
    return true;
  }

  /// One forward of one request. Returns why it was refused; nothing changed then.
  std::optional<std::string> step(RequestId request, std::uint32_t tokens, Check check) {
    const std::array batch{StepRequest{.request = request, .new_tokens = tokens}};
    const auto start = Clock::now();
    const StepPlan& plan = planner_.plan(batch);
    double seconds = seconds_since(start);
    std::optional<std::string> refusal;
    if (!plan.refused().empty()) refusal = plan.refused().front().why;
    if (options_.on_plan) options_.on_plan(plan, check);
    if (options_.verifier != nullptr) options_.verifier->run(plan, check);

    const auto settling = Clock::now();
    planner_.settle(plan.step());
    seconds += seconds_since(settling);
    replay_.manager_seconds += seconds;
    memory_.sample();
    if (!refusal) {
      replay_.step_us.push_back(static_cast<float>(seconds * 1e6));
      replay_.computed_tokens += tokens;
    }
    return refusal;
  }

  void finish_oldest() {
    const TraceRow& row = *live_.front();
    live_.pop_front();
    if (const auto refusal = grow(row)) {
      ++replay_.growth_refused;
      refuse(row, refusal->reason, refusal->example);
    }
    release(id_of(row));
    memory_.sample();
  }

  struct GrowthRefusal {
    std::string_view reason;
    std::string example;
  };
  std::optional<GrowthRefusal> grow(const TraceRow& row) {
    if (row.output_length == 0) return {};
    const std::uint32_t max_len = manager_.options().max_len;
    if (row.output_length > max_len - row.input_length) {
      return GrowthRefusal{"growth: the answer ends past max_len",
                           fmt::format("{} tokens and {} more; at most {} would be accepted",
                                       row.input_length, row.output_length, max_len)};
    }
    const RequestId request = id_of(row);
    trace_.output(row, answer_);
    timed([&] { manager_.append(request, answer_); });
    if (options_.verifier != nullptr) options_.verifier->append(request, answer_);
    const std::uint32_t step_tokens = manager_.options().max_step_tokens;
    for (std::uint32_t left = row.output_length; left != 0;) {
      const std::uint32_t count = std::min(left, step_tokens);
      left -= count;
      // Its last step reads all that the request still reaches.
      if (const auto refusal =
              step(request, count, left == 0 ? Check::everything : Check::sample)) {
        return GrowthRefusal{"growth: no room for the answer", *refusal};
      }
    }
    return {};
  }

  void release(RequestId request) {
    if (options_.verifier != nullptr) options_.verifier->release(request);
    timed([&] { manager_.release(request); });
  }

  const Trace& trace_;
  BlockManager& manager_;
  StepPlanner planner_;
  const ReplayOptions& options_;
  const bool encoder_;
  Replay replay_;
  MemoryMeter memory_;
  std::deque<const TraceRow*> live_;  // the oldest first
  std::vector<Token> tokens_;         // of the prompt being served
  std::vector<Token> answer_;         // of the request that grows
};

}  // namespace

double Replay::hit_pct() const { return per_cent(hit_tokens, prompt_tokens); }

double Replay::us_per_request() const {
  return requests.empty() ? 0 : manager_seconds * 1e6 / static_cast<double>(requests.size());
}

float Replay::step_quantile(double share) const {
  if (step_us.empty()) return 0;
  std::vector<float> sorted = step_us;
  const auto index =
      static_cast<std::size_t>(std::ceil(share * static_cast<double>(sorted.size())) - 1);
  const auto at = sorted.begin() + static_cast<std::ptrdiff_t>(std::min(index, sorted.size() - 1));
  std::nth_element(sorted.begin(), at, sorted.end());
  return *at;
}

Replay replay(const Trace& trace, BlockManager& manager, const ReplayOptions& options) {
  return Run(trace, manager, options).run();
}

bool has_encoder(const Leaves& leaves) {
  return std::ranges::any_of(leaves, [](const Leaf& leaf) {
    return leaf->group_id().pattern.domain() == AccessPattern::Domain::encoder;
  });
}

}  // namespace kvleaf::cli
