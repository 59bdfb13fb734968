// One Python exception for each C++ one, named alike. KVError is the base of all; each is also what
// a Python programmer would catch without knowing kvleaf.
#include <nanobind/stl/string.h>

#include <exception>
#include <string>
#include <type_traits>

#include "bind.h"
#include "kvleaf/leaf/device.h"
#include "kvleaf/leaf/errors.h"

namespace kvleaf::python {

namespace nb = nanobind;

namespace {

template <class Error>
void translate(const std::exception_ptr& thrown, void* type) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    nb::object raised = nb::borrow(static_cast<PyObject*>(type))(error.what());
    if constexpr (std::is_same_v<Error, GeometryError>) {
      raised.attr("least_budget") = error.least_budget;
      raised.attr("blamed_leaf") = error.blamed_leaf;
    }
    PyErr_SetObject(static_cast<PyObject*>(type), raised.ptr());
  }
}

template <class Error>
nb::object bind(nb::module_& module, const char* name, nb::handle base, nb::handle builtin,
                const char* doc) {
  const std::string path = std::string("kvleaf._kvleaf.") + name;
  nb::object type = nb::steal(
      PyErr_NewExceptionWithDoc(path.c_str(), doc, nb::make_tuple(base, builtin).ptr(), nullptr));
  if (!type.is_valid()) throw nb::python_error();
  module.attr(name) = type;
  nb::register_exception_translator(translate<Error>,
                                    type.ptr());  // the module keeps the type alive
  return type;
}

}  // namespace

void bind_errors(nb::module_& module) {
  nb::object base = nb::steal(PyErr_NewExceptionWithDoc(
      "kvleaf._kvleaf.KVError",
      "Base of all errors of this library. Whoever raises one has changed nothing.",
      PyExc_Exception, nullptr));
  module.attr("KVError") = base;
  nb::register_exception_translator(translate<KVError>, base.ptr());

  // A translator that is registered later is asked first, so the base comes before those derived
  // from it.
  bind<InvalidArgument>(module, "InvalidArgument", base, PyExc_ValueError,
                        "A value that no call with these arguments could accept.");
  nb::object geometry_error = bind<GeometryError>(
      module, "GeometryError", base, PyExc_ValueError,
      "Pages that cannot be tiled in the budget. least_budget: bytes that would start, "
      "0 if none would; blamed_leaf: the leaf that is in the way.");
  geometry_error.attr("least_budget") = 0;
  geometry_error.attr("blamed_leaf") = "";
  bind<PoolExhausted>(
      module, "PoolExhausted", base, PyExc_MemoryError,
      "Memory that is not there now. Wait, preempt or refuse; nothing has changed.");
  bind<BlockError>(
      module, "BlockError", base, PyExc_ValueError,
      "A block that the call may not touch: null, foreign, free already, of another leaf.");
  bind<InvariantError>(module, "InvariantError", base, PyExc_RuntimeError,
                       "A broken equation: a bug. The object refuses all further work.");
  bind<RequestError>(
      module, "RequestError", base, PyExc_ValueError,
      "A request that is unknown, known already, in the wrong state, or a length that it "
      "cannot have.");
  bind<StepError>(
      module, "StepError", base, PyExc_ValueError,
      "A step that was not begun, was settled already, or is not the oldest one in flight.");
  bind<PlanShapeError>(module, "PlanShapeError", base, PyExc_ValueError,
                       "A batch or array whose shape does not fit what it is for.");
  bind<DeviceError>(module, "DeviceError", base, PyExc_RuntimeError,
                    "A CUDA device that is not there, or what its runtime reports.");
  bind<ConfigError>(
      module, "ConfigError", base, PyExc_ValueError,
      "A model configuration that cannot be read: names the key and what is accepted.");
}

}  // namespace kvleaf::python
