"""Requests: any hashable as id, tokens as lists and arrays, answers in names."""

import random

import kvleaf
import numpy as np
import pytest
from kvleaf import BlockManager, Geometry, KVCacheGroupId, KVLeafRegion, PageSpec, Slab

HEADS = dict(layers=2, kv_heads=2, head_dim=8, dtype="bfloat16")


def full(page=16, name="kv"):
    return kvleaf.FullAttentionLeaf(name, tokens_per_page=page, **HEADS)


def window(tokens, page=16, name="window"):
    return kvleaf.SlidingWindowLeaf(name, window=tokens, tokens_per_page=page, **HEADS)


def state(name="state", **options):
    return kvleaf.RecurrentStateLeaf(
        name, layers=2, slabs=[Slab("s", (4, 4), "float32")], **options
    )


def manager_of(*leaves, huge_blocks=64, **options):
    """Every leaf with huge blocks of one page each, all of one class."""
    huge = max(leaf.bytes_per_page for leaf in leaves)
    pages = [PageSpec(leaf.leaf_id, leaf.bytes_per_page, 1) for leaf in leaves]
    geometry = Geometry.by_hand(
        pages, huge_bytes=huge, huge_blocks=huge_blocks, ratios=[1] * len(leaves)
    )
    defaults = dict(max_len=4096, retention="dense")
    return BlockManager(leaves, None, geometry=geometry, **(defaults | options))


def run(manager, request, tokens, chunk=None, **options):
    """Admits and computes all of a prompt; gives the admission."""
    admission = manager.admit(request, tokens, **options)
    compute(manager, request, chunk)
    return admission


def compute(manager, request, chunk=None):
    while (left := manager.length(request) - manager.computed(request)) > 0:
        step = manager.begin_step([(request, min(left, chunk or left))])
        assert step.served == [request]
        manager.settle(step.id)
        manager.audit()


def tokens_from(start, count):
    return list(range(start, start + count))


# ---- construction ----------------------------------------------------------------------------


def test_a_manager_plans_its_own_geometry():
    leaves = [full(), window(64), state()]
    manager = BlockManager(leaves, 1 << 20, max_len=512)
    assert manager.geometry.arena_bytes <= 1 << 20
    assert [leaf.name for leaf in manager.geometry.leaves] == ["kv", "window", "state"]
    assert (manager.page_tokens, manager.max_len) == (16, 512)
    assert (manager.max_step_tokens, manager.max_steps_in_flight) == (8192, 2)
    assert manager.leaves == leaves and manager.leaves[0] is leaves[0]
    assert manager.tokens_per_page("kv") == 16
    assert manager.pool.geometry == manager.geometry


def test_c05_the_longest_request_of_a_pool():
    assert manager_of(full(), huge_blocks=32, max_len=512).longest_request() == 512
    assert manager_of(full(), huge_blocks=31, max_len=512).longest_request() == 496


@pytest.mark.parametrize(
    "wrong",
    [
        dict(leaves=[]),
        dict(leaves=[full(), full()]),
        dict(leaves=["kv"]),
        dict(leaves=[full(page=24)]),
        dict(max_len=0),
        dict(page_tokens=0),
        dict(budget_bytes=None),
        dict(retention="forever"),
        dict(retention=-1),
        dict(eviction="random"),
        dict(hash="md5"),
        dict(seed=-1),
    ],
)
def test_l12_managers_that_cannot_be_are_refused(wrong):
    given = dict(leaves=[full()], budget_bytes=1 << 20, max_len=512) | wrong
    with pytest.raises(kvleaf.InvalidArgument):
        BlockManager(given.pop("leaves"), given.pop("budget_bytes"), **given)


@pytest.mark.parametrize("retention", ["tail", "dense", "spaced", 64])
@pytest.mark.parametrize("eviction", ["value", "lru"])
def test_every_retention_and_eviction_serves_a_repeat(retention, eviction):
    manager = BlockManager(
        [full(), state()], 1 << 20, max_len=512, retention=retention, eviction=eviction
    )
    run(manager, "a", tokens_from(0, 100), chunk=16)
    assert manager.probe(tokens_from(0, 100)).hit_tokens >= 64


