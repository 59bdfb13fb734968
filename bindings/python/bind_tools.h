// What the module has beside the library's layers: the leaf contract, and the command.
#pragma once

#include <nanobind/nanobind.h>

namespace kvleaf::python {

void bind_testing(nanobind::module_& module);
void bind_command(nanobind::module_& module);

}  // namespace kvleaf::python
