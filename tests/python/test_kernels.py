"""Kernels on NumPy arrays: what a plan lists, carried out on the host, against NumPy itself."""

import gc

import kvleaf
import numpy as np
import pytest
from kvleaf import BlockManager, InvalidArgument, KVPages, StepPlanner

P, HEADS, DIM = 4, 2, 8


def arena_of(geometry):
    return np.zeros(geometry.arena_bytes, np.uint8)


def softmax_attention(q, k, v, scale, visible):
    """q [heads, dim] over k, v [entries, kv_heads, dim]; visible: indices of entries."""
    group = q.shape[0] // k.shape[1]
    out = np.zeros((q.shape[0], v.shape[2]), np.float64)
    for head in range(q.shape[0]):
        keys, values = k[visible, head // group], v[visible, head // group]
        weights = (
            np.exp((products := keys @ q[head] * scale) - products.max()) if len(visible) else None
        )
        if weights is not None:
            out[head] = (weights / weights.sum()) @ values
    return out


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_v01_append_and_gather_are_each_others_reverse(dtype):
    pages = np.zeros((4, 2, 2, P, HEADS, DIM), dtype)
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((2, 3, HEADS, DIM)).astype(dtype)
    kvleaf.append_kv(k, v, np.array([5, -1, 14]), pages, layer=1)
    expected = np.zeros_like(pages)
    expected[1, 1, :, 1] = k[0], v[0]
    expected[3, 1, :, 2] = k[2], v[2]
    assert np.array_equal(pages, expected)
    got_k, got_v = kvleaf.gather_kv(pages, np.array([14, -1, 5, 0]), layer=1)
    assert got_k.dtype == dtype
    assert np.array_equal(got_k, np.stack([k[2], 0 * k[0], k[0], 0 * k[0]]))
    assert np.array_equal(got_v, np.stack([v[2], 0 * k[0], v[0], 0 * k[0]]))


def test_strided_tokens_and_conversion():
    pages = np.zeros((3, 2, P, HEADS, DIM), "float16")
    wide = np.random.default_rng(2).standard_normal((5, 3, HEADS, DIM)).astype("float32")
    kvleaf.append_kv(wide[:, 0], wide[:, 2], np.arange(4, 9), pages)
    k, v = kvleaf.gather_kv(pages, np.arange(4, 9), dtype="float32")
    assert np.array_equal(k, wide[:, 0].astype("float16").astype("float32"))
    assert np.array_equal(v, wide[:, 2].astype("float16").astype("float32"))


def test_bfloat16_comes_as_its_bits_or_as_a_type():
    memory = np.zeros(3 * P * HEADS * DIM * 2 * 2, np.uint8)
    pages = KVPages(memory, layers=1, slots=P, kv_heads=HEADS, key_dim=DIM, dtype="bfloat16")
    assert (pages.blocks, pages.page_stride, pages.dtype) == (2, P * HEADS * DIM * 4, "bfloat16")
    bits = np.full((1, HEADS, DIM), 0x3FC0, np.uint16)  # 1.5
    kvleaf.append_kv(bits, bits, np.array([4]), pages)
    k, _ = kvleaf.gather_kv(pages, np.array([4]), dtype="float32")
    assert np.array_equal(k, np.full((1, HEADS, DIM), 1.5, np.float32))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3", "float8_e5m2"])
def test_v03_quantised_pages_with_scales_of_their_own(dtype):
    values = kvleaf.FullAttentionLeaf(
        "kv", layers=1, kv_heads=HEADS, head_dim=DIM, dtype=dtype, tokens_per_page=P
    )
    scales = kvleaf.ScalesLeaf(values, granularity=4, dtype="float32")
    manager = BlockManager([values, scales], 1 << 16, max_len=64, page_tokens=P)
    planner = StepPlanner(manager, max_batch=2, max_step_tokens=32)
    manager.admit("a", range(10))
    plan = planner.plan([("a", 10)])
    arena = arena_of(manager.geometry)
    kvleaf.zero_pages(arena, manager.geometry, plan.zero_fills)
    pages = KVPages.of(values, manager.geometry, arena)
    scale_pages = KVPages.of(scales, manager.geometry, arena)
    slots, scale_slots = plan.slot_mapping["kv"], plan.slot_mapping["kv.scales"]
    k, v = np.random.default_rng(3).standard_normal((2, 10, HEADS, DIM)).astype("float32")
    k[4] = 0
    v[7, 0, 0] = 1000  # an outlier costs its own group alone
    with pytest.raises(InvalidArgument):
        kvleaf.append_kv(k, v, slots, pages, scales=scale_pages)
    kvleaf.append_kv(k, v, slots, pages, scales=scale_pages, scale_slot_mapping=scale_slots)
    got_k, got_v = kvleaf.gather_kv(
        pages, slots, scales=scale_pages, scale_slot_mapping=scale_slots
    )
    step = {"int8": 1 / 254, "float8_e4m3": 1 / 16, "float8_e5m2": 1 / 8}[dtype]
    for got, true in ((got_k, k), (got_v, v)):
        largest = np.abs(true.reshape(10, HEADS, 2, 4)).max(-1, keepdims=True)
        error = np.abs(got - true).reshape(10, HEADS, 2, 4)
        assert (error <= 1.01 * step * largest).all()
    assert np.array_equal(got_k[4], 0 * k[4])


@pytest.mark.parametrize("window, sinks", [(None, 0), (5, 0), (3, 2)])
def test_attention_through_a_plan_equals_numpy(window, sinks):
    options = dict(layers=2, kv_heads=HEADS, head_dim=DIM, dtype="float32", tokens_per_page=P)
    leaf = (
        kvleaf.FullAttentionLeaf("kv", **options)
        if window is None
        else kvleaf.SlidingWindowLeaf("kv", window=window, sinks=sinks, compact=True, **options)
    )
    manager = BlockManager([leaf], 1 << 18, max_len=64, page_tokens=P)
    planner = StepPlanner(manager, max_batch=4, max_step_tokens=64)
    arena = arena_of(manager.geometry)
    pages = KVPages.of(leaf, manager.geometry, arena)
    rng = np.random.default_rng(4)
    keys = {name: rng.standard_normal((64, HEADS, DIM)).astype("float32") for name in "ab"}
    values = {name: rng.standard_normal((64, HEADS, DIM)).astype("float32") for name in "ab"}
    for i, name in enumerate("ab"):
        manager.admit(name, range(100 * i, 100 * i + 12 + i))
    done = dict.fromkeys("ab", 0)
    for counts in (
        {"a": 7, "b": 13},
        {"b": 1, "a": 5},
        {"a": 1, "b": 1},
        {"a": 1, "b": 1},
        {"b": 1},
    ):
        for name, count in counts.items():
            manager.append(name, [7] * max(0, done[name] + count - manager.length(name)))
        plan = planner.plan(list(counts.items()), pad_to=3)
        kvleaf.copy_pages(arena, manager.geometry, plan.copies)
        kvleaf.zero_pages(arena, manager.geometry, plan.zero_fills)
        spans = [(name, done[name], done[name] + count) for name, count in counts.items()]
        new = np.zeros(
            (2, plan.num_tokens, HEADS, DIM), np.float32
        )  # those of dummy rows go nowhere
        at = 0
        for name, begin, end in spans:
            new[:, at : at + end - begin] = keys[name][begin:end], values[name][begin:end]
            at += end - begin
        kvleaf.append_kv(new[0], new[1], plan.slot_mapping["kv"], pages, layer=1)
        q = rng.standard_normal((plan.num_tokens, 2 * HEADS, DIM)).astype("float32")
        arrays = plan.arrays["kv"]
        compact = (
            {}
            if window is None
            else dict(first_slot=arrays["first_slot"], sink_slots=-(-sinks // P))
        )
        out = kvleaf.paged_attention(
            q,
            pages,
            arrays["block_table"],
            plan.seq_lens,
            plan.cu_seqlens_q,
            layer=1,
            window=window,
            sinks=sinks,
            **compact,
        )
        assert out.shape == (plan.num_tokens, 2 * HEADS, DIM)
        token = 0
        for name, begin, end in spans:
            for t in range(begin, end):
                tail = 0 if window is None else max(0, t + 1 - window)
                visible = [i for i in range(t + 1) if i < sinks or i >= tail]
                expected = softmax_attention(q[token], keys[name], values[name], DIM**-0.5, visible)
                np.testing.assert_allclose(out[token], expected, rtol=2e-5, atol=2e-6)
                token += 1
            done[name] = end
        planner.settle(plan.step)


def test_latent_pages_and_cross_attention():
    latent = kvleaf.LatentAttentionLeaf(
        "mla", layers=1, width=12, dtype="float32", tokens_per_page=P
    )
    geometry = kvleaf.plan_geometry(1 << 14, [latent])
    pages = KVPages.of(latent, geometry, arena_of(geometry))
    assert (pages.value_dim, pages.kv_heads) == (0, 1)
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((6, 1, 12)).astype("float32")
    kvleaf.append_kv(rows, None, np.array([4, 5, 6, 7, 12, 13]), pages)
    k, v = kvleaf.gather_kv(pages, np.array([13]))
    assert v is None and np.array_equal(k[0], rows[5])
    q = rng.standard_normal((2, 3, 12)).astype("float32")
    out = kvleaf.paged_attention(
        q,
        pages,
        np.array([[1, 3]], np.int32),
        np.array([6], np.int32),
        np.array([0, 2], np.int32),
        causal=False,
        latent_width=8,
        scale=0.5,
    )
    for t in range(2):
        expected = softmax_attention(q[t], rows, rows[:, :, :8], 0.5, list(range(6)))
        np.testing.assert_allclose(out[t], expected, rtol=2e-5, atol=2e-6)


def test_changes_scattered_into_a_copy_keep_it_equal():
    leaf = kvleaf.FullAttentionLeaf(
        "kv", layers=1, kv_heads=1, head_dim=8, dtype="bfloat16", tokens_per_page=P
    )
    manager = BlockManager([leaf], 1 << 16, max_len=64, page_tokens=P)
    planner = StepPlanner(manager, max_batch=3, max_step_tokens=64)
    copy = np.zeros((3, 16), np.int32)
    for name, length in (("a", 9), ("b", 17)):
        manager.admit(name, range(length))
    for batch in ([("a", 9), ("b", 5)], [("b", 12)], [("a", 4), ("b", 4)], [("b", 1), ("a", 1)]):
        plan = planner.plan(batch)
        changes = plan.changes["kv"]["block_table"]
        kvleaf.scatter_table(copy, *changes)
        table = plan.arrays["kv"]["block_table"]
        assert np.array_equal(copy[: table.shape[0], : table.shape[1]], table)
        planner.settle(plan.step)
    with pytest.raises(InvalidArgument, match="row 3"):
        kvleaf.scatter_table(copy, *np.array([[3], [0], [1]], np.int32))


def test_copies_and_fills_are_named_by_leaf():
    leaf = kvleaf.FullAttentionLeaf(
        "kv", layers=1, kv_heads=1, head_dim=8, dtype="float32", tokens_per_page=P
    )
    geometry = kvleaf.plan_geometry(1 << 14, [leaf])
    arena = arena_of(geometry)
    begin, end = geometry.byte_range("kv", 2)
    arena[begin:end] = 7
    kvleaf.copy_pages(arena, geometry, [("kv", 2, 3)])
    assert (arena[slice(*geometry.byte_range("kv", 3))] == 7).all()
    kvleaf.zero_pages(arena, geometry, iter([("kv", 2)]))
    assert arena.sum() == 7 * (end - begin)
    before = arena.copy()
    for bad in (
        [("kv", 3, 0)],
        [("kv", 1, 2), ("kv", 2, 3)],
        [("kv", 1, 10**6)],
        [("other", 1, 2)],
        [("kv", 1)],
        [("kv", "1", 2)],
    ):
        with pytest.raises(kvleaf.KVError):
            kvleaf.copy_pages(arena, geometry, bad)
    with pytest.raises(InvalidArgument):
        kvleaf.zero_pages(arena, geometry, [("kv", 0)])
    with pytest.raises(InvalidArgument, match="arena of"):
        kvleaf.zero_pages(arena[:-1], geometry, [])
    assert np.array_equal(arena, before)


def test_bad_arguments_write_nothing():
    pages = np.zeros((3, 2, P, HEADS, DIM), np.float32)
    k = np.ones((1, HEADS, DIM), np.float32)
    one = np.array([4])
    read_only = pages.view()
    read_only.flags.writeable = False
    for call in (
        lambda: kvleaf.append_kv(k, k, np.array([3]), pages),  # the null block
        lambda: kvleaf.append_kv(k, k, np.array([12]), pages),  # beyond the last
        lambda: kvleaf.append_kv(k, k[:, :1], one, pages),
        lambda: kvleaf.append_kv(k, k, np.array([4, 5]), pages),
        lambda: kvleaf.append_kv(k, k, np.array([4], np.int32), pages),
        lambda: kvleaf.append_kv(k, None, one, pages),
        lambda: kvleaf.append_kv(k.astype(np.float64), k, one, pages),
        lambda: kvleaf.append_kv(k, k.astype(np.float16), one, pages),
        lambda: kvleaf.append_kv(k, k, one, pages, layer=1),
        lambda: kvleaf.append_kv(k, k, one, pages[..., ::2]),
        lambda: kvleaf.append_kv(k, k, one, pages[0]),
        lambda: kvleaf.append_kv(k, k, one, read_only),
        lambda: kvleaf.append_kv("k", k, one, pages),
        lambda: kvleaf.append_kv(k, k, one, pages, scales=pages, scale_slot_mapping=one),
        lambda: kvleaf.gather_kv(pages, np.array([12])),
        lambda: kvleaf.gather_kv(pages, one, dtype="int32"),
    ):
        with pytest.raises(InvalidArgument):
            call()
    assert not pages.any()
    q = np.ones((1, HEADS, DIM), np.float32)
    table, lens, begins = (
        np.array([[1]], np.int32),
        np.array([2], np.int32),
        np.array([0, 1], np.int32),
    )
    assert kvleaf.paged_attention(q, pages, table, lens, begins).shape == q.shape
    for call in (
        lambda: kvleaf.paged_attention(
            q, pages, table, np.array([5], np.int32), begins
        ),  # slot 1 is not in the table
        lambda: kvleaf.paged_attention(q, pages, table, lens, np.array([0, 2], np.int32)),
        lambda: kvleaf.paged_attention(q[:, :, :4], pages, table, lens, begins),
        lambda: kvleaf.paged_attention(q, pages, table.astype(np.int64), lens, begins),
        lambda: kvleaf.paged_attention(
            q, pages, table, np.array([2, 2], np.int32), np.array([0, 1, 1], np.int32)
        ),
        lambda: kvleaf.paged_attention(
            np.ones((1, 3, DIM), np.float32), pages, table, lens, begins
        ),
    ):
        with pytest.raises(InvalidArgument):
            call()


def test_pages_keep_their_memory_alive():
    pages = KVPages(
        np.zeros(2 * 4 * P, np.uint8),
        layers=1,
        slots=P,
        kv_heads=1,
        key_dim=1,
        value_dim=0,
        dtype="float32",
    )
    gc.collect()
    assert pages.blocks == 1
    kvleaf.append_kv(np.full((1, 1, 1), 3, np.float32), None, np.array([P]), pages)
    assert kvleaf.gather_kv(pages, np.array([P]))[0].item() == 3
    assert "1 blocks of 4 slots" in repr(pages)
    for bad in (dict(dtype="int32"), dict(page_stride=15), dict(slots=0), dict(layers=1 << 20)):
        with pytest.raises(InvalidArgument):
            KVPages(
                np.zeros(32, np.uint8),
                **(
                    dict(layers=1, slots=P, kv_heads=1, key_dim=1, value_dim=0, dtype="float32")
                    | bad
                ),
            )
