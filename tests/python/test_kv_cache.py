"""KVCache from Python: its interface, tensors, errors, lifetimes; layouts of kernel libraries."""

import copy
import gc
import inspect
import json
import pickle
import threading
import weakref
from pathlib import Path

import kvleaf
import numpy as np
import pytest
from kvleaf import KVCache, KVCacheConfig, KVCacheMode, KVLayerSpec

MODELS = Path(__file__).resolve().parents[1] / "data" / "models"


def attention(**more):
    return KVLayerSpec.attention(2, 8, **more)


def state():
    return KVLayerSpec.state(conv=[(6, 3), (4, 2)], heads=2, k_dim=4, v_dim=5)


def make(*specs, max_seqs=2, max_len=64, page_tokens=4, **more):
    config = KVCacheConfig(len(specs), max_seqs, max_len, page_tokens=page_tokens, **more)
    return KVCache.make(config, specs)


def serve(cache, slot, prompt):
    hit = cache.admit(slot, prompt)
    cache.prepare_step([0, len(prompt) - hit], [hit], [slot])
    cache.retire(slot, prompt)
    return hit


# ---- the published interfaces --------------------------------------------------------------------

REQUIRED = inspect.Parameter.empty

# Name, then parameters with their defaults; None: a property. What kvleaf adds is keyword-only.
REGION = {
    "__init__": {
        "leaf_id": REQUIRED,
        "group_id": REQUIRED,
        "bytes_per_page": REQUIRED,
        "*stride_alignment": None,
    },
    "leaf_id": None,
    "group_id": None,
    "bytes_per_page": None,
    "stride_alignment": None,
    "cacheable": None,
    "blocks_to_reserve": {"num_blocks": REQUIRED, "*enable_prefix_caching": REQUIRED},
    "staged_input_shapes": {"batch_size": REQUIRED, "num_blocks": REQUIRED},
    "write_staged_inputs": {"plans": REQUIRED, "into": REQUIRED},
    "bound_row_span": {"block": REQUIRED},
    "bound_row_copies": {"src": REQUIRED, "dst": REQUIRED},
}
CACHE = {
    "make": {"config": REQUIRED, "layer_specs": REQUIRED},
    "mode": {},
    "admit": {"batch_idx": REQUIRED, "prompt_ids": REQUIRED, "addressable_len": -1},
    "reserve": {"slot_ids": REQUIRED, "n_new_per_seq": REQUIRED},
    "prepare_step": {"cu_seqlens_q": REQUIRED, "past_len": REQUIRED, "slot_ids": REQUIRED},
    "retire": {"batch_idx": REQUIRED, "full_token_ids": REQUIRED, "addressable_len": -1},
    "evict_batch": {"batch_idx": REQUIRED},
    "fill": {"layer": REQUIRED, "batch_idx": REQUIRED, "k": REQUIRED, "v": REQUIRED},
    "keys": {"layer": REQUIRED},
    "values": {"layer": REQUIRED},
    "conv_state": {"layer": REQUIRED, "index": 0},
    "recurrent_state": {"layer": REQUIRED},
    "paged_block_table": {},
    "seq_lens": {},
    "update_position": {"batch_idx": REQUIRED, "new_pos": REQUIRED},
    "reset": {},
}


@pytest.mark.parametrize(
    "cls, name, wanted",
    [(kvleaf.KVLeafRegion, name, wanted) for name, wanted in REGION.items()]
    + [(KVCache, name, wanted) for name, wanted in CACHE.items()],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", ""),
)
def test_the_published_interface_is_complete(cls, name, wanted):
    member = inspect.getattr_static(cls, name)
    if wanted is None:
        assert not callable(getattr(kvleaf.ScratchLeaf("s", bytes_per_page=1), name))
        return
    assert member is not None
    signature = inspect.signature(cls if name == "__init__" else getattr(cls, name))
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    given = {}
    for parameter in parameters:
        star = "*" if parameter.kind is inspect.Parameter.KEYWORD_ONLY else ""
        given[star + parameter.name] = parameter.default
    extra = {key: value for key, value in given.items() if key not in wanted}
    assert {key: value for key, value in given.items() if key in wanted} == wanted
    published = [key for key in given if key in wanted]
    assert published == list(wanted), "in the published order"
    for key, default in extra.items():
        optional = default is not REQUIRED
        # A table by layer may be asked for by position too: nothing published stands behind it.
        assert optional and (key.startswith("*") or (name, key) == ("paged_block_table", "layer"))


