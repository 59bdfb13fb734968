// StepPlan::Data: one host set: the arrays of all leaves, and the plan that lies in them. Internal
// to the step planner.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <vector>

#include "kvleaf/group/leaf_arrays.h"
#include "kvleaf/group/step_plan.h"

namespace kvleaf {

struct StepPlan::Data {
  struct Leaf {
    LeafArrays arrays;
    std::vector<std::int64_t> slot_mapping;  // as long as a step can be; empty: it has none
  };

  std::uint64_t plan = 0;  // number of the plan whose contents these arrays have; 0: zeros
  StepId step{0};
  const Step* served = nullptr;
  std::vector<RequestId> rows;
  std::uint32_t batch = 0;
  std::uint32_t tokens = 0;
  std::vector<Leaf> leaves;
  std::vector<std::int32_t> seq_lens;
  std::vector<std::int32_t> cu_seqlens;

  const Leaf& at(LeafId leaf) const {
    if (leaf.value() >= leaves.size())
      throw PlanShapeError(fmt::format("leaf {} of {}", leaf.value(), leaves.size()));
    return leaves[leaf.value()];
  }
};

}  // namespace kvleaf
