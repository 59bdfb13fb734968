"""Leaves: patterns, groups, the region, the kinds that ship, and kinds written in Python."""

import random
import types

import kvleaf
import numpy as np
import pytest
from kvleaf import AccessPattern, KVCacheGroupId, KVLeafRegion, Slab

HEADS = dict(layers=2, kv_heads=2, head_dim=8, dtype="bfloat16")


def region(tokens_per_page=16, group=None, **options):
    return KVLeafRegion(
        "leaf", group or KVCacheGroupId.full(), 64, tokens_per_page=tokens_per_page, **options
    )


def reserve(leaf, num_blocks, step_tokens=1, caching=False):
    return leaf.blocks_to_reserve(
        num_blocks, enable_prefix_caching=caching, step_tokens=step_tokens
    )


# ---- patterns --------------------------------------------------------------------------------


def test_reach_lists_the_slots_of_every_pattern():
    assert AccessPattern.full().reach(40, 16) == [0, 1, 2]
    assert AccessPattern.window(8, sinks=4).reach(40, 4) == [0, 8, 9]
    assert AccessPattern.window(8, 4).reach(6, 4) == [0, 1]
    assert AccessPattern.chunk(8).reach(17, 4) == [4]
    assert AccessPattern.chunk(8).reach(16, 4) == []
    assert AccessPattern.point().reach(64, 16) == [3]
    assert AccessPattern.encoder().reach(5, 32, encoder_tokens=1500) == list(range(47))
    assert AccessPattern.none().reach(100, 16) == []


def test_a_custom_pattern_is_asked_in_python():
    asked = []

    def tail_begin(n):
        asked.append(n)
        return n // 2

    pattern = AccessPattern.custom(head=1, tail_begin=tail_begin, ahead=1)
    assert pattern.reach(40, 4) == [0, 5, 6, 7, 8, 9]
    assert asked == [40]
    assert (pattern.head, pattern.ahead, pattern.tail_begin(10)) == (1, 1, 5)


def test_what_a_custom_pattern_raises_comes_out_as_it_is():
    def tail_begin(n):
        raise LookupError(f"no tail at {n}")

    with pytest.raises(LookupError, match="no tail at 40") as caught:
        AccessPattern.custom(tail_begin=tail_begin).reach(40, 4)
    assert "tail_begin" in [frame.name for frame in caught.traceback]


@pytest.mark.parametrize("answer", [-1, 2**32, "3", 1.5, None])
def test_a_custom_pattern_that_answers_no_token_count_is_refused(answer):
    with pytest.raises(kvleaf.InvalidArgument, match="tail_begin"):
        AccessPattern.custom(tail_begin=lambda n: answer).reach(40, 4)


def test_a_custom_pattern_needs_a_function_and_at_most_one_token_ahead():
    with pytest.raises(kvleaf.InvalidArgument, match="tail_begin"):
        AccessPattern.custom()
    with pytest.raises(kvleaf.InvalidArgument, match="ahead is 2"):
        AccessPattern.custom(tail_begin=lambda n: 0, ahead=2)


def test_patterns_and_groups_are_values():
    assert AccessPattern.window(8) == AccessPattern.window(8) != AccessPattern.window(9)
    assert AccessPattern.full() != 3
    assert len({AccessPattern.chunk(8), AccessPattern.chunk(8), AccessPattern.chunk(4)}) == 2
    assert KVCacheGroupId.sliding_window(8) == KVCacheGroupId.sliding_window(8)
    assert len({KVCacheGroupId.full(), KVCacheGroupId.full()}) == 1
    custom = AccessPattern.custom(tail_begin=lambda n: 0)
    assert custom == custom != AccessPattern.custom(tail_begin=lambda n: 0)


