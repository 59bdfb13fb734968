// BlockManager as Python sees it: requests by any hashable, leaves by name. The C++ manager knows
// requests by 64-bit ids; a name is given a fresh one when it is admitted or forked, so a request
// that is released in flight and admitted again under the same name is another request, as it
// should be.
#pragma once

#include <concepts>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "convert.h"
#include "exclusive.h"
#include "kvleaf/group/group.h"

namespace kvleaf::python {

class Manager {
 public:
  Manager(nb::handle leaves, const ManagerOptions& options);

  BlockManager& core() const noexcept { return *core_; }
  Exclusive& exclusive() const noexcept { return exclusive_; }
  nb::list leaves() const { return nb::list(leaves_); }
  nb::handle leaf_id(LeafId leaf) const { return leaf_ids_[leaf.value()]; }

  /// Calls `f` alone and without the GIL. Ids in messages are replaced by the names that Python
  /// gave.
  template <std::invocable F>
  auto alone(F&& f) const {
    const Exclusive::Use use(exclusive_, "this manager");
    return spelled([&] {
      const nb::gil_scoped_release release;
      return f();
    });
  }
  /// Calls `f`, which is over soon, alone and with the GIL: another thread that took it for a long
  /// while would make a short call long.
  template <std::invocable F>
  auto briefly(F&& f) const {
    const Exclusive::Use use(exclusive_, "this manager");
    return spelled(std::forward<F>(f));
  }
  /// Calls `f`, which changes nothing and is over soon, with the GIL held.
  template <std::invocable F>
  auto ask(F&& f) const {
    exclusive_.require_readable("this manager");
    return spelled(std::forward<F>(f));
  }

  // ---- names -----------------------------------------------------------------------------------
  bool knows(nb::handle name) const;
  /// Throws RequestError for a name that is not a request now.
  RequestId id_of(nb::handle name) const;
  /// Calls f(id) with the id of `name`: the one it has, or a new one, which is kept if f returns.
  template <class F>
  auto introduce(nb::handle name, F&& f) {
    if (knows(name)) return f(id_of(name));
    const RequestId id(next_id_++);
    remember(name, id);
    try {
      return f(id);
    } catch (...) {
      forget(name);
      throw;
    }
  }
  void forget(nb::handle name);

  /// (request, new_tokens) pairs, and the names in them.
  struct Batch {
    std::vector<StepRequest> rows;
    std::vector<nb::object> names;
  };
  Batch batch_of(nb::handle source) const;
  /// A step was begun: until it is over, its requests go by their names even if they are released.
  /// Gives these names, in the order served.
  nb::list began(StepId step, std::span<const RequestId> served, const Batch& batch);
  /// Settles through `of`, a manager or a planner.
  template <class Of>
  void settle(Of& of, nb::handle step, const nb::dict& kept) {
    const StepId id = step_of(step);
    const std::vector<Kept> stands = kept_of(id, kept);
    alone([&] { of.settle(id, stands); });
    over(id, id);
  }
  template <class Of>
  nb::dict abandon(Of& of, nb::handle step) {
    const StepId id = step_of(step);
    const auto lengths = alone([&] { return of.abandon(id); });
    nb::dict named;
    for (const auto& [request, length] : lengths) named[name_of(request)] = length;
    over(id, std::nullopt);
    return named;
  }

  nb::dict refusals_of(std::span<const Refusal> refused) const;
  nb::list copies_of(std::span<const BlockCopy> copies) const;
  nb::list fills_of(std::span<const ZeroFill> fills) const;

  template <class F>
  void each_object(F f) const {
    f(leaves_);
    f(leaf_ids_);
    f(ids_);
    f(names_);
    for (const Flight& flight : flights_) f(flight.names);
  }

 private:
  struct Flight {
    StepId step;
    std::vector<RequestId> ids;
    nb::list names;  // of these
  };

  template <class F>
  auto spelled(F&& f) const {
    try {
      return f();
    } catch (const PoolExhausted& error) {
      throw PoolExhausted(spell(error.what()));
    } catch (const RequestError& error) {
      throw RequestError(spell(error.what()));
    } catch (const StepError& error) {
      throw StepError(spell(error.what()));
    } catch (const PlanShapeError& error) {
      throw PlanShapeError(spell(error.what()));
    }
  }
  void remember(nb::handle name, RequestId id);
  std::string spell(const std::string& message) const;
  nb::object name_of(RequestId id) const;
  static StepId step_of(nb::handle step);
  std::vector<Kept> kept_of(StepId step, const nb::dict& kept) const;
  void over(StepId first, std::optional<StepId> last);

  nb::list leaves_;  // own the leaves that core_ refers to, so outlive it
  nb::list leaf_ids_;
  nb::dict ids_;    // name: id
  nb::dict names_;  // id: name
  // Far above any other number in a message, so that spell() knows an id when it sees one.
  static constexpr std::uint64_t first_id = std::uint64_t{1} << 63;
  std::uint64_t next_id_ = first_id;
  std::deque<Flight> flights_;  // steps in flight, oldest first
  mutable Exclusive exclusive_;
  std::unique_ptr<BlockManager> core_;
};

}  // namespace kvleaf::python
