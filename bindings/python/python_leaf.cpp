#include "python_leaf.h"

#include <fmt/format.h>

#include <limits>

namespace kvleaf::python {

thread_local nb::handle StagingOwner::current_;

bool PythonLeaf::overrides(const char* name) const {
  const nb::object own = nb::getattr(self_.type(), name, nb::none());
  return !own.is(nb::type<KVLeafRegion>().attr(name));
}

std::string PythonLeaf::called(const char* name) const {
  return fmt::format("leaf '{}': {}", nb::str(self_.attr("leaf_id")).c_str(), name);
}

namespace {

std::string shown(nb::handle value) { return nb::repr(value).c_str(); }

std::uint32_t u32_of(const std::string& what, nb::handle value) {
  Whole whole;
  if (!Whole::read(value, whole)) {
    throw InvalidArgument(fmt::format("{} gave {}; accepted: an int", what, shown(value)));
  }
  return whole.u32(what.c_str());
}

nb::dict dict_of(const std::string& what, nb::handle value) {
  if (PyDict_Check(value.ptr())) return nb::borrow<nb::dict>(value);
  try {  // any mapping
    return nb::cast<nb::dict>(nb::borrow(reinterpret_cast<PyObject*>(&PyDict_Type))(value));
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_TypeError) && !error.matches(PyExc_ValueError)) throw;
    throw InvalidArgument(fmt::format("{} gave {}; accepted: a dict", what, shown(value)));
  }
}

BoundRows rows_of(const std::string& what, nb::handle key, nb::handle range) {
  Whole begin;
  Whole end;
  Whole step;
  if (!PyRange_Check(range.ptr()) || !Whole::read(range.attr("start"), begin) ||
      !Whole::read(range.attr("stop"), end) || !Whole::read(range.attr("step"), step) ||
      step.u64(what.c_str()) != 1) {
    throw InvalidArgument(fmt::format("{} gave {} for {}; accepted: range(begin, end)", what,
                                      shown(range), shown(key)));
  }
  return {name_in(key, what.c_str()), begin.u64(what.c_str()), end.u64(what.c_str())};
}

nb::dict views_of(StagedArrays into) {
  nb::dict views;
  for (const StagedArray& array : into.all()) {
    views[nb::str(array.key.data(), array.key.size())] = view_of(array, StagingOwner::current());
  }
  return views;
}

}  // namespace

bool PythonLeaf::get_bool(const char* name) const { return truth_of(self_.attr(name)); }

std::uint32_t PythonLeaf::get_u32(const char* name) const {
  return u32_of(called(name), self_.attr(name));
}

std::uint32_t PythonLeaf::call_u32(const char* name, std::uint32_t argument) const {
  return u32_of(called(name), self_.attr(name)(argument));
}

StateKernel PythonLeaf::get_state_kernel() const {
  return require_state_kernel(nb::str(nb::object(self_.attr("state_kernel"))).c_str());
}

// step_tokens is an addition to the method's first form, (num_blocks, *, enable_prefix_caching),
// and an override may be of that form: its figure is then that of one token a step.
bool PythonLeaf::takes_step_tokens(const nb::object& method) {
  const PyObject* function = nb::getattr(method, "__func__", method).ptr();
  if (function == inspected_) return takes_step_tokens_;
  takes_step_tokens_ = false;
  const nb::object signature = nb::module_::import_("inspect").attr("signature")(method);
  for (const nb::handle parameter : nb::iter(signature.attr("parameters").attr("values")())) {
    takes_step_tokens_ |=
        nb::str(nb::object(parameter.attr("name"))).c_str() == std::string_view("step_tokens") ||
        nb::str(nb::object(parameter.attr("kind").attr("name"))).c_str() ==
            std::string_view("VAR_KEYWORD");
  }
  inspected_ = function;
  return takes_step_tokens_;
}

std::uint32_t PythonLeaf::call_blocks_to_reserve(std::uint32_t num_blocks,
                                                 std::uint32_t tokens_per_page,
                                                 ReserveOptions options) {
  page_tokens = tokens_per_page;
  const nb::object method = self_.attr("blocks_to_reserve");
  const std::string what = called("blocks_to_reserve");
  if (takes_step_tokens(method)) {
    return u32_of(
        what, method(num_blocks, nb::arg("enable_prefix_caching") = options.enable_prefix_caching,
                     nb::arg("step_tokens") = options.step_tokens));
  }
  // What more tokens in a step add to the reach they add to it too, whatever it holds beside the
  // reach.
  const std::uint64_t one = u32_of(
      what, method(num_blocks, nb::arg("enable_prefix_caching") = options.enable_prefix_caching));
  const auto reach = [&](std::uint32_t step_tokens) -> std::uint64_t {
    return base_blocks_to_reserve(
        num_blocks, tokens_per_page,
        {.enable_prefix_caching = options.enable_prefix_caching, .step_tokens = step_tokens});
  };
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(
      one + reach(options.step_tokens) - reach(1), std::numeric_limits<std::uint32_t>::max()));
}