@pytest.mark.parametrize(
    "group, name, writing",
    [
        (KVCacheGroupId.full(), "full", "append"),
        (KVCacheGroupId.sliding_window(1024), "window_1024", "append"),
        (KVCacheGroupId.sliding_window(1024, sinks=4), "window_1024_sinks_4", "append"),
        (KVCacheGroupId.chunked(8192), "chunk_8192", "append"),
        (KVCacheGroupId.state(), "state", "in_place"),
        (KVCacheGroupId.encoder(), "encoder", "write_once"),
        (KVCacheGroupId.scratch(), "scratch", "private"),
        (KVCacheGroupId("mine", AccessPattern.full(), "append"), "mine", "append"),
    ],
)
def test_a_group_has_a_name_a_pattern_and_a_way_of_writing(group, name, writing):
    assert (group.name, group.writing) == (name, writing)
    assert isinstance(group.pattern, AccessPattern)
    assert name in repr(group)


def test_a_group_whose_writing_does_not_fit_its_pattern_is_refused():
    with pytest.raises(kvleaf.InvalidArgument, match="scratch"):
        KVCacheGroupId("scratch", AccessPattern.full(), "private")
    with pytest.raises(kvleaf.InvalidArgument, match="accepted"):
        KVCacheGroupId("x", AccessPattern.full(), "sometimes")


# ---- the region ------------------------------------------------------------------------------


def test_a_region_says_what_it_was_given():
    leaf = KVLeafRegion("kv", KVCacheGroupId.full(), 4096, stride_alignment=256, tokens_per_page=32)
    assert (leaf.leaf_id, leaf.group_id, leaf.bytes_per_page) == (
        "kv",
        KVCacheGroupId.full(),
        4096,
    )
    assert (leaf.stride_alignment, leaf.tokens_per_page, leaf.cacheable) == (256, 32, True)
    bare = KVLeafRegion("kv", KVCacheGroupId.full(), 4096)
    assert (bare.stride_alignment, bare.tokens_per_page) == (None, None)
    assert "kv" in repr(bare) and "4096" in repr(bare)


def test_b05_sizes_beyond_32_bits_are_exact():
    leaf = KVLeafRegion("big", KVCacheGroupId.full(), 2**40 + 1, stride_alignment=2**33)
    assert (leaf.bytes_per_page, leaf.stride_alignment) == (2**40 + 1, 2**33)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(leaf_id=""),
        dict(bytes_per_page=0),
        dict(bytes_per_page=-1),
        dict(bytes_per_page=2**64),
        dict(stride_alignment=0),
        dict(tokens_per_page=0),
        dict(tokens_per_page=2**32),
    ],
)
def test_l12_what_no_leaf_can_be_is_refused(wrong):
    given = dict(leaf_id="x", group_id=KVCacheGroupId.full(), bytes_per_page=64) | wrong
    with pytest.raises(kvleaf.InvalidArgument):
        KVLeafRegion(**given)


def test_l12_windows_and_chunks_of_nothing_are_refused_and_a_window_of_one_is_not():
    with pytest.raises(kvleaf.InvalidArgument):
        kvleaf.SlidingWindowLeaf("w", window=0, tokens_per_page=16, **HEADS)
    with pytest.raises(kvleaf.InvalidArgument):
        kvleaf.ChunkedAttentionLeaf("c", chunk=0, tokens_per_page=16, **HEADS)
    assert kvleaf.SlidingWindowLeaf("w", window=1, tokens_per_page=16, **HEADS).window == 1


def test_numbers_of_numpy_are_numbers():
    leaf = KVLeafRegion("kv", KVCacheGroupId.full(), np.int64(64), tokens_per_page=np.uint8(16))
    assert reserve(leaf, np.int32(3)) == 3
    with pytest.raises(TypeError):
        KVLeafRegion("kv", KVCacheGroupId.full(), 64.0)


# ---- how many blocks -------------------------------------------------------------------------


def test_l01_a_full_leaf_reserves_every_slot():
    assert [reserve(region(), n) for n in (0, 1, 3, 100)] == [0, 1, 3, 100]


@pytest.mark.parametrize("window, page, blocks", [(512, 128, 5), (1024, 16, 65), (4, 4, 2)])
def test_l02_a_window_reserves_its_span(window, page, blocks):
    leaf = kvleaf.SlidingWindowLeaf("w", window=window, tokens_per_page=page, **HEADS)
    assert reserve(leaf, 10_000) == blocks
    assert reserve(leaf, 1) == 1


