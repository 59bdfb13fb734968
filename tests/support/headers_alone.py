"""Compiles every header alone, twice included, warnings as errors, with each compiler given.

    python headers_alone.py ROOT SCRATCH COMPILER...

The list of headers is read from the layers' folders. Goes through ccache where there is one, so a
run after which nothing changed costs little. Prints what does not compile, then `N passed, N
failed`.
"""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LAYERS = ["leaf", "pool", "kernels", "group", "cache"]
FLAGS = ["-std=c++20", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror", "-O0", "-c"]


def all_headers(root: Path) -> list[str]:
    """As they are included; parts of a layer that are not installed too."""
    headers = ["kvleaf/kvleaf.h"]
    for layer in LAYERS:
        paths = (root / layer).rglob("*.h")
        headers += sorted(f"kvleaf/{path.relative_to(root)}" for path in paths)
    contract = (root / "tests/contract").glob("*.h")
    return headers + sorted(f"kvleaf/testing/{path.name}" for path in contract)


def compile_alone(root: Path, scratch: Path, compiler: str, header: str) -> str | None:
    """Nothing, or what the compiler says."""
    source = scratch / f"{header.replace('/', '_')}.{Path(compiler).name}.cpp"
    text = f'#include "{header}"\n#include "{header}"\n'
    if not source.exists() or source.read_text() != text:
        source.write_text(text)
    result = source.with_suffix(".o")
    command = [compiler, *FLAGS, f"-I{root / 'include'}", str(source), "-o", str(result)]
    if ccache := shutil.which("ccache"):
        command.insert(0, ccache)
    done = subprocess.run(command, capture_output=True, text=True)
    return None if done.returncode == 0 else f"{' '.join(command)}\n{done.stderr}"


def main(root: Path, scratch: Path, compilers: list[str]) -> int:
    scratch.mkdir(parents=True, exist_ok=True)
    work = [(header, compiler) for compiler in compilers for header in all_headers(root)]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        results = list(threads.map(lambda w: compile_alone(root, scratch, w[1], w[0]), work))
    failed = 0
    for (header, compiler), message in zip(work, results):
        if message:
            failed += 1
            print(f"{header} does not compile alone with {compiler}:\n{message}")
    print(f"{len(work) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
