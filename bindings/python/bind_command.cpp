// The command `kvleaf` inside Python, so that it can serve leaf kinds written in Python.
// `python -m kvleaf` calls it.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <fmt/format.h>

#include <string>
#include <vector>

#include "bind_tools.h"
#include "convert.h"
#ifdef KVLEAF_COMMAND
#include "commands.h"
#include "leaf_module.h"
#endif

namespace kvleaf::python {
namespace {

using namespace nb::literals;

#ifdef KVLEAF_COMMAND
/// What the file's function gives, as leaves. What it raises is told in one line, with its type.
Leaves leaves_of(const nb::object& load, const std::string& file, const Leaves& model,
                 std::uint32_t tokens_per_page) {
  std::string why;
  try {
    Leaves leaves;
    for (const nb::handle made : nb::iter(load(file, model, tokens_per_page))) {
      Leaf leaf;
      if (made.is_none() || !nb::try_cast(made, leaf)) {
        throw InvalidArgument(
            fmt::format("--leaf-module {}: leaves() gave a {}; it must give KVLeafRegions", file,
                        class_name(made)));
      }
      leaves.push_back(std::move(leaf));
    }
    return leaves;
  } catch (nb::python_error& error) {
    why = fmt::format("{}: {}", nb::str(error.type().attr("__name__")).c_str(),
                      nb::str(error.value()).c_str());
  }
  throw InvalidArgument(fmt::format("--leaf-module {}: {}", file, why));
}

int command(std::vector<std::string> arguments, const nb::object& load) {
  cli::serve_python_modules(
      [&load](const std::string& file, const Leaves& model, std::uint32_t tokens_per_page) {
        return leaves_of(load, file, model, tokens_per_page);
      });
  std::string name = "kvleaf";
  std::vector<char*> argv = {name.data()};
  for (std::string& argument : arguments) argv.push_back(argument.data());
  const int code = cli::run_command(static_cast<int>(argv.size()), argv.data());
  cli::serve_python_modules({});
  return code;
}
#else
int command(const std::vector<std::string>&, const nb::object&) {
  throw InvalidArgument("this package was built without the command: CLI11 was not found");
}
#endif

}  // namespace

void bind_command(nb::module_& m) {
  m.def("_command", &command, "arguments"_a, "load"_a,
        nb::sig("def _command(arguments: list[str], load: collections.abc.Callable[[str, "
                "list[KVLeafRegion], "
                "int], collections.abc.Iterable[KVLeafRegion]]) -> int"));
}

}  // namespace kvleaf::python
