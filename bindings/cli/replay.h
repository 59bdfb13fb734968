// A replay: a trace served by one manager and one planner, in the order of arrival.
//
// At most `max_live` requests are live. A request is admitted (its hit counts), its prompt is
// computed in chunks of at most max_step_tokens that end where the manager asks for it, and it
// joins the live ones. When they are full, or the newcomer does not fit, the oldest one first grows
// by its answer (all at once; growth that does not fit is skipped and counted), is committed and
// released. What does not fit with nothing else live is refused. At the end the live ones are
// finished in the same way.
//
// Every step is planned, so all tables are written, and settled before the next one. Only calls of
// the manager and the planner are timed: making token ids and verification are not.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "kvleaf/group/group.h"
#include "trace.h"
#include "verify.h"

namespace kvleaf::cli {

struct ReplayOptions {
  std::uint32_t max_live = 64;
  std::optional<std::uint32_t> encoder_tokens;  // of each request, where the model has an encoder
  Verifier* verifier = nullptr;                 // sees every step
  /// After each request, with their number so far.
  std::function<void(std::uint64_t requests)> on_request;
  /// Before the verifier sees a plan, with how it will read it: for tests that break something.
  std::function<void(const StepPlan&, Check)> on_plan;
};

/// Bytes of one leaf at one time, or a mean of them.
struct LeafBytes {
  double live = 0;    // of blocks that requests hold
  double cached = 0;  // of blocks that can be found again
  double clean = 0;   // of blocks that are neither, in huge blocks of its page class; leaves of one
                      // class show the same ones
  double padding = 0;  // between the pages of live and cached blocks
};

struct LeafReport {
  std::string id;
  std::string group;
  std::uint64_t blocks = 0;       // that the budget has for it
  std::uint64_t lost_tokens = 0;  // by which its group shortened hits
  LeafBytes peak;                 // each figure's own
  LeafBytes mean;                 // over steps
  LeafBytes at_peak;              // when all leaves together used most
};

struct RefusalReport {
  std::string reason;  // in general
  std::uint64_t count = 0;
  std::uint32_t row = 0;  // of the first one, in the trace
  std::string example;    // what was said of that one
};

struct RequestReport {
  std::uint32_t row = 0;     // in the trace
  std::uint32_t prompt = 0;  // tokens
  std::uint32_t hit = 0;     // tokens; 0 when refused
  bool refused = false;
};

/// The cache after some request: for charts.
struct Moment {
  std::uint64_t request = 0;
  std::uint64_t prompt_tokens = 0;  // so far
  std::uint64_t hit_tokens = 0;     // so far
  std::vector<LeafBytes> leaves;
};

struct Replay {
  std::uint64_t prompt_tokens = 0;  // of all requests, refused ones too
  std::uint64_t hit_tokens = 0;     // of those served
  std::uint64_t refused = 0;
  std::uint64_t growth_refused = 0;
  std::uint64_t preemptions = 0;
  std::uint64_t computed_tokens = 0;
  double manager_seconds = 0;  // in calls of the manager and the planner
  double wall_seconds = 0;
  std::vector<float> step_us;  // plan + settle, of each step
  double peak_bytes = 0;       // live + cached + padding of all leaves
  double mean_bytes = 0;
  std::vector<RequestReport> requests;  // in order of arrival
  std::vector<RefusalReport> refusals;  // by reason; growth_refused's too
  std::vector<LeafReport> leaves;
  std::vector<GroupStats> groups;
  std::vector<Moment> moments;  // a few hundred, evenly spread

  double hit_pct() const;
  double us_per_request() const;
  /// The step time that `share` of the steps do not exceed: 0.5, 0.99.
  float step_quantile(double share) const;
};

/// Serves the whole trace. Throws VerifyError from the verifier.
Replay replay(const Trace& trace, BlockManager& manager, const ReplayOptions& options);

/// Whether a leaf asks for an encoder's input with each request.
bool has_encoder(const Leaves& leaves);

}  // namespace kvleaf::cli
