#include "hand_over.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "kvleaf/leaf/errors.h"
#include "leaf_module.h"

namespace kvleaf::cli {
namespace {

// Fails in one line, and as a wrong input, where this Python has no kvleaf.
constexpr const char* start = R"(
import sys
try:
    from kvleaf.__main__ import main
except ImportError as error:
    print(f"kvleaf replay: --leaf-module: {sys.executable} has no kvleaf ({error}); expected a Python with "
          "the package, named by KVLEAF_PYTHON", file=sys.stderr)
    sys.exit(2)
sys.exit(main(sys.argv[1:]))
)";

bool asks_for_python(int argc, char** argv) {
  constexpr std::string_view option = "--leaf-module";
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == option && i + 1 < argc && is_python_module(argv[i + 1])) return true;
    if (argument.starts_with(option) && argument.size() > option.size() &&
        argument[option.size()] == '=' &&
        is_python_module(std::string(argument.substr(option.size() + 1)))) {
      return true;
    }
  }
  return false;
}

std::string python() {
  if (const char* named = std::getenv("KVLEAF_PYTHON"); named != nullptr && *named != '\0')
    return named;
  std::error_code error;
  const auto beside =
      std::filesystem::read_symlink("/proc/self/exe", error).parent_path() / "python3";
  return !error && std::filesystem::exists(beside, error) ? beside.string() : "python3";
}

}  // namespace

void hand_over_to_python(int argc, char** argv) {
  if (!asks_for_python(argc, argv)) return;
  std::string program = python();
  std::string flag = "-c";
  std::string code = start;
  std::vector<char*> arguments = {program.data(), flag.data(), code.data()};
  for (int i = 1; i < argc; ++i) arguments.push_back(argv[i]);
  arguments.push_back(nullptr);
  execvp(program.c_str(), arguments.data());
  throw InvalidArgument(fmt::format(
      "--leaf-module: {}: {}; expected a Python with the package kvleaf, named by KVLEAF_PYTHON",
      program, std::strerror(errno)));
}

}  // namespace kvleaf::cli
