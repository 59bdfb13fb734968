#!/usr/bin/env python3
"""Runs the five workloads of README.md on MAX's Jenga KV cache manager, without a device.

Set up a venv (Python 3.11, Linux x86-64; the first import compiles one small Mojo module):

    python3.11 -m venv maxenv
    maxenv/bin/pip install --no-deps max==26.7.0 max-core==26.7.0 max-mojo-libs==26.7.0 \
        max-shmem-libs==26.7.0 mojo-compiler==1.2.0 mojo-compiler-mojo-libs==1.2.0
    maxenv/bin/pip install numpy msgspec psutil rich click exceptiongroup taskgroup \
        typing_extensions huggingface-hub requests "transformers<5.13,>=5.12" pillow av
    taskset -c 1 maxenv/bin/python max_driver.py --workload all --model gemma-3-27b --page 16

What runs is the wheel's own JengaKVCacheManager: claim, alloc, runtime_inputs, step, release. Four
things differ from a server:
  - The slab is address space only: anonymous memory that nothing reads or writes.
  - State copies and zero fills are left out. They are device work, and the slab is not real.
  - Tables are staged to a CPU "device", so the upload is one memory copy. MAX writes no slot
    mapping: its kernels work it out from table and length.
  - Page sizes below 128 are accepted here. MAX's own registry refuses them (KERN-1308).
Prompts are split as MAX's scheduler does by default: 8,192 tokens per forward, and for models with
a state the last piece is cut at the last page boundary. Appending a token to a request is outside
every time given, except where a row says otherwise.
"""

import argparse
import csv
import gc
import gzip
import json
import math
import mmap
import random
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace

import numpy as np
from max._kv_core import JengaBlockPool
from max.driver import Buffer
from max.dtype import DType
from max.graph import DeviceRef
from max.nn.kv_cache import MultiKVCacheParams
from max.nn.kv_cache.cache_params import (
    MHAKVCacheParams,
    RecurrentStateParams,
    RecurrentStateRegion,
)
from max.pipelines.context import TextContext, TokenBuffer
from max.pipelines.kv_cache.paged_kv_cache import jenga_cache_manager
from max.pipelines.kv_cache.paged_kv_cache._common import compute_block_hashes
from max.pipelines.kv_cache.paged_kv_cache.block_utils import InsufficientBlocksError

SYSTEM = "max 26.7.0"
DATA = Path(__file__).resolve().parents[2] / "data"
CHUNK = 8192  # tokens per forward; the wheel's default max_batch_input_tokens
GIB = 1 << 30
BF16 = 2  # bytes
MODELS = ["llama-3.1-70b", "gemma-3-27b", "gpt-oss-20b", "qwen3-next-80b-a3b"]
TRACES = ["mooncake_conversation", "agent_sessions", "rtp_llm_online"]
MAP_NORESERVE = 0x4000  # Linux; the mmap module names it only in later versions
UNIQUE = 1 << 30  # token ids from here on belong to one request; no trace reaches it


# ---- the system under test ---------------------------------------------------------------------


class AddressSpace:
    """Stands in for Buffer where the manager makes its slab: reserves it, commits nothing."""

    @staticmethod
    def zeros(shape, dtype, device=None):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        memory = mmap.mmap(-1, math.prod(shape) * dtype.size_in_bytes, flags=flags)
        return Buffer.from_numpy(np.frombuffer(memory, np.uint8).reshape(shape))


class Manager(jenga_cache_manager.JengaKVCacheManager):
    """The wheel's manager, less the copies of state bytes."""

    def _fill_state(self, replica_idx, fills):
        pass


jenga_cache_manager.Buffer = AddressSpace


