// The parts of the module, one file each, in the order of the layers.
#pragma once

#include <nanobind/nanobind.h>

namespace kvleaf::python {

void bind_errors(nanobind::module_& module);
void bind_leaf(nanobind::module_& module);
void bind_pool(nanobind::module_& module);
void bind_group(nanobind::module_& module);
void bind_planner(nanobind::module_& module);
void bind_cache(nanobind::module_& module);
void bind_kernels(nanobind::module_& module);
void bind_tensor(nanobind::module_& module);
void bind_arena(nanobind::module_& module);
void bind_kv_cache(nanobind::module_& module);

}  // namespace kvleaf::python
