// The planner: what one forward reads, as NumPy views on the planner's own memory.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <fmt/format.h>

#include <memory>
#include <optional>
#include <utility>

#include "bind.h"
#include "convert.h"
#include "python_leaf.h"
#include "python_manager.h"

namespace kvleaf::python {
namespace {

using namespace nb::literals;
using OptionalWhole = std::optional<Whole>;

class Planner {
 public:
  Planner(nb::object manager, PlannerOptions options)
      : manager_(std::move(manager)),
        names_(nb::inst_ptr<Manager>(manager_)),
        core_(std::make_unique<StepPlanner>(names_->core(), options)) {}

  Manager& manager() const noexcept { return *names_; }
  nb::object manager_object() const { return manager_; }
  StepPlanner& core() const noexcept { return *core_; }

  template <class F>
  void each_object(F f) const {
    f(manager_);
  }

 private:
  nb::object manager_;
  Manager* names_;
  std::unique_ptr<StepPlanner> core_;
};

/// One forward's inputs. Lists and names are the caller's; arrays are views on the planner's host
/// set, which a later plan takes over.
class Plan {
 public:
  Plan(nb::object planner, const StepPlan& plan, const Manager::Batch& asked)
      : step(plan.step().value()),
        batch(plan.batch()),
        num_tokens(plan.num_tokens()),
        planner_(std::move(planner)),
        core_(plan) {
    Manager& manager = names();
    refused = manager.refusals_of(plan.refused());
    rows = manager.began(plan.step(), plan.rows(), asked);
    copies = manager.copies_of(plan.copies());
    zero_fills = manager.fills_of(plan.zero_fills());
  }

  const std::uint64_t step;
  const std::uint32_t batch;
  const std::uint32_t num_tokens;
  nb::list rows;
  nb::dict refused;
  nb::list copies;
  nb::list zero_fills;

  /// The plan, as long as its host set is its own. Throws StepError.
  const StepPlan& core() const {
    if (core_.step().value() != step) {
      throw StepError(fmt::format("the arrays of step {} are gone: its host set now serves step {}",
                                  step, core_.step().value()));
    }
    return core_;
  }
  nb::handle owner() const noexcept { return planner_; }
  Manager& names() const { return nb::inst_ptr<Planner>(planner_)->manager(); }

  /// {leaf_id: {key: f(leaf, array)}} over the arrays that f has an answer for.
  template <class F>
  nb::dict by_array(F f) const {
    const StepPlan& plan = core();
    nb::dict leaves;
    for (std::uint32_t i = 0; i < names().core().leaves().size(); ++i) {
      nb::dict keys;
      for (const StagedArray& array : plan.arrays(LeafId(i))) {
        nb::object value = f(LeafId(i), array);
        if (value.is_valid()) keys[nb::str(array.key.data(), array.key.size())] = std::move(value);
      }
      leaves[names().leaf_id(LeafId(i))] = std::move(keys);
    }
    return leaves;
  }

  template <class F>
  void each_object(F f) const {
    f(rows);
    f(refused);
    f(copies);
    f(zero_fills);
    f(planner_);
  }