class Model:
    """Cache shape of one file in tests/data/models, as MAX parameters and as plain byte counts."""

    def __init__(self, name: str, page: int, caching: bool = True):
        config = json.loads((DATA / "models" / f"{name}.json").read_text())
        config = config.get("text_config", config)
        self.name, self.page = name, page
        layers = config["num_hidden_layers"]
        types = config.get("layer_types") or ["full_attention"] * layers
        every = config.get("full_attention_interval")
        if every:
            types = ["full_attention" if (i + 1) % every == 0 else "state" for i in range(layers)]
        heads = config["num_key_value_heads"]
        width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        self.full_layers = types.count("full_attention")
        self.window_layers = types.count("sliding_attention")
        self.window = config.get("sliding_window") if self.window_layers else None
        self.token_bytes = 2 * heads * width * BF16  # one layer, keys and values
        device = [DeviceRef.CPU()]

        def attention(count, window=None):
            return MHAKVCacheParams(
                dtype=DType.bfloat16,
                head_dim=width,
                n_kv_heads=heads,
                num_layers=count,
                devices=device,
                enable_prefix_caching=caching,
                page_size=page,
                window_size=window,
            )

        children = {}  # in the order MAX's own models declare: it decides who grows first
        if self.window_layers:
            children["sliding_attention"] = attention(self.window_layers, self.window)
        children["full_attention"] = attention(self.full_layers)
        regions = self.state_regions(config, types.count("state"))
        self.state_bytes = sum(region.bytes_per_page for region in regions)
        if regions:
            children["state"] = RecurrentStateParams(regions=regions, devices=device)
        one = len(children) == 1
        self.params = (
            children["full_attention"] if one else MultiKVCacheParams.from_params(children)
        )

    @staticmethod
    def state_regions(config: dict, layers: int) -> tuple:
        """Gated DeltaNet: bf16 convolution state, f32 recurrent state."""
        if not layers:
            return ()
        k_heads, v_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        k_dim, v_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
        conv = (2 * k_heads * k_dim + v_heads * v_dim, config["linear_conv_kernel_dim"] - 1)
        return (
            RecurrentStateRegion("conv", layers, conv, DType.bfloat16),
            RecurrentStateRegion("recurrent", layers, (v_heads, v_dim, k_dim), DType.float32),
        )

    def useful_bytes(self, tokens: int) -> int:
        windowed = self.window_layers * min(tokens, self.window or 0)
        return (self.full_layers * tokens + windowed) * self.token_bytes + self.state_bytes

    def manager(self, budget: int, longest: int, batch: int = 1, chunk: int | None = CHUNK):
        return Manager.create(
            params=self.params,
            available_bytes=budget,
            max_batch_size=batch,
            max_seq_len=longest,
            max_num_input_tokens=chunk,
        )

    def budget_for(self, requests: int, tokens: int, in_flight: int) -> int:
        """Bytes that surely hold `requests` of `tokens`, `in_flight` tokens being prefilled.

        Two huge blocks per request and leaf are added: what a request keeps may lie in blocks
        whose other pages no other leaf can have.
        """
        plan = Manager._plan_geometry(self.params, 1 << 46)
        blocks = 16
        for leaf_id, leaf in self.params.leaves().items():
            pages = leaf.blocks_to_reserve(-(-tokens // self.page), enable_prefix_caching=True)
            wanted = requests * (pages + 2 * plan.ratios[leaf_id]) + in_flight // self.page
            blocks += -(-wanted // plan.ratios[leaf_id])
        return blocks * plan.huge_page_bytes


class Server:
    """Calls the manager in the scheduler's order, and adds up the time spent inside it."""

    def __init__(self, manager: Manager, chunk: int | None = CHUNK):
        self.manager, self.chunk, self.seconds = manager, chunk, 0.0

    def timed(self, call: Callable, ctx: TextContext):
        start = perf_counter()
        try:
            return call(ctx)
        finally:
            self.seconds += perf_counter() - start

    def claim(self, ctx: TextContext):
        self.timed(self.manager.claim, ctx)

    def release(self, ctx: TextContext):
        self.timed(self.manager.release, ctx)

    def run(self, ctx: TextContext, align: bool = True):
        """Reserves and commits every waiting token, a piece at a time, and appends one more."""
        while True:
            self.timed(self.manager.alloc, ctx)
            self.split(ctx, align)
            last = not ctx.tokens.actively_chunked
            ctx.update(1)
            self.timed(self.manager.step, ctx)
            if last:
                return

    def split(self, ctx: TextContext, align: bool):
        start, waiting = ctx.tokens.processed_length, ctx.tokens.active_length
        size = min(waiting, self.chunk or waiting)
        page = self.manager.chunk_alignment_tokens if align else 0
        if page:
            to_boundary = (start + size) // page * page - start
            size = to_boundary if to_boundary > 0 else size
        if size < waiting:
            ctx.tokens.chunk(size)

    def grow(self, ctx: TextContext, ids: range):
        """Gives a request generated tokens, all at once, and commits them."""
        for token in ids[1:]:  # the first is already there: run() appended it
            ctx.update(token)
        ctx.tokens.rewind_processing(len(ids) - 1)
        self.run(ctx, align=False)


def request(tokens: np.ndarray) -> TextContext:
    return TextContext(max_length=1 << 40, tokens=TokenBuffer(tokens))


def quiet_gc():
    gc.collect()
    gc.freeze()
    gc.disable()


# ---- workloads: each yields (case, metric, value, unit) ------------------------------------------


def draw(model: Model) -> Iterator[tuple]:
    plan = Manager._plan_geometry(model.params, 64 * GIB)
    leaf = next(leaf_id for leaf_id in plan.ratios if leaf_id.endswith("full_group"))
    pool = JengaBlockPool(2000 // plan.ratios[leaf] + 4, plan.ratios)
    held = [pool.alloc_block(leaf) for _ in range(1000)]
    picks = [random.Random(1).randrange(1000) for _ in range(200_000)]
    free, alloc = pool.free_block, pool.alloc_block

    def pairs():
        for i in picks:
            free(held[i])
            held[i] = alloc(leaf)

    times = repeats(pairs)
    ns = statistics.median(times) / len(picks) * 1e9
    case = f"{model.name} full leaf P={model.page}, compiled pool, python loop included, gc off"
    yield case, "pair_ns", ns, "ns"
    yield case, "pair_ns_batch64", None, "ns", "the pool has no call for several blocks"


def repeats(work: Callable, count: int = 5) -> list[float]:
    quiet_gc()
    times = []
    for _ in range(count + 1):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return times[1:]


def prompt(model: Model, chunk: int | None) -> Iterator[tuple]:
    length = 131_072
    how = f"chunks of {chunk}" if chunk else "one forward"
    case = f"{model.name} P={model.page} {how}, ahash64, gc off"
    manager = model.manager(model.budget_for(2, length + 1, length), length + 1, chunk=chunk)
    hashed = request(np.arange(length, dtype=np.int64))
    for algo in ("ahash64", "sha256") if chunk is None else ():
        times = repeats(lambda a=algo: compute_block_hashes(hashed, [], model.page, a, None))
        yield case.replace("ahash64", algo), "hash_us", statistics.median(times) * 1e6, "us"

    quiet_gc()
    cold, warm, inputs, drop, hit = [], [], [], [], 0
    for _ in range(6):
        for into in (cold, warm):
            ctx = request(np.arange(length, dtype=np.int64))
            server = Server(manager, chunk)
            server.claim(ctx)
            server.run(ctx)
            into.append(server.seconds)
            hit = ctx.cached_prefix_length
            manager.alloc(ctx)
            start = perf_counter()
            manager.runtime_inputs([[ctx]])
            inputs.append(perf_counter() - start)
            server.seconds = 0.0
            server.release(ctx)
            drop.append(server.seconds)
        manager.reset_prefix_cache()
        gc.collect()
    case = f"{case}; claim + alloc + step"
    yield case, "cold_us", statistics.median(cold[1:]) * 1e6, "us"
    yield f"{case}; {hit} tokens hit", "warm_us", statistics.median(warm[1:]) * 1e6, "us"
    yield case, "release_us", statistics.median(drop[2:]) * 1e6, "us"
    yield case, "tables_us", statistics.median(inputs[2:]) * 1e6, "us"


def decode(model: Model, length: int, batch: int = 256, steps: int = 256) -> Iterator[tuple]:
    longest = length + steps + 16
    manager = model.manager(model.budget_for(batch, longest, 2 * CHUNK), longest, batch)
    server = Server(manager)
    live = []
    for i in range(batch):
        live.append(request(np.arange(length, dtype=np.int64) + UNIQUE + i * length))
        server.claim(live[-1])
        server.run(live[-1])
    quiet_gc()
    parts = {"alloc_us_median": [], "tables_us_median": [], "commit_us_median": []}
    append, total = [], []
    for step in range(steps + 8):
        marks = [perf_counter()]
        for ctx in live:
            manager.alloc(ctx)
        marks.append(perf_counter())
        manager.runtime_inputs([live])
        marks.append(perf_counter())
        for ctx in live:
            ctx.update(step)
        marks.append(perf_counter())
        for ctx in live:
            manager.step(ctx)
        marks.append(perf_counter())
        alloc, tables, update, commit = np.diff(marks) * 1e6
        if step >= 8:  # the first eight warm up
            for times, us in zip(parts.values(), (alloc, tables, commit)):
                times.append(us)
            append.append(update)
            total.append(alloc + tables + commit)
    case = (
        f"{model.name} L={length} B={batch} P={model.page}; alloc + runtime_inputs + step, "
        "lengths and tables staged to cpu, no slot mapping, gc off"
    )
    yield case, "step_us_median", statistics.median(total), "us"
    yield case, "step_us_p99", float(np.percentile(total, 99)), "us"
    for metric, times in parts.items():
        yield case, metric, statistics.median(times), "us"
    yield case, "append_us_median", statistics.median(append), "us"


def trace_rows(name: str) -> Iterator[tuple[np.ndarray, int]]:
    """Token ids of every prompt, and how many tokens it generates."""
    size = {"rtp_llm_online": 1024, "agent_sessions": 16}.get(name, 512)
    offsets = np.arange(size, dtype=np.int64)
    unique = UNIQUE
    with gzip.open(DATA / "traces" / f"{name}.jsonl.gz", "rt") as lines:
        for line in lines:
            row = json.loads(line)
            length = row["input_length"]
            if not length:  # MAX has no request without a token; 53 rows of agent_sessions are so
                continue
            ids = np.array(row["hash_ids"], dtype=np.int64)[:, None] * size + offsets
            tokens = ids.reshape(-1)[:length]
            tail = length - len(tokens)  # a tail block without an id is this request's own
            own = np.arange(unique, unique + tail, dtype=np.int64)
            unique += tail
            yield np.concatenate([tokens, own]), row["output_length"]


def replay_once(model: Model, trace: str, chunk: int | None, budget: int, rows: int):
    longest = 131_072 if budget >= 64 * GIB else 65_536  # create() refuses what cannot fit alone
    manager = model.manager(budget, longest, chunk=chunk)
    server = Server(manager, chunk)
    live: deque[tuple[TextContext, int]] = deque()
    seen = SimpleNamespace(rows=0, tokens=0, hits=0, refused=0, grow_refused=0, broken=0)
    generated = UNIQUE + (1 << 29)

    def tell(refusal: InsufficientBlocksError):
        # alloc's own check words its refusal so; anything else failed after that check said yes.
        seen.broken += not str(refusal).startswith("Serving")

    def retire():
        nonlocal generated
        ctx, count = live.popleft()
        if count:
            try:
                server.grow(ctx, range(generated, generated + count))
            except InsufficientBlocksError as refusal:
                tell(refusal)
                seen.grow_refused += 1
            generated += count
        server.release(ctx)

    def admitted(ctx: TextContext) -> bool:
        server.claim(ctx)
        while True:
            try:
                server.run(ctx)
                return True
            except InsufficientBlocksError as refusal:
                tell(refusal)
                if not live:
                    server.release(ctx)
                    return False
                retire()

    quiet_gc()
    for tokens, count in trace_rows(trace):
        if seen.rows == rows:
            break
        if len(live) == 64:
            retire()
        ctx = request(tokens)
        seen.rows += 1
        seen.tokens += len(tokens)
        if admitted(ctx):
            seen.hits += ctx.cached_prefix_length
            live.append((ctx, count))
        else:
            seen.refused += 1
    seen.us = server.seconds / seen.rows * 1e6
    return seen


def replay(
    model: Model, trace: str, chunk: int | None, budget: int, rows: int, runs: int
) -> Iterator[tuple]:
    if runs > 1:
        replay_once(model, trace, chunk, budget, rows)  # warms up
    all_seen = [replay_once(model, trace, chunk, budget, rows) for _ in range(runs)]
    seen = all_seen[0]
    how = f"chunks of {chunk}" if chunk else "one forward"
    case = (
        f"{model.name} {trace} P={model.page} R=64 {budget // GIB} GiB, {seen.rows} rows, {how}, "
        f"{runs} run{'s' if runs > 1 else ''}, gc off"
    )
    yield case, "hit_tokens_pct", 100 * seen.hits / seen.tokens, "%"
    yield case, "refused", seen.refused, "requests"
    yield case, "us_per_request", statistics.median(run.us for run in all_seen), "us"
    yield case, "growth_refused", seen.grow_refused, "requests"
    yield case, "accepted_then_failed", seen.broken, "calls"


def capacity(model: Model, budget: int, note: str) -> Iterator[tuple]:
    manager = model.manager(budget, 16_384)
    server = Server(manager)
    held = useful = 0
    live = []
    path = DATA / "traces" / "azure_llm_2023_conv.csv.gz"
    with gzip.open(path, "rt") as lines:
        for row in csv.DictReader(lines):
            length = int(row["ContextTokens"]) + int(row["GeneratedTokens"])
            first = UNIQUE + len(live) * 16_384
            live.append(request(np.arange(first, first + length, dtype=np.int64)))
            server.claim(live[-1])
            try:
                server.run(live[-1])
            except InsufficientBlocksError:
                break
            held += 1
            useful += model.useful_bytes(length)
    blocks = manager.huge_block_count().total + 1
    huge = Manager._plan_geometry(model.params, budget).huge_page_bytes
    case = (
        f"{model.name} P={model.page} {budget // GIB} GiB, prefix caching {note}; "
        f"{blocks} huge blocks of {huge / (1 << 20):g} MiB"
    )
    yield case, "requests", held, "requests"
    yield case, "useful_pct", 100 * useful / budget, "%"


# ---- command line --------------------------------------------------------------------------------


def rows_of(workload: str, args: argparse.Namespace) -> Iterator[tuple]:
    model = Model(args.model, args.page)
    chunk = args.chunk or None
    if workload == "draw":
        yield from draw(model)
    elif workload == "prompt":
        yield from prompt(model, None)
        yield from prompt(model, CHUNK)
    elif workload == "decode":
        for length in args.lengths:
            yield from decode(model, length)
    elif workload == "replay":
        for trace in TRACES if args.trace == "all" else [args.trace]:
            yield from replay(model, trace, chunk, args.gib * GIB, args.rows, args.runs)
    elif workload == "capacity":
        yield from capacity(model, 16 * GIB, "on")
        yield from capacity(Model(args.model, args.page, caching=False), 16 * GIB, "off")


def main():
    parse = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    workloads = ["draw", "prompt", "decode", "replay", "capacity"]
    parse.add_argument("--workload", choices=[*workloads, "all"], default="all")
    parse.add_argument("--model", choices=MODELS, default="llama-3.1-70b")
    parse.add_argument("--page", type=int, default=128, help="tokens per attention page")
    parse.add_argument("--trace", choices=[*TRACES, "all"], default="all")
    parse.add_argument("--rows", type=int, default=-1, help="replay: first rows only")
    parse.add_argument("--runs", type=int, default=1, help="replay: timed runs; 2 or more warm up")
    parse.add_argument("--gib", type=int, default=64, help="replay: budget")
    parse.add_argument("--chunk", type=int, default=CHUNK, help="replay: 0 is one forward a prompt")
    parse.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192, 32768])
    parse.add_argument("--out", type=Path, help="append the records here as well")
    args = parse.parse_args()
    with args.out.open("a") if args.out else open("/dev/null", "w") as out:
        for workload in workloads if args.workload == "all" else [args.workload]:
            for case, metric, value, unit, *why in rows_of(workload, args):
                record = dict(system=SYSTEM, workload=workload, case=case, metric=metric)
                record |= dict(value=value if value is None else round(value, 2), unit=unit)
                if why:
                    record["why"] = why[0]
                line = json.dumps(record)
                print(line, flush=True)
                print(line, file=out, flush=True)


if __name__ == "__main__":
    sys.exit(main())