def test_specs_are_values():
    assert attention() == attention() and hash(attention()) == hash(attention())
    assert attention() != attention(window=4)
    assert repr(attention(window=4) + state()) == (
        "KVLayerSpec(window 4, 2 x 8 + state conv_0[6,3] conv_1[4,2] recurrent[2,4,5])"
    )


def test_config_and_specs_have_their_published_parameters():
    names = list(inspect.signature(KVCacheConfig).parameters)
    assert names[:10] == [
        "num_layers", "max_seqs", "max_len", "mode", "page_tokens", "budget_bytes", "dtype",
        "device", "max_encoder_len", "enable_prefix_caching",
    ]  # fmt: skip
    defaults = {k: p.default for k, p in inspect.signature(KVCacheConfig).parameters.items()}
    assert defaults["mode"] is KVCacheMode.paged and defaults["dtype"] == "bfloat16"
    assert defaults["page_tokens"] == 16 and defaults["device"] == "cpu"
    parameters = inspect.signature(KVLayerSpec.attention).parameters
    assert list(parameters)[:5] == ["kv_heads", "head_dim", "window", "sinks", "chunk"]
    assert list(inspect.signature(KVLayerSpec.state).parameters)[:5] == [
        "conv", "heads", "k_dim", "v_dim", "dtype",
    ]  # fmt: skip


# ---- slots and tensors ---------------------------------------------------------------------------


def test_c_01_slotted_has_no_table_and_paged_has_one():
    slotted = make(attention(), max_seqs=4, mode=KVCacheMode.slotted)
    assert slotted.mode() is KVCacheMode.slotted
    assert slotted.paged_block_table() is None
    assert slotted.keys(0).shape == (4, 64, 2, 8)
    with pytest.raises(kvleaf.InvalidArgument, match="slot 4"):
        slotted.prepare_step([0, 1], [0], [4])
    paged = make(attention(), max_seqs=4, max_len=100, page_tokens=16)
    assert paged.mode() is KVCacheMode.paged
    assert paged.paged_block_table().shape == (4, 7)
    assert paged.paged_block_table().dtype == "int32"
    assert paged.seq_lens().shape == (4,)


def test_a_prompt_that_was_computed_is_found_again():
    cache = make(attention())
    prompt = np.arange(21, dtype=np.int64)
    assert serve(cache, 0, prompt) == 0
    assert cache.admit(1, prompt) == 20
    assert list(cache.seq_lens()[:]) == [0, 20]
    step = cache.prepare_step([0, 1], [20], [1])
    assert step.num_tokens == 1 and step.batch == 1
    table = np.asarray(cache.paged_block_table())
    assert step.slot_mapping()[0] == table[1, 5] * 4
    cache.evict_batch(1)
    assert not table.any()
    cache.audit()


def test_a_state_is_brought_back_to_its_slot():
    cache = make(state(), attention())
    cache.admit(0, range(9))
    cache.prepare_step([0, 8], [0], [0])
    cache.recurrent_state(0)[0] = 3.0
    cache.conv_state(0, 1)[0] = 4.0
    cache.prepare_step([0, 1], [8], [0])
    cache.retire(0, range(9))
    assert cache.admit(1, range(9)) == 8
    cache.prepare_step([0, 1], [8], [1])
    assert (cache.recurrent_state(0)[1] == 3.0).all()
    assert (cache.conv_state(0, 1)[1] == 4.0).all()
    assert cache.conv_state(0).shape == (2, 6, 3)


def test_c_04_after_reset_old_tensors_are_stale_and_old_arrays_keep_their_bytes():
    cache = make(attention(), dtype="float32")
    keys = cache.keys(0)
    array = np.asarray(keys)
    array[1] = 7.0
    cache.reset()
    assert keys.stale and "stale" in repr(keys)
    with pytest.raises(kvleaf.StepError, match="stale"):
        np.asarray(keys)
    with pytest.raises(kvleaf.StepError):
        keys.numpy()
    with pytest.raises(kvleaf.StepError):
        keys.__dlpack__()
    assert (array[1] == 7.0).all()
    assert not np.asarray(cache.keys(0))[1].any()
    array[1] = 8.0
    assert not np.asarray(cache.keys(0))[1].any()


