"""Runs the five peer workloads (README.md beside this file) on vLLM's v1 KVCacheManager.

Setup, Python 3.11, no GPU, about 7 GB of disk:

    python3 -m venv vllmenv
    vllmenv/bin/pip install --no-deps vllm==0.33.0
    vllmenv/bin/pip install torch==2.14.0 'transformers>=5.16.1,<5.21' numpy pydantic msgspec \
        pyzmq pillow cbor2 prometheus_client regex cachetools psutil cloudpickle py-cpuinfo blake3 \
        pybase64 requests tqdm aiohttp openai einops setproctitle python-json-logger watchfiles \
        partial-json-parser jsonschema protobuf sentencepiece tiktoken depyf ijson orjson lark \
        ninja nvtx uvloop xxhash 'oss-harmony>=0.0.11' 'anthropic>=0.71' 'mcp>=2.2,<3' \
        'fastapi[standard]<0.137' 'model-hosting-container-standards<1' opentelemetry-sdk \
        prometheus-fastapi-instrumentator 'mistral_common[image]' 'llguidance<1.8' \
        xgrammar==0.2.8 lm-format-enforcer==0.11.3 outlines_core==0.2.14 numba==0.65.0 \
        compressed-tensors==0.17.0
    vllmenv/bin/python vllm_driver.py --workload all --model llama-3.1-70b --page 16 --out FILE

Real vLLM code: KVCacheManager, BlockPool, Request and its block hasher, layer grouping, page
sizing, hybrid block-size alignment, Scheduler._mamba_block_aligned_split, worker BlockTable.
Stand-ins: the engine configuration (a namespace; CacheConfig is real) and one object per layer
that answers what the loaded layer would on an SM90 GPU. The scheduler's own queues are not run.

How a server would call it: prompts in chunks of 8,192 tokens (max_num_batched_tokens of the API
server on H100), whole-prompt admission check, no speculation, every step settled before the next.
A live request gives its out-of-window blocks back at once (its next decode step would do so).
"""

import argparse
import csv
import gc
import gzip
import json
import logging
import os
import random
import statistics
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
logging.disable(logging.WARNING)

import numpy as np
import torch
import vllm
from vllm.config import CacheConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase, get_mamba_prefill_checkpoint_grid
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.config import (
    HybridAttentionMambaModelConfig,
    NemotronHForCausalLMConfig,
)
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_planning import (
    _pool_bytes_per_block,
    get_global_kv_cache_groups,
    get_kv_cache_config_from_groups,
)
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request
from vllm.v1.worker.block_table import MultiGroupBlockTable, SlotMappingMode

DATA = Path(__file__).resolve().parents[2] / "data"
GIB = 1 << 30
MAX_MODEL_LEN = 131_072
CHUNK = 8_192  # tokens one prefill step computes
UNIQUE_IDS = 1 << 30  # token ids from here on belong to one request only
GDN_ALIGNMENT = 64  # FlashInfer Gated DeltaNet prefill, the default on SM90
SAMPLING = SamplingParams(max_tokens=1)


# --- models: one stand-in per layer that owns cache ---------------------------------------------


class AttentionLayer(AttentionLayerBase):
    """Full (window None), sliding-window, or cross attention, bf16."""

    def __init__(self, heads, head_dim, window=None, cross=False):
        self.shape = dict(num_kv_heads=heads, head_size=head_dim, dtype=torch.bfloat16)
        self.window, self.cross = window, cross

    def get_attn_backend(self):
        return TritonAttentionBackend  # any page that is a multiple of 16, as FlashAttention

    def get_kv_cache_spec(self, config):
        page = config.cache_config.block_size
        if self.cross:
            return CrossAttentionSpec(block_size=page, **self.shape)
        if self.window:
            return SlidingWindowSpec(block_size=page, sliding_window=self.window, **self.shape)
        return FullAttentionSpec(block_size=page, **self.shape)

    def bytes_needed(self, tokens):
        tokens = 0 if self.cross else min(tokens, self.window or tokens)
        return 4 * self.shape["num_kv_heads"] * self.shape["head_size"] * tokens


class StateBackend:
    is_ssm = staticmethod(lambda: True)


