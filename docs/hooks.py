"""What mkdocs does for this site beside its pages: the C++ reference, and the tests of each
guarantee.

The reference is made by doxygen from the headers that are installed, into files of the site, so
that links to it are checked like all others.
"""

import importlib.util
import logging
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
log = logging.getLogger("mkdocs.kvleaf")

MAIN_PAGE = """/** @mainpage The C++ reference

Each layer has one front header, and sees nothing of the layers after it in this list:

- kvleaf/leaf/leaf.h: what a leaf is, and the leaf kinds
- kvleaf/pool/pool.h: one pool of bytes for all leaves
- kvleaf/group/group.h: requests, prefix reuse, steps
- kvleaf/cache/cache.h: the whole cache of one model
- kvleaf/kernels/kernels.h: the loops over bytes, beside the ladder

kvleaf/kvleaf.h brings them all. Everything is in namespace kvleaf. */
"""

DOXYFILE = """
PROJECT_NAME = kvleaf
PROJECT_BRIEF = "Caches of hybrid language models: every kind of memory a leaf, one pool of bytes"
INPUT = {inputs}
STRIP_FROM_PATH = {include}
STRIP_FROM_INC_PATH = {include}
INCLUDE_PATH = {include}
FILE_PATTERNS = *.h *.dox
EXTENSION_MAPPING = h=C++ dox=C++
INPUT_FILTER = "python3 {filter}"
FILTER_SOURCE_FILES = NO
OUTPUT_DIRECTORY = {output}
HTML_OUTPUT = html
EXTRACT_ALL = YES
HIDE_UNDOC_RELATIONS = YES
SORT_MEMBER_DOCS = NO
BRIEF_MEMBER_DESC = YES
JAVADOC_AUTOBRIEF = YES
GENERATE_LATEX = NO
SOURCE_BROWSER = YES
VERBATIM_HEADERS = YES
EXCLUDE_SYMBOLS = kvleaf::kernels::detail*
HTML_TIMESTAMP = NO
HAVE_DOT = NO
QUIET = YES
WARNINGS = NO
"""


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def named(nav) -> set[str]:
    if isinstance(nav, str):
        return {nav}
    values = nav.values() if isinstance(nav, dict) else nav
    return set().union(*map(named, values)) if values else set()


def on_config(config):
    """Pages that the menu does not name come under "How to", by their title."""
    (how_to,) = (entry["How to"] for entry in config.nav if "How to" in entry)
    for path in sorted((ROOT / "docs").rglob("*.md")):
        name = str(path.relative_to(ROOT / "docs"))
        if name not in named(config.nav):
            title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
            how_to.append({title: name})
    return config


def on_files(files, config):
    """Adds the C++ reference to the site."""
    doxygen = shutil.which("doxygen")
    if doxygen is None:
        log.warning("doxygen is not installed: no C++ reference")
        return files
    include = ROOT / "include"
    headers = load(include / "install_headers.py").public_headers()
    with tempfile.TemporaryDirectory() as folder:
        main_page = Path(folder) / "main.dox"
        main_page.write_text(MAIN_PAGE, encoding="utf-8")
        inputs = [main_page, *(include / header for header in headers)]
        text = DOXYFILE.format(
            inputs=" ".join(f'"{path}"' for path in inputs),
            include=include,
            filter=ROOT / "docs/doxygen_filter.py",
            output=folder,
        )
        subprocess.run([doxygen, "-"], input=text, text=True, check=True)
        for path in sorted((Path(folder) / "html").rglob("*")):
            if path.is_file():
                name = f"reference/cpp/{path.relative_to(Path(folder) / 'html')}"
                files.append(File.generated(config, name, content=path.read_bytes()))
    return files


def on_page_markdown(markdown, page, config, files):
    """Beside each guarantee, the tests that hold it."""
    if page.file.src_uri != "guarantees.md":
        return markdown
    tests = load(ROOT / "tests/support/guarantees.py").tests_by_case(ROOT)

    def row(match):
        case, text = match[1], match[2]
        if not tests.get(case):
            log.warning("guarantee %s has no test", case)
        shown = "<br>".join(f"`{place}`" for place in tests.get(case, [])[:3])
        return f"| {case} | {text} | {shown} |"

    markdown = re.sub(
        r"^\| case \| what holds \|$", "| case | what holds | tests |", markdown, flags=re.M
    )
    markdown = re.sub(r"^\|---\|---\|$", "|---|---|---|", markdown, flags=re.M)
    return re.sub(r"^\| ([A-Z]-\d\d) \| (.*) \|$", row, markdown, flags=re.M)
