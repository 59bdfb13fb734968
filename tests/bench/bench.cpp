#include "bench/bench.h"

#include <benchmark/benchmark.h>
#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <utility>

namespace bench {
namespace {

constexpr int repeats = 11;  // the first warms up

double scale_of(const std::string& unit) { return unit == "ms" ? 1e3 : unit == "us" ? 1e6 : 1e9; }

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Times of one item, in seconds; the first repeat is left out.
std::vector<double> times_of(const std::vector<benchmark::BenchmarkReporter::Run>& runs,
                             double items) {
  std::vector<double> times;
  for (std::size_t i = runs.size() > 1 ? 1 : 0; i < runs.size(); ++i) {
    times.push_back(runs[i].real_accumulated_time / static_cast<double>(runs[i].iterations) /
                    items);
  }
  return times;
}

void print(const std::string& workload, const Figure& figure) {
  fmt::print(
      "{{\"system\": \"kvleaf {}\", \"workload\": \"{}\", \"case\": \"{}\", \"metric\": \"{}\", "
      "\"value\": {}, \"unit\": \"{}\"",
      KVLEAF_VERSION, workload, figure.name, figure.metric,
      figure.value ? fmt::format("{:.3f}", *figure.value) : "null", figure.unit);
  if (figure.floor) fmt::print(", \"floor\": {:.3f}", *figure.floor);
  if (!figure.why.empty()) fmt::print(", \"why\": \"{}\"", figure.why);
  fmt::print("}}\n");
  std::fflush(stdout);
}

/// Benchmarks come as floor, measured, floor, measured, …: a record is printed with each second
/// one.
class Records : public benchmark::BenchmarkReporter {
 public:
  Records(std::string workload, const std::vector<Case>& cases, bool medians)
      : workload_(std::move(workload)), cases_(cases), medians_(medians) {}

  bool ReportContext(const Context&) override { return true; }

  void ReportRuns(const std::vector<Run>& runs) override {
    // Aggregates come in a call of their own.
    if (runs.front().run_type != Run::RT_Iteration) return;
    const std::string name = runs.front().run_name.function_name;
    const bool is_floor = name.starts_with("floor/");
    const Case& measured = cases_.at(std::stoul(name.substr(name.find('/') + 1)));
    const std::vector<double> times = times_of(runs, measured.items);
    const double value =
        (medians_ ? median(times) : *std::min_element(times.begin(), times.end())) *
        scale_of(measured.unit);
    if (is_floor) {
      floor_ = value;
      return;
    }
    print(workload_, {measured.name, measured.metric, measured.unit, value,
                      std::exchange(floor_, std::nullopt)});
  }

 private:
  std::string workload_;
  const std::vector<Case>& cases_;
  bool medians_;
  std::optional<double> floor_;
};

/// Repeats on one core, so that they do not differ by which one they met.
void pin_to_this_core() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(sched_getcpu(), &cores);
  sched_setaffinity(0, sizeof cores, &cores);
}

}  // namespace

double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void InTurn::run(std::span<const Round> works, int rounds) {
  seconds_.resize(works.size());
  for (int round = 0; round < rounds; ++round) {
    for (std::size_t i = 0; i < works.size(); ++i) seconds_[i].push_back(works[i]());
  }
}

double InTurn::least(std::size_t index) const {
  return *std::min_element(seconds_.at(index).begin(), seconds_.at(index).end());
}

double InTurn::ratio(std::size_t of, std::size_t to) const {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < seconds_.at(of).size(); ++i)
    ratios.push_back(seconds_[of][i] / seconds_.at(to)[i]);
  return median(std::move(ratios));
}

Suite::Suite(std::string workload, int argc, char** argv)
    : workload_(std::move(workload)), options_(argv + 1, argv + argc) {
  for (std::size_t i = 0; i < options_.size(); ++i) {
    if (options_[i] == "--quick") quick_ = true;
    if (options_[i] == "--median") medians_ = true;
    if (options_[i] == "--workload" && i + 1 < options_.size()) {
      wanted_ = named_ = options_[i + 1] == workload_;
    }
  }
}

void Suite::add(Case measured, Body body, Body floor) {
  const std::size_t index = cases_.size();
  const auto add_one = [&](const std::string& kind, Body one) {
    benchmark::RegisterBenchmark((kind + "/" + std::to_string(index)).c_str(), std::move(one))
        ->Iterations(quick_ ? std::max<std::int64_t>(1, measured.iterations / 100)
                            : measured.iterations)
        ->Repetitions(quick_ ? 1 : repeats)
        ->UseRealTime();
  };
  if (floor) add_one("floor", std::move(floor));
  add_one("measured", std::move(body));
  cases_.push_back(std::move(measured));
}

int Suite::run() {
  for (std::size_t i = 0; i < options_.size(); ++i) {
    if (options_[i] == "--quick" || options_[i] == "--median") continue;
    if (options_[i] == "--workload" && i + 1 < options_.size()) {
      ++i;
      continue;
    }
    fmt::print(stderr, "{}: '{}' is unknown; accepted: --workload NAME, --quick, --median\n",
               workload_, options_[i]);
    return 2;
  }
  if (!wanted_) return 0;
  pin_to_this_core();
  if (!cases_.empty()) {
    Records records(workload_, cases_, medians_);
    if (benchmark::RunSpecifiedBenchmarks(&records) == 0) return 1;
  }
  for (const Work& work : works_) {
    for (const Figure& figure : work(quick_)) print(workload_, figure);
  }
  return 0;
}

}  // namespace bench
