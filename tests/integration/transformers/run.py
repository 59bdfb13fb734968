"""Runs the tests beside it, or says why they cannot be run and exits 77, as Meson wants it."""

import sys
from pathlib import Path

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ImportError as missing:
    print(
        f"skipped: {missing}. `./dev test integration` installs PyTorch and transformers where pip "
        "finds them: examples/transformers_cache/requirements.txt"
    )
    sys.exit(77)

import pytest

sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--durations=5", str(Path(__file__).parent)]))