@pytest.mark.parametrize(
    "window, page, step, blocks", [(3, 1, 20, 22), (1024, 16, 1024, 129), (64, 16, 128, 13)]
)
def test_l03_a_window_reserves_for_the_tokens_of_a_step(window, page, step, blocks):
    leaf = kvleaf.SlidingWindowLeaf("w", window=window, tokens_per_page=page, **HEADS)
    assert reserve(leaf, 10_000, step_tokens=step) == blocks


def test_l04_sinks_and_chunks():
    sinks = kvleaf.SlidingWindowLeaf("s", window=1024, sinks=4, tokens_per_page=16, **HEADS)
    assert reserve(sinks, 10_000) == 66
    chunk = kvleaf.ChunkedAttentionLeaf("c", chunk=8192, tokens_per_page=16, **HEADS)
    assert (reserve(chunk, 10_000), reserve(chunk, 10_000, 2048)) == (512, 640)


def test_l05_a_state_reserves_one_and_a_checkpoint_and_its_rollback():
    slabs = [Slab("conv", (64, 3), "bfloat16"), Slab("rec", (4, 8, 8), "float32")]
    leaf = kvleaf.RecurrentStateLeaf("state", layers=3, slabs=slabs)
    assert (reserve(leaf, 1000), reserve(leaf, 1000, caching=True)) == (1, 2)
    back = kvleaf.RecurrentStateLeaf("state", layers=3, slabs=slabs, rollback=3)
    assert (reserve(back, 1000), reserve(back, 1000, caching=True)) == (4, 5)
    assert back.rollback == 3 and back.layers == 3
    assert leaf.bytes_per_page == 3 * (64 * 3 * 2 + 4 * 8 * 8 * 4)


def test_without_tokens_of_its_own_a_leaf_counts_pages_of_16():
    leaf = KVLeafRegion("w", KVCacheGroupId.sliding_window(1024), 64)
    assert reserve(leaf, 10_000) == 65
    given = leaf.blocks_to_reserve(10_000, enable_prefix_caching=False, tokens_per_page=128)
    assert given == 9
    with pytest.raises(kvleaf.InvalidArgument):
        leaf.blocks_to_reserve(1, enable_prefix_caching=False, tokens_per_page=0)


# ---- the kinds -------------------------------------------------------------------------------


def test_attention_leaves_say_their_layout():
    leaf = kvleaf.FullAttentionLeaf(
        "kv", layers=3, kv_heads=4, head_dim=64, value_head_dim=32, dtype="bf16", tokens_per_page=16
    )
    assert leaf.bytes_per_page == 3 * 16 * 4 * (64 + 32) * 2
    assert (leaf.layers, leaf.kv_heads, leaf.head_dim, leaf.value_head_dim) == (3, 4, 64, 32)
    assert (leaf.dtype, leaf.table, leaf.tokens_per_page) == ("bfloat16", "dense", 16)
    assert isinstance(leaf, kvleaf.AttentionLeaf) and isinstance(leaf, KVLeafRegion)
    latent = kvleaf.LatentAttentionLeaf(
        "mla", layers=61, width=576, dtype="bf16", tokens_per_page=64
    )
    assert latent.bytes_per_page == 4_497_408  # M-02


def test_l07_scales_lie_beside_their_values():
    values = kvleaf.FullAttentionLeaf(
        "kv", layers=50, kv_heads=16, head_dim=256, dtype="fp8", tokens_per_page=128
    )
    scales = kvleaf.ScalesLeaf(values, granularity=128, dtype="bfloat16")
    assert (values.bytes_per_page, scales.bytes_per_page) == (52_428_800, 819_200)
    assert scales.leaf_id == "kv.scales" and scales.group_id == values.group_id
    with pytest.raises(kvleaf.InvalidArgument):
        kvleaf.ScalesLeaf(values, granularity=100, dtype="bfloat16")