StagedInputs PythonLeaf::call_staged_input_shapes(std::uint32_t batch,
                                                  std::uint32_t num_blocks) const {
  const std::string what = called("staged_input_shapes");
  const nb::dict shapes = dict_of(what, self_.attr("staged_input_shapes")(batch, num_blocks));
  if (shapes.size() > max_staged_inputs) {
    throw InvalidArgument(fmt::format("{} gave {} inputs; accepted: at most {}", what,
                                      shapes.size(), max_staged_inputs));
  }
  StagedInputs inputs;
  for (const auto [key, value] : shapes) {
    nb::object shape;
    nb::object dtype;
    if (PyUnicode_Check(key.ptr()) && PyTuple_Check(value.ptr()) && nb::len(value) == 2) {
      shape = value[0];
      dtype = value[1];
    } else {
      throw InvalidArgument(fmt::format("{} gave {}: {}; accepted: a str: (shape, dtype)", what,
                                        shown(key), shown(value)));
    }
    StagedInput input{interned(nb::str(key).c_str()), {}, DType::int32};
    try {
      input.dtype = dtype_of_python(dtype);
    } catch (const InvalidArgument& error) {
      throw InvalidArgument(fmt::format("{}: dtype of '{}': {}", what, input.key, error.what()));
    }
    const std::vector<std::uint32_t> extents =
        u32s_of(shape, fmt::format("{}: shape of '{}'", what, input.key).c_str());
    if (extents.empty() || extents.size() > max_staged_rank) {
      throw InvalidArgument(fmt::format("{} gave '{}' {} dimensions; accepted: 1 to {}", what,
                                        input.key, extents.size(), max_staged_rank));
    }
    input.shape.assign(extents.begin(), extents.end());
    inputs.push_back(input);
  }
  return inputs;
}

void PythonLeaf::call_write_staged_inputs(std::span<const std::span<const BlockId>> plans,
                                          StagedArrays into) const {
  nb::list rows;
  for (const std::span<const BlockId> blocks : plans) rows.append(list_of(blocks));
  self_.attr("write_staged_inputs")(rows, views_of(into));
}

void PythonLeaf::call_write_staged_delta(std::span<const RowDelta> rows, StagedArrays into) const {
  const nb::object make = nb::module_::import_("kvleaf._kvleaf").attr("RowDelta");
  nb::list deltas;
  for (const RowDelta& row : rows) {
    deltas.append(make(nb::arg("new_owner") = row.new_owner, nb::arg("padding") = row.padding,
                       nb::arg("first_changed_slot") = row.first_changed_slot,
                       nb::arg("blocks") = list_of(row.blocks), nb::arg("computed") = row.computed,
                       nb::arg("new_tokens") = row.new_tokens,
                       nb::arg("read_block") = row.read_block.value(),
                       nb::arg("write_block") = row.write_block.value(),
                       nb::arg("boundary_blocks") = list_of(row.boundary_blocks)));
  }
  self_.attr("write_staged_delta")(deltas, views_of(into));
}

std::vector<BoundRows> PythonLeaf::call_bound_row_span(BlockId block) const {
  const std::string what = called("bound_row_span");
  std::vector<BoundRows> spans;
  for (const auto [key, range] : dict_of(what, self_.attr("bound_row_span")(block.value()))) {
    spans.push_back(rows_of(what, key, range));
  }
  return spans;
}

std::vector<std::pair<BoundRows, BoundRows>> PythonLeaf::call_bound_row_copies(BlockId src,
                                                                               BlockId dst) const {
  const std::string what = called("bound_row_copies");
  std::vector<std::pair<BoundRows, BoundRows>> copies;
  for (const auto [key, pair] :
       dict_of(what, self_.attr("bound_row_copies")(src.value(), dst.value()))) {
    if (!PyTuple_Check(pair.ptr()) || nb::len(pair) != 2) {
      throw InvalidArgument(fmt::format("{} gave {} for {}; accepted: (range, range)", what,
                                        shown(pair), shown(key)));
    }
    copies.emplace_back(rows_of(what, key, pair[0]), rows_of(what, key, pair[1]));
  }
  return copies;
}

}  // namespace kvleaf::python
