"""Builds the example as a user of the installed library would, and runs it.

installed.py BUILD SCRATCH COMPILER
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path


def main(build: Path, scratch: Path, compiler: str) -> int:
    image = scratch / "image"
    shutil.rmtree(image, ignore_errors=True)
    subprocess.run(
        ["meson", "install", "-C", build, "--no-rebuild", "--quiet", "--destdir", image], check=True
    )
    found = list(image.rglob("kvleaf_c.pc"))
    assert len(found) == 1, f"installed kvleaf_c.pc: {found}"
    environment = dict(os.environ, PKG_CONFIG_PATH=str(found[0].parent))
    flags = subprocess.run(["pkg-config", "--cflags", "--libs", "kvleaf_c"], env=environment,
                           check=True, capture_output=True, text=True).stdout.split()  # fmt: skip
    # C alone: nothing of C++ is linked by its users, and nothing of the source tree is seen.
    assert "-lkvleaf_c" in flags and "-lstdc++" not in flags, flags
    assert str(Path(__file__).resolve().parents[2] / "bindings") not in " ".join(flags), flags
    program = scratch / "embed_in_c"
    source = Path(__file__).with_name("embed_in_c.c")
    strict = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *strict, source, "-o", program, *flags], check=True)
    environment = dict(os.environ, LD_LIBRARY_PATH=str(found[0].parents[1]))
    return subprocess.run([program], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
