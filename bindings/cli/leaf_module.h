// --leaf-module FILE: leaf kinds from elsewhere. A shared library is loaded here; a Python file is
// served where Python is: by `python -m kvleaf`, which runs these very commands, and which the
// executable hands over to.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "kvleaf/leaf/leaf.h"

namespace kvleaf::cli {

/// The leaves that a Python file gives for a model's.
using PythonLeaves = std::function<Leaves(const std::string& file, const Leaves& model,
                                          std::uint32_t tokens_per_page)>;

/// Set once, before commands run; without one, Python files are refused.
void serve_python_modules(PythonLeaves leaves);

bool is_python_module(const std::string& file);

/// Throws InvalidArgument, naming the file, where it is no module, is of another version of this
/// library, or gives no leaf.
Leaves module_leaves(const std::string& file, const Leaves& model, std::uint32_t tokens_per_page);

}  // namespace kvleaf::cli