def test_l08_compressed_entries():
    leaf = kvleaf.FullAttentionLeaf("kv", tokens_per_page=128, slots_per_page=32, **HEADS)
    dense = kvleaf.FullAttentionLeaf("kv", tokens_per_page=128, **HEADS)
    assert (leaf.slots_per_page(), dense.slots_per_page()) == (32, 128)
    assert leaf.bytes_per_page * 4 == dense.bytes_per_page
    with pytest.raises(kvleaf.InvalidArgument, match="48"):
        kvleaf.FullAttentionLeaf("kv", tokens_per_page=128, slots_per_page=48, **HEADS)


def test_cross_scratch_and_their_groups():
    cross = kvleaf.CrossAttentionLeaf("cross", tokens_per_page=32, **HEADS)
    assert (cross.group_id.name, cross.group_id.writing) == ("encoder", "write_once")
    scratch = kvleaf.ScratchLeaf("tmp", bytes_per_page=4096)
    assert (scratch.cacheable, reserve(scratch, 1000)) == (False, 1)
    assert scratch.group_id.writing == "private"


def test_n10_rows_of_a_state_block():
    leaf = kvleaf.RecurrentStateLeaf(
        "s", layers=18, slabs=[("rec", (4, 8), "float32")], table="rows"
    )
    assert leaf.table == "rows"
    leaf.bind(leaf.bytes_per_page)  # a stride of 18 rows
    assert leaf.bound_row_span(3) == {"rec": range(54, 72)}
    assert leaf.bound_row_copies(3, 1) == {"rec": (range(54, 72), range(18, 36))}
    into = {"state_rows": np.full((18, 2), 7, np.int32)}
    leaf.write_staged_inputs([[3], []], into)
    assert into["state_rows"][:, 0].tolist() == list(range(54, 72))
    assert (into["state_rows"][:, 1] == -1).all()
    blocks = kvleaf.RecurrentStateLeaf("s", layers=18, slabs=[("rec", (4, 8), "float32")])
    assert blocks.bound_row_span(3) == {} and blocks.bound_row_copies(3, 1) == {}
    with pytest.raises(kvleaf.InvalidArgument):
        leaf.bind(2 * leaf.bytes_per_page)


def test_states_take_slabs_kernels_and_tables_by_name():
    slab = Slab("conv", [64, 3], np.dtype("float16"))
    assert (slab.name, slab.shape, slab.dtype, slab.bytes) == ("conv", (64, 3), "float16", 384)
    leaf = kvleaf.RecurrentStateLeaf("s", layers=1, slabs=[slab], kernel="in_out", in_chunk=True)
    assert (leaf.state_kernel, leaf.in_chunk, leaf.slabs[0].name) == ("in_out", True, "conv")
    assert leaf.emits_in_chunk
    for wrong in (dict(kernel="sideways"), dict(table="csr"), dict(slabs=[])):
        with pytest.raises(kvleaf.InvalidArgument):
            kvleaf.RecurrentStateLeaf("s", **(dict(layers=1, slabs=[slab]) | wrong))


class Named:
    def __init__(self, name):
        self.name = name


class TorchLike:
    def __str__(self):
        return "torch.bfloat16"


@pytest.mark.parametrize(
    "dtype, name",
    [
        ("bfloat16", "bfloat16"),
        ("bf16", "bfloat16"),
        ("half", "float16"),
        (np.float32, "float32"),
        (np.dtype("float16"), "float16"),
        (np.dtype("int8"), "int8"),
        (Named("float8_e4m3fn"), "float8_e4m3"),
        (TorchLike(), "bfloat16"),
    ],
)
def test_element_types_are_taken_from_whatever_has_their_name(dtype, name):
    leaf = kvleaf.LatentAttentionLeaf("x", layers=1, width=8, dtype=dtype, tokens_per_page=16)
    assert leaf.dtype == name


