// Where `kvleaf replay --leaf-module FILE.py` runs: in Python, which has the same commands.
#pragma once

namespace kvleaf::cli {

/// Becomes `python3 -m kvleaf` with the same arguments where they ask for a leaf module in Python;
/// returns where they do not. Python: KVLEAF_PYTHON, else the python3 beside this executable, else
/// that of PATH. Throws InvalidArgument where there is none.
void hand_over_to_python(int argc, char** argv);

}  // namespace kvleaf::cli
