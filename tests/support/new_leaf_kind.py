"""Kinds of memory outside the project, as their author would build, check and serve them.

    new_leaf_kind.py cpp BUILD SCRATCH COMPILER [FLAG...]   the example, with `meson install`
    new_leaf_kind.py python BUILD SCRATCH                   the same, with the built package
    new_leaf_kind.py tutorial BUILD SCRATCH                 docs/new-leaf-kind.md, block by block

Prints `N passed, N failed`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/new_leaf_kind"
TRACE = ROOT / "tests/data/traces/mooncake_conversation.jsonl.gz"
MODELS = ROOT / "tests/data/models"


def call(*command: str | Path, **options) -> str:
    """What the command prints; raises with everything it said if it fails."""
    done = subprocess.run(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout


def short(path: Path, most: int = 80) -> None:
    lines = path.read_text(encoding="utf-8").count("\n")
    if lines >= most:
        raise RuntimeError(f"{path} has {lines} lines; a kind takes fewer than {most}")


def replay(
    module: Path, model: str, budget: str, expected: set[str], environment: dict[str, str]
) -> None:
    """Serves a real trace with the module's leaves, every byte checked."""
    report = json.loads(
        call("kvleaf", "replay", TRACE, "--model", MODELS / f"{model}.json", "--budget", budget,
             "--limit", "40", "--verify", "--json", "--leaf-module", module, env=environment)
    )  # fmt: skip
    if not expected <= set(report["leaves"]):
        raise RuntimeError(f"expected the leaves {expected}, served were {set(report['leaves'])}")
    for leaf in expected:
        if report["leaves"][leaf]["live"] == 0:
            raise RuntimeError(f"leaf {leaf} never held a byte")
    if report["refused"] or not report["hit_tokens"]:
        raise RuntimeError(f"refused {report['refused']}, hit tokens {report['hit_tokens']}")


def in_cpp(build: Path, scratch: Path, compiler: list[str]) -> None:
    image = scratch / "image"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    call("meson", "install", "-C", build, "--no-rebuild", "--quiet", "--destdir", image)
    (config,) = image.rglob("kvleaf.pc")
    (command,) = image.rglob("bin/kvleaf")
    environment = dict(
        os.environ,
        PKG_CONFIG_PATH=str(config.parent),
        LD_LIBRARY_PATH=str(config.parents[1]),
        PATH=f"{command.parent}:{os.environ['PATH']}",
        CXX=compiler[0],
        CXXFLAGS=" ".join(compiler[1:]),
        LDFLAGS=" ".join(compiler[1:]),
    )
    shutil.copytree(EXAMPLE, scratch / "project")
    project = scratch / "project/build"
    call("meson", "setup", project, scratch / "project", "-Doptimization=0", "-Ddebug=false",
         "-Db_lundef=false", env=environment)  # fmt: skip
    call("ninja", "-C", project, env=environment)
    call(project / "check_leaves", env=environment)
    for header in EXAMPLE.glob("*.h"):
        short(header)
    kinds = {"landmarks", "dilated"}
    replay(
        project / "new_leaf_kinds.so", "gemma-3-27b", "64GiB", kinds | {"window_1024"}, environment
    )


def in_python(build: Path, scratch: Path, compiler: list[str]) -> None:
    environment = dict(os.environ, KVLEAF_PYTHON=sys.executable)
    folder = EXAMPLE / "python"
    call(
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        folder,
        env=environment,
        cwd=folder,
    )
    source = (folder / "leaf_kinds.py").read_text(encoding="utf-8")
    for kind in re.split(r"^(?=class )", source, flags=re.MULTILINE)[1:]:
        if kind.count("\n") >= 80:
            raise RuntimeError(f"{kind.splitlines()[0]} takes 80 lines or more")
    refusals(scratch, environment)
    kinds = {"retrieval", "memory"}
    replay(folder / "leaf_kinds.py", "lfm2-1.2b", "4GiB", kinds | {"full"}, environment)


WRONG = {  # a file, and what is said of it
    "syntax.py": ("def leaves(:", "SyntaxError"),
    "nameless.py": ("", "expected a function leaves(model_leaves, tokens_per_page)"),
    "raises.py": ("def leaves(model, tokens):\n    return 1 // 0", "ZeroDivisionError"),
    "nothing.py": ("def leaves(model, tokens):\n    return []", "it gave no leaf"),
    "others.py": ("def leaves(model, tokens):\n    return [7]", "leaves() gave a int"),
    "library.so": ("not an object file", "expected a shared library or a Python file (.py)"),
}


def refusals(scratch: Path, environment: dict[str, str]) -> None:
    """What is no leaf module is refused in one line that names the file, with exit code 2."""
    scratch.mkdir(parents=True, exist_ok=True)
    for name, (text, why) in {**WRONG, "absent.py": (None, "no such file")}.items():
        if text is not None:
            (scratch / name).write_text(text + "\n", encoding="utf-8")
        command = [
            "kvleaf",
            "replay",
            TRACE,
            "--model",
            MODELS / "llama-3.1-70b.json",
            "--leaf-module",
        ]
        done = subprocess.run([*map(str, command), str(scratch / name)], env=environment, text=True,
                              capture_output=True)  # fmt: skip
        line = done.stderr.strip()
        if (
            done.returncode != 2
            or "\n" in line
            or name not in line
            or why not in line
            or done.stdout
        ):
            raise RuntimeError(
                f"{name}: exit code {done.returncode}, said {line!r}; expected {why!r}"
            )


# A block, and the file's name where the line before it is `NAME`:
FENCE = re.compile(r"(?:^`([\w.]+)`:\n\n)?^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def tutorial(build: Path, scratch: Path, compiler: list[str]) -> None:
    """Each block in turn: one with a name becomes that file, `console` runs what stands behind `$`,
    and what it prints is compared; `…` stands for anything."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    environment = dict(os.environ, KVLEAF_PYTHON=sys.executable)
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    shutil.copyfile(TRACE, scratch / "trace.jsonl.gz")
    shutil.copyfile(MODELS / "gemma-3-27b.json", scratch / "model.json")
    text = (ROOT / "docs/new-leaf-kind.md").read_text(encoding="utf-8")
    ran = 0
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        name, language, body = match.groups()
        if language == "python" and name:
            (scratch / name).write_text(body, encoding="utf-8")
        elif language == "console":
            ran += 1
            for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
                command, _, expected = part.partition("\n")
                done = subprocess.run(command, shell=True, cwd=scratch, env=environment, text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
                pattern = ".*".join(map(re.escape, expected.strip().split("…")))
                if not re.fullmatch(pattern, done.stdout.strip(), re.DOTALL):
                    raise RuntimeError(
                        f"docs/new-leaf-kind.md:{line}: $ {command}\nprinted\n{done.stdout}\n"
                        f"but the page says\n{expected}"
                    )
    if not ran:
        raise RuntimeError("docs/new-leaf-kind.md runs nothing")


WAYS = {"cpp": in_cpp, "python": in_python, "tutorial": tutorial}


def main(way: str, build: Path, scratch: Path, compiler: list[str]) -> int:
    try:
        WAYS[way](build, scratch, compiler)
    except RuntimeError as error:
        print(error)
        print("0 passed, 1 failed")
        return 1
    print("1 passed, 0 failed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
