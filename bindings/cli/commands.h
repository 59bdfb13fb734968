// The commands of `kvleaf`. Each declares its arguments on the application and hands back what runs
// it; main parses, runs the one that was asked for, and turns what it throws into an exit code:
//
//   0  done
//   1  the work failed
//   2  the command line or an input is wrong: InvalidArgument, ConfigError, GeometryError
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace kvleaf::cli {

struct Command {
  CLI::App* app = nullptr;         // owned by the root
  std::function<void()> run = {};  // after parsing; prints to stdout, throws
};

Command add_plan(CLI::App& root);    // plan_command.cpp
Command add_leaves(CLI::App& root);  // leaves_command.cpp
Command add_replay(CLI::App& root);  // replay_command.cpp

}  // namespace kvleaf::cli
