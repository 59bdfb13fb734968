"""kvleaf.testing.check_leaf: each rule finds the leaf that breaks it, and nothing else of it."""

import time

import kvleaf
import numpy as np
import pytest
from kvleaf import AccessPattern, KVCacheGroupId, KVLeafRegion, Slab, _kvleaf
from kvleaf.testing import check_leaf

RULES = [
    "memory", "reach", "reserve", "cacheable", "shapes", "inside", "covers",
    "delta", "rows", "copies", "release", "resume", "refusal",
]  # fmt: skip


class Plain(KVLeafRegion):
    def __init__(self, group=None, bytes_per_page=1024, alignment=64):
        super().__init__(
            "near miss",
            group or KVCacheGroupId.full(),
            bytes_per_page,
            stride_alignment=alignment,
            tokens_per_page=16,
        )


def custom(tail_begin):
    pattern = AccessPattern.custom(tail_begin=tail_begin)
    return Plain(KVCacheGroupId("custom", pattern, "append"))


class RowsShear(Plain):
    """Rows of 96 bytes, 4 to a block, whatever the stride."""

    def __init__(self):
        super().__init__(KVCacheGroupId.state(), 4 * 96, 128)

    def bound_row_span(self, block):
        return {"state": range(4 * block, 4 * block + 4)}

    def bound_row_copies(self, src, dst):
        return {"state": (self.bound_row_span(src)["state"], self.bound_row_span(dst)["state"])}


def comes_back():
    return custom(lambda n: max(0, n - (50 if n % 100 == 99 else 40)))


