"""Runs the examples of the README and of docs/ as a user would, and compares what they print with
what the page says.

    readme.py installed  BUILD SCRATCH COMPILER [FLAG...]   C++, with `meson install`, pkg-config
    readme.py c          BUILD SCRATCH COMPILER [FLAG...]   C, the same
    readme.py subproject BUILD SCRATCH COMPILER [FLAG...]   the README's C++, as Meson subproject
    readme.py python     BUILD SCRATCH                      Python, with the built package
    readme.py wheel      BUILD SCRATCH COMPILER             the same, with a wheel alone

An example is a code block of the language, a whole program; a `text` block right after it is its
expected output. Prints `N passed, N failed`.
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


# Their blocks are the files of one project, and a test of their own takes them together.
OWN_TEST = {"docs/new-leaf-kind.md": "tests/support/new_leaf_kind.py"}


class Example(NamedTuple):
    page: str
    line: int  # in the page
    code: str
    output: str | None


def pages(way: str) -> list[str]:
    if way == "subproject":
        return ["README.md"]
    found = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))]
    return ["README.md"] + [page for page in found if page not in OWN_TEST]


def examples(language: str, way: str) -> list[Example]:
    found = []
    for page in pages(way):
        text = (ROOT / page).read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            # A block that shows a file of the repository shows what other tests build.
            if match[1] == language and not match[2].startswith("--8<--"):
                line = text.count("\n", 0, match.start()) + 2
                found.append(Example(page, line, match[2], match[3]))
    return found


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


def in_installed(
    build: Path, scratch: Path, compiler: list[str], language: str = "cpp"
) -> Callable[[Path], str]:
    image = scratch / "image"
    shutil.rmtree(image, ignore_errors=True)
    call("meson", "install", "-C", build, "--no-rebuild", "--quiet", "--destdir", image)
    found = list(image.rglob("kvleaf.pc"))
    assert len(found) == 1, f"installed kvleaf.pc: {found}"
    environment = dict(os.environ, PKG_CONFIG_PATH=str(found[0].parent))
    package = "kvleaf_c" if language == "c" else "kvleaf"
    flags = call("pkg-config", "--cflags", "--libs", package, env=environment).split()
    # None of the source tree's own headers may be what is found.
    for folder in (ROOT / "include", ROOT / "bindings"):
        assert str(folder) not in " ".join(flags), flags
    standard = ["-std=c99", "-pedantic", "-Werror"] if language == "c" else ["-std=c++20"]

    def run(source: Path) -> str:
        program = source.with_suffix(".installed")
        call(*compiler, *standard, source, "-o", program, *flags)
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


def in_installed_c(build: Path, scratch: Path, compiler: list[str]) -> Callable[[Path], str]:
    return in_installed(build, scratch, compiler, "c")


def in_python(build: Path, scratch: Path, compiler: list[str]) -> Callable[[Path], str]:
    return lambda source: call(sys.executable, source)


def in_wheel(build: Path, scratch: Path, compiler: list[str]) -> Callable[[Path], str]:
    """Its own build, little optimised and kept; pip fetches what it is built with."""
    shutil.rmtree(scratch / "dist", ignore_errors=True)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pip = ("-m", "pip", "--disable-pip-version-check", "--quiet")
    call(
        sys.executable, *pip, "wheel", ROOT, "--no-deps", "--wheel-dir", scratch / "dist",
        f"--config-settings=build-dir={scratch / 'build'}",
        "--config-settings=setup-args=-Doptimization=1",
        env=dict(clean, CXX=compiler[0]),
    )  # fmt: skip
    wheels = list((scratch / "dist").glob("kvleaf-*.whl"))
    assert len(wheels) == 1, f"wheels: {wheels}"
    call(sys.executable, "-m", "venv", "--clear", scratch / "empty")
    python = scratch / "empty" / "bin" / "python"
    call(python, *pip, "install", wheels[0], env=clean)
    call(scratch / "empty" / "bin" / "kvleaf", "--version", env=clean)
    return lambda source: call(python, source, env=clean)


WAYS = {
    "installed": (in_installed, "cpp"),
    "c": (in_installed_c, "c"),
    "subproject": (in_subproject, "cpp"),
    "python": (in_python, "python"),
    "wheel": (in_wheel, "python"),
}


def main(way: str, build: Path, scratch: Path, compiler: list[str]) -> int:
    prepare, language = WAYS[way]
    scratch.mkdir(parents=True, exist_ok=True)
    run = prepare(build, scratch, compiler)
    failed = 0
    found = examples(language, way)
    for number, example in enumerate(found):
        source = scratch / f"example_{number}.{language.replace('python', 'py')}"
        source.write_text(f"{example.code}", encoding="utf-8")
        try:
            output = run(source)
            if example.output is not None and output != example.output:
                raise RuntimeError(f"printed:\n{output}but the page says:\n{example.output}")
        except RuntimeError as error:
            failed += 1
            print(f"{example.page}:{example.line}: {error}")
    if not found:
        print(f"no page has a {language} example")
        failed = 1
    for page, test in OWN_TEST.items():
        if (ROOT / page).exists() and not (ROOT / test).exists():
            print(f"{page} has no {test}")
            failed += 1
    print(f"{len(found) - min(failed, len(found))} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
