#include "python_manager.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "python_leaf.h"

namespace kvleaf::python {

namespace {

/// The value of a key that need not be there; an unhashable name raises what Python raises.
nb::object find(const nb::dict& dict, nb::handle key) {
  PyObject* value = PyDict_GetItemWithError(dict.ptr(), key.ptr());
  if (value == nullptr && PyErr_Occurred() != nullptr) throw nb::python_error();
  return value == nullptr ? nb::object() : nb::borrow(value);
}

}  // namespace

Manager::Manager(nb::handle leaves, const ManagerOptions& options) {
  Leaves regions;
  for (const nb::handle leaf : nb::iter(leaves)) {
    auto* region = instance_of<KVLeafRegion>(leaf);
    if (region == nullptr) {
      throw InvalidArgument(
          fmt::format("leaves[{}] is of type {}; accepted: a KVLeafRegion that was initialised",
                      regions.size(), Py_TYPE(leaf.ptr())->tp_name));
    }
    if (auto* python = dynamic_cast<PythonLeaf*>(region)) python->page_tokens = options.page_tokens;
    leaves_.append(leaf);
    leaf_ids_.append(nb::str(region->leaf_id().c_str()));
    // Owned by leaves_, where the garbage collector sees it: a leaf may well refer to its manager.
    regions.push_back(Leaf(region, [](KVLeafRegion*) {}));
  }
  const nb::gil_scoped_release release;
  core_ = std::make_unique<BlockManager>(std::move(regions), options);
}

bool Manager::knows(nb::handle name) const { return find(ids_, name).is_valid(); }

RequestId Manager::id_of(nb::handle name) const {
  const nb::object id = find(ids_, name);
  if (!id.is_valid())
    throw RequestError(fmt::format("request {} is unknown", nb::repr(name).c_str()));
  return RequestId(nb::cast<std::uint64_t>(id));
}

void Manager::remember(nb::handle name, RequestId id) {
  const nb::object number = nb::cast(id.value());
  ids_[name] = number;
  names_[number] = name;
}

void Manager::forget(nb::handle name) {
  const nb::object id = find(ids_, name);
  if (!id.is_valid()) return;
  nb::del(names_[id]);
  nb::del(ids_[name]);
}

nb::object Manager::name_of(RequestId id) const {
  const nb::object number = nb::cast(id.value());
  nb::object name = find(names_, number);
  if (name.is_valid()) return name;
  for (const Flight& flight : flights_) {  // released since its step was begun
    const auto found = std::find(flight.ids.begin(), flight.ids.end(), id);
    if (found != flight.ids.end()) {
      return nb::borrow(flight.names[static_cast<std::size_t>(found - flight.ids.begin())]);
    }
  }
  return number;
}

std::string Manager::spell(const std::string& message) const {
  constexpr std::string_view digits = "0123456789";
  std::string spelled;
  for (std::size_t at = 0; at < message.size();) {
    const std::size_t begin = std::min(message.find_first_of(digits, at), message.size());
    const std::size_t end = std::min(message.find_first_not_of(digits, begin), message.size());
    spelled.append(message, at, begin - at);
    std::uint64_t number = 0;
    std::from_chars(message.data() + begin, message.data() + end, number);
    if (number >= first_id) {
      spelled += nb::repr(name_of(RequestId(number))).c_str();
    } else {
      spelled.append(message, begin, end - begin);
    }
    at = end;
  }
  return spelled;
}

Manager::Batch Manager::batch_of(nb::handle source) const {
  Batch batch;
  for (const nb::handle row : nb::iter(source)) {
    Whole tokens;
    const bool pair = PyTuple_Check(row.ptr())
                          ? PyTuple_GET_SIZE(row.ptr()) == 2
                          : PyList_Check(row.ptr()) && PyList_GET_SIZE(row.ptr()) == 2;
    if (!pair || !Whole::read(nb::object(row[1]), tokens)) {
      throw InvalidArgument(fmt::format("batch[{}] is {}; accepted: (request, new_tokens)",
                                        batch.rows.size(), nb::repr(row).c_str()));
    }
    batch.names.push_back(nb::object(row[0]));
    batch.rows.push_back({id_of(batch.names.back()), tokens.u32("new_tokens")});
  }
  return batch;
}

nb::list Manager::began(StepId step, std::span<const RequestId> served, const Batch& batch) {
  nb::list names;
  std::size_t row = 0;  // those served are in the order of the batch
  for (const RequestId id : served) {
    while (batch.rows[row].request != id) ++row;
    names.append(batch.names[row]);
  }
  flights_.push_back({step, {served.begin(), served.end()}, nb::list(names)});
  return names;
}

StepId Manager::step_of(nb::handle step) {
  Whole whole;
  if (!Whole::read(step, whole) && !Whole::read(nb::getattr(step, "id", nb::none()), whole)) {
    throw InvalidArgument(
        fmt::format("step is {}; accepted: the id of a step", nb::repr(step).c_str()));
  }
  return StepId(whole.u64("step"));
}

std::vector<Kept> Manager::kept_of(StepId step, const nb::dict& kept) const {
  std::vector<Kept> stands;
  if (kept.size() == 0) return stands;
  const auto of_step = std::find_if(flights_.begin(), flights_.end(),
                                    [step](const Flight& flight) { return flight.step == step; });
  for (const auto [name, tokens] : kept) {
    std::optional<RequestId> request;
    if (of_step != flights_.end()) {
      const nb::object live = find(ids_, name);
      if (live.is_valid()) request = RequestId(nb::cast<std::uint64_t>(live));
      const std::vector<RequestId>& ids = of_step->ids;
      if (!request || std::find(ids.begin(), ids.end(), *request) == ids.end()) {
        request.reset();  // another of this name: the one in the step was released
        for (std::size_t i = 0; i < ids.size() && !request; ++i) {
          if (of_step->names[i].equal(name)) request = ids[i];
        }
      }
    }
    if (!request) {
      throw RequestError(
          fmt::format("kept: request {} is not in step {}", nb::repr(name).c_str(), step.value()));
    }
    Whole whole;
    if (!Whole::read(tokens, whole)) {
      throw InvalidArgument(fmt::format("kept: {} for request {}; accepted: tokens",
                                        nb::repr(tokens).c_str(), nb::repr(name).c_str()));
    }
    stands.push_back({*request, whole.u32("kept")});
  }
  return stands;
}

void Manager::over(StepId first, std::optional<StepId> last) {
  std::erase_if(flights_, [&](const Flight& flight) {
    return flight.step >= first && (!last || flight.step <= *last);
  });
}

nb::dict Manager::refusals_of(std::span<const Refusal> refused) const {
  nb::dict refusals;
  if (refused.empty()) return refusals;
  const nb::object type = nb::module_::import_("kvleaf._kvleaf").attr("PoolExhausted");
  for (const Refusal& refusal : refused) {
    refusals[name_of(refusal.request)] = type(spell(refusal.why));
  }
  return refusals;
}

nb::list Manager::copies_of(std::span<const BlockCopy> copies) const {
  nb::list list;
  for (const BlockCopy& copy : copies) {
    list.append(nb::make_tuple(leaf_id(copy.leaf), copy.src.value(), copy.dst.value()));
  }
  return list;
}

nb::list Manager::fills_of(std::span<const ZeroFill> fills) const {
  nb::list list;
  for (const ZeroFill& fill : fills)
    list.append(nb::make_tuple(leaf_id(fill.leaf), fill.block.value()));
  return list;
}

}  // namespace kvleaf::python