# ---- ids -------------------------------------------------------------------------------------


class Job:
    """A request object of an engine, hashable by identity."""


@pytest.mark.parametrize(
    "request_id",
    [7, -1, 2**70, "seven", b"seven", (1, "a"), 1.5, None, frozenset({1}), Job()],
    ids=lambda value: type(value).__name__,
)
def test_any_hashable_is_a_request(request_id):
    manager = manager_of(full())
    manager.admit(request_id, tokens_from(0, 40))
    assert request_id in manager and "other" not in manager
    step = manager.begin_step([(request_id, 40)])
    assert step.served == [request_id]
    manager.settle(step.id)
    assert (manager.length(request_id), manager.computed(request_id)) == (40, 40)
    assert len(manager.blocks(request_id, "kv")) == 3
    manager.release(request_id)
    assert request_id not in manager


def test_what_is_not_hashable_is_refused_as_python_refuses_it():
    manager = manager_of(full())
    with pytest.raises(TypeError, match="unhashable"):
        manager.admit([1], [1, 2, 3])


def test_ids_are_let_go_when_their_request_ends():
    import gc
    import weakref

    manager = manager_of(full())
    job = Job()
    gone = weakref.ref(job)
    run(manager, job, tokens_from(0, 20))
    manager.release(job)
    del job
    gc.collect()
    assert gone() is None


def test_messages_name_requests_as_the_caller_does():
    manager = manager_of(full())
    with pytest.raises(kvleaf.RequestError, match="'who' is unknown"):
        manager.length("who")
    manager.admit("again", [1, 2, 3])
    with pytest.raises(kvleaf.RequestError, match="'again'"):
        manager.admit("again", [1, 2, 3])
    with pytest.raises(kvleaf.RequestError, match="'again'"):
        manager.begin_step([("again", 99999)])
    with pytest.raises(kvleaf.RequestError, match="at least one token"):
        manager.admit("new", [])
    assert "new" not in manager


def test_a_name_may_come_back_while_its_old_request_is_in_flight():
    manager = manager_of(full())
    manager.admit("a", tokens_from(0, 32))
    first = manager.begin_step([("a", 32)])
    manager.release("a")
    manager.admit("a", tokens_from(100, 20))
    second = manager.begin_step([("a", 20)])
    manager.settle(first.id, kept={"a": 0})  # the one in that step, not the one of today
    manager.settle(second)
    assert manager.computed("a") == 20
    manager.audit()


def test_a_refused_admission_leaves_no_name_behind():
    manager = manager_of(full(), huge_blocks=4, max_len=256)
    with pytest.raises(MemoryError) as caught:
        manager.admit("big", tokens_from(0, 200))
    assert isinstance(caught.value, kvleaf.PoolExhausted)
    assert "big" not in manager
    manager.admit("big", tokens_from(0, 40))


# ---- tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens",
    [
        list(range(40)),
        tuple(range(40)),
        range(40),
        np.arange(40, dtype=np.int32),
        np.arange(40, dtype=np.int64),
        np.arange(40, dtype=np.uint32),
        np.arange(40, dtype=np.uint8),
        np.arange(80, dtype=np.int32)[:40],
        np.arange(0, 80)[::2] // 2,
        np.arange(40, dtype=np.int32)[::-1][::-1],
        [np.int64(i) for i in range(40)],
        (i for i in range(40)),
    ],
    ids=lambda value: getattr(getattr(value, "dtype", None), "name", type(value).__name__),
)
def test_tokens_of_every_kind_are_the_same_tokens(tokens):
    manager = manager_of(full())
    run(manager, "a", list(range(40)))
    assert manager.admit("b", tokens).hit_tokens == 32


