#include "leaf_module.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <filesystem>
#include <utility>

#include "kvleaf/cache/leaf_module.h"
#include "kvleaf/leaf/errors.h"

namespace kvleaf::cli {
namespace {

PythonLeaves& python_leaves() {
  static PythonLeaves leaves;
  return leaves;
}

Leaves from_library(const std::string& file, const Leaves& model, std::uint32_t tokens_per_page) {
  // With a slash, so that it is this file and none of a search path. Never closed: the leaves' code
  // is in it.
  const std::string path = std::filesystem::absolute(file).string();
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw InvalidArgument(
        fmt::format("--leaf-module {}: {}; expected a shared library or a Python file "
                    "(.py)",
                    file, dlerror()));
  }
  const auto* module = static_cast<const LeafModule*>(dlsym(library, "kvleaf_leaf_module"));
  if (module == nullptr) {
    throw InvalidArgument(fmt::format(
        "--leaf-module {}: no leaf module in it; expected KVLEAF_LEAF_MODULE(function) of "
        "<kvleaf/cache/leaf_module.h>",
        file));
  }
  if (module->abi != LeafModuleAbi{}) {
    throw InvalidArgument(
        fmt::format("--leaf-module {}: built for another version of kvleaf; expected one built "
                    "with the headers of this "
                    "one",
                    file));
  }
  return module->leaves(model, {.tokens_per_page = tokens_per_page});
}

}  // namespace

void serve_python_modules(PythonLeaves leaves) { python_leaves() = std::move(leaves); }

bool is_python_module(const std::string& file) { return file.ends_with(".py"); }

Leaves module_leaves(const std::string& file, const Leaves& model, std::uint32_t tokens_per_page) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(file, error)) {
    throw InvalidArgument(fmt::format(
        "--leaf-module {}: no such file; expected a shared library or a Python file (.py)", file));
  }
  Leaves leaves;
  if (!is_python_module(file)) {
    leaves = from_library(file, model, tokens_per_page);
  } else if (python_leaves()) {
    leaves = python_leaves()(file, model, tokens_per_page);
  } else {
    throw InvalidArgument(
        fmt::format("--leaf-module {}: there is no Python here to read it", file));
  }
  if (leaves.empty()) {
    throw InvalidArgument(
        fmt::format("--leaf-module {}: it gave no leaf; expected at least one", file));
  }
  for (const Leaf& leaf : leaves) {
    if (leaf == nullptr)
      throw InvalidArgument(fmt::format("--leaf-module {}: one of its leaves is null", file));
  }
  return leaves;
}

}  // namespace kvleaf::cli
