// The extension module. Users import the package kvleaf, which names what is public.
#include <nanobind/nanobind.h>

#include "bind.h"
#include "bind_tools.h"

namespace {

namespace nb = nanobind;

// inspect.signature asks a call's type for __signature__. nanobind's types of calls are closed to
// Python, but they are this package's own (NB_DOMAIN), so it may add to them.
void set_attribute(PyTypeObject* type, const char* name, nb::handle value) {
  if (PyDict_SetItemString(type->tp_dict, name, value.ptr()) != 0) throw nb::python_error();
  PyType_Modified(type);
}

void tell_signatures(nb::handle of_call, nb::handle of_bound_call) {
  const nb::object module = nb::module_::import_("kvleaf._kvleaf");
  const nb::object method = module.attr("AccessPattern").attr("reach");
  const nb::object bound = method.attr("__get__")(module.attr("AccessPattern").attr("full")());
  set_attribute(Py_TYPE(nb::object(module.attr("plan_geometry")).ptr()), "__signature__", of_call);
  set_attribute(Py_TYPE(method.ptr()), "__signature__", of_call);
  set_attribute(Py_TYPE(bound.ptr()), "__signature__", of_bound_call);
}

}  // namespace

NB_MODULE(_kvleaf, module) {
  module.doc() = "kvleaf in C++. Import `kvleaf`.";
  // What is left when an interpreter ends is Python's own order of dying, not a leak of ours; tests
  // turn the warnings on to see that there is none.
  nanobind::set_leak_warnings(false);
  module.def(
      "_set_leak_warnings", [](bool on) { nanobind::set_leak_warnings(on); }, nanobind::arg("on"));
  module.def("_tell_signatures", &tell_signatures, nanobind::arg("of_call"),
             nanobind::arg("of_bound_call"));
  kvleaf::python::bind_errors(module);
  kvleaf::python::bind_leaf(module);
  kvleaf::python::bind_pool(module);
  kvleaf::python::bind_group(module);
  kvleaf::python::bind_planner(module);
  kvleaf::python::bind_cache(module);
  kvleaf::python::bind_kernels(module);
  kvleaf::python::bind_testing(module);
  kvleaf::python::bind_command(module);
  kvleaf::python::bind_tensor(module);
  kvleaf::python::bind_arena(module);
  kvleaf::python::bind_kv_cache(module);
}
