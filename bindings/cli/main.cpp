#include <exception>

#include "commands.h"
#include "hand_over.h"
#include "kvleaf/leaf/errors.h"

int main(int argc, char** argv) {
  try {
    kvleaf::cli::hand_over_to_python(argc, argv);
  } catch (const kvleaf::InvalidArgument& error) {
    return kvleaf::cli::wrong_input("kvleaf replay", error.what());
  }
  return kvleaf::cli::run_command(argc, argv);
}