def test_c_05_a_budget_that_does_not_reach_max_len_is_said_at_start():
    layer = KVLayerSpec.attention(1, 8)
    page = 16 * 2 * 8 * 2
    config = KVCacheConfig(1, 1, 512, budget_bytes=33 * page)
    assert KVCache.make(config, [layer]).longest_request() == 512
    config = KVCacheConfig(1, 1, 512, budget_bytes=32 * page)
    with pytest.warns(RuntimeWarning, match="at most 496 tokens; max_len is 512"):
        cache = KVCache.make(config, [layer])
    assert cache.longest_request() == 496
    with pytest.raises(kvleaf.PoolExhausted):
        cache.admit(0, range(500))


def test_numpy_views_alias_the_memory_and_keep_it():
    cache = make(attention(), dtype="float32")
    view = np.asarray(cache.keys(0))
    assert view.shape == cache.keys(0).shape
    assert [stride // 4 for stride in view.strides] == list(cache.keys(0).strides)
    view[1, 2, 1] = 5.0
    assert (cache.keys(0)[1, 2, 1] == 5.0).all()
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
    assert (view[1, 2, 1] == 5.0).all()
    view[:] = 1.0


@pytest.mark.parametrize(
    "dtype, bits, bytes_",
    [("bfloat16", np.uint16, 2), ("float8_e4m3", np.uint8, 1), ("float16", np.float16, 2)],
)
def test_types_without_a_numpy_name_are_seen_as_their_bits(dtype, bits, bytes_):
    cache = make(attention(), dtype=dtype)
    keys = cache.keys(0)
    assert keys.dtype == dtype
    assert np.asarray(keys).dtype == bits
    assert keys.numpy().dtype.itemsize == bytes_
    try:
        import ml_dtypes
    except ImportError:
        assert keys.numpy().dtype == bits
    else:
        names = {
            "bfloat16": ml_dtypes.bfloat16,
            "float8_e4m3": ml_dtypes.float8_e4m3fn,
            "float16": np.float16,
        }
        assert keys.numpy().dtype == np.dtype(names[dtype])


def test_dlpack_goes_both_ways_without_a_copy():
    cache = make(attention(), dtype="float32")
    keys = cache.keys(0)
    assert keys.__dlpack_device__() == (1, 0)
    array = np.from_dlpack(keys)
    assert array.ctypes.data == keys.data_ptr
    back = kvleaf.Tensor.from_dlpack(np.arange(6, dtype=np.float32).reshape(2, 3).T)
    assert back.shape == (3, 2) and back.strides == (1, 3)
    assert list(back[:, 1]) == [3, 4, 5]
    # A capsule that nobody takes frees what it holds.
    capsule = keys.__dlpack__()
    del capsule
    versioned = keys.__dlpack__(max_version=(1, 0))
    del versioned
    with pytest.raises(kvleaf.InvalidArgument):
        keys.__dlpack__(copy=True)
    with pytest.raises(kvleaf.InvalidArgument):
        keys.__dlpack__(dl_device=(2, 0))
    with pytest.raises(kvleaf.InvalidArgument):
        kvleaf.Tensor.from_dlpack(object())
    with pytest.raises(kvleaf.InvalidArgument):
        kvleaf.Tensor.from_dlpack(np.zeros(3, dtype=np.float64))


def test_b_05_bfloat16_keeps_type_and_strides_in_pytorch():
    torch = pytest.importorskip("torch")
    cache = make(attention())
    keys = torch.from_dlpack(cache.keys(0))
    assert keys.dtype == torch.bfloat16
    assert keys.stride() == cache.keys(0).strides
    keys[1] = 2.5
    assert (np.asarray(cache.keys(0))[1] == 0x4020).all()
    encoded = torch.full((3, 2, 8), 1.5, dtype=torch.bfloat16)
    crossed = make(KVLayerSpec.cross_attention(2, 8), max_encoder_len=4)
    crossed.admit(0, [1, 2, 3])
    crossed.fill(0, 0, encoded, encoded)
    page = crossed.paged_block_table(0)[0, 0]
    assert (np.asarray(crossed.keys(0))[page, :3] == 0x3FC0).all()


def test_cross_attention_is_filled_once_for_an_input():
    cache = make(attention(), KVLayerSpec.cross_attention(2, 8), max_encoder_len=6)
    bits = np.arange(5 * 2 * 8, dtype=np.uint16).reshape(5, 2, 8)
    prompt = list(range(17))
    assert cache.admit(0, prompt, encoder_digest="image") == 0
    assert not cache.encoder_filled(0)
    with pytest.raises(kvleaf.RequestError, match="not every layer of cross attention is filled"):
        cache.prepare_step([0, 18], [0], [0])
    cache.fill(1, 0, bits, bits + 1)
    assert cache.encoder_filled(0)
    cache.prepare_step([0, 17], [0], [0])
    cache.retire(0, prompt)
    assert cache.admit(1, prompt, encoder_digest="image") == 16
    assert cache.encoder_filled(1)
    assert list(cache.encoder_lens()[:]) == [0, 5]
    table = cache.paged_block_table(1)
    assert (cache.keys(1).numpy().view(np.uint16)[table[1, 1], 0] == bits[4]).all()
    assert (cache.values(1).numpy().view(np.uint16)[table[1, 0], :4] == bits[:4] + 1).all()
    with pytest.raises(kvleaf.InvalidArgument, match="no cross attention"):
        cache.fill(0, 1, bits, bits)
    with pytest.raises(kvleaf.PlanShapeError):
        cache.fill(1, 1, bits.astype(np.float32), bits)
    assert cache.admit(0, prompt) == 0  # without a digest nothing is reused


def test_a_published_configuration_by_path_text_or_dict():
    path = MODELS / "gemma-3-27b.json"
    for given in (path, path.read_text(), json.loads(path.read_text())):
        cache = KVCache.from_config(given, max_seqs=2, max_len=128)
        assert cache.config.num_layers == 62
        assert cache.keys(0).dtype == cache.config.dtype
        assert cache.paged_block_table(0).data_ptr != cache.paged_block_table(5).data_ptr
    with pytest.raises(kvleaf.ConfigError):
        KVCache.from_config({"model_type": "nothing known"}, max_seqs=1, max_len=8)


def test_memory_that_the_caller_gives_is_kept_and_used():
    config = KVCacheConfig(2, 2, 32, page_tokens=4)
    specs = [attention(), state()]
    size = KVCache.memory_bytes(config, specs)
    raw = np.empty(size + 256, dtype=np.uint8)
    start = -raw.ctypes.data % 256
    memory = raw[start : start + size]
    first = memory.ctypes.data
    cache = KVCache.make(config, specs, memory=memory)
    keys = cache.keys(0)
    assert first <= keys.data_ptr < first + size
    alive = weakref.ref(memory)
    del memory, raw, cache
    gc.collect()
    assert alive() is not None
    keys[1] = 0
    del keys
    gc.collect()
    assert alive() is None


# ---- errors, lifetimes, threads ------------------------------------------------------------------


def test_errors_are_typed_and_change_nothing():
    cache = make(attention())
    cache.admit(0, range(5))
    for call, error in [
        (lambda: cache.admit(0, [1]), kvleaf.RequestError),
        (lambda: cache.admit(7, [1]), kvleaf.InvalidArgument),
        (lambda: cache.admit(1, []), kvleaf.RequestError),
        (lambda: cache.admit(1, [1.5]), kvleaf.InvalidArgument),
        (lambda: cache.admit(1, np.zeros((2, 2), np.int32)), kvleaf.InvalidArgument),
        (lambda: cache.admit(1, range(65)), kvleaf.RequestError),
        (lambda: cache.admit(1, [2**40]), kvleaf.InvalidArgument),
        (lambda: cache.reserve([0], [1, 2]), kvleaf.PlanShapeError),
        (lambda: cache.prepare_step([0, 5], [1], [0]), kvleaf.RequestError),
        (lambda: cache.prepare_step([0, 5, 6], [0, 0], [0, 1]), kvleaf.RequestError),
        (lambda: cache.prepare_step([0, 65], [0], [0]), kvleaf.RequestError),
        (lambda: cache.prepare_step([0], [], []), kvleaf.PlanShapeError),
        (lambda: cache.retire(1, [1]), kvleaf.RequestError),
        (lambda: cache.keys(1), kvleaf.InvalidArgument),
        (lambda: cache.keys(0, part="half"), kvleaf.InvalidArgument),
        (lambda: cache.update_position(0, 9), kvleaf.RequestError),
        (lambda: KVCache.make(None, []), kvleaf.InvalidArgument),
        (lambda: make(attention(), device="cuda:0"), kvleaf.InvalidArgument),
        (lambda: make(attention(), mode="other"), kvleaf.InvalidArgument),
    ]:
        with pytest.raises(error) as raised:
            call()
        assert isinstance(raised.value, kvleaf.KVError)
        assert list(cache.seq_lens()[:]) == [0, 0]
        cache.audit()
    cache.prepare_step([0, 5], [0], [0])


def test_nothing_of_a_cache_is_pickled_or_copied():
    cache = make(attention())
    cache.admit(0, range(3))
    step = cache.prepare_step([0, 3], [0], [0])
    for thing in (cache, cache.config, attention(), cache.keys(0), step):
        for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="cannot be pickled or copied: "):
                attempt(thing)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1), (1, 3, 0, 2)])
