// Benchmarks that report in one format, each figure beside its floor: what the cheapest program
// that does the same work needs, measured in the same run.
//
//   int main(int argc, char** argv) {
//     bench::Suite suite("draw", argc, argv);
//     suite.add({.name = "1,000 held", .metric = "pair_ns"}, measured, floor);
//     return suite.run();
//   }
//
// prints one JSON object a line: {"system": "kvleaf 0.1.0", "workload": "draw", "case": "1,000
// held", "metric": "pair_ns", "value": 12.3, "unit": "ns", "floor": 9.8}.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace benchmark {
class State;
}

namespace bench {

struct Case {
  std::string name;
  std::string metric;
  std::string unit = "ns";         // ns, us or ms
  std::int64_t iterations = 1000;  // of one repeat
  double items = 1;                // of one iteration: the figure is the time of one item
};

/// A loop `for (auto _ : state)`; what comes before it is not timed.
using Body = std::function<void(benchmark::State& state)>;

/// A figure that is counted, not timed per iteration: printed as it is.
struct Figure {
  std::string name;
  std::string metric;
  std::string unit;
  std::optional<double> value;       // none: it cannot be given, and `why` says so
  std::optional<double> floor = {};  // or the ideal, in the same unit
  std::string why = {};
};
/// Does the work and says what came out. `quick`: only to see that it runs.
using Work = std::function<std::vector<Figure>(bool quick)>;

/// One round of some work; returns the seconds of it that count.
using Round = std::function<double()>;
/// Seconds of what `work` does.
double seconds_of(const std::function<void()>& work);
/// Rounds of several works in turn: where the machine's clock changes from one second to the next,
/// it changes for all of them.
class InTurn {
 public:
  void run(std::span<const Round> works, int rounds);
  /// Of all rounds of the index-th work.
  double least(std::size_t index) const;
  /// Median of what a round of one took, divided by what the other took in its turn.
  double ratio(std::size_t of, std::size_t to) const;

 private:
  std::vector<std::vector<double>> seconds_;  // per work, per round
};

/// The workload of one executable. Times are the least of ten repeats after one warm-up, on one
/// core: what else the machine does, and a clock that it lowers, only ever add to them. Options:
/// `--workload NAME` does nothing unless NAME is this one; `--median` of the repeats, as other
/// systems' figures are; `--quick` a hundredth of the iterations once, to see that it runs.
class Suite {
 public:
  Suite(std::string workload, int argc, char** argv);
  void add(Case measured, Body body, Body floor = {});
  void add(Work work) { works_.push_back(std::move(work)); }
  /// It takes minutes: without `--workload` naming it, it is left out.
  void only_when_named() { wanted_ = named_ || quick_; }
  /// The exit code: 0, 1 if a benchmark failed, 2 for an option that is unknown.
  int run();

 private:
  std::string workload_;
  std::vector<std::string> options_;
  bool quick_ = false;
  bool medians_ = false;
  bool wanted_ = true;
  bool named_ = false;
  std::vector<Case> cases_;
  std::vector<Work> works_;  // done after the cases
};

}  // namespace bench
