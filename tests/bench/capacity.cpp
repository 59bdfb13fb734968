#include "bench/capacity.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <stdexcept>

#include "kvleaf/group/group.h"

namespace bench {

using namespace kvleaf;

double exact_need(const KVLeafRegion& leaf, std::uint32_t page_tokens, std::uint32_t n) {
  const auto bytes = static_cast<double>(leaf.bytes_per_page());
  const Writing writing = leaf.group_id().writing;
  if (writing == Writing::in_place || writing == Writing::exclusive) return bytes;
  if (writing == Writing::write_once || n == 0) return 0;
  // With n-1 tokens computed, the last one reads its reach and is written itself.
  const AccessPattern& pattern = leaf.group_id().pattern;
  const std::uint32_t tail = n - std::min(n, pattern.tail_begin(n - 1));
  const std::uint32_t head = std::min(pattern.head(), n - tail);
  return bytes * (head + tail) / leaf.tokens_per_page().value_or(page_tokens);
}

Capacity measure_capacity(const ModelLeaves& model, const std::vector<std::uint32_t>& lengths,
                          const CapacityOptions& options) {
  ManagerOptions manager_options;
  manager_options.budget_bytes = options.budget_bytes;
  manager_options.max_len = *std::max_element(lengths.begin(), lengths.end());
  manager_options.max_step_tokens = options.step_tokens;
  manager_options.expected_tokens = options.expected_tokens;
  manager_options.enable_prefix_caching = options.prefix_caching;
  BlockManager manager(model.leaves, manager_options);

  Capacity out;
  const auto need = [&](std::uint32_t n) {
    double bytes = 0;
    for (const Leaf& leaf : model.leaves) {
      bytes += exact_need(*leaf, manager_options.page_tokens, n);
    }
    return bytes;
  };
  double needed = 0;
  const auto budget = static_cast<double>(options.budget_bytes);
  for (const std::uint32_t n : lengths) {
    needed += need(n);
    if (needed > budget) break;
    ++out.ideal_requests;
  }

  Token next_token = 0;  // no two requests share a prefix
  double useful = 0;
  std::vector<Token> tokens;
  const auto serve = [&](RequestId id, std::uint32_t n) {
    tokens.resize(n);
    std::iota(tokens.begin(), tokens.end(), next_token);
    next_token += static_cast<Token>(n);
    try {
      manager.admit(id, tokens);
    } catch (const PoolExhausted&) {
      return false;
    }
    while (manager.planned(id) < n) {
      const std::uint32_t at = manager.planned(id);
      const std::uint32_t end = std::min(manager.next_stop(id).value_or(n), n);
      const StepRequest row{id, std::min(options.step_tokens, end - at)};
      const Step& step = manager.begin_step({&row, 1});
      const bool refused = !step.refused.empty();
      manager.settle(step.id);
      if (refused) return false;
    }
    return true;
  };
  for (const std::uint32_t n : lengths) {
    if (!serve(RequestId{out.requests}, n)) break;
    ++out.requests;
    useful += need(n);
  }
  if (out.requests == lengths.size()) {
    throw std::logic_error("all requests fit: the trace is too short for this budget");
  }
  manager.audit();
  out.useful_pct = 100 * useful / budget;
  out.checkpoints = static_cast<std::uint32_t>(manager.stats().checkpoints);
  for (const Leaf& leaf : model.leaves) {
    out.state_parts += leaf->group_id().writing == Writing::in_place ? 1 : 0;
  }
  return out;
}

}  // namespace bench
