"""Whether a leaf keeps the contract that a pool, a manager and a planner rely on.

    from kvleaf.testing import check_leaf

    def test_my_leaf_keeps_the_contract():
        check_leaf(lambda: MyLeaf("mine", ...))

Works in any test framework: a broken rule is an AssertionError.
"""

from __future__ import annotations

from collections.abc import Callable

from kvleaf import _kvleaf

__all__ = ["check_leaf"]


def check_leaf(
    make_leaf: Callable[[], _kvleaf.KVLeafRegion],
    *,
    page_tokens: int = 16,
    max_len: int | None = None,
    seed: int = 1,
    histories: int = 24,
) -> list[str]:
    """Drives a leaf alone and inside a real pool, manager and planner.

    Raises AssertionError that lists every broken rule: the numbers that break it, the smallest
    sequence of calls that shows it, and the rule's paragraph. Returns notes on what is allowed but
    costs something, such as blocks that are reserved for nothing.

    make_leaf    makes one leaf, the same at each call but a new one
    page_tokens  of the cache, for a leaf that leaves its page to it
    max_len      tokens of the longest request that is tried; None: five times what the leaf reaches
                 back, and 64 pages for one that reaches everything; at most 65,536
    seed         everything random follows from it
    histories    sequences of forwards that write_staged_delta is tried on

    Raises InvalidArgument for a make_leaf that gives no leaf, one leaf twice, or unequal leaves.
    """
    kept, text, notes, _ = _kvleaf._check_leaf(
        make_leaf, page_tokens=page_tokens, max_len=max_len, seed=seed, histories=histories
    )
    if not kept:
        raise AssertionError(text)
    return notes
