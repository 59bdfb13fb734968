"""Objects may die in any order, cycles are collected, and nothing is left behind."""

import copy
import gc
import itertools
import pickle
import random
import subprocess
import sys
import textwrap
import weakref

import kvleaf
import pytest
from kvleaf import BlockManager, BlockPool, KVCacheGroupId, KVLeafRegion, StepPlanner

HEADS = dict(layers=2, kv_heads=2, head_dim=8, dtype="bfloat16", tokens_per_page=16)


class Mine(KVLeafRegion):
    def __init__(self, name="mine"):
        pattern = kvleaf.AccessPattern.custom(tail_begin=lambda n: 0)
        super().__init__(
            name,
            KVCacheGroupId("mine", pattern, "append"),
            64,
            stride_alignment=1,
            tokens_per_page=16,
        )

    def write_staged_inputs(self, plans, into):
        super().write_staged_inputs(plans, into)


def make():
    """One of everything, in use."""
    things = {"leaf": Mine(), "shipped": kvleaf.FullAttentionLeaf("kv", **HEADS)}
    things["manager"] = BlockManager([things["leaf"], things["shipped"]], 1 << 20, max_len=512)
    things["planner"] = StepPlanner(things["manager"], max_batch=2, max_step_tokens=64)
    things["manager"].admit("a", range(40))
    things["plan"] = things["planner"].plan([("a", 40)])
    things["view"] = things["plan"].arrays["mine"]["block_table"]
    things["pool"] = things["manager"].pool
    things["stats"] = things["manager"].stats()
    things["geometry"] = things["manager"].geometry
    things["error"] = pytest.raises(kvleaf.RequestError, things["manager"].length, "x").value
    return things


def test_objects_die_in_any_order():
    numbers = random.Random(1)
    names = list(make())
    orders = list(itertools.permutations(names))
    for order in numbers.sample(orders, 200):
        things = make()
        for name in order:
            del things[name]
            if "view" in things:
                assert things["view"].shape == (1, 3) and things["view"].all()
            if "pool" in things:
                assert things["pool"].stats().leaves["mine"].live == 3
    gc.collect()


def test_a_manager_keeps_its_python_leaves():
    leaf = Mine()
    gone = weakref.ref(leaf)
    manager = BlockManager([leaf], 1 << 20, max_len=512)
    del leaf
    gc.collect()
    assert isinstance(manager.leaves[0], Mine)
    del manager
    gc.collect()
    assert gone() is None


def test_cycles_through_managers_are_collected():
    leaf = Mine()
    leaf.manager = BlockManager([leaf], 1 << 20, max_len=512)
    leaf.planner = StepPlanner(leaf.manager, max_batch=2, max_step_tokens=64)
    leaf.manager.admit(leaf, range(40))  # as the id of a request too
    leaf.plan = leaf.planner.plan([(leaf, 40)])
    leaf.step = leaf.plan.rows
    leaf.pool = leaf.manager.pool
    gone = [weakref.ref(thing) for thing in (leaf, leaf.manager, leaf.planner, leaf.pool)]
    del leaf
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4


def test_cycles_through_steps_and_stats_are_collected():
    class Job:
        pass

    job = Job()
    job.manager = BlockManager([Mine()], 1 << 20, max_len=512)
    job.manager.admit(job, range(40))
    job.step = job.manager.begin_step([(job, 40)])
    job.manager.release(job)  # named by the step in flight only
    gone = weakref.ref(job)
    del job
    gc.collect()
    assert gone() is None


def test_one_leaf_may_serve_two_managers():
    leaf = Mine()
    managers = [BlockManager([leaf], 1 << 20, max_len=512) for _ in range(2)]
    gc.collect()
    del managers[0]
    gc.collect()
    managers[0].admit("a", range(20))
    assert managers[0].leaves == [leaf]


@pytest.mark.parametrize("name", ["leaf", "shipped", "manager", "planner", "pool", "geometry"])
def test_pickling_and_copying_are_refused_with_advice(name):
    thing = make()[name]
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"cannot be pickled or copied: .+"):
            attempt(thing)


@pytest.mark.parametrize(
    "thing",
    [
        kvleaf.AccessPattern.full(),
        KVCacheGroupId.full(),
        kvleaf.PageSpec("a", 1),
        kvleaf.Slab("s", (1,), "int8"),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_values_say_how_to_make_them_anew(thing):
    with pytest.raises(TypeError, match="recreate it from its arguments"):
        pickle.dumps(thing)


def test_errors_can_be_pickled():
    for name in kvleaf.__all__:
        error = getattr(kvleaf, name)
        if isinstance(error, type) and issubclass(error, kvleaf.KVError):
            again = pickle.loads(pickle.dumps(error("why")))
            assert type(again) is error and str(again) == "why"


def test_an_interpreter_that_ends_leaves_no_object_of_ours():
    script = """
        import kvleaf
        from kvleaf import _kvleaf
        _kvleaf._set_leak_warnings(True)
        leaves = [
            kvleaf.KVLeafRegion("a", kvleaf.KVCacheGroupId.full(), 64),
            kvleaf.ScratchLeaf("b", bytes_per_page=64),
        ]
        manager = kvleaf.BlockManager(leaves, 1 << 20, max_len=512)
        planner = kvleaf.StepPlanner(manager, max_batch=2, max_step_tokens=64)
        manager.admit("a", range(40))
        plan = planner.plan([("a", 40)])
        view = plan.arrays["a"]["block_table"]
        pool = kvleaf.BlockPool(manager.geometry)
        pool.on_evict(lambda leaf, block, key: pool)
        def main():
            global manager, planner, plan, view, pool, leaves
            del manager, planner, plan, view, pool, leaves
        main()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_interpreter_may_end_with_everything_in_use():
    script = """
        import kvleaf
        class Mine(kvleaf.KVLeafRegion):
            def write_staged_inputs(self, plans, into):
                super().write_staged_inputs(plans, into)
        pattern = kvleaf.AccessPattern.custom(tail_begin=lambda n: 0)
        leaf = Mine("a", kvleaf.KVCacheGroupId("g", pattern, "append"), 64)
        manager = kvleaf.BlockManager([leaf], 1 << 20, max_len=512)
        planner = kvleaf.StepPlanner(manager, max_batch=2, max_step_tokens=64)
        manager.admit("a", range(40))
        plan = planner.plan([("a", 40)])
        view = plan.arrays["a"]["block_table"]
        pool = kvleaf.BlockPool(manager.geometry)
        pool.on_evict(lambda leaf, block, key: pool)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_pool_outlives_what_made_it():
    pool = BlockPool(kvleaf.plan_geometry(1 << 20, [Mine(), kvleaf.PageSpec("b", 100)]))
    gc.collect()
    assert pool.allocate("mine") == 1
    assert pool.geometry.leaves[1].name == "b"
