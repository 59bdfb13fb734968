"""Runs the README's examples as a user would, and compares what they print with what it says.

    readme.py installed  BUILD SCRATCH COMPILER [FLAG...]   C++, with `meson install`, pkg-config
    readme.py subproject BUILD SCRATCH COMPILER [FLAG...]   C++, with kvleaf as Meson subproject
    readme.py python     BUILD SCRATCH                      Python, with the built package

An example is a code block of the language; a `text` block right after it is its expected output.
Prints `N passed, N failed`.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```\n(?:\s*^```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


class Example(NamedTuple):
    line: int  # in the README
    code: str
    output: str | None


def examples(language: str) -> list[Example]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return [
        Example(text.count("\n", 0, match.start()) + 2, match[2], match[3])
        for match in FENCE.finditer(text)
        if match[1] == language
    ]


def call(*command: str | Path, **options) -> str:
    """What the command prints; raises with everything it said if it fails."""
    done = subprocess.run(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout


def in_installed(build: Path, scratch: Path, compiler: list[str]) -> Callable[[Path], str]:
    image = scratch / "image"
    shutil.rmtree(image, ignore_errors=True)
    call("meson", "install", "-C", build, "--no-rebuild", "--quiet", "--destdir", image)
    found = list(image.rglob("kvleaf.pc"))
    assert len(found) == 1, f"installed kvleaf.pc: {found}"
    environment = dict(os.environ, PKG_CONFIG_PATH=str(found[0].parent))
    flags = call("pkg-config", "--cflags", "--libs", "kvleaf", env=environment).split()
    # None of the source tree's own headers may be what is found.
    assert str(ROOT / "include") not in " ".join(flags), flags

    def run(source: Path) -> str:
        program = source.with_suffix(".installed")
        call(*compiler, "-std=c++20", source, "-o", program, *flags)
        return call(program, env=dict(os.environ, LD_LIBRARY_PATH=str(found[0].parents[1])))

    return run


def in_subproject(build: Path, scratch: Path, compiler: list[str]) -> Callable[[Path], str]:
    project = scratch / "project"
    (project / "subprojects").mkdir(parents=True, exist_ok=True)
    link = project / "subprojects" / "kvleaf"
    if not link.is_symlink():
        link.symlink_to(ROOT)
    (project / "meson.build").write_text(
        "project('user', 'cpp', default_options: ['cpp_std=c++20'])\n"
        "executable('user', 'user.cpp', dependencies: dependency('kvleaf', fallback: 'kvleaf'))\n"
    )
    options = [f"-Dkvleaf:{name}=disabled" for name in ("cuda", "python", "cli", "bench")]

    def run(source: Path) -> str:
        shutil.copyfile(source, project / "user.cpp")
        if not (project / "build" / "build.ninja").exists():
            environment = dict(os.environ, CXX=compiler[0])
            call("meson", "setup", project / "build", project, "-Doptimization=0", "-Ddebug=false",
                 "--force-fallback-for=kvleaf", *options, env=environment)  # fmt: skip
        call("ninja", "-C", project / "build", "user")
        return call(project / "build" / "user")

    return run


def in_python(build: Path, scratch: Path, compiler: list[str]) -> Callable[[Path], str]:
    return lambda source: call(sys.executable, source)


WAYS = {
    "installed": (in_installed, "cpp"),
    "subproject": (in_subproject, "cpp"),
    "python": (in_python, "python"),
}


def main(way: str, build: Path, scratch: Path, compiler: list[str]) -> int:
    prepare, language = WAYS[way]
    scratch.mkdir(parents=True, exist_ok=True)
    run = prepare(build, scratch, compiler)
    failed = 0
    found = examples(language)
    for number, example in enumerate(found):
        source = scratch / f"readme_{number}.{language.replace('python', 'py')}"
        source.write_text(f"{example.code}", encoding="utf-8")
        try:
            output = run(source)
            if example.output is not None and output != example.output:
                raise RuntimeError(f"printed:\n{output}but the README says:\n{example.output}")
        except RuntimeError as error:
            failed += 1
            print(f"README.md:{example.line}: {error}")
    if not found:
        print(f"README.md has no {language} example")
        failed = 1
    print(f"{len(found) - min(failed, len(found))} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
