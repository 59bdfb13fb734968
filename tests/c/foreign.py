"""Builds foreign.rs against the C library and runs it.

foreign.py RUSTC LIBRARY_FOLDER SCRATCH
"""

import os
import subprocess
import sys
from pathlib import Path


def main(rustc: str, library: Path, scratch: Path) -> int:
    scratch.mkdir(parents=True, exist_ok=True)
    program = scratch / "foreign"
    source = Path(__file__).with_name("foreign.rs")
    subprocess.run([rustc, "--edition=2021", "-L", library, "-o", program, source], check=True)
    environment = dict(os.environ, LD_LIBRARY_PATH=str(library))
    return subprocess.run([program], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