def test_things_die_in_any_order(order):
    cache = make(attention())
    cache.admit(0, range(7))
    step = cache.prepare_step([0, 7], [0], [0])
    things = [cache, step, step.slot_mapping(), np.asarray(cache.keys(0))]
    del cache, step
    for i in order:
        things[i] = None
        gc.collect()
        for thing in things:
            if isinstance(thing, np.ndarray):
                thing[:] = 1
            elif isinstance(thing, kvleaf.Tensor):
                assert list(np.asarray(thing) >= 0) == [True] * 7


def test_a_step_s_tensors_are_stale_once_its_arrays_serve_another():
    cache = make(attention())
    cache.admit(0, range(7))
    mapping = cache.prepare_step([0, 7], [0], [0]).slot_mapping()
    cache.prepare_step([0, 1], [7], [0])
    assert not mapping.stale
    cache.prepare_step([0, 1], [8], [0])
    with pytest.raises(kvleaf.StepError, match="stale"):
        np.asarray(mapping)


def test_b_04_another_thread_runs_during_a_long_call_and_may_not_use_the_cache():
    cache = make(attention(), max_len=200_000, page_tokens=16, max_seqs=1)
    prompt = np.arange(200_000, dtype=np.int32)
    counted = refused = 0
    stop = threading.Event()

    def other():
        nonlocal counted, refused
        while not stop.is_set():
            counted += 1
            try:
                cache.audit()
            except kvleaf.KVError:
                refused += 1

    thread = threading.Thread(target=other)
    thread.start()
    try:
        for _ in range(3):
            while True:
                try:
                    serve(cache, 0, prompt)
                    break
                except kvleaf.KVError as error:
                    assert "in use by another thread" in str(error)
                    try:
                        cache.evict_batch(0)
                    except kvleaf.KVError:
                        pass
    finally:
        stop.set()
        thread.join()
    assert counted > 0