@pytest.mark.parametrize(
    "tokens",
    [
        [2**31],
        [-(2**31) - 1],
        [2**80],
        np.array([2**31], np.int64),
        np.array([2**32 - 1], np.uint32),
        np.array([2**64 - 1], np.uint64),
        np.array([1.0]),
        np.array([[1, 2]]),
        np.array([True]),
        [1.5],
        ["a"],
        "text",
        5,
    ],
    ids=repr,
)
def test_tokens_that_are_none_are_refused(tokens):
    manager = manager_of(full())
    with pytest.raises(kvleaf.InvalidArgument):
        manager.admit("a", tokens)
    assert "a" not in manager


def test_negative_tokens_are_tokens_of_their_own():
    manager = manager_of(full())
    run(manager, "a", [-(2**31)] * 40)
    assert manager.probe(np.full(40, -(2**31), np.int64)).hit_tokens == 32
    assert manager.probe([2**31 - 1] * 40).hit_tokens == 0


# ---- reuse -----------------------------------------------------------------------------------


def test_a_repeat_hits_all_whole_pages_before_its_last_token():
    manager = manager_of(full())
    assert run(manager, "a", tokens_from(0, 40)).hit_tokens == 0
    admission = manager.admit("b", tokens_from(0, 40))
    assert (admission.hit_tokens, admission.lost, admission.encoder_cached) == (32, {}, False)
    assert manager.blocks("b", "kv")[:2] == manager.blocks("a", "kv")[:2]
    stats = manager.stats()
    assert (stats.admitted, stats.hit_tokens, stats.prompt_tokens) == (2, 32, 80)
    assert stats.requests == 2 and stats.pool.leaves["kv"].live == 3


def test_h07_what_the_state_cost_is_told_by_group():
    manager = manager_of(full(), state(), retention="tail")
    run(manager, "a", tokens_from(0, 110), chunk=55)
    shorter = tokens_from(0, 75) + tokens_from(5000, 25)
    admission = manager.probe(shorter)
    assert admission.hit_tokens < 64
    assert set(admission.lost) == {"state"} and admission.lost["state"] > 0
    assert admission.reason
    lost = manager.stats().groups["state"].lost_tokens
    manager.admit("b", shorter)
    assert manager.stats().groups["state"].lost_tokens > lost


def test_probe_claims_nothing():
    manager = manager_of(full())
    run(manager, "a", tokens_from(0, 40))
    manager.release("a")
    before = manager.stats()
    assert manager.probe(tokens_from(0, 40)).hit_tokens == 32
    after = manager.stats()
    assert after.admitted == before.admitted
    assert after.pool.leaves["kv"].live == before.pool.leaves["kv"].live == 0


def test_k02_salt_and_adapter_are_never_shared():
    manager = manager_of(full())
    run(manager, "a", tokens_from(0, 40), salt=b"s", adapter="a@1")
    assert manager.probe(tokens_from(0, 40), salt="s", adapter="a@1").hit_tokens == 32
    assert manager.probe(tokens_from(0, 40), salt=b"s", adapter="a@2").hit_tokens == 0
    assert manager.probe(tokens_from(0, 40)).hit_tokens == 0


def test_k07_media_digests_tell_prompts_apart():
    manager = manager_of(full())
    prompt = tokens_from(0, 16) + [9] * 32 + tokens_from(100, 20)
    run(manager, "a", prompt, media=[(16, 32, 11)])
    assert manager.probe(prompt, media=[(16, 32, "11", False)]).hit_tokens == 64
    assert manager.probe(prompt, media=[(16, 32, 22)]).hit_tokens == 16
    assert manager.probe(prompt, media=[[16, 32, b"22"]]).hit_tokens == 16


@pytest.mark.parametrize(
    "options",
    [
        dict(media=[(1, 2)]),
        dict(media=[5]),
        dict(media=[(0, 4, 1.5)]),
        dict(media=[(-1, 4, "x")]),
        dict(encoder=("x",)),
        dict(encoder="x"),
        dict(encoder=("x", "y")),
        dict(salt=1.5),
        dict(priority=2**31),
        dict(guarantee=-1),
    ],
    ids=repr,
)
def test_admission_options_that_cannot_be_are_refused(options):
    with pytest.raises(kvleaf.InvalidArgument):
        manager_of(full()).admit("a", tokens_from(0, 40), **options)


