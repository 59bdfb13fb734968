"""What the engine promises, with windows and with states; and that the comparison bites."""

import kvleaf
import pytest
import torch
from comparison import by_default_cache, compare, workload
from kvleaf_transformers import Arena, Engine, Request
from kvleaf_transformers.cache import _Entries
from small_models import VOCABULARY, make

CLOSE = 2e-4  # of logits whose spread is near 1


def prompt(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCABULARY - 4, (length,), generator=generator).tolist()


def engine_of(model, budget_bytes=1 << 22, **options):
    settings = dict(page_tokens=8, chunk=24, record_logits=True) | options
    return Engine(model, budget_bytes=budget_bytes, **settings)


def assert_as_by_default(model, requests, results):
    for request, samples in zip(requests, results):
        for number, result in enumerate(samples):
            expected = by_default_cache(model, request, number)
            assert result.tokens == expected.tokens
            for ours, theirs in zip(result.logits, expected.logits):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=CLOSE)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gemma3", dict(steps_in_flight=1)),
        ("lfm2", dict(steps_in_flight=3, chunk=7)),
        ("gemma3", dict(chunk=1)),
        ("qwen3_next", dict(page_tokens=16, chunk=64)),
        ("lfm2", dict(retention="dense", max_batch=2)),
        ("gemma3", dict(retention="spaced", eviction="lru")),
        ("lfm2", dict(enable_prefix_caching=False)),
    ],
    ids=str,
)
def test_answers_do_not_depend_on_how_they_are_scheduled(name, options):
    outcome = compare(name, **options)
    assert outcome.wrong_tokens() == 0
    assert outcome.max_difference() < CLOSE
    if options.get("steps_in_flight") == 1:
        assert outcome.report.early_tokens == 0
    hits = sum(result.hit_tokens for of in outcome.results for result in of if not result.forked)
    assert (hits == 0) == (options.get("enable_prefix_caching") is False)


@pytest.mark.parametrize("name", ["llama", "gemma3", "bamba", "jamba"])
def test_an_arena_too_small_for_all_preempts_and_evicts_and_answers_the_same(name):
    model = make(name)
    requests = [Request(prompt(40 + i, seed=i), 40) for i in range(6)]
    needs = Engine(model, budget_bytes=1 << 22, page_tokens=8, chunk=24)
    needs.generate(requests[:1])
    one = needs.report.peak_live_bytes
    with engine_of(model, budget_bytes=int(3.2 * one)) as engine:
        results = engine.generate(requests)
        stats = engine.manager.stats()
        engine.manager.audit()
    assert engine.report.preemptions > 0
    assert sum(leaf.evicted for leaf in stats.pool.leaves.values()) > 0
    assert_as_by_default(model, requests, results)


def test_a_request_that_no_empty_arena_could_serve_is_refused():
    with engine_of(make("llama"), budget_bytes=1 << 16) as engine:
        with pytest.raises(kvleaf.PoolExhausted):
            engine.generate([Request(prompt(100), 100)])


@pytest.mark.parametrize("name", ["gemma3", "falcon_h1", "whisper"])
def test_layers_keep_nothing_outside_the_arena(name):
    model = make(name)
    with engine_of(model) as engine:
        engine.generate(workload(model)[0])
        arena = engine.arena.bytes.untyped_storage().data_ptr()
        caches = [engine.model.cache, getattr(engine.model, "cross", None)]
        views = 0
        for cache in filter(None, caches):
            for layer in cache.layers:
                held = vars(layer) | getattr(layer, "slabs", {})
                if "entries" in held:
                    held |= vars(layer.entries)
                for key, value in held.items():
                    if isinstance(value, torch.Tensor) and value.numel() > 1 and key != "blocks":
                        assert value.untyped_storage().data_ptr() == arena, key
                        views += 1
                for states in ("conv_states", "recurrent_states"):
                    assert all(s is None for s in held.get(states, {}).values())
    assert views >= 2 * len(engine.model.cache.layers)


def test_one_row_updates_its_state_in_the_arena_itself():
    model = make("qwen3_next")
    with engine_of(model) as engine:
        layer = engine.model.cache.layers[0]
        seen = []
        bind = layer.bind_state

        def spy(batch):
            bind(batch)
            seen.append(layer.conv_states[0].untyped_storage().data_ptr())

        layer.bind_state = spy
        engine.generate([Request(prompt(30), 4)])
        assert set(seen) == {engine.arena.bytes.untyped_storage().data_ptr()}