# ---- the layouts of kernel libraries ------------------------------------------------------------


@pytest.fixture
def batch():
    """Three sequences of a model with full, window and shared layers: a chunk, and two decodes."""
    specs = [attention(), attention(window=12), KVLayerSpec.shared(0)]
    cache = make(*specs, max_seqs=4, max_len=64, page_tokens=16, dtype="float16")
    for slot, length in ((3, 40), (0, 17), (2, 33)):
        cache.admit(slot, np.arange(length) + 1000 * slot)
        cache.prepare_step([0, length - 1], [0], [slot])
    cache.admit(1, np.arange(30) + 5000)
    step = cache.prepare_step([0, 1, 26, 27], [39, 0, 16], [3, 1, 0])
    return cache, step


def contract(tensor, dtype, shape):
    array = np.asarray(tensor)
    assert array.dtype == dtype
    assert array.shape == shape
    assert array.strides[-1] == array.itemsize, "the innermost dimension is contiguous"
    return array


def test_flash_attention_takes_the_arrays_of_a_step(batch):
    # flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=, block_table=), and
    # flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    # block_table=): caches [num_blocks, page_block_size, kv_heads, head_dim], block_table int32
    # [batch, max_blocks] with a contiguous last dimension, cache_seqlens int32 [batch],
    # cu_seqlens int32 [batch + 1].
    cache, step = batch
    for layer in range(3):
        keys = contract(cache.keys(layer), np.float16, cache.keys(layer).shape)
        values = contract(cache.values(layer), np.float16, keys.shape)
        assert keys.shape[1:] == (16, 2, 8)
        assert keys.strides == values.strides
        table = contract(step.block_table(layer), np.int32, (3, 3))
        assert (table < keys.shape[0]).all()
    assert list(contract(step.seq_lens, np.int32, (3,))) == [40, 25, 17]
    assert list(contract(step.cu_seqlens_q, np.int32, (4,))) == [0, 1, 26, 27]
    assert list(contract(step.cu_seqlens_k, np.int32, (4,))) == [0, 40, 65, 82]
    assert (step.max_seqlen_q, step.max_seqlen_k) == (25, 40)