def test_element_types_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for dtype in (ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)):
        leaf = kvleaf.LatentAttentionLeaf("x", layers=1, width=8, dtype=dtype, tokens_per_page=16)
        assert leaf.dtype == "bfloat16"


@pytest.mark.parametrize("dtype", ["float128", 3, np.complex64])
def test_unknown_element_types_are_refused_with_those_accepted(dtype):
    with pytest.raises(kvleaf.InvalidArgument, match="bfloat16"):
        kvleaf.LatentAttentionLeaf("x", layers=1, width=8, dtype=dtype, tokens_per_page=16)


# ---- staged inputs ---------------------------------------------------------------------------


def test_a_region_stages_a_block_table():
    leaf = region()
    (shape, dtype) = leaf.staged_input_shapes(3, 5)["block_table"]
    assert (shape, dtype) == ((3, 5), np.dtype("int32"))
    table = np.full(shape, -7, dtype)
    leaf.write_staged_inputs([[1, 2], [], [9, 8, 0, 6, 5]], {"block_table": table})
    assert table.tolist() == [[1, 2, 0, 0, 0], [0] * 5, [9, 8, 0, 6, 5]]


def test_plans_may_be_arrays_and_tables_views():
    wide = np.full((4, 9), -7, np.int32)
    region().write_staged_inputs(np.array([[1, 2], [3, 4]]), {"block_table": wide[:2, :3]})
    assert wide[:2, :3].tolist() == [[1, 2, 0], [3, 4, 0]]
    assert (wide[2:] == -7).all() and (wide[:, 3:] == -7).all()


def test_a_delta_writes_what_changed():
    leaf = region()
    table = np.zeros((2, 4), np.int32)
    leaf.write_staged_inputs([[1, 2], [3]], {"block_table": table})
    rows = [
        kvleaf.RowDelta(first_changed_slot=2, blocks=[7], computed=32, new_tokens=1),
        kvleaf.RowDelta(new_owner=True, blocks=[5, 6]),
    ]
    leaf.write_staged_delta(rows, {"block_table": table})
    assert table.tolist() == [[1, 2, 7, 0], [5, 6, 0, 0]]
    alike = types.SimpleNamespace(
        new_owner=True,
        padding=True,
        first_changed_slot=0,
        blocks=[],
        computed=0,
        new_tokens=0,
        read_block=0,
        write_block=0,
    )
    leaf.write_staged_delta([rows[0], alike], {"block_table": table})
    assert table.tolist() == [[1, 2, 7, 0], [0] * 4]


@pytest.mark.parametrize(
    "into",
    [
        {},
        {"table": np.zeros((1, 4), np.int32)},
        {"block_table": np.zeros((1, 4), np.int64)},
        {"block_table": np.zeros((1, 2), np.int32)},
        {"block_table": np.zeros((0, 4), np.int32)},
        {"block_table": np.zeros(4, np.int32)},
    ],
)
def test_arrays_that_do_not_fit_the_plans_are_refused(into):
    with pytest.raises(kvleaf.PlanShapeError):
        region().write_staged_inputs([[1, 2, 3]], into)


def test_arrays_that_cannot_be_written_are_refused():
    frozen = np.zeros((1, 4), np.int32)
    frozen.flags.writeable = False
    for array in (frozen, np.zeros((1, 4), np.int32)[:, ::-1]):
        with pytest.raises(kvleaf.InvalidArgument):
            region().write_staged_inputs([[1, 2, 3]], {"block_table": array})


def test_blocks_that_cannot_be_are_refused_in_plans():
    table = np.zeros((1, 4), np.int32)
    for wrong in ([-1], [2**40], ["a"], np.array([0.5])):
        with pytest.raises(kvleaf.KVError):
            region().write_staged_inputs([wrong], {"block_table": table})
    assert (table == 0).all()


def test_csr_tables():
    leaf = kvleaf.FullAttentionLeaf("kv", tokens_per_page=16, table="csr", **HEADS)
    shapes = leaf.staged_input_shapes(2, 3)
    into = {key: np.zeros(shape, dtype) for key, (shape, dtype) in shapes.items()}
    leaf.write_staged_inputs([[4, 5], [6]], into)
    assert into["indptr"].tolist() == [0, 2, 3]
    assert into["indices"][:3].tolist() == [4, 5, 6]


