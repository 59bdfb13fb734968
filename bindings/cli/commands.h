// The commands of `kvleaf`. Each declares its arguments on the application and hands back what runs
// it; run_command parses, runs the one that was asked for, and turns what it throws into an exit
// code:
//
//   0  done
//   1  the work failed
//   2  the command line or an input is wrong: InvalidArgument, ConfigError, GeometryError
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

namespace kvleaf::cli {

struct Command {
  CLI::App* app = nullptr;         // owned by the root
  std::function<void()> run = {};  // after parsing; prints to stdout, throws
};

/// Parses the command line and runs the command that it asks for; the exit code.
int run_command(int argc, char** argv);
/// Says in one line what is wrong with an input; the exit code.
int wrong_input(const std::string& command, const std::string& what);

Command add_plan(CLI::App& root);    // plan_command.cpp
Command add_leaves(CLI::App& root);  // leaves_command.cpp
Command add_replay(CLI::App& root);  // replay_command.cpp

}  // namespace kvleaf::cli
