"""Serves small models of real architectures from one arena: nothing changes but the work.

    ./dev run -- python examples/transformers_cache/transformers_cache.py [MODEL]...

Per model: requests, their prompt tokens, how many of those were not computed, tokens planned
before their ids were known, forks, preemptions, encoder runs saved, the most bytes that were
live at once, and the largest difference of a logit from the model's own default cache, over
every token of every request.
"""

import sys
import warnings

import torch
import transformers
from comparison import Outcome, compare
from small_models import CONFIGS

COLUMNS = (
    "model", "requests", "prompt", "not computed", "early", "forks", "preempted", "encoder saved",
    "peak live KiB", "max difference", "wrong tokens",
)  # fmt: skip


def row(outcome: Outcome) -> tuple:
    report = outcome.report
    return (
        outcome.model,
        report.requests,
        report.prompt_tokens,
        f"{report.reused_tokens} ({report.reused_tokens / report.prompt_tokens:.0%})",
        report.early_tokens,
        report.forks,
        report.preemptions,
        report.encoder_runs_saved,
        f"{report.peak_live_bytes / 1024:.0f}",
        f"{outcome.max_difference():.1e}",
        outcome.wrong_tokens(),
    )


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in CONFIGS]
    if unknown:
        print(f"{unknown[0]!r} is unknown; accepted: {', '.join(CONFIGS)}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)  # these models are too small to share out
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)
    widths = [max(len(column), 8) for column in COLUMNS]
    widths[0] = max(map(len, CONFIGS))

    def show(cells) -> None:
        first, *others = (str(cell) for cell in cells)
        print(first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(others, widths[1:])), flush=True)

    show(COLUMNS)
    wrong = 0
    for name in names or CONFIGS:
        outcome = compare(name)
        show(row(outcome))
        wrong += outcome.wrong_tokens()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