class ReservesOneTooFew(Plain):
    def __init__(self):
        super().__init__(KVCacheGroupId.sliding_window(48))

    def blocks_to_reserve(self, num_blocks, *, enable_prefix_caching, step_tokens=1):
        return min(num_blocks, (48 + step_tokens - 1 + 15) // 16)


class NotCacheable(Plain):
    @property
    def cacheable(self):
        return False


class Table(Plain):
    """One array of its own: "blocks" int32 [batch, columns]."""

    def staged_input_shapes(self, batch_size, num_blocks):
        return {"blocks": ((batch_size, num_blocks), np.int32)}

    def write_staged_inputs(self, plans, into):
        into["blocks"][:] = 0
        for row, blocks in enumerate(plans):
            into["blocks"][row, : len(blocks)] = blocks


class TooNarrow(Table):
    def staged_input_shapes(self, batch_size, num_blocks):
        return {"blocks": ((batch_size, max(num_blocks, 2) - 1), np.int32)}


class KeepsTheWidestView(Table):
    """Marks the rows behind the batch as padding, in the widest array it ever saw."""

    def __init__(self):
        super().__init__()
        self._widest = None

    def write_staged_inputs(self, plans, into):
        if self._widest is None or self._widest.shape < into["blocks"].shape:
            self._widest = into["blocks"]
        super().write_staged_inputs(plans, into)
        self._widest[len(plans) :] = -1


class LosesASlot(Table):
    def write_staged_inputs(self, plans, into):
        super().write_staged_inputs(plans, into)
        for row, blocks in enumerate(plans):
            if len(blocks) > 2:
                into["blocks"][row, 1] = blocks[0]


class StaleTail(Table):
    def write_staged_delta(self, rows, into):
        for i, row in enumerate(rows):
            first = 0 if row.padding else row.first_changed_slot
            blocks = [] if row.padding else row.blocks
            into["blocks"][i, first : first + len(blocks)] = blocks
            if row.new_owner or row.padding:
                into["blocks"][i, first + len(blocks) :] = 0


class ByRow(Plain):
    def __init__(self):
        super().__init__(KVCacheGroupId.state(), 4 * 128, 128)
        self._rows = 4

    def bind(self, page_stride):
        self._rows = page_stride // 128

    def bound_row_span(self, block):
        return {"state": range(self._rows * block, self._rows * block + 4)}

    def bound_row_copies(self, src, dst):
        return {"state": (self.bound_row_span(src)["state"], self.bound_row_span(dst)["state"])}


class WrapsAround(ByRow):
    def bound_row_span(self, block):
        return super().bound_row_span(block % 8)


class LosesARow(ByRow):
    def bound_row_copies(self, src, dst):
        rows = super().bound_row_copies(src, dst)["state"]
        return {"state": tuple(range(r.start, r.stop - 1) for r in rows)}


class NeverForgets(Table):
    """Numbers blocks in the order it first saw them."""

    def __init__(self):
        super().__init__()
        self._numbers = {0: 0}

    def write_staged_inputs(self, plans, into):
        number = self._numbers.setdefault
        numbered = [[number(block, len(self._numbers)) for block in blocks] for blocks in plans]
        super().write_staged_inputs(numbered, into)


def needs_every_checkpoint():
    return Plain(KVCacheGroupId("state", AccessPattern.window(40), "in_place"))


class RemembersWhatWasRefused(Plain):
    def __init__(self):
        super().__init__()
        self._most = 0

    def blocks_to_reserve(self, num_blocks, *, enable_prefix_caching, step_tokens=1):
        self._most = max(self._most, num_blocks)
        return num_blocks + (self._most >= 40)


NEAR_MISSES = [
    ("memory", RowsShear),
    ("reach", comes_back),
    ("reserve", ReservesOneTooFew),
    ("cacheable", NotCacheable),
    ("shapes", TooNarrow),
    ("inside", KeepsTheWidestView),
    ("covers", LosesASlot),
    ("delta", StaleTail),
    ("rows", WrapsAround),
    ("copies", LosesARow),
    ("release", NeverForgets),
    ("resume", needs_every_checkpoint),
    ("refusal", RemembersWhatWasRefused),
]


@pytest.mark.parametrize("rule, make_leaf", NEAR_MISSES, ids=[rule for rule, _ in NEAR_MISSES])
def test_each_near_miss_breaks_its_rule_and_no_other_within_two_seconds(rule, make_leaf):
    begin = time.perf_counter()
    _, text, _, broken = _kvleaf._check_leaf(
        make_leaf, page_tokens=16, max_len=None, seed=1, histories=24
    )
    assert broken == [rule], text
    assert time.perf_counter() - begin < 2.0
    with pytest.raises(AssertionError, match=f"(?s)breaks 1 of the 13 rules.*{rule}: .*the rule: "):
        check_leaf(make_leaf)


def test_every_rule_has_a_near_miss():
    assert [rule for rule, _ in NEAR_MISSES] == RULES


def test_an_assertion_lists_numbers_sequence_and_rule():
    with pytest.raises(AssertionError) as caught:
        check_leaf(ReservesOneTooFew)
    text = str(caught.value)
    assert "blocks_to_reserve(4, step_tokens=1) is 3, but 4 blocks are held with 48 tokens" in text
    assert "the smallest sequence that shows it:" in text
    assert "the rule: blocks_to_reserve(num_blocks, step_tokens=c) is the most slots" in text


@pytest.mark.parametrize("make_leaf", [Plain, Table, ByRow])
def test_what_near_misses_are_made_of_breaks_nothing(make_leaf):
    assert check_leaf(make_leaf) == []


def test_shipped_kinds_keep_the_contract():
    heads = dict(layers=2, kv_heads=2, head_dim=8, dtype="bfloat16", tokens_per_page=16)
    slabs = [Slab("recurrent", (2, 8, 4), "float32")]
    values = kvleaf.FullAttentionLeaf("full", **{**heads, "dtype": "float8_e4m3"})
    for make in (
        lambda: kvleaf.FullAttentionLeaf("full", table="csr", **heads),
        lambda: kvleaf.LatentAttentionLeaf(
            "latent", layers=2, width=64, dtype="bfloat16", tokens_per_page=128, slots_per_page=32
        ),
        lambda: kvleaf.SlidingWindowLeaf("window", window=40, sinks=4, compact=True, **heads),
        lambda: kvleaf.ChunkedAttentionLeaf("chunk", chunk=64, **heads),
        lambda: kvleaf.RecurrentStateLeaf("state", layers=2, slabs=slabs, table="rows"),
        lambda: kvleaf.CrossAttentionLeaf("cross", **heads),
        lambda: kvleaf.ScratchLeaf("scratch", bytes_per_page=4096),
        lambda: kvleaf.ScalesLeaf(values, granularity=8, dtype="float32"),
    ):
        assert check_leaf(make) == []


def test_blocks_reserved_for_nothing_are_noted():
    class Generous(Plain):
        def blocks_to_reserve(self, num_blocks, *, enable_prefix_caching, step_tokens=1):
            return num_blocks + 3

    (note,) = check_leaf(Generous)
    assert "3 lie idle" in note


def test_what_a_leaf_raises_breaks_the_rule_that_was_tried():
    class Raises(Table):
        def write_staged_inputs(self, plans, into):
            raise LookupError("not today")

    with pytest.raises(AssertionError, match="(?s)shapes: .*LookupError: not today"):
        check_leaf(Raises)
    with pytest.raises(AssertionError, match=r"(?s)reach: tail_begin throws: .*ZeroDivisionError"):
        check_leaf(lambda: custom(lambda n: 1 // (n - n)))


def test_a_factory_that_gives_no_new_leaf_is_refused():
    one = Plain()
    with pytest.raises(kvleaf.InvalidArgument, match="a second time; it must make a new one"):
        check_leaf(lambda: one)
    with pytest.raises(kvleaf.InvalidArgument, match="make_leaf gave a NoneType"):
        check_leaf(lambda: None)
    with pytest.raises(kvleaf.InvalidArgument, match="page_tokens is 0"):
        check_leaf(Plain, page_tokens=0)
