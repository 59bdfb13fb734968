"""Checks docs/ and the README without building the site.

    documentation.py ROOT SCRATCH

Links between pages and to files and headings lead somewhere, every guarantee has a test that names
it, pictures are what their scripts draw, and no page names what is not in the repository. Prints
what is wrong, then `N passed, N failed`.
"""

import re
import subprocess
import sys
from pathlib import Path

from guarantees import tests_by_case

LINK = re.compile(r"(?<!`)!?\[[^\]]*\]\(([^)\s]+)\)")
SNIPPET = re.compile(r'^--8<-- "([^"]+)"$', re.MULTILINE)
PICTURES = {"pictures.py": ["reach.svg", "joint_hit.svg"]}
MADE_BY_MKDOCS = ("reference/cpp/",)


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """As mkdocs makes them of headings."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", without_code(path.read_text("utf-8")), re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", heading.lower()).strip()
        found.add(re.sub(r"[-\s]+", "-", words))
    return found


def broken_links(root: Path, page: Path):
    for target in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target) or path.startswith(MADE_BY_MKDOCS):
            continue
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            yield f"links to {target}, which is not there"
        elif anchor and anchor not in anchors(file):
            yield f"links to {target}, a heading that is not there"
    for file in SNIPPET.findall(page.read_text(encoding="utf-8")):
        if not (root / file).exists():
            yield f"shows {file}, which is not there"


def guarantees_without_test(root: Path):
    tests = tests_by_case(root)
    text = (root / "docs/guarantees.md").read_text(encoding="utf-8")
    cases = re.findall(r"^\| ([A-Z]-\d\d) \|", text, re.MULTILINE)
    for case in cases:
        if case not in tests:
            yield f"docs/guarantees.md: {case} has no test that names it"
    if len(cases) < 100 or len(set(cases)) != len(cases):
        yield f"docs/guarantees.md: {len(cases)} cases, {len(set(cases))} of them different"


def old_pictures(root: Path, scratch: Path):
    scratch.mkdir(parents=True, exist_ok=True)
    for script, names in PICTURES.items():
        subprocess.run([sys.executable, root / "docs" / script, scratch], check=True)
        for name in names:
            if (scratch / name).read_bytes() != (root / "docs" / name).read_bytes():
                yield f"docs/{name} is not what docs/{script} draws"
    drawn = subprocess.run(
        [sys.executable, root / "docs/tiling.py"], capture_output=True, check=True
    )
    if drawn.stdout != (root / "docs/tiling.svg").read_bytes():
        yield "docs/tiling.svg is not what docs/tiling.py draws"


def main(root: Path, scratch: Path) -> int:
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    wrong = [
        f"{page.relative_to(root)}: {what}" for page in pages for what in broken_links(root, page)
    ]
    wrong += guarantees_without_test(root)
    wrong += old_pictures(root, scratch)
    for message in wrong:
        print(message)
    checks = len(pages) + 1 + len(PICTURES) + 1
    print(f"{max(0, checks - len(wrong))} passed, {len(wrong)} failed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
