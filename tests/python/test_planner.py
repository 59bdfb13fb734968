"""The planner: arrays as views, lists for the device, leaves of one's own."""

import gc
import weakref

import kvleaf
import numpy as np
import pytest
from kvleaf import BlockManager, KVCacheGroupId, KVLeafRegion, Slab, StepPlanner

HEADS = dict(layers=2, kv_heads=2, head_dim=8, dtype="bfloat16")


def full(name="kv", page=16, **options):
    return kvleaf.FullAttentionLeaf(name, tokens_per_page=page, **(HEADS | options))


def planner_of(*leaves, max_batch=4, max_step_tokens=256, max_len=512, **options):
    manager = BlockManager(leaves or [full()], 1 << 20, max_len=max_len, **options)
    return StepPlanner(manager, max_batch=max_batch, max_step_tokens=max_step_tokens)


def admit(planner, **lengths):
    for i, (name, length) in enumerate(lengths.items()):
        planner.manager.admit(name, [1000 * i + t for t in range(length)])


def plan_and_settle(planner, batch, **options):
    plan = planner.plan(batch, **options)
    planner.settle(plan.step)
    return plan


def test_n11_lengths_of_a_batch():
    planner = planner_of()
    admit(planner, a=13, b=21, c=4)
    plan_and_settle(planner, [("a", 10), ("b", 20)])
    plan = planner.plan([("a", 3), ("b", 1), ("c", 4)])
    assert plan.rows == ["a", "b", "c"]
    assert (plan.batch, plan.num_tokens, plan.refused) == (3, 8, {})
    assert plan.cu_seqlens_q.tolist() == [0, 3, 4, 8]
    assert plan.seq_lens.tolist() == [13, 21, 4]
    assert plan.cu_seqlens_q.dtype == plan.seq_lens.dtype == np.int32
    assert "3 rows" in repr(plan)