class StateLayer(MambaBase):
    """One recurrent state; shapes and dtypes come from vLLM's model class."""

    def __init__(self, shapes, dtypes, mamba_type, checkpoint_alignment):
        self.shapes, self.dtypes, self.kind = shapes, dtypes, mamba_type
        self.checkpoint_alignment = checkpoint_alignment

    @property
    def mamba_type(self):
        return self.kind

    def get_state_shape(self):
        return self.shapes

    def get_state_dtype(self):
        return self.dtypes

    def get_attn_backend(self):
        return StateBackend

    def get_prefill_checkpoint_alignment(self):
        return self.checkpoint_alignment

    def get_kv_cache_spec(self, config):
        spec = super().get_kv_cache_spec(config)
        if self.checkpoint_alignment is None:
            return spec
        return replace(
            spec,
            num_prefill_checkpoint_blocks=1,
            prefill_checkpoint_alignment=get_mamba_prefill_checkpoint_grid(config),
        )

    def bytes_needed(self, tokens):
        return MambaSpec(block_size=1, shapes=self.shapes, dtypes=self.dtypes).page_size_bytes


def layer_kinds(text):
    """One of full, window, state, cross per layer that owns cache."""
    count = text["num_hidden_layers"]
    if "layer_types" in text:
        return ["window" if kind == "sliding_attention" else "full" for kind in text["layer_types"]]
    if "full_attention_interval" in text:
        every = text["full_attention_interval"]
        return ["state" if (i + 1) % every else "full" for i in range(count)]
    if "hybrid_override_pattern" in text:
        kinds = {"M": "state", "*": "full"}
        return [kinds[c] for c in text["hybrid_override_pattern"] if c in kinds]
    cross = text.get("cross_attention_layers", [])
    return ["cross" if i in cross else "full" for i in range(count)]


@dataclass
class Plan:
    """A model laid out by vLLM's own planner."""

    config: SimpleNamespace
    layers: list
    groups: list
    slab_bytes: int  # bytes that one block id stands for
    label: str  # "model P=..."
    caching: bool

    def bytes_needed(self, tokens):
        return sum(layer.bytes_needed(tokens) for layer in self.layers)

    def kv_config(self, budget):
        return get_kv_cache_config_from_groups(self.config, self.groups, budget)

    def describe(self):
        names = {
            "FullAttentionSpec": "full",
            "SlidingWindowSpec": "window",
            "MambaSpec": "state",
            "CrossAttentionSpec": "cross",
        }
        width = max(len(group.layer_names) for group in self.groups)
        lost = sum(width - len(group.layer_names) for group in self.groups)
        groups = ", ".join(
            f"{names[type(g.kv_cache_spec).__name__]} x{len(g.layer_names)} "
            f"block {g.kv_cache_spec.block_size}"
            for g in self.groups
        )
        state = next(
            (g.kv_cache_spec for g in self.groups if isinstance(g.kv_cache_spec, MambaSpec)), None
        )
        padding = ""
        if state:
            real, padded = state.real_page_size_bytes, state.page_size_bytes
            padding = f"; state {real} B padded to {padded} B ({padded / real - 1:.2%})"
        return (
            f"{len(self.groups)} groups ({groups}); {lost} empty layer slots; "
            f"slab {self.slab_bytes} B{padding}"
        )