def test_vllm_s_kernels_take_the_arrays_of_a_step(batch):
    # reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping int64 [tokens], ...):
    # entry slot // block_size, slot % block_size; the caches are strided by block. One tensor of
    # both is [2, num_blocks, block_size, kv_heads, head_size], taken apart by unbind(0).
    cache, step = batch
    for layer in range(3):
        slots = contract(step.slot_mapping(layer), np.int64, (27,))
        table = np.asarray(step.block_table(layer))
        rows, positions = np.repeat([0, 1, 2], [1, 25, 1]), np.asarray(step.positions)
        assert (slots // 16 == table[rows, positions // 16]).all()
        assert (slots % 16 == positions % 16).all()
        both = cache.keys_values(layer).permuted(1, 0, 2, 3, 4)
        assert both.shape == (2, *cache.keys(layer).shape)
        halves = np.asarray(both)
        assert np.shares_memory(halves[0], np.asarray(cache.keys(layer)))
        assert halves[1].ctypes.data == cache.values(layer).data_ptr
        assert halves[1].strides == np.asarray(cache.values(layer)).strides
    assert contract(cache.paged_block_table(0), np.int32, (4, 4)).flags.c_contiguous


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_flashinfer_takes_the_arrays_of_a_step(batch, layout):
    # BatchPrefillWithPagedKVCacheWrapper.plan(qo_indptr, paged_kv_indptr, paged_kv_indices,
    # paged_kv_last_page_len, ...): int32; run(q, paged_kv_cache): a pair or one tensor
    # [pages, 2, page_size, kv_heads, head_dim] (NHD) or [pages, 2, kv_heads, page_size, head_dim]
    # (HND).
    cache, step = batch
    indptr, indices, last = step.csr(0)
    assert list(contract(indptr, np.int32, (4,))) == [0, 3, 5, 7]
    contract(indices, np.int32, (7,))
    assert list(contract(last, np.int32, (3,))) == [8, 9, 1]
    pages, table = np.asarray(indices), np.asarray(step.block_table(0))
    assert (pages == np.concatenate([table[0, :3], table[1, :2], table[2, :2]])).all()
    assert list(np.asarray(step.cu_seqlens_q)) == [0, 1, 26, 27]  # qo_indptr
    both = cache.keys_values(0)
    entries = (16, 2) if layout == "NHD" else (2, 16)
    if layout == "HND":
        both = both.permuted(0, 1, 3, 2, 4)
    paged = contract(both, np.float16, (cache.keys(0).shape[0], 2, *entries, 8))
    keys, values = paged[:, 0], paged[:, 1]
    assert keys.strides == values.strides, "FlashInfer wants equal strides of keys and values"
    cache.keys(0)[pages[0], 5, 1] = 3
    assert (keys[(pages[0], 5, 1) if layout == "NHD" else (pages[0], 1, 5)] == 3).all()


def test_a_window_layer_s_table_holds_the_null_page_where_the_window_has_passed(batch):
    cache, step = batch
    table = np.asarray(step.block_table(1))
    assert list(table[0] != 0) == [False, True, True]  # 40 tokens, window 12: pages 1 and 2
    assert not np.asarray(cache.keys(1))[0].any(), "page 0 is readable zeros"