# ---- kinds written in Python -----------------------------------------------------------------


class Window32(KVLeafRegion):
    """L-13: a kind that is not in the library, by its pattern alone."""

    def __init__(self, leaf_id="mine"):
        pattern = AccessPattern.custom(tail_begin=lambda n: max(0, n - 31))
        super().__init__(
            leaf_id,
            KVCacheGroupId("mine", pattern, "append"),
            96,
            stride_alignment=32,
            tokens_per_page=8,
        )


def test_l13_a_kind_of_ones_own_reserves_as_the_shipped_window():
    mine = Window32()
    shipped = kvleaf.SlidingWindowLeaf("w", window=32, tokens_per_page=8, **HEADS)
    numbers = random.Random(7)
    for _ in range(1000):
        blocks, step = numbers.randrange(40), numbers.randrange(1, 80)
        assert reserve(mine, blocks, step) == reserve(shipped, blocks, step)
        n = numbers.randrange(400)
        assert mine.group_id.pattern.reach(n, 8) == shipped.group_id.pattern.reach(n, 8)


def test_super_is_the_shipped_behaviour_and_does_not_come_back():
    calls = []

    class Mine(KVLeafRegion):
        @property
        def cacheable(self):
            calls.append("cacheable")
            return super().cacheable

        def blocks_to_reserve(self, num_blocks, *, enable_prefix_caching, step_tokens=1):
            calls.append("blocks_to_reserve")
            return 1 + super().blocks_to_reserve(
                num_blocks, enable_prefix_caching=enable_prefix_caching, step_tokens=step_tokens
            )

        def staged_input_shapes(self, batch_size, num_blocks):
            calls.append("staged_input_shapes")
            return super().staged_input_shapes(batch_size, num_blocks + 1)

        def write_staged_inputs(self, plans, into):
            calls.append("write_staged_inputs")
            super().write_staged_inputs([plan + [99] for plan in plans], into)

        def bound_row_span(self, block):
            return {**super().bound_row_span(block), "k": range(block, block + 1)}

    leaf = Mine("m", KVCacheGroupId.full(), 64, tokens_per_page=16)
    assert leaf.cacheable is True
    assert reserve(leaf, 3) == 4
    (shape, dtype) = leaf.staged_input_shapes(1, 2)["block_table"]
    table = np.zeros(shape, dtype)
    leaf.write_staged_inputs([[1, 2]], {"block_table": table})
    assert table.tolist() == [[1, 2, 99]]
    assert leaf.bound_row_span(4) == {"k": range(4, 5)}
    assert len(calls) == 4


def test_a_subclass_of_a_shipped_kind_is_of_that_kind():
    class Named(kvleaf.SlidingWindowLeaf):
        def __init__(self, window):
            super().__init__(f"w{window}", window=window, tokens_per_page=16, **HEADS)
            self.note = "mine"

    leaf = Named(64)
    assert (leaf.leaf_id, leaf.window, leaf.note) == ("w64", 64, "mine")
    assert reserve(leaf, 100) == reserve(
        kvleaf.SlidingWindowLeaf("w", window=64, tokens_per_page=16, **HEADS), 100
    )


def test_a_leaf_that_forgot_to_initialise_is_no_leaf():
    class Forgetful(KVLeafRegion):
        def __init__(self):
            pass

    with pytest.warns(RuntimeWarning, match="uninitialized"), pytest.raises(TypeError):
        Forgetful().blocks_to_reserve(1, enable_prefix_caching=False)
    with pytest.raises(kvleaf.InvalidArgument, match="Forgetful"):
        kvleaf.plan_geometry(1 << 20, [Forgetful()])
    with pytest.raises(kvleaf.InvalidArgument, match="initialised"):
        kvleaf.BlockManager([Forgetful()], 1 << 20, max_len=512)