def test_n04_slots_follow_the_table():
    planner = planner_of()
    admit(planner, a=36)
    plan = planner.plan([("a", 36)])
    table = plan.arrays["kv"]["block_table"]
    assert (table.dtype, table.shape) == (np.int32, (1, 3))
    assert table[0].tolist() == planner.manager.blocks("a", "kv")
    slots = plan.slot_mapping["kv"]
    assert (slots.dtype, slots.shape) == (np.int64, (36,))
    assert slots.tolist() == [table[0, t // 16] * 16 + t % 16 for t in range(36)]


def test_n03_dummy_rows_write_nowhere():
    planner = planner_of(
        full(), kvleaf.RecurrentStateLeaf("s", layers=2, slabs=[("x", (4,), "float32")])
    )
    admit(planner, a=20)
    plan = planner.plan([("a", 20)], pad_to=3)
    assert (plan.rows, plan.batch, plan.num_tokens) == (["a"], 3, 22)
    assert plan.arrays["kv"]["block_table"][1:].tolist() == [[0, 0]] * 2
    assert plan.slot_mapping["kv"][20:].tolist() == [-1, -1]
    assert plan.seq_lens.tolist() == [20, 1, 1]
    assert plan.arrays["s"]["state_rows"].tolist() == [planner.manager.live_block("a", "s"), -1, -1]
    assert "s" not in plan.slot_mapping
    assert ("s", planner.manager.live_block("a", "s")) in plan.zero_fills


def test_every_table_format_has_its_keys():
    state = dict(layers=2, slabs=[Slab("x", (64,), "float32")])
    planner = planner_of(
        full("dense"),
        full("csr", table="csr"),
        kvleaf.SlidingWindowLeaf("compact", window=32, compact=True, tokens_per_page=16, **HEADS),
        kvleaf.RecurrentStateLeaf("rows", table="rows", group="one", **state),
        kvleaf.RecurrentStateLeaf("in_out", kernel="in_out", group="two", **state),
        kvleaf.ScratchLeaf("scratch", bytes_per_page=64),
        KVLeafRegion("bare", KVCacheGroupId.full(), 64),
    )
    admit(planner, a=100, b=30)
    plan = planner.plan([("a", 100), ("b", 30)])
    keys = {leaf: set(arrays) for leaf, arrays in plan.arrays.items()}
    assert keys == {
        "dense": {"block_table"},
        "csr": {"indptr", "indices", "last_page_len"},
        "compact": {"block_table", "first_slot"},
        "rows": {"state_rows"},
        "in_out": {"state_read_rows", "state_write_rows"},
        "scratch": {"block_table"},
        "bare": {"block_table"},
    }
    arrays = plan.arrays
    assert arrays["csr"]["indptr"].tolist() == [0, 7, 9]
    assert arrays["csr"]["last_page_len"].tolist() == [4, 14]
    assert arrays["rows"]["state_rows"].shape == (2, 2)
    assert arrays["bare"]["block_table"].tolist()[0] == planner.manager.blocks("a", "bare")
    assert set(plan.changes) == set(plan.dirty) == set(plan.arrays)


def test_changes_and_dirty_tell_what_became_of_the_previous_plan():
    planner = planner_of(max_steps_in_flight=1)
    admit(planner, a=31, b=40)
    plan = plan_and_settle(planner, [("a", 31), ("b", 40)])
    before = plan.arrays["kv"]["block_table"].copy()
    planner.manager.append("a", [7, 8])
    planner.manager.append("b", [7])
    plan = planner.plan([("a", 2), ("b", 1)])
    after = plan.arrays["kv"]["block_table"]
    rows, columns, values = plan.changes["kv"]["block_table"]
    assert {array.dtype for array in (rows, columns, values)} == {np.dtype(np.int32)}
    applied = np.zeros_like(after)
    applied[:, : before.shape[1]] = before
    applied[rows, columns] = values
    assert (applied == after).all()
    assert list(zip(rows, columns)) == [(0, 2)]
    [(begin, end)] = plan.dirty["kv"]["block_table"]
    assert (begin, end) == (2 * 4, 3 * 4)


def test_a_row_that_does_not_fit_leaves_the_batch():
    huge = full().bytes_per_page
    geometry = kvleaf.Geometry.by_hand([full()], huge_bytes=huge, huge_blocks=2, ratios=[1])
    planner = planner_of(geometry=geometry)
    admit(planner, a=16, b=16)
    plan_and_settle(planner, [("a", 16), ("b", 16)])
    planner.manager.append("a", [1])
    planner.manager.release("b", keep=False)
    admit(planner, c=8)
    plan = planner.plan([("c", 8), ("a", 1)])
    assert plan.rows == ["c"]
    assert isinstance(plan.refused["a"], kvleaf.PoolExhausted)
    assert plan.seq_lens.tolist() == [8]


def test_n08_an_abandoned_plan_leaves_no_trace():
    planner = planner_of()
    admit(planner, a=40)
    first = planner.plan([("a", 40)])
    table = first.arrays["kv"]["block_table"].copy()
    free = planner.manager.stats().pool.leaves["kv"].clean
    assert planner.abandon(first.step) == {"a": 0}
    second = planner.plan([("a", 40)])
    assert (second.arrays["kv"]["block_table"] == table).all()
    assert planner.manager.stats().pool.leaves["kv"].clean == free
    planner.settle(second.step, kept={"a": 40})
    planner.manager.audit()


def test_n13_batches_beyond_the_bounds_are_refused_and_begin_no_step():
    planner = planner_of(max_batch=2, max_step_tokens=64)
    admit(planner, a=100, b=100, c=100)
    for batch, options in (
        ([("a", 65)], {}),
        ([("a", 1), ("b", 1), ("c", 1)], {}),
        ([("a", 1)], dict(pad_to=3)),
    ):
        with pytest.raises(kvleaf.PlanShapeError):
            planner.plan(batch, **options)
    with pytest.raises(kvleaf.InvalidArgument):
        planner.plan([("a", 1)], pad_to=-1)
    assert planner.manager.stats().steps_in_flight == 0
    assert planner.plan([("a", 32), ("b", 32)]).batch == 2
    for wrong in (dict(max_batch=0), dict(max_step_tokens=0)):
        with pytest.raises(kvleaf.PlanShapeError):
            StepPlanner(planner.manager, **(dict(max_batch=1, max_step_tokens=1) | wrong))
    with pytest.raises(kvleaf.InvalidArgument):
        StepPlanner("manager", max_batch=1, max_step_tokens=1)


# ---- views -----------------------------------------------------------------------------------


def test_n13_views_lie_at_the_same_addresses_every_time_round():
    planner = planner_of(max_steps_in_flight=2)
    admit(planner, a=200)
    addresses = []
    for _ in range(6):
        plan = plan_and_settle(planner, [("a", 16)])
        table = plan.arrays["kv"]["block_table"]
        again = plan.arrays["kv"]["block_table"]
        assert np.shares_memory(table, again)
        addresses.append(table.ctypes.data)
    assert len(set(addresses)) == 2 and addresses[::2] == [addresses[0]] * 3


def test_b04_views_keep_what_they_look_at_alive():
    planner = planner_of()
    admit(planner, a=40)
    plan = planner.plan([("a", 40)])
    views = [
        plan.arrays["kv"]["block_table"],
        plan.seq_lens,
        plan.cu_seqlens_q,
        plan.slot_mapping["kv"],
    ]
    copies = [view.copy() for view in views]
    gone = weakref.ref(planner)
    del planner, plan
    gc.collect()
    junk = [np.full(100_000, 7, np.int32) for _ in range(20)]
    assert all((view == copy).all() for view, copy in zip(views, copies))
    assert gone() is not None and junk
    del views
    gc.collect()
    assert gone() is None


def test_a_plan_whose_host_set_serves_another_step_refuses_to_show_it():
    planner = planner_of(max_steps_in_flight=2)
    admit(planner, a=200)
    first = plan_and_settle(planner, [("a", 16)])
    first.arrays  # noqa: B018
    for _ in range(2):
        plan_and_settle(planner, [("a", 16)])
    for name in ("arrays", "slot_mapping", "seq_lens", "cu_seqlens_q", "dirty", "changes"):
        with pytest.raises(kvleaf.StepError, match=f"step {first.step}"):
            getattr(first, name)
    assert first.rows == ["a"] and first.copies == []


# ---- leaves of one's own ---------------------------------------------------------------------


class Positions(KVLeafRegion):
    """Stages its blocks as int64, twice, and the length of each row."""

    def __init__(self):
        super().__init__("mine", KVCacheGroupId.full(), 64, stride_alignment=1, tokens_per_page=16)
        self.fail = False
        self.seen = []

    def staged_input_shapes(self, batch_size, num_blocks):
        return {
            "twice": ((batch_size, num_blocks, 2), np.int64),
            "count": ((batch_size,), np.dtype("int32")),
        }

    def write_staged_inputs(self, plans, into):
        if self.fail:
            raise ZeroDivisionError(f"cannot write {plans}")
        self.seen.append(plans)
        into["twice"][:] = 0
        for i, blocks in enumerate(plans):
            into["twice"][i, : len(blocks)] = np.array(blocks)[:, None] * [1, 2]
            into["count"][i] = len(blocks)


def test_a_leaf_written_in_python_fills_its_own_arrays():
    leaf = Positions()
    planner = planner_of(full(), leaf)
    admit(planner, a=40, b=10)
    plan = planner.plan([("a", 40), ("b", 10)])
    blocks = [planner.manager.blocks(name, "mine") for name in "ab"]
    assert [[block for block in row if block] for row in leaf.seen[-1]] == blocks
    twice = plan.arrays["mine"]["twice"]
    assert (twice.dtype, twice.shape) == (np.int64, (2, 3, 2))
    assert twice[0, :, 1].tolist() == [2 * block for block in blocks[0]]
    assert plan.arrays["mine"]["count"].tolist()[0] == 3
    assert "twice" not in plan.changes["mine"] and "count" in plan.changes["mine"]
    assert len(plan.slot_mapping["mine"]) == 50


def test_b03_what_a_leaf_raises_comes_out_of_plan_and_no_step_is_begun():
    leaf = Positions()
    planner = planner_of(full(), leaf)
    admit(planner, a=40, b=10)
    plan_and_settle(planner, [("a", 20)])
    before = repr(planner.manager.stats().pool)
    leaf.fail = True
    for _ in range(5):
        with pytest.raises(ZeroDivisionError, match="cannot write") as caught:
            planner.plan([("a", 20), ("b", 10)])
        assert "write_staged_inputs" in [frame.name for frame in caught.traceback]
        assert planner.manager.stats().steps_in_flight == 0
        assert repr(planner.manager.stats().pool) == before
        planner.manager.audit()
    leaf.fail = False
    plan = plan_and_settle(planner, [("a", 20), ("b", 10)])
    assert plan.rows == ["a", "b"]
    assert planner.manager.computed("a") == 40
    assert plan.arrays["kv"]["block_table"][0].tolist() == planner.manager.blocks("a", "kv")


def test_a_leaf_may_write_deltas_in_python():
    class Deltas(KVLeafRegion):
        def write_staged_delta(self, rows, into):
            self.rows = rows
            table = into["block_table"]
            for i, row in enumerate(rows):
                if row.padding:
                    table[i] = 0
                    continue
                end = row.first_changed_slot + len(row.blocks)
                table[i, row.first_changed_slot : end] = row.blocks
                table[i, end:] = 0

    leaf = Deltas("mine", KVCacheGroupId.full(), 64, stride_alignment=1, tokens_per_page=16)
    planner = planner_of(full(), leaf, max_steps_in_flight=1)
    admit(planner, a=40, b=100)
    for batch in (
        [("a", 16), ("b", 30)],
        [("a", 16), ("b", 30)],
        [("b", 1)],
        [("b", 20), ("a", 8)],
    ):
        plan = plan_and_settle(planner, batch, pad_to=3)
        for row, (name, _) in enumerate(batch):
            held = planner.manager.blocks(name, "mine")
            table = plan.arrays["mine"]["block_table"][row].tolist()
            assert table == held + [0] * (len(table) - len(held))
    assert [row.padding for row in leaf.rows] == [False, False, True]
    assert leaf.rows[0].new_tokens == 20 and leaf.rows[0].computed == 61


def test_a_python_leaf_that_keeps_its_arrays_keeps_the_planner():
    class Keeper(KVLeafRegion):
        kept = None

        def write_staged_inputs(self, plans, into):
            super().write_staged_inputs(plans, into)
            self.kept = into["block_table"]

    leaf = Keeper("mine", KVCacheGroupId.full(), 64, stride_alignment=1, tokens_per_page=16)
    planner = planner_of(leaf)
    admit(planner, a=40)
    blocks = planner.plan([("a", 40)]).arrays["mine"]["block_table"].tolist()
    del planner
    gc.collect()
    junk = [np.full(100_000, 7, np.int32) for _ in range(20)]
    assert leaf.kept.tolist() == blocks and junk


@pytest.mark.parametrize(
    "shapes",
    [
        5,
        {"x": 5},
        {"x": ((1,), "float128")},
        {"x": ((-1,), "int32")},
        {"x": ((), "int32")},
        {"x": ((1, 1, 1, 1, 1), "int32")},
        {5: ((1,), "int32")},
        {str(i): ((1,), "int32") for i in range(9)},
    ],
    ids=repr,
)
def test_shapes_that_cannot_be_staged_are_refused(shapes):
    class Odd(KVLeafRegion):
        def staged_input_shapes(self, batch_size, num_blocks):
            return shapes

    with pytest.raises(kvleaf.InvalidArgument, match="'odd': staged_input_shapes"):
        planner_of(Odd("odd", KVCacheGroupId.full(), 64))