 private:
  nb::object planner_;
  StepPlan core_;
};

nb::dict slot_mapping(const Plan& self) {
  nb::dict leaves;
  for (std::uint32_t i = 0; i < self.names().core().leaves().size(); ++i) {
    const std::span<const std::int64_t> slots = self.core().slot_mapping(LeafId(i));
    // Leaves that are not written token by token have none.
    if (!slots.empty()) leaves[self.names().leaf_id(LeafId(i))] = view_of(slots, self.owner());
  }
  return leaves;
}

nb::dict dirty(const Plan& self) {
  return self.by_array([&](LeafId leaf, const StagedArray& array) -> nb::object {
    nb::list ranges;
    for (const ByteRange& range : self.core().dirty(leaf, array.key)) {
      ranges.append(nb::make_tuple(range.begin, range.end));
    }
    return ranges;
  });
}

nb::dict changes(const Plan& self) {
  return self.by_array([&](LeafId leaf, const StagedArray& array) -> nb::object {
    if (array.dtype != DType::int32 || array.shape.size() > 2) return {};
    TableChanges entries = self.core().changes(leaf, array.key);
    return nb::make_tuple(array_of(std::move(entries.rows)), array_of(std::move(entries.columns)),
                          array_of(std::move(entries.values)));
  });
}

#define KVLEAF_BY_LEAF_AND_KEY(type) "dict[str, dict[str, " type "]]"

void bind_plan(nb::module_& m) {
  nb::class_<Plan>(m, "StepPlan", nb::type_slots(collected<Plan>),
                   "One forward's inputs. Arrays are views, without a copy, on the planner's host "
                   "set for this step: they are\n"
                   "valid until the planner comes round to the same set, max_steps_in_flight plans "
                   "later, and asking a plan for\n"
                   "them after that raises StepError. A view keeps the planner alive.")
      .def_ro("step", &Plan::step, "Id of the step that was begun.")
      .def_ro("batch", &Plan::batch, "Rows, dummy rows included.")
      .def_ro("num_tokens", &Plan::num_tokens, "Tokens of all rows, one per dummy row.")
      .def_ro("rows", &Plan::rows, nb::sig("def rows(self) -> list[typing.Any]"),
              "The served requests in row order.")
      .def_ro("refused", &Plan::refused,
              nb::sig("def refused(self) -> dict[typing.Any, PoolExhausted]"),
              "Requests that left the batch, and why.")
      .def_ro("copies", &Plan::copies, nb::sig("def copies(self) -> list[tuple[str, int, int]]"),
              "(leaf_id, src, dst), to run before the forward, in any order.")
      .def_ro("zero_fills", &Plan::zero_fills,
              nb::sig("def zero_fills(self) -> list[tuple[str, int]]"),
              "(leaf_id, block), to run before the forward.")
      .def_prop_ro(
          "arrays",
          [](const Plan& self) {
            return self.by_array(
                [&](LeafId, const StagedArray& array) { return view_of(array, self.owner()); });
          },
          nb::sig(
              "def arrays(self) -> " KVLEAF_BY_LEAF_AND_KEY("numpy.typing.NDArray[typing.Any]")),
          "{leaf_id: {key: array}}, narrowed to this batch.")
      .def_prop_ro(
          "slot_mapping", &slot_mapping,
          nb::sig("def slot_mapping(self) -> dict[str, numpy.typing.NDArray[numpy.int64]]"),
          "{leaf_id: [num_tokens] int64}: block * slots_per_page + slot in the page; -1 is "
          "padding. Only of\n"
          "leaves that are written token by token.")
      .def_prop_ro(
          "seq_lens",
          [](const Plan& self) { return view_of(self.core().seq_lens(), self.owner()); },
          nb::sig("def seq_lens(self) -> numpy.typing.NDArray[numpy.int32]"), "[batch] int32")
      .def_prop_ro(
          "cu_seqlens_q",
          [](const Plan& self) { return view_of(self.core().cu_seqlens_q(), self.owner()); },
          nb::sig("def cu_seqlens_q(self) -> numpy.typing.NDArray[numpy.int32]"),
          "[batch + 1] int32")
      .def_prop_ro("dirty", &dirty,
                   nb::sig("def dirty(self) -> " KVLEAF_BY_LEAF_AND_KEY("list[tuple[int, int]]")),
                   "{leaf_id: {key: [(begin, end)]}}: bytes of the array, counted from its first "
                   "element, that differ\n"
                   "from the previous plan.")
      .def_prop_ro(
          "changes", &changes,
          nb::sig("def changes(self) -> " KVLEAF_BY_LEAF_AND_KEY(
              "tuple[numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.int32], "
              "numpy.typing.NDArray[numpy.int32]]")),
          "{leaf_id: {key: (rows, columns, values)}}: the same entry by entry, for scatter_table. "
          "Of int32 arrays of\n"
          "at most two dimensions.")
      .def("__repr__", [](const Plan& self) {
        return fmt::format("StepPlan(step {}, {} rows, {} tokens, {} refused)", self.step,
                           self.batch, self.num_tokens, self.refused.size());
      });
}

}  // namespace

void bind_planner(nb::module_& m) {
  bind_plan(m);
  nb::class_<Planner> planner(m, "StepPlanner", nb::type_slots(collected<Planner>),
                              nb::is_weak_referenceable(),
                              "One call per forward: reserves for a whole batch and writes what "
                              "the forward reads. It owns one host set of\n"
                              "arrays per step in flight, sized once, at fixed addresses, used in "
                              "turn. A row that still belongs to the\n"
                              "same request is extended, not rewritten.");
  planner
      .def(
          "__init__",
          [](Planner* self, nb::handle manager, Whole max_batch, Whole max_step_tokens) {
            if (instance_of<Manager>(manager) == nullptr) {
              throw InvalidArgument("manager: want a BlockManager");
            }
            new (self) Planner(nb::borrow(manager),
                               {.max_batch = max_batch.u32("max_batch"),
                                .max_step_tokens = max_step_tokens.u32("max_step_tokens")});
          },
          "manager"_a, nb::kw_only(), "max_batch"_a, "max_step_tokens"_a,
          nb::sig("def __init__(self, manager: BlockManager, *, max_batch: int, max_step_tokens: "
                  "int) -> None"),
          "max_batch: rows, dummy rows included; max_step_tokens: tokens of all rows together.")
      .def_prop_ro("manager", &Planner::manager_object,
                   nb::sig("def manager(self) -> BlockManager"))
      .def_prop_ro("max_batch", [](const Planner& self) { return self.core().options().max_batch; })
      .def_prop_ro("max_step_tokens",
                   [](const Planner& self) { return self.core().options().max_step_tokens; })
      .def(
          "plan",
          [](nb::handle self, nb::handle batch, const OptionalWhole& pad_to) {
            const Planner& planner = *nb::inst_ptr<Planner>(self);
            const Manager::Batch asked = planner.manager().batch_of(batch);
            const auto padded = pad_to ? std::optional(pad_to->u32("pad_to")) : std::nullopt;
            const StagingOwner owner(self);
            const StepPlan& plan =
                *planner.manager().alone([&] { return &planner.core().plan(asked.rows, padded); });
            return new Plan(nb::borrow(self), plan, asked);
          },
          "batch"_a, "pad_to"_a = nb::none(),
          nb::sig("def plan(self, batch: collections.abc.Iterable[tuple[collections.abc.Hashable, "
                  "int]], pad_to: int "
                  "| None = None) -> StepPlan"),
          nb::rv_policy::take_ownership,
          "begin_step for (request, new_tokens) in row order, plus the arrays. pad_to: batch size "
          "to fill with dummy\n"
          "rows (one query token, length 1, slot -1, null blocks). Raises what begin_step raises, "
          "and\n"
          "PlanShapeError beyond the bounds; what a leaf written in Python raises comes out as it "
          "is. Nothing has\n"
          "changed then.")
      .def(
          "settle",
          [](const Planner& self, nb::handle step, const nb::dict& kept) {
            self.manager().settle(self.core(), step, kept);
          },
          "step"_a, "kept"_a = nb::dict(),
          nb::sig("def settle(self, step: int, kept: dict[typing.Any, int] = {}) -> None"),
          "As the manager's.")
      .def(
          "abandon",
          [](const Planner& self, nb::handle step) {
            return self.manager().abandon(self.core(), step);
          },
          "step"_a, nb::sig("def abandon(self, step: int) -> dict[typing.Any, int]"),
          "As the manager's.");
  refuse_pickle(planner, "its arrays are one process's memory; make another from its manager");
}

}  // namespace kvleaf::python
