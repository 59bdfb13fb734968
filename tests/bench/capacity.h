// Workload "capacity": how many requests fit. An empty pool, requests of a published trace's
// lengths in file order, each computed to its end and none released, until the first refusal.
//
// The ideal is the same with needs that are exact to the byte: what the requests' reach holds of
// each leaf, no page rounded up, no huge block half used.
#pragma once

#include <cstdint>
#include <vector>

#include "kvleaf/cache/model_leaves.h"

namespace bench {

struct CapacityOptions {
  std::uint64_t budget_bytes = 16ull << 30;
  std::uint32_t step_tokens = 512;
  std::uint32_t expected_tokens = 1366;  // of a request, for the geometry
  bool prefix_caching = true;
};

struct Capacity {
  std::uint32_t requests = 0;        // served before the first refusal
  std::uint32_t ideal_requests = 0;  // whose exact needs fit the budget
  double useful_pct = 0;             // exact needs of the requests served, of the budget
  std::uint32_t state_parts = 0;     // leaves that the states were split into
  std::uint32_t checkpoints = 0;     // that were taken meanwhile, at best effort
};

/// Bytes that a request of n tokens needs of one leaf when its last token is computed.
double exact_need(const kvleaf::KVLeafRegion& leaf, std::uint32_t page_tokens, std::uint32_t n);

/// `lengths`: tokens of each request, in order of arrival. Throws std::logic_error if all fit.
Capacity measure_capacity(const kvleaf::ModelLeaves& model,
                          const std::vector<std::uint32_t>& lengths,
                          const CapacityOptions& options);

}  // namespace bench
