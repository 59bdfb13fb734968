"""The command `kvleaf` inside Python, so that it can serve leaf kinds written in Python:

    python -m kvleaf replay TRACE --model CONFIG.json --leaf-module FILE.py

FILE.py defines `leaves(model_leaves, tokens_per_page)`, which returns the leaves to serve: the
model's, others in their place, or more beside them. `kvleaf replay --leaf-module FILE.py` comes
here by itself.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

from kvleaf import KVLeafRegion, _kvleaf


def _load(
    file: str, model_leaves: list[KVLeafRegion], tokens_per_page: int
) -> Iterable[KVLeafRegion]:
    path = Path(file).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))  # as a script finds what lies beside it
    spec.loader.exec_module(module)
    if not callable(getattr(module, "leaves", None)):
        raise AttributeError("expected a function leaves(model_leaves, tokens_per_page)")
    leaves: Iterable[KVLeafRegion] = module.leaves(model_leaves, tokens_per_page)
    return leaves


def main(arguments: list[str] | None = None) -> int:
    # A replay runs in C++: an interrupt ends it as it ends the command.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _kvleaf._command(sys.argv[1:] if arguments is None else arguments, _load)


if __name__ == "__main__":
    sys.exit(main())
