"""Checks that pool, group, kernels and cache never ask which kind a leaf is.

    python asks_no_kind.py ROOT

A kind nobody here thought of must get the same service as one that ships. So no layer above `leaf`
casts a leaf to a kind, compares type ids, or names one, but for cache, which makes leaves of
configurations. Prints each place, then `N passed, N failed` (files).
"""

import re
import sys
from pathlib import Path

LAYERS = ["pool", "group", "kernels", "cache"]
SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".c"}
CAST = re.compile(
    r"\b(?:dynamic_cast|dynamic_pointer_cast|typeid|any_cast)\b|\b\w*[lL]eaf\w*(?:\.|->)kind\b|\bLeafKind\b"
)
MAKES_LEAVES = {
    "cache/model_leaves.cpp"
}  # from configurations; other files of cache know their options


def kinds(root: Path) -> list[str]:
    """Every class that derives from the region, as the headers of `leaf` declare them."""
    names: list[str] = ["KVLeafRegion"]
    headers = "".join(
        path.read_text(encoding="utf-8") for path in sorted((root / "leaf").glob("*.h"))
    )
    found = True
    while found:
        derived = re.findall(
            rf"class (\w+)\s*(?:final\s*)?:\s*public (?:{'|'.join(names)})\b", headers
        )
        found = set(derived) - set(names)
        names += sorted(found)
    return names[1:]


def places(text: str, names: re.Pattern[str], may_make: bool, may_include: bool):
    code = re.sub(r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.DOTALL)
    for number, line in enumerate(code.splitlines(), start=1):
        line = line.partition("//")[0]
        if match := CAST.search(line):
            yield number, match[0], "asks for the type of an object"
        elif not may_make and (match := names.search(line)):
            yield number, match[0], "names a kind of leaf"
        elif match := re.search(r"#include \"kvleaf/leaf/(attention|sliding_window|recurrent_state|"
                                r"cross_attention|scratch|scales)\.h\"", line):  # fmt: skip
            if not may_include:
                yield number, match[0], "includes a kind of leaf"


# Each is a place that must be found, and the last ones are not.
OFFENDERS = [
    "if (dynamic_cast<const Foo*>(&leaf)) {}",
    "const bool window = typeid(leaf) == typeid(other);",
    "if (std::dynamic_pointer_cast<Foo>(leaf)) {}",
    "switch (leaf->kind()) {}",
    "const auto& state = static_cast<const RecurrentStateLeaf&>(leaf);",
    '#include "kvleaf/leaf/sliding_window.h"',
]
INNOCENTS = [
    "// dynamic_cast<FullAttentionLeaf> is what nobody here does",
    "leaf.cacheable();",
    "step.kind();",
]


def main(root: Path) -> int:
    found = kinds(root)
    assert {"AttentionLeaf", "FullAttentionLeaf", "RecurrentStateLeaf", "ScratchLeaf"} <= set(
        found
    ), found
    names = re.compile(rf"\b(?:{'|'.join(found)})\b")
    for line in OFFENDERS:
        assert list(places(line, names, may_make=False, may_include=False)), (
            f"goes unnoticed: {line}"
        )
    for line in INNOCENTS:
        assert not list(places(line, names, may_make=False, may_include=False)), (
            f"is no offence: {line}"
        )
    passed = failed = 0
    for path in (p for layer in LAYERS for p in sorted((root / layer).rglob("*"))):
        if path.suffix not in SUFFIXES:
            continue
        relative = path.relative_to(root)
        text = path.read_text(encoding="utf-8")
        wrong = list(
            places(text, names, str(relative) in MAKES_LEAVES, relative.parts[0] == "cache")
        )
        for number, what, why in wrong:
            print(f"{relative}:{number}: {what}: {why}")
        failed += bool(wrong)
        passed += not wrong
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
