"""Installs the public headers: each layer's front header and what it includes, to the last.

What no front header reaches is a part of its layer that nobody else needs, and stays here. Run by
`meson install`; read at that time, so that no list of headers can be out of date.

    install_headers.py [--list]
"""

import os
import re
import shutil
import sys
from pathlib import Path

INCLUDE = Path(__file__).resolve().parent
PATTERN = re.compile(r'^\s*#\s*include\s*["<](kvleaf/[^">]+)[">]', re.MULTILINE)


def public_headers() -> list[str]:
    """As they are included, "kvleaf/pool/geometry.h"."""
    front = [f"kvleaf/{name}/{name}.h" for name in ("leaf", "pool", "kernels", "group", "cache")]
    testing = [f"kvleaf/testing/{path.name}" for path in (INCLUDE / "kvleaf/testing").glob("*.h")]
    found: set[str] = set()
    waiting = ["kvleaf/kvleaf.h", *front, *testing]
    while waiting:
        header = waiting.pop()
        path = INCLUDE / header
        if header not in found and path.exists():
            found.add(header)
            waiting += PATTERN.findall(path.read_text(encoding="utf-8"))
    return sorted(found)


def main() -> None:
    if sys.argv[1:] == ["--list"]:
        print("\n".join(public_headers()))
        return
    # The folder is given relative to the prefix, as Meson's own options are.
    target = Path(os.environ["MESON_INSTALL_DESTDIR_PREFIX"]) / sys.argv[1]
    for header in public_headers():
        path = target / header
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(INCLUDE / header, path)
        path.chmod(0o644)


if __name__ == "__main__":
    main()