def make_plan(name, page, retention="tail", state_dtype="float32", match_unit=None, caching=True):
    model = json.loads((DATA / "models" / f"{name}.json").read_text())
    text = model.get("text_config", model)
    kinds = layer_kinds(text)
    heads = text["num_key_value_heads"]
    head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    caching = caching and "cross" not in kinds  # CrossAttentionManager refuses prefix caching
    cache = CacheConfig(
        block_size=page,
        enable_prefix_caching=caching,
        prefix_cache_retention_interval=None if retention == "dense" else 0,
        prefix_match_unit=match_unit,
        mamba_ssm_cache_dtype=state_dtype,
    )
    hf = SimpleNamespace(**text)
    config = SimpleNamespace(
        cache_config=cache,
        model_config=SimpleNamespace(
            architecture=model["architectures"][0],
            architectures=model["architectures"],
            hf_config=hf,
            hf_text_config=hf,
            dtype=torch.bfloat16,
            max_model_len=MAX_MODEL_LEN,
            use_mla=False,
            is_hybrid="state" in kinds,
            model_impl="vllm",
            convert_type="none",
            runner_type="generate",
            supports_kv_cache_grouping=False,
            get_num_kv_heads=lambda parallel: heads,
            get_head_size=lambda: head_dim,
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, decode_context_parallel_size=1),
        scheduler_config=SimpleNamespace(
            enable_chunked_prefill=True,
            max_num_encoder_input_tokens=CHUNK,
            disable_hybrid_kv_cache_manager=False,
            long_prefill_token_threshold=0,
        ),
        compilation_config=SimpleNamespace(static_forward_context={}),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        kv_transfer_config=None,
        num_speculative_tokens=0,
        num_prefill_lookahead_tokens=0,
        max_in_flight_tokens=CHUNK,
    )

    if "state" in kinds:
        kind, alignment = MambaAttentionBackendEnum.MAMBA2, None
        if model["model_type"] == "nemotron_h":
            NemotronHForCausalLMConfig.verify_and_update_config(config)
        else:
            kind = MambaAttentionBackendEnum.GDN_ATTN
            alignment = GDN_ALIGNMENT if caching else None
        HybridAttentionMambaModelConfig.verify_and_update_config(config)
        model_class, _ = ModelRegistry.resolve_model_cls(
            model["architectures"], config.model_config
        )
        shapes = model_class.get_mamba_state_shape_from_config(config)
        dtypes = model_class.get_mamba_state_dtype_from_config(config)
    layers = {}
    for i, layer in enumerate(kinds):
        layers[f"layers.{i}"] = (
            StateLayer(shapes, dtypes, kind, alignment)
            if layer == "state"
            else AttentionLayer(
                heads,
                head_dim,
                text["sliding_window"] if layer == "window" else None,
                cross=layer == "cross",
            )
        )
    config.compilation_config.static_forward_context = layers
    current_platform.update_block_size_for_backend(config)
    specs = {name: layer.get_kv_cache_spec(config) for name, layer in layers.items()}
    register_all_kvcache_specs(config)
    supported = [layout.name for layout in get_supported_kv_cache_layouts([])]
    resolve_kv_cache_layout(config, [supported], specs.values())
    groups = get_global_kv_cache_groups(config, [specs])
    came_out = cache.block_size
    label = f"{name} P={page}" + (f" (came out as {came_out})" if came_out != page else "")
    if match_unit:
        label += f" prefix_match_unit={match_unit}"
    if "state" in kinds and dtypes[-1] != torch.float32:
        label += f" state={str(dtypes[-1]).removeprefix('torch.')}"
    slab_bytes = _pool_bytes_per_block(config, groups)
    return Plan(config, list(layers.values()), groups, slab_bytes, label, caching)


# --- the manager, called as the scheduler calls it ----------------------------------------------