def test_x05_an_encoder_is_known_by_its_digest():
    manager = manager_of(full(), kvleaf.CrossAttentionLeaf("cross", tokens_per_page=16, **HEADS))
    text = tokens_from(0, 40)
    first = manager.admit("a", text, encoder=(b"\x00clip", 100))
    assert first.encoder_cached is False
    compute(manager, "a")
    manager.append("a", [1])
    with pytest.raises(kvleaf.RequestError, match="'a'"):
        manager.begin_step([("a", 1)])
    manager.encoder_filled("a")
    compute(manager, "a")
    assert len(manager.blocks("a", "cross")) == 7
    again = manager.admit("b", text, encoder=(b"\x00clip", 100, 0))
    assert (again.hit_tokens, again.encoder_cached) == (32, True)
    assert manager.probe(text, encoder=(b"\x00clop", 100)).hit_tokens == 0


def test_addressable_limits_what_is_matched_and_kept():
    manager = manager_of(full())
    run(manager, "a", tokens_from(0, 64), addressable=32)
    manager.release("a")
    assert manager.probe(tokens_from(0, 64)).hit_tokens == 32
    assert manager.probe(tokens_from(0, 64), addressable=16).hit_tokens == 16
    run(manager, "b", tokens_from(500, 64))
    manager.release("b", addressable=16)
    assert manager.probe(tokens_from(500, 64)).hit_tokens == 16


def test_release_without_keeping_leaves_nothing_findable():
    manager = manager_of(full())
    run(manager, "a", tokens_from(0, 64))
    manager.release("a", keep=False)
    assert manager.probe(tokens_from(0, 64)).hit_tokens == 0


def test_reset_cache_forgets_all():
    manager = manager_of(full())
    run(manager, "a", tokens_from(0, 64))
    manager.reset_cache()
    assert manager.probe(tokens_from(0, 64)).hit_tokens == 0
    assert manager.computed("a") == 64
    manager.audit()


# ---- steps -----------------------------------------------------------------------------------


def test_n07_a_row_that_does_not_fit_is_refused_alone():
    manager = manager_of(full(), huge_blocks=5)
    for name in "abc":
        run(manager, name, tokens_from(ord(name) * 100, 16))
        manager.append(name, [1])
    step = manager.begin_step([("a", 1), ("b", 1), ("c", 1)])
    assert step.served == ["a", "b"]
    assert list(step.refused) == ["c"]
    assert isinstance(step.refused["c"], kvleaf.PoolExhausted)
    assert isinstance(step.refused["c"], MemoryError)
    assert len(manager.blocks("c", "kv")) == 1
    manager.settle(step.id)
    manager.audit()
    assert manager.stats().step_refusals == 1


def test_tokens_may_be_planned_before_they_are_known():
    manager = manager_of(full())
    run(manager, "a", tokens_from(0, 31))
    step = manager.begin_step([("a", 1)])
    assert (manager.planned("a"), manager.computed("a"), manager.length("a")) == (32, 31, 31)
    manager.settle(step.id)
    assert manager.probe(tokens_from(0, 40)).hit_tokens == 16
    manager.append("a", np.array([31]))
    assert manager.probe(tokens_from(0, 40)).hit_tokens == 32


def test_a04_steps_settle_in_order_and_once():
    manager = manager_of(full())
    manager.admit("a", tokens_from(0, 64))
    first = manager.begin_step([("a", 16)])
    second = manager.begin_step([("a", 16)])
    with pytest.raises(kvleaf.StepError):
        manager.begin_step([("a", 16)])
    with pytest.raises(kvleaf.StepError):
        manager.settle(second.id)
    manager.settle(first.id)
    with pytest.raises(kvleaf.StepError):
        manager.settle(first.id)
    manager.settle(second.id)
    with pytest.raises(kvleaf.StepError):
        manager.settle(10**6)
    with pytest.raises(kvleaf.InvalidArgument):
        manager.settle("x")


