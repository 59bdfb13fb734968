"""Shows doxygen what our comments are: the one that opens a header, and those behind a member.

doxygen_filter.py HEADER
"""

import re
import sys
from pathlib import Path

TRAILING = re.compile(r"^(\s*[^/\s].*?[;,{}\w)>\]])\s*//\s(.*)$")
ALONE = re.compile(r"^\s{8,}//\s(.*)$")


def main(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    opening = 0
    while opening < len(lines) and lines[opening].startswith("//"):
        opening += 1
    if opening:
        print("/** @file\n@verbatim")
        for line in lines[:opening]:
            print(line.removeprefix("//").removeprefix(" "))
        print("@endverbatim */")
    behind = False  # whether the last line ended in a comment
    for line in lines[opening:]:
        if "//" in line and '"' not in line and (match := TRAILING.match(line)):
            line, behind = f"{match[1]}  ///< {match[2]}", True
        elif behind and (match := ALONE.match(line)):
            line = f"  ///< {match[1]}"
        else:
            behind = False
        print(line)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