class Engine:
    def __init__(self, plan, budget, hash_name="sha256"):
        kv_config = plan.kv_config(budget)
        scheduler_block, hash_block = resolve_kv_cache_block_sizes(kv_config, plan.config)
        self.manager = KVCacheManager(
            kv_config,
            MAX_MODEL_LEN,
            scheduler_block,
            hash_block,
            max_in_flight_tokens=CHUNK,
            enable_caching=plan.caching,
        )
        hash_fn = get_hash_fn_by_name(hash_name)
        init_none_hash(hash_fn)
        self.hasher = get_request_block_hasher(hash_block, hash_fn) if plan.caching else None
        state = next(
            (
                g.kv_cache_spec
                for g in plan.groups
                if isinstance(g.kv_cache_spec, MambaSpec) and plan.caching
            ),
            None,
        )
        self.state_block = state.block_size if state else None  # a step must end on its boundary
        coordinator = self.manager.coordinator
        # What Scheduler._mamba_block_aligned_split reads of the scheduler.
        self.split = state and SimpleNamespace(
            cache_config=plan.config.cache_config,
            scheduler_config=plan.config.scheduler_config,
            block_size=scheduler_block,
            hash_block_size=hash_block,
            max_num_scheduled_tokens=CHUNK,
            num_hash_lookahead_tokens=0,
            use_eagle_block_drop=False,
            mamba_partial_cache_hit=hash_block < scheduler_block
            and coordinator.enable_partial_hash_hits,
            mamba_has_prefill_checkpoint_blocks=state.num_prefill_checkpoint_blocks > 0,
            mamba_prefill_checkpoint_alignment=state.prefill_checkpoint_alignment,
            mamba_shared_prefix_checkpoint=False,
        )

    def request(self, name, tokens):
        return Request(name, tokens, SAMPLING, None, block_hasher=self.hasher)

    def chunk(self, request, hit=0):
        tokens = min(CHUNK, request.num_tokens - request.num_computed_tokens - hit)
        if self.split is None:
            return tokens
        return Scheduler._mamba_block_aligned_split(self.split, request, tokens, hit)

    def settle(self):
        manager = self.manager
        _, retained = manager.take_kv_cache_block_copies()
        if retained:
            manager.block_pool.free_blocks(retained)
        manager.take_new_block_ids()
        manager.take_boundary_state_offloads()

    def admit(self, request, encoder_tokens=0):
        """Look up, reserve and commit the whole prompt; hit tokens, or None and nothing held."""
        manager = self.manager
        manager.new_step_starts()
        blocks, hit, request.shared_prefix_boundary = manager.get_computed_blocks(request)
        tokens = self.chunk(request, hit)
        if (
            manager.allocate_slots(
                request,
                tokens,
                hit,
                blocks,
                num_encoder_tokens=encoder_tokens,
                full_sequence_must_fit=True,
            )
            is None
        ):
            return None
        request.num_computed_tokens = hit + tokens
        self.settle()
        while request.num_computed_tokens < request.num_prompt_tokens:
            manager.new_step_starts()
            tokens = self.chunk(request)
            if manager.allocate_slots(request, tokens) is None:
                self.release(request)
                return None
            request.num_computed_tokens += tokens
            self.settle()
        manager.remove_skipped_blocks(request.request_id, request.num_computed_tokens)
        return hit

    def grow(self, request, token_ids):
        """Reserve and commit generated tokens; False, with what fitted kept, when they do not fit.

        A state is written where a step ends, so with state layers steps end on block boundaries.
        """
        manager = self.manager
        request.append_output_token_ids(token_ids)
        while request.num_computed_tokens < request.num_tokens:
            tokens = request.num_tokens - request.num_computed_tokens
            if self.state_block:
                done = request.num_computed_tokens % self.state_block
                tokens = min(tokens, self.state_block - done)
            manager.new_step_starts()
            if manager.allocate_slots(request, tokens) is None:
                return False
            request.num_computed_tokens += tokens
            self.settle()
        return True

    def release(self, request):
        self.manager.free(request)
        request.num_computed_tokens = 0


# --- workloads ----------------------------------------------------------------------------------


def now():
    return time.perf_counter_ns()


def quiet_gc():
    gc.collect()
    gc.freeze()
    gc.disable()


