"""Checks that includes point down the ladder of layers only.

    leaf < pool < group < cache < bindings        kernels: plain data, beside the ladder
                  group < tests/contract          the leaf contract, which is shipped

A file may include its own layer and those before it. kernels sees none of the ladder; cache and the
bindings see kernels. Prints every include that points up, then `N passed, N failed` (files).
"""

import re
import sys
from pathlib import Path

MAY_INCLUDE = {
    "leaf": {"leaf"},
    "pool": {"leaf", "pool"},
    "kernels": {"kernels"},
    "group": {"leaf", "pool", "group"},
    "cache": {"leaf", "pool", "group", "cache", "kernels"},
    "tests/contract": {"leaf", "pool", "group", "testing"},
    "bindings": {"leaf", "pool", "group", "cache", "kernels", "testing", "kvleaf.h"},
}
SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".c"}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^">]+)[">]')
CUDA_HEADERS = re.compile(r"cooperative_groups/|cub/|cuda/|thrust/")


def wrong_includes(path: Path, layer: str):
    """Yields (line number, header, why) for each include that `layer` may not have."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        match = INCLUDE.match(line)
        if match is None:
            continue
        header = match.group(1)
        if header.startswith("kvleaf/"):
            target = header.split("/")[1]
            if layer == "bindings" and target in ("c", "python", "cli"):
                continue
            if target not in MAY_INCLUDE[layer]:
                yield number, header, f"{layer} sees only {', '.join(sorted(MAY_INCLUDE[layer]))}"
        elif layer == "kernels" and "/" in header and not CUDA_HEADERS.match(header):
            # So that a .cu file builds under any nvcc.
            yield number, header, "kernels sees the standard library and CUDA only"
        elif layer != "bindings" and '"' in line:
            yield number, header, 'write "kvleaf/<layer>/<file>.h"'


def main(root: Path) -> int:
    passed = failed = 0
    for layer in MAY_INCLUDE:
        for path in sorted((root / layer).rglob("*")):
            if path.suffix not in SUFFIXES:
                continue
            wrong = list(wrong_includes(path, layer))
            for number, header, why in wrong:
                print(f"{path.relative_to(root)}:{number}: includes {header}: {why}")
            failed += bool(wrong)
            passed += not wrong
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
