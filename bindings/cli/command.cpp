#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "commands.h"
#include "kvleaf/leaf/errors.h"

namespace kvleaf::cli {
namespace {

enum ExitCode : int { done = 0, failed = 1, wrong = 2 };

/// One line, whatever the error says.
int report(const std::string& command, std::string what, ExitCode code) {
  std::ranges::replace(what, '\n', ' ');
  fmt::print(stderr, "{}: {}\n", command, what);
  return code;
}

int run(const Command& command) {
  const std::string name = "kvleaf " + command.app->get_name();
  try {
    command.run();
    // What was printed into a full disk or a closed pipe was not printed.
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
      return report(name, "standard output cannot be written", failed);
    return done;
  } catch (const ConfigError& error) {
    return report(name, error.what(), wrong);
  } catch (const InvalidArgument& error) {
    return report(name, error.what(), wrong);
  } catch (const GeometryError& error) {
    return report(name, error.what(), wrong);
  } catch (const std::exception& error) {
    return report(name, error.what(), failed);
  }
}

}  // namespace

int wrong_input(const std::string& command, const std::string& what) {
  return report(command, what, wrong);
}

int run_command(int argc, char** argv) {
  CLI::App root(
      "The caches of hybrid language models: what a model keeps, how a budget of memory is shared, "
      "and what a trace of requests makes of it.",
      "kvleaf");
  root.set_version_flag("--version", "kvleaf " KVLEAF_VERSION);
  root.require_subcommand(1);
  root.footer("kvleaf COMMAND --help tells each command's arguments.");
  const std::vector<Command> commands = {add_leaves(root), add_plan(root), add_replay(root)};
  try {
    root.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return root.exit(error);  // --help, --version
    const std::vector<CLI::App*> chosen = root.get_subcommands();
    if (chosen.empty()) {
      std::vector<std::string> names;
      for (const Command& command : commands) names.push_back(command.app->get_name());
      return report(
          "kvleaf",
          fmt::format("{}; expected a command: {} (kvleaf --help tells more)",
                      argc > 1 ? fmt::format("\"{}\" is no command", argv[1]) : "no command",
                      fmt::join(names, ", ")),
          wrong);
    }
    const std::string name = "kvleaf " + chosen[0]->get_name();
    return report(name, fmt::format("{} ({} --help tells what is accepted)", error.what(), name),
                  wrong);
  }
  const auto asked =
      std::ranges::find_if(commands, [](const Command& command) { return command.app->parsed(); });
  return run(*asked);
}

}  // namespace kvleaf::cli