def test_f10_rejected_drafts_are_taken_back():
    manager = manager_of(full())
    run(manager, "a", tokens_from(0, 30))
    for _ in range(50):  # five drafts, whose ids the device knows; one stands each time
        before = manager.computed("a")
        step = manager.begin_step([("a", 5)])
        with pytest.raises(kvleaf.RequestError, match="'b'"):
            manager.settle(step.id, kept={"b": 1})
        with pytest.raises(kvleaf.RequestError, match="'a'"):
            manager.settle(step.id, kept={"a": 6})
        with pytest.raises(kvleaf.InvalidArgument):
            manager.settle(step.id, kept={"a": -1})
        manager.settle(step.id, kept={"a": 1})
        manager.append("a", [before])
        assert manager.computed("a") == manager.length("a") == before + 1
        assert len(manager.blocks("a", "kv")) == -(-(before + 1) // 16)
        manager.audit()
    assert manager.probe(tokens_from(0, 80)).hit_tokens == 64


def test_k03_rejected_drafts_that_were_appended_are_forgotten():
    manager = manager_of(full())
    run(manager, "a", tokens_from(0, 30))
    manager.append("a", [30, 99, 99])
    step = manager.begin_step([("a", 3)])
    manager.settle(step.id, kept={"a": 1})
    assert (manager.computed("a"), manager.length("a")) == (31, 31)
    manager.append("a", [31])
    compute(manager, "a")
    assert manager.probe(tokens_from(0, 40)).hit_tokens == 32
    assert manager.probe(tokens_from(0, 31) + [99] * 9).hit_tokens == 16


def test_abandoned_steps_take_lengths_back():
    manager = manager_of(full())
    manager.admit("a", tokens_from(0, 64))
    manager.admit("b", tokens_from(100, 64))
    first = manager.begin_step([("a", 16)])
    manager.begin_step([("a", 16), ("b", 16)])
    assert manager.abandon(first.id) == {"a": 0, "b": 0}
    assert manager.stats().steps_in_flight == 0
    assert manager.probe(tokens_from(0, 64)).hit_tokens == 0
    compute(manager, "a")


@pytest.mark.parametrize("batch", [[("a", 0)], [("a", 1), ("a", 1)], [("x", 1)], [("a", 5000)]])
def test_batches_that_cannot_be_are_refused_and_change_nothing(batch):
    manager = manager_of(full())
    manager.admit("a", tokens_from(0, 64))
    with pytest.raises(kvleaf.RequestError):
        manager.begin_step(batch)
    assert (manager.planned("a"), manager.stats().steps_in_flight) == (0, 0)


@pytest.mark.parametrize("batch", [["a"], [("a",)], [("a", "b")], [("a", -1)], [3]])
def test_batches_of_the_wrong_form_are_refused(batch):
    manager = manager_of(full())
    manager.admit("a", tokens_from(0, 64))
    with pytest.raises(kvleaf.InvalidArgument):
        manager.begin_step(batch)


def test_s13_a_new_state_is_cleared_and_a_copy_is_listed():
    manager = manager_of(full(), state())
    manager.admit("a", tokens_from(0, 40))
    step = manager.begin_step([("a", 20)])
    live = manager.live_block("a", "state")
    assert ("state", live) in step.zero_fills
    manager.settle(step.id)
    manager.fork("a", "b")
    step = manager.begin_step([("b", 4)])
    copied = {leaf: (src, dst) for leaf, src, dst in step.copies}
    assert copied["state"] == (live, manager.live_block("b", "state"))
    assert copied["kv"] == (manager.blocks("a", "kv")[1], manager.blocks("b", "kv")[1])
    manager.settle(step.id)
    manager.audit()


# ---- sharing ---------------------------------------------------------------------------------


def test_f01_forks_share_full_pages():
    manager = manager_of(full(), huge_blocks=8)
    run(manager, "p", tokens_from(0, 32))
    for child in ("x", "y"):
        manager.fork("p", child)
        manager.append(child, [1])
    manager.append("p", [2])
    step = manager.begin_step([("p", 1), ("x", 1), ("y", 1)])
    assert step.copies == []
    manager.settle(step.id)
    assert manager.stats().pool.leaves["kv"].live == 5
    for name in ("p", "x", "y"):
        manager.release(name)
    assert manager.stats().pool.leaves["kv"].live == 0
    with pytest.raises(kvleaf.RequestError):
        manager.fork("p", "z")
    assert "z" not in manager


def test_f02_rewind_keeps_the_first_tokens():
    manager = manager_of(full())
    run(manager, "a", tokens_from(0, 40))
    manager.rewind("a", 36)
    assert (manager.length("a"), len(manager.blocks("a", "kv"))) == (36, 3)
    manager.rewind("a", 32)
    assert (manager.length("a"), len(manager.blocks("a", "kv"))) == (32, 2)
    with pytest.raises(kvleaf.RequestError, match="'a'"):
        manager.rewind("a", 33)


def test_f06_a_preempted_request_is_resumed_under_its_name():
    manager = manager_of(full())
    run(manager, "a", tokens_from(0, 55))
    manager.preempt("a")
    assert manager.stats().pool.leaves["kv"].cached == 3
    assert manager.admit("a", tokens_from(0, 55)).hit_tokens == 48
    stats = manager.stats()
    assert (stats.preemptions, stats.resumed, stats.admitted) == (1, 1, 1)


# ---- events ----------------------------------------------------------------------------------


def test_k06_events_carry_chained_keys():
    def events(**options):
        manager = manager_of(full(), events=True, **options)
        run(manager, "a", tokens_from(0, 48))
        return manager.take_events()

    shared = events(hash="sha256", seed=1)
    assert [(e.kind, e.group, e.leaf, e.tokens) for e in shared] == [
        ("stored", "full", "kv", tokens) for tokens in (16, 32, 48)
    ]
    assert all(isinstance(e.key, bytes) and len(e.key) == 16 for e in shared)
    assert shared[0].parent_key == bytes(16)
    assert [e.parent_key for e in shared[1:]] == [e.key for e in shared[:-1]]
    assert [e.key for e in events(hash="sha256", seed=1)] == [e.key for e in shared]
    assert [e.key for e in events(hash="sha256", seed=2)] != [e.key for e in shared]
    assert events()[0].key != events()[0].key
    manager = manager_of(full())
    run(manager, "a", tokens_from(0, 48))
    assert manager.take_events() == []


# ---- leaves of one's own ---------------------------------------------------------------------


class Window32(KVLeafRegion):
    def __init__(self, name, page=8):
        pattern = kvleaf.AccessPattern.custom(tail_begin=lambda n: max(0, n - 31))
        super().__init__(
            name,
            KVCacheGroupId(f"group of {name}", pattern, "append"),
            256,
            stride_alignment=32,
            tokens_per_page=page,
        )


def test_l13_a_leaf_kind_written_in_python_counts_as_the_shipped_one():
    kind = kvleaf.SlidingWindowLeaf(
        "w", window=32, layers=1, kv_heads=1, head_dim=8, dtype="bfloat16", tokens_per_page=8
    )
    managers = [
        manager_of(leaf, page_tokens=8, huge_blocks=40, max_len=400)
        for leaf in (Window32("w"), kind)
    ]
    numbers = random.Random(3)
    live = {}
    for i in range(400):
        do = numbers.random()
        if do < 0.3 and len(live) < 4:
            prompt = [numbers.randrange(3) for _ in range(numbers.randrange(1, 120))]
            outcomes = []
            for manager in managers:
                try:
                    outcomes.append(manager.admit(i, prompt).hit_tokens)
                except kvleaf.PoolExhausted:
                    outcomes.append(None)
            assert outcomes[0] == outcomes[1]
            if outcomes[0] is not None:
                live[i] = len(prompt)
        elif do < 0.4 and live:
            ended = numbers.choice(list(live))
            del live[ended]
            for manager in managers:
                manager.release(ended)
        elif live:
            request = numbers.choice(list(live))
            answers = []
            for manager in managers:
                left = manager.length(request) - manager.computed(request)
                if left == 0:
                    manager.append(request, [i % 3])
                step = manager.begin_step([(request, min(16, max(1, left)))])
                answers.append((step.served, list(step.refused)))
                manager.settle(step.id)
            assert answers[0] == answers[1]
        for leaf in ("live", "cached", "clean"):
            assert len({getattr(m.stats().pool.leaves["w"], leaf) for m in managers}) == 1
        managers[0].audit()


def test_a_leaf_that_is_not_cacheable_is_invisible_to_hits():
    class Private(Window32):
        @property
        def cacheable(self):
            return False

    manager = manager_of(full(), Private("p", 16))
    run(manager, "a", tokens_from(0, 40))
    manager.release("a")
    assert manager.probe(tokens_from(0, 40)).hit_tokens == 32


def test_a08_what_a_leaf_raises_in_admission_comes_out_and_changes_nothing():
    class Broken(Window32):
        broken = False

        def blocks_to_reserve(self, num_blocks, *, enable_prefix_caching, step_tokens=1):
            if self.broken:
                raise ArithmeticError("cannot count")
            return super().blocks_to_reserve(
                num_blocks, enable_prefix_caching=enable_prefix_caching, step_tokens=step_tokens
            )

    leaf = Broken("b", 16)
    manager = manager_of(leaf)
    leaf.broken = True
    with pytest.raises(ArithmeticError, match="cannot count") as caught:
        manager.admit("a", tokens_from(0, 40), guarantee=100)
    assert "blocks_to_reserve" in [frame.name for frame in caught.traceback]
    assert "a" not in manager and manager.stats().requests == 0
    manager.audit()
    leaf.broken = False
    manager.admit("a", tokens_from(0, 40), guarantee=100)
    compute(manager, "a")


def test_an_override_of_the_first_form_knows_no_step_tokens():
    asked = []

    class Old(KVLeafRegion):
        def blocks_to_reserve(self, num_blocks, *, enable_prefix_caching):
            asked.append(num_blocks)
            return min(num_blocks, 5) + 1

    leaf = Old("o", KVCacheGroupId.sliding_window(64), 64, stride_alignment=1, tokens_per_page=16)
    manager = manager_of(leaf, max_step_tokens=128)
    asked.clear()
    run(manager, "a", tokens_from(0, 300), chunk=128, guarantee=300)
    assert asked  # and, called as it can be, it raised no TypeError


# ---- one thread ------------------------------------------------------------------------------


def test_a_call_that_comes_while_one_is_under_way_is_refused():
    caught = []

    class Calls(Window32):
        manager = None

        def blocks_to_reserve(self, num_blocks, *, enable_prefix_caching, step_tokens=1):
            if self.manager is not None:
                assert self.manager.stats().requests == 0
                try:
                    self.manager.admit("inner", [1, 2, 3])
                except kvleaf.KVError as error:
                    caught.append(str(error))
            return super().blocks_to_reserve(
                num_blocks, enable_prefix_caching=enable_prefix_caching, step_tokens=step_tokens
            )

    leaf = Calls("c", 16)
    manager = manager_of(leaf)
    leaf.manager = manager
    manager.admit("outer", tokens_from(0, 40), guarantee=100)
    leaf.manager = None
    assert caught and all("in use" in message for message in caught)
    assert "inner" not in manager
    manager.audit()


def test_b04_another_thread_runs_during_a_long_admission():
    import threading
    import time

    manager = BlockManager([full()], 256 << 20, max_len=1 << 20, max_step_tokens=1 << 20)
    tokens = np.arange(1 << 20, dtype=np.int32)
    run(manager, "a", tokens)
    manager.release("a")
    ticks = []
    stop = threading.Event()

    def tick():
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        during = 0
        for i in range(50):
            begin = time.perf_counter()
            manager.admit(i, tokens)
            end = time.perf_counter()
            manager.release(i)
            during += sum(begin < t < end for t in ticks[-1000:])
            if during > 3:
                break
    finally:
        stop.set()
        thread.join()
    assert during > 3
