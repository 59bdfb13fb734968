"""Geometry and pool, by leaf names and plain block numbers."""

import gc
import weakref

import kvleaf
import numpy as np
import pytest
from kvleaf import BlockPool, Geometry, KVCacheGroupId, KVLeafRegion, PageSpec, plan_geometry

MIB = 1 << 20
GIB = 1 << 30


def by_hand(huge_blocks, *ratios, **options):
    """A pool of leaves a, b, … with pages of one byte times what tiles a huge block."""
    huge = int(np.lcm.reduce(ratios))
    pages = [PageSpec("abcdef"[i], huge // ratio) for i, ratio in enumerate(ratios)]
    return BlockPool(
        Geometry.by_hand(pages, huge_bytes=huge, huge_blocks=huge_blocks, ratios=ratios), **options
    )


def key(number):
    return number.to_bytes(16, "big")


# ---- geometry --------------------------------------------------------------------------------


def test_g01_packed_pages_of_two_sizes():
    geometry = plan_geometry(
        120 * GIB,
        [PageSpec("state", 100 * MIB), PageSpec("kv", 10 * MIB)],
        max_huge_bytes=1 << 40,
        alignment=1,
    )
    assert (geometry.huge_bytes, geometry.huge_blocks) == (100 * MIB, 1227)
    assert [leaf.ratio for leaf in geometry.leaves] == [1, 10]
    assert geometry.null_bytes == 100 * MIB
    assert geometry.arena_bytes == 100 * MIB * 1228 == 120 * GIB - 80 * MIB


def test_g09_weights_decide():
    def planned(a, b):
        pages = [
            PageSpec("a", 10, 1, a),
            PageSpec("b", 7, stride_alignment=1, weight=b),
        ]
        return plan_geometry(1000, pages, max_huge_bytes=64, alignment=1)

    assert [leaf.ratio for leaf in planned(0.5, 0.5).leaves] == [4, 5]
    assert [leaf.ratio for leaf in planned(0.1, 0.9).leaves] == [1, 2]
    assert [leaf.ratio for leaf in planned(0.9, 0.1).leaves] == [1, 1]
    assert 0 < planned(0.5, 0.5).cost < planned(0.5, 0.5).huge_bytes


def test_g11_views_begin_before_the_first_huge_block():
    geometry = Geometry.by_hand(
        [PageSpec("a", 24), PageSpec("b", 8)], huge_bytes=24, huge_blocks=2, ratios=[1, 3]
    )
    a, b = geometry.leaves
    assert (a.base_offset, b.base_offset) == (0, 16)
    assert [geometry.byte_range("b", block)[0] for block in (1, 2, 3, 4)] == [24, 32, 40, 48]
    assert geometry.byte_range("a", 2) == (48, 72)
    assert [geometry.huge_block_of("b", block) for block in (3, 4)] == [0, 1]
    assert (a.name, a.bytes_per_page, a.page_stride, a.blocks, a.floor, a.ceiling) == (
        "a",
        24,
        24,
        2,
        0,
        None,
    )


def test_g04_one_byte_less_is_refused_with_the_least_budget():
    assert plan_geometry(2 * MIB, [PageSpec("x", MIB)], alignment=1).huge_blocks == 1
    with pytest.raises(kvleaf.GeometryError) as caught:
        plan_geometry(2 * MIB - 1, [PageSpec("x", MIB)], alignment=1)
    assert caught.value.least_budget == 2 * MIB
    assert caught.value.blamed_leaf == "x"


def test_a_region_serves_as_a_page():
    leaf = KVLeafRegion("kv", KVCacheGroupId.full(), 640, stride_alignment=64)
    geometry = plan_geometry(MIB, [leaf, PageSpec("other", 100, 4)])
    assert [page.name for page in geometry.leaves] == ["kv", "other"]
    assert geometry.leaves[0].page_stride % 64 == 0
    with pytest.raises(kvleaf.InvalidArgument, match=r"pages\[0\]"):
        plan_geometry(MIB, ["kv"])


def test_by_hand_refuses_what_does_not_tile():
    pages = [PageSpec("a", 10)]
    with pytest.raises(kvleaf.GeometryError, match="a"):
        Geometry.by_hand(pages, huge_bytes=25, huge_blocks=2, ratios=[2])
    with pytest.raises(kvleaf.InvalidArgument):
        Geometry.by_hand(pages, huge_bytes=20, huge_blocks=2, ratios=[2, 2])
    with pytest.raises(kvleaf.InvalidArgument):
        Geometry.by_hand([], huge_bytes=20, huge_blocks=2, ratios=[])
    with pytest.raises(kvleaf.KVError):  # B-05: tables are int32
        Geometry.by_hand([PageSpec("a", 1)], huge_bytes=2**31, huge_blocks=1, ratios=[2**31])


def test_geometries_and_pages_are_values():
    page = PageSpec("a", 10, None, 2.0, 1, 5)
    assert page == PageSpec("a", 10, weight=2.0, floor=1, ceiling=5) != PageSpec("a", 10)
    assert (page.weight, page.floor, page.ceiling, page.stride_alignment) == (2.0, 1, 5, None)
    geometry = plan_geometry(1000, [page], alignment=1)
    assert geometry == plan_geometry(1000, [page], alignment=1) != geometry.resized(1)
    assert geometry.resized(1).huge_blocks == 1


# ---- drawing ---------------------------------------------------------------------------------


def test_p01_blocks_are_numbered_from_one():
    pool = by_hand(2, 42, 43, 3)
    assert [pool.allocate("c") for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    assert pool.allocate("c") is None


def test_p02_returned_memory_serves_any_leaf():
    pool = by_hand(5, 4, 1)
    drawn = pool.allocate_all({"a": 8, "b": 2})
    assert {leaf: len(blocks) for leaf, blocks in drawn.items()} == {"a": 8, "b": 2}
    assert pool.stats().empty == 1
    for leaf, blocks in drawn.items():
        pool.free_many(leaf, blocks)
    assert pool.can_allocate({"a": 20, "b": 0}) and pool.can_allocate({"b": 5})
    assert not pool.can_allocate({"a": 1, "b": 5})
    pool.audit()


def test_p04_the_oldest_commit_is_evicted_and_told():
    pool = by_hand(1, 2)
    told = []
    pool.on_evict(lambda leaf, block, key: told.append((leaf, block, key)))
    first, second = pool.allocate_many("a", 2)
    pool.commit("a", first, key(1))
    pool.commit("a", second, key(2), 99)
    pool.free_many("a", np.array([first, second]))
    assert pool.allocate("a") == first
    assert told == [("a", first, key(1))]
    assert pool.find("a", key(1)) is None and pool.find("a", key(2)) == second


def test_values_order_eviction():
    pool = by_hand(1, 3)
    blocks = pool.allocate_many("a", 3)
    for block, value in zip(blocks, (30, 10, 20)):
        pool.commit("a", block, key(block), value)
    pool.free_many("a", blocks)
    pool.revalue("a", blocks[1], 40)
    assert [pool.allocate("a") for _ in range(3)] == [blocks[2], blocks[0], blocks[1]]


def test_touch_makes_a_cached_block_live():
    pool = by_hand(1, 2)
    block = pool.allocate("a", fate="request")
    pool.commit("a", block, key(1))
    pool.free("a", block)
    assert pool.stats().leaves["a"].cached == 1 and pool.stats().idle == 1
    pool.touch("a", pool.find("a", key(1)))
    pool.touch_many("a", [block], value=7)
    assert pool.references("a", block) == 2 and pool.stats().leaves["a"].live == 1
    pool.uncommit("a", block)
    assert not pool.committed("a", block)
    pool.free_many("a", [block, block])
    assert pool.stats().empty == 1
    with pytest.raises(kvleaf.BlockError):
        pool.touch("a", block)


def test_commit_many_takes_a_key_for_each_block():
    pool = by_hand(1, 3)
    blocks = pool.allocate_many("a", 3)
    with pytest.raises(kvleaf.InvalidArgument, match="3 blocks, but 2 keys"):
        pool.commit_many("a", blocks, [key(1), key(2)])
    pool.commit_many("a", blocks, [key(i) for i in range(3)])
    assert [pool.find("a", key(i)) for i in range(3)] == blocks


def test_p19_blocks_that_cannot_be_touched_are_refused():
    pool = by_hand(4, 3, 3)
    block = pool.allocate("a")
    for wrong in (0, -1, 12, 13, 2**31, 2**40):
        with pytest.raises(kvleaf.BlockError):
            pool.free("a", wrong)
    with pytest.raises(kvleaf.BlockError):
        pool.free("b", block)  # of its class, but not its own
    with pytest.raises(kvleaf.BlockError):
        pool.commit("a", 0, key(1))
    pool.free("a", block)
    with pytest.raises(kvleaf.BlockError):
        pool.free("a", block)
    pool.audit()


def test_p21_demands_beyond_all_numbers_are_refused_and_take_nothing():
    pool = by_hand(2, 2)
    for much in (2**32 + 1, 2**64 - 1, 2**64, 2**70):
        assert not pool.can_allocate({"a": much})
        assert pool.allocate_all({"a": much}) is None
        assert pool.allocate_many("a", much) is None
    with pytest.raises(kvleaf.InvalidArgument):
        pool.allocate_all({"a": -1})
    with pytest.raises(kvleaf.InvalidArgument):
        pool.can_allocate({"a": 1.5})
    assert pool.stats().empty == 2


def test_allocate_all_takes_fates_and_answers_for_every_leaf_named():
    pool = by_hand(4, 2, 1)
    drawn = pool.allocate_all({"a": 2, "b": 0}, fate={"a": "request"})
    assert drawn["b"] == [] and len(drawn["a"]) == 2
    assert pool.allocate_all({"a": 1, "b": 4}) is None
    with pytest.raises(kvleaf.InvalidArgument, match="forever"):
        pool.allocate_all({"a": 1}, fate="forever")
    with pytest.raises(kvleaf.InvalidArgument, match="there are"):
        pool.allocate_all({"z": 1})


def test_hints_are_ignored_when_useless():
    pool = by_hand(4, 2)
    assert pool.allocate("a", hint=10**30) is not None
    assert pool.allocate("a", hint=-3) is not None
    assert pool.allocate("a", hint=2) is not None


def test_keys_are_sixteen_bytes():
    pool = by_hand(1, 2)
    block = pool.allocate("a")
    with pytest.raises(kvleaf.InvalidArgument, match="16 bytes, not 3"):
        pool.commit("a", block, b"abc")
    with pytest.raises(TypeError):
        pool.commit("a", block, "a" * 16)
    odd = bytes(range(240, 256))
    pool.commit("a", block, odd)
    told = []
    pool.on_evict(lambda leaf, block, key: told.append(key))
    pool.free("a", block)
    pool.allocate_many("a", 2)
    assert told == [odd]


def test_floors_and_ceilings_bound_live_blocks():
    pages = [PageSpec("a", 1, floor=2), PageSpec("b", 1, ceiling=1)]
    pool = BlockPool(Geometry.by_hand(pages, huge_bytes=1, huge_blocks=4, ratios=[1, 1]))
    assert pool.can_allocate({"b": 1}) and not pool.can_allocate({"b": 2})
    assert pool.allocate("b") is not None and pool.allocate("b") is None


# ---- callbacks -------------------------------------------------------------------------------


def full_of_commits():
    pool = by_hand(1, 2)
    blocks = pool.allocate_many("a", 2)
    pool.commit_many("a", blocks, [key(1), key(2)])
    pool.free_many("a", blocks)
    return pool


def test_a08_what_a_callback_raises_reaches_the_caller_and_nothing_is_taken():
    pool = full_of_commits()

    def callback(leaf, block, key):
        raise ZeroDivisionError(f"{leaf} {block}")

    pool.on_evict(callback)
    with pytest.raises(ZeroDivisionError, match="a 1") as caught:
        pool.allocate("a")
    assert "callback" in [frame.name for frame in caught.traceback]
    assert pool.stats().leaves["a"].live == 0
    pool.audit()
    pool.on_evict(None)
    assert len(pool.allocate_many("a", 2)) == 2


def test_a_callback_may_ask_and_uncommit_and_nothing_else():
    pool = full_of_commits()
    seen = []

    def callback(leaf, block, key):
        seen.append(pool.find(leaf, key))
        for block in (1, 2):
            if pool.committed(leaf, block):
                pool.uncommit(leaf, block)
        with pytest.raises(kvleaf.KVError, match="in use"):
            pool.allocate(leaf)

    pool.on_evict(callback)
    assert pool.allocate("a") is not None
    assert seen == [None]
    assert pool.stats().leaves["a"].cached == 0
    pool.audit()


def test_a_callback_that_holds_its_pool_is_collected_with_it():
    class Owner:
        def __init__(self):
            self.pool = full_of_commits()
            self.pool.on_evict(self.evicted)

        def evicted(self, leaf, block, key):
            pass

    gone = weakref.ref(Owner().pool)
    gc.collect()
    assert gone() is None


# ---- the arena -------------------------------------------------------------------------------


def test_compaction_moves_blocks_together():
    pool = by_hand(2, 4)
    blocks = pool.allocate_many("a", 8)
    pool.commit("a", blocks[7], key(7))
    for block in blocks[1:4] + blocks[5:7]:
        pool.free("a", block)
    moves = pool.plan_compaction("a", 1 << 20)
    assert moves and pool.plan_compaction("a", 0) == []
    for leaf, src, dst in moves:
        assert leaf == "a"
        pool.move(leaf, src, dst)
    assert pool.stats().empty == 1
    assert pool.references("a", pool.find("a", key(7))) == 1
    pool.audit()


def test_resize_gives_ranges_and_names_the_least_number():
    pool = by_hand(4, 2)
    ranges = pool.resize(2)
    assert sum(end - begin for begin, end in ranges) == 2 * pool.geometry.huge_bytes
    assert pool.stats().huge_blocks == 2 and not pool.can_allocate({"a": 5})
    assert pool.resize(4) == ranges
    pool.allocate_many("a", 8)
    with pytest.raises(kvleaf.PoolExhausted, match="4"):
        pool.resize(3)
    growing = by_hand(2, 2, max_huge_blocks=6)
    assert growing.resize(6) and growing.can_allocate({"a": 12})


def test_p23_clean_blocks_are_shown_for_each_leaf_of_a_class():
    pool = by_hand(1, 4, 4)
    a, _ = pool.allocate_many("a", 2), pool.allocate_many("b", 2)
    pool.free_many("a", a)
    stats = pool.stats()
    assert (stats.leaves["a"].clean, stats.leaves["b"].clean) == (2, 2)
    assert (stats.claimed, stats.idle, stats.empty, stats.huge_blocks) == (1, 0, 0, 1)
    assert stats.leaves["b"].live == 2 and "b" in repr(stats)
    for demand, fits in (({"a": 2}, True), ({"a": 1, "b": 1}, True), ({"a": 2, "b": 1}, False)):
        assert pool.can_allocate(demand) == fits


def test_a_pool_knows_its_geometry_and_its_own_bytes():
    pool = by_hand(3, 2)
    assert pool.geometry.huge_blocks == 3
    assert pool.metadata_bytes > 0
