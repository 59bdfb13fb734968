// The planner. A plan's handle is one per host set, and stays where it is.
#include <memory>

#include "border.h"

struct kvleaf_plan {
  kvleaf::StepPlan core;
  std::uint32_t leaves = 0;
  mutable kvleaf::c::Refusals refused;
  mutable kvleaf::TableChanges changes;
};

struct kvleaf_planner {
  kvleaf_planner(std::shared_ptr<kvleaf::c::Managed> owner, kvleaf::PlannerOptions options)
      : managed(std::move(owner)),
        core(managed->manager, options),
        plans(managed->manager.options().max_steps_in_flight) {
    for (kvleaf_plan& plan : plans) plan.refused.reserve(options.max_batch);
  }

  std::shared_ptr<kvleaf::c::Managed> managed;  // outlives the planner
  kvleaf::StepPlanner core;
  std::vector<kvleaf_plan> plans;  // sized once, used in turn
  std::size_t next = 0;
};

namespace kvleaf::c {
namespace {

const StepPlan& plan_of(const kvleaf_plan* plan, std::uint32_t leaf) {
  if (leaf >= require(plan, "plan").leaves) {
    throw InvalidArgument(fmt::format("leaf {}; there are {}", leaf, plan->leaves));
  }
  return plan->core;
}

}  // namespace
}  // namespace kvleaf::c

using namespace kvleaf;
using namespace kvleaf::c;

kvleaf_status kvleaf_planner_create(kvleaf_manager* manager, const kvleaf_planner_options* given,
                                    kvleaf_planner** out) {
  return guarded([&] {
    require(out, "out");
    const std::shared_ptr<Managed>& managed = require(manager, "manager").managed;
    const kvleaf_planner_options options = read_struct(given, "options");
    *out = std::make_unique<kvleaf_planner>(
               managed, PlannerOptions{.max_batch = options.max_batch,
                                       .max_step_tokens = options.max_step_tokens,
                                       .max_encoder_tokens = options.max_encoder_tokens})
               .release();
  });
}

void kvleaf_planner_destroy(kvleaf_planner* planner) { delete planner; }

kvleaf_status kvleaf_planner_plan(kvleaf_planner* planner, const kvleaf_step_request* batch,
                                  size_t count, uint32_t pad_to, const kvleaf_plan** out) {
  return guarded([&] {
    require(out, "out");
    kvleaf_planner& self = require(planner, "planner");
    const StepPlan& plan =
        self.core.plan(batch_of(batch, count), pad_to == 0 ? std::nullopt : std::optional(pad_to));
    kvleaf_plan& shown = self.plans[self.next];
    self.next = (self.next + 1) % self.plans.size();
    shown.core = plan;
    shown.leaves = static_cast<std::uint32_t>(self.managed->manager.leaves().size());
    show(plan.refused(), shown.refused);
    *out = &shown;
  });
}

kvleaf_status kvleaf_planner_settle(kvleaf_planner* planner, uint64_t step, const kvleaf_kept* kept,
                                    size_t count) {
  return guarded([&] {
    std::vector<Kept> storage;
    require(planner, "planner").core.settle(StepId(step), kept_of(kept, count, storage));
  });
}

kvleaf_status kvleaf_planner_abandon(kvleaf_planner* planner, uint64_t step,
                                     const kvleaf_request_length** out, size_t* count) {
  return guarded([&] {
    kvleaf_planner& self = require(planner, "planner");
    abandon(*self.managed, &self.core, step, out, count);
  });
}

kvleaf_status kvleaf_plan_describe(const kvleaf_plan* plan, kvleaf_plan_info* out) {
  return guarded([&] {
    const StepPlan& core = require(plan, "plan").core;
    Output(out, "out")
        .write({.struct_size = 0,
                .step = core.step().value(),
                .rows = same<const std::uint64_t>(core.rows().data()),
                .row_count = core.rows().size(),
                .refused = plan->refused.data(),
                .refused_count = plan->refused.size(),
                .batch = core.batch(),
                .num_tokens = core.num_tokens(),
                .seq_lens = core.seq_lens().data(),
                .cu_seqlens_q = core.cu_seqlens_q().data(),
                .copies = same<const kvleaf_block_copy>(core.copies().data()),
                .copy_count = core.copies().size(),
                .zero_fills = same<const kvleaf_zero_fill>(core.zero_fills().data()),
                .zero_fill_count = core.zero_fills().size()});
  });
}

kvleaf_status kvleaf_plan_array_count(const kvleaf_plan* plan, uint32_t leaf, size_t* out) {
  return guarded([&] { require(out, "out") = plan_of(plan, leaf).arrays(LeafId(leaf)).size(); });
}

kvleaf_status kvleaf_plan_array_at(const kvleaf_plan* plan, uint32_t leaf, size_t index,
                                   kvleaf_array* out) {
  return guarded([&] {
    require(out, "out");
    const auto arrays = plan_of(plan, leaf).arrays(LeafId(leaf));
    if (index >= arrays.size()) {
      throw InvalidArgument(
          fmt::format("array {} of leaf {}; there are {}", index, leaf, arrays.size()));
    }
    *out = array_of(arrays[index]);
  });
}

kvleaf_status kvleaf_plan_array(const kvleaf_plan* plan, uint32_t leaf, const char* key,
                                kvleaf_array* out) {
  return guarded([&] {
    require(out, "out");
    require(key, "key");
    *out = array_of(plan_of(plan, leaf).array(LeafId(leaf), key));
  });
}

kvleaf_status kvleaf_plan_slot_mapping(const kvleaf_plan* plan, uint32_t leaf, const int64_t** out,
                                       size_t* count) {
  return guarded([&] {
    require(out, "out");
    require(count, "count");
    const auto slots = plan_of(plan, leaf).slot_mapping(LeafId(leaf));
    *out = slots.data();
    *count = slots.size();
  });
}

kvleaf_status kvleaf_plan_dirty(const kvleaf_plan* plan, uint32_t leaf, const char* key,
                                const kvleaf_byte_range** out, size_t* count) {
  return guarded([&] {
    require(out, "out");
    require(count, "count");
    require(key, "key");
    const auto ranges = plan_of(plan, leaf).dirty(LeafId(leaf), key);
    *out = same<const kvleaf_byte_range>(ranges.data());
    *count = ranges.size();
  });
}

kvleaf_status kvleaf_plan_changes(const kvleaf_plan* plan, uint32_t leaf, const char* key,
                                  const int32_t** rows, const int32_t** columns,
                                  const int32_t** values, size_t* count) {
  return guarded([&] {
    require(rows, "rows");
    require(columns, "columns");
    require(values, "values");
    require(count, "count");
    require(key, "key");
    TableChanges changes = plan_of(plan, leaf).changes(LeafId(leaf), key);
    plan->changes = std::move(changes);
    *rows = plan->changes.rows.data();
    *columns = plan->changes.columns.data();
    *values = plan->changes.values.data();
    *count = plan->changes.values.size();
  });
}