def draw(emit):
    """Free and draw in a pool whose freed blocks carry no hash."""
    held_count, rounds = 1_000, 200_000
    for batch in (1, 64):
        samples = []
        for repeat in range(6):
            pool = BlockPool(4_096, enable_caching=True, hash_block_size=16)
            held = pool.get_new_blocks(held_count)
            rng = random.Random(repeat)
            order = [rng.randrange(held_count) for _ in range(rounds)]
            if batch > 1:  # distinct inside one call
                order = [rng.sample(range(held_count), batch) for _ in range(rounds // batch)]
            quiet_gc()
            start = now()
            if batch == 1:
                for i in order:
                    pool.free_blocks((held[i],))
                    held[i] = pool.get_new_blocks(1)[0]
            else:
                for chosen in order:
                    pool.free_blocks([held[i] for i in chosen])
                    for i, block in zip(chosen, pool.get_new_blocks(batch)):
                        held[i] = block
            samples.append((now() - start) / (len(order) * batch))
            gc.enable()
        name = "pair_ns" if batch == 1 else "pair_ns_batch64"
        emit(
            "draw",
            "BlockPool of 4096, 1000 held, caching on, gc off",
            name,
            statistics.median(samples[1:]),
            "ns",
        )


def prompt(emit, plan, retention, hash_name):
    tokens = list(range(MAX_MODEL_LEN))
    engine = Engine(plan, 64 * GIB, hash_name)
    samples = {"hash_us": [], "cold_us": [], "release_us": [], "warm_us": []}
    for repeat in range(6):
        engine.manager.reset_prefix_cache()
        request = Request(f"cold{repeat}", tokens, SAMPLING, None)
        again = Request(f"warm{repeat}", tokens, SAMPLING, None)
        quiet_gc()
        t0 = now()
        request.block_hashes = engine.hasher(request)
        t1 = now()
        miss = engine.admit(request)
        t2 = now()
        engine.release(request)
        t3 = now()
        again.block_hashes = request.block_hashes
        hit = engine.admit(again)
        t4 = now()
        gc.enable()
        engine.release(again)
        assert miss == 0 and hit is not None
        for metric, took in zip(samples, (t1 - t0, t2 - t1, t3 - t2, t4 - t3)):
            samples[metric].append(took / 1e3)
    case = (
        f"{plan.label} 131072 tokens, {hash_name}, retention={retention}, chunks of {CHUNK}, "
        f"64 GiB, gc off; warm hit {hit} tokens, release not in warm"
    )
    for metric, values in samples.items():
        emit("prompt", case, metric, statistics.median(values[1:]), "us")


def decode(emit, plan, retention, hash_name, lengths):
    batch, steps, warm_up = 256, 256, 16
    for length in lengths:
        specs = [group.kv_cache_spec for group in plan.groups]
        end = length + steps + warm_up
        blocks = 2
        for spec in specs:
            if isinstance(spec, SlidingWindowSpec):
                blocks += batch * (min(spec.sliding_window, end) // spec.block_size + 3)
                blocks += (spec.sliding_window + CHUNK) // spec.block_size + 2
            elif isinstance(spec, MambaSpec):
                blocks += batch * 4
            else:
                blocks += batch * (end // spec.block_size + 1)
        engine = Engine(plan, blocks * plan.slab_bytes, hash_name)
        manager = engine.manager
        table = MultiGroupBlockTable(
            batch,
            batch,
            False,
            torch.device("cpu"),
            [spec.block_size for spec in specs],
            [spec.max_num_blocks_per_req(plan.config, MAX_MODEL_LEN) for spec in specs],
            slot_mapping_modes=[SlotMappingMode.NONE] * len(specs),
        )
        shared = list(range(length - 1))
        requests = []
        for row in range(batch):
            request = engine.request(f"r{row}", [UNIQUE_IDS + row, *shared])
            assert engine.admit(request) is not None
            table.add_row(manager.get_block_ids(request.request_id), row)
            requests.append(request)
        rows = np.arange(batch)
        attention = [i for i, spec in enumerate(specs) if isinstance(spec, AttentionSpec)]
        positions = np.full(batch, length - 1, dtype=np.int64)
        lengths_now = np.full(batch, length, dtype=np.int32)
        slots = np.zeros((len(specs), batch), dtype=np.int64)
        parts = []
        quiet_gc()
        for step in range(warm_up + steps):
            token = UNIQUE_IDS + batch + step
            t0 = now()
            for request in requests:  # last step's sampled token; hashes a filled page
                request.append_output_token_ids(token)
            t1 = now()
            manager.new_step_starts()
            grown = []
            for request in requests:
                new = manager.allocate_slots(request, 1)
                request.num_computed_tokens += 1
                grown.append(new.get_block_ids(allow_none=True))
            engine.settle()
            t2 = now()
            for row, ids in enumerate(grown):
                if ids is not None:
                    table.append_row(ids, row)
            positions += 1
            lengths_now += 1
            for i in attention:  # vLLM does this part in a GPU kernel
                block_size = specs[i].block_size
                slots[i] = (
                    table[i].block_table.np[rows, positions // block_size] * block_size
                    + positions % block_size
                )
            t3 = now()
            parts.append((t3 - t0, t1 - t0, t2 - t1, t3 - t2))
        gc.enable()
        parts = np.array(parts[warm_up:]) / 1e3
        keys = f"retention={retention}, {hash_name}" if plan.caching else "prefix caching off"
        case = (
            f"{plan.label} L={length} B=256, {keys}, "
            f"{len(specs)} groups, BlockTable rows, numpy slot mapping, gc off; "
            "no scheduler queues, no copy to a device"
        )
        emit("decode", case, "step_us_median", float(np.median(parts[:, 0])), "us")
        emit("decode", case, "step_us_p99", float(np.percentile(parts[:, 0], 99)), "us")
        emit("decode", case, "step_us_mean", float(parts[:, 0].mean()), "us")
        for i, name in enumerate(("token_append_hash", "manager", "rows_slots_lengths"), 1):
            emit("decode", case, f"{name}_us_mean", float(parts[:, i].mean()), "us")


def trace_rows(name):
    sizes = {
        "mooncake_conversation": 512,
        "mooncake_synthetic": 512,
        "rtp_llm_online": 1024,
        "agent_sessions": 16,
    }
    with gzip.open(DATA / "traces" / f"{name}.jsonl.gz", "rt") as file:
        return sizes[name], [json.loads(line) for line in file]


def replay(emit, plan, retention, hash_name, trace, limit, budget, most_live=64):
    size, rows = trace_rows(trace)
    total = len(rows)
    rows = [row for row in rows[:limit] if row["input_length"]]  # vLLM refuses an empty prompt
    engine = Engine(plan, budget, hash_name)
    live, offsets, next_id = deque(), np.arange(size), UNIQUE_IDS
    prompt_tokens = hit_tokens = refused = cut_short = spent = hashing = 0

    def retire():
        nonlocal next_id, cut_short
        request, output = live.popleft()
        if output and not engine.grow(request, list(range(next_id, next_id + output))):
            cut_short += 1
        next_id += output
        engine.release(request)

    quiet_gc()
    for index, row in enumerate(rows):
        length = row["input_length"]
        ids = (np.array(row["hash_ids"], dtype=np.int64)[:, None] * size + offsets).ravel()[:length]
        tokens = ids.tolist()
        missing = length - len(tokens)  # a tail without a hash id is nobody else's
        tokens.extend(range(next_id, next_id + missing))
        next_id += missing
        start = now()
        request = engine.request(str(index), tokens)
        hashing += now() - start
        if len(live) == most_live:
            retire()
        while (hit := engine.admit(request)) is None and live:
            retire()
        if hit is None:
            refused += 1
        else:
            live.append((request, row["output_length"]))
            hit_tokens += hit
        prompt_tokens += length
        spent += now() - start
    gc.enable()
    part = f", first {limit} rows" if limit else ""
    if len(rows) < min(total, limit or total):
        part += f", {min(total, limit or total) - len(rows)} empty prompts left out"
    case = (
        f"{plan.label} {trace} in file order{part}, R={most_live}, {budget // GIB} GiB, "
        f"retention={retention}, {hash_name}, chunks of {CHUNK}, gc off"
    )
    note = f"{cut_short} retired requests could not grow by their whole output"
    emit("replay", case, "hit_tokens_pct", 100 * hit_tokens / prompt_tokens, "%", note=note)
    emit("replay", case, "refused", refused, "requests")
    emit("replay", case, "us_per_request", spent / 1e3 / len(rows), "us")
    emit(
        "replay",
        case,
        "hash_us_per_request",
        hashing / 1e3 / len(rows),
        "us",
        note="part of us_per_request: Request() with its block hashes",
    )


def capacity(emit, plan, hash_name, budget=16 * GIB, encoder_tokens=0):
    with gzip.open(DATA / "traces" / "azure_llm_2023_conv.csv.gz", "rt") as file:
        rows = [(int(r["ContextTokens"]), int(r["GeneratedTokens"])) for r in csv.DictReader(file)]
    image = sum(
        encoder_tokens * 4 * layer.shape["num_kv_heads"] * layer.shape["head_size"]
        for layer in plan.layers
        if getattr(layer, "cross", False)
    )
    totals = np.cumsum(
        [plan.bytes_needed(context + generated) + image for context, generated in rows]
    )
    engine = Engine(plan, budget, hash_name)
    admitted = next_id = 0
    for index, (context, generated) in enumerate(rows):
        request = engine.request(str(index), list(range(next_id, next_id + context)))
        outputs = range(next_id + context, next_id + context + generated)
        next_id = outputs.stop
        if engine.admit(request, encoder_tokens) is None:
            break
        if not all(engine.grow(request, [token]) for token in outputs):
            break
        admitted += 1
    case = (
        f"{plan.label} azure_llm_2023_conv, {budget // GIB} GiB, prefix caching "
        f"{'on' if plan.caching else 'off'}, prompt in chunks of {CHUNK}, then token by token"
    )
    if encoder_tokens:
        case += f", one image of {encoder_tokens} tokens each"
    note = f"{plan.describe()}; {engine.manager.block_pool.num_gpu_blocks} blocks"
    used = totals[admitted - 1] if admitted else 0
    emit("capacity", case, "requests", admitted, "requests", note=note)
    emit("capacity", case, "ideal_requests", int((totals <= budget).sum()), "requests")
    emit("capacity", case, "useful_pct", float(100 * used / budget), "%", note=note)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--workload",
        default="all",
        choices=["draw", "prompt", "decode", "replay", "capacity", "all"],
    )
    parser.add_argument("--model", default="llama-3.1-70b")
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--trace", default="mooncake_conversation")
    parser.add_argument(
        "--retention",
        default="tail",
        choices=["dense", "tail"],
        help="window and state checkpoints: every page, or vLLM's default",
    )
    parser.add_argument("--hash", default="sha256", help="prefix_caching_hash_algo")
    parser.add_argument("--rows", type=int, help="replay only the first ROWS requests")
    parser.add_argument("--gib", type=int, default=64, help="budget of replay")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1_024, 8_192, 32_768])
    parser.add_argument("--state-dtype", default="float32", help="vLLM's default is auto")
    parser.add_argument("--match-unit", type=int, help="prefix_match_unit; vLLM's default is none")
    parser.add_argument("--no-caching", action="store_true", help="capacity without prefix caching")
    parser.add_argument("--encoder-tokens", type=int, default=0, help="capacity: one image each")
    parser.add_argument("--out", type=argparse.FileType("a"), default="-")
    args = parser.parse_args()

    def emit(workload, case, metric, value, unit, **extra):
        value = value if value is None else round(value, 3)
        print(
            json.dumps(
                {
                    "system": f"vllm {vllm.__version__}",
                    "workload": workload,
                    "case": case,
                    "metric": metric,
                    "value": value,
                    "unit": unit,
                    **extra,
                }
            ),
            file=args.out,
            flush=True,
        )

    names = ["draw", "prompt", "decode", "replay", "capacity"]
    wanted = names if args.workload == "all" else [args.workload]
    if "draw" in wanted:
        draw(emit)
    if wanted == ["draw"]:
        return
    plan = make_plan(
        args.model,
        args.page,
        args.retention,
        args.state_dtype,
        args.match_unit,
        not args.no_caching,
    )
    for name, metric in (("prompt", "warm_us"), ("replay", "hit_tokens_pct")):
        if name in wanted and not plan.caching:
            wanted = [other for other in wanted if other != name]
            emit(
                name,
                plan.label,
                metric,
                None,
                "",
                why="no prefix caching: vLLM refuses it next to cross attention, and dropped "
                "MllamaForConditionalGeneration after 0.10.2",
            )
    if "prompt" in wanted:
        prompt(emit, plan, args.retention, args.hash)
    if "decode" in wanted:
        decode(emit, plan, args.retention, args.hash, args.lengths)
    if "replay" in wanted:
        replay(emit, plan, args.retention, args.hash, args.trace, args.rows, args.gib * GIB)
    if "capacity" in wanted:
        capacity(emit, plan, args.hash, encoder_tokens=args.encoder_tokens)


if __name__ == "__main__":
    main()