def test_the_null_block_stays_zero():
    model = make("gemma3")
    with engine_of(model) as engine:
        for wave in workload(model):
            engine.generate(wave)
        geometry = engine.manager.geometry
        assert not engine.arena.bytes[: geometry.null_bytes].any()
        assert engine.arena.bytes[geometry.null_bytes :].any()


def test_adapters_and_salts_share_nothing():
    model = make("llama")
    text = prompt(40)
    with engine_of(model) as engine:
        for options in (dict(), dict(adapter="a@1"), dict(adapter="a@2"), dict(salt=b"tenant")):
            for again in (False, True):
                ((result,),) = engine.generate([Request(text, 4, **options)])
                assert result.hit_tokens == (32 if again else 0), options


def test_an_early_end_with_a_step_in_flight_gives_everything_back():
    model = make("llama")
    text = prompt(30)
    whole = by_default_cache(model, Request(text, 12)).tokens
    with engine_of(model) as engine:
        ((result,),) = engine.generate([Request(text, 12, eos=whole[5])])
        assert result.tokens == whole[: whole.index(whole[5]) + 1]
        assert engine.report.early_tokens >= len(result.tokens)  # one token too many was planned
        assert all(leaf.live == 0 for leaf in engine.manager.stats().pool.leaves.values())
        engine.manager.audit()


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "whisper"])
def test_a_forward_that_fails_is_abandoned_and_tried_again(name):
    model = make(name)
    requests = [request for wave in workload(model) for request in wave]
    with engine_of(model) as engine:
        forward, calls = engine.model.forward, []

        def fails_at_times(*arguments):
            calls.append(1)
            if len(calls) in (2, 9, 31):
                raise RuntimeError("device lost")
            return forward(*arguments)

        engine.model.forward = fails_at_times
        failures = 0
        todo, results = requests, None
        while results is None or engine.running or engine.waiting:
            try:
                given = engine.generate(todo)
                results = results or given
            except RuntimeError as error:
                assert str(error) == "device lost"
                failures += 1
                engine.manager.audit()
            todo = []
            results = results or engine.answers
        assert failures == 3
    assert_as_by_default(model, requests, results)


def test_a_prompt_in_use_is_shared_before_its_request_ends():
    model = make("llama")
    text = prompt(33)
    shared = []

    def on_step(engine):
        if engine.report.steps == 4 and not shared:
            shared.append(engine.manager.probe(text).hit_tokens)

    with engine_of(model, on_step=on_step) as engine:
        engine.generate([Request(text, 8)])
    assert shared == [32]


# ---- near misses: what would be wrong is seen to be wrong ----------------------------------------


def outcome_is_wrong(name):
    try:
        outcome = compare(name)
    except (ValueError, RuntimeError, IndexError):
        return True
    return outcome.wrong_tokens() > 0 or outcome.max_difference() > 100 * CLOSE


def test_copies_that_are_not_run_are_noticed(monkeypatch):
    monkeypatch.setattr(Arena, "copy", lambda self, copies: None)
    assert outcome_is_wrong("llama")  # the partly filled page of a fork
    assert outcome_is_wrong("lfm2")  # a checkpoint


def test_entries_in_the_wrong_slot_are_noticed(monkeypatch):
    write = _Entries.write

    def shifted(self, where, keys, values):
        write(self, (where[0], (where[1] + 1) % 8), keys, values)

    monkeypatch.setattr(_Entries, "write", shifted)
    assert outcome_is_wrong("llama")


def test_a_window_one_token_too_short_is_noticed(monkeypatch):
    columns = kvleaf.AccessPattern.tail_begin
    from kvleaf_transformers import batch

    class Short:
        head = 0

        def __init__(self, pattern):
            self.pattern = pattern

        def tail_begin(self, n):
            begin = columns(self.pattern, n)
            return begin + (begin > 0)

    pattern_of = batch.pattern_of
    monkeypatch.setattr(batch, "pattern_of", lambda leaf: Short(pattern_of(leaf)))
    assert outcome_is_wrong("gemma3")
