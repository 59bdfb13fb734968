"""Which tests hold which case of docs/guarantees.md: those that name it."""

import re
from collections import defaultdict
from pathlib import Path

CASE = re.compile(r"\b([LGPHSWXNFAKCMVB])-(\d\d)\b")
NAMED = re.compile(r'(?:TEST_CASE|SUBCASE|TEST_CASE_TEMPLATE)\s*\(\s*"((?:[^"\\]|\\.|"\s*")*)"')


def tests_by_case(root: Path) -> dict[str, list[str]]:
    """For each case, "tests/<layer>/<file>: name"; the file alone where a comment names it."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((root / "tests").rglob("*")):
        if path.suffix not in (".cpp", ".cu", ".c", ".py") or "data" in path.parts:
            continue
        text, place = path.read_text(encoding="utf-8"), path.relative_to(root)
        named = set()
        for match in NAMED.finditer(text):
            name = re.sub(r'"\s*"', "", match[1])
            for case in CASE.finditer(name):
                named.add(case[0])
                found[case[0]].append(f"{place}: {name}")
        for case in {match[0] for match in CASE.finditer(text)} - named:
            found[case].append(str(place))
    # Those that are named for it first.
    return {
        case: sorted(places, key=lambda place: ": " not in place) for case, places in found.items()
    }
