"""Runs `draw`, `prompt` and `replay` of the peer workloads (README.md beside this file) on SGLang's
radix cache, for models whose layers are all full attention.

Setup, Python 3.11, no GPU: the virtual environment of vllm_driver.py, and in it

    vllmenv/bin/pip install --no-deps sglang==0.5.23 torchvision gguf
    vllmenv/bin/pip install ipython
    vllmenv/bin/python sglang_driver.py --workload all --page 1 --out FILE

Real SGLang code: UnifiedRadixCache (the default, with its Rust tree), the token or page allocator,
ReqToTokenPool, ReqKvInfo. The calls follow its scheduler: match, lock, evict, allocate, write the
row, checkpoint each chunk, release. Its slot indices are torch tensors that a server keeps on the
GPU; here they are on the CPU, so a server's times differ. Admission checks the prompt alone.
"""

import argparse
import gc
import gzip
import json
import logging
import random
import statistics
import time
import warnings
from array import array
from collections import deque
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import numpy as np
import torch

torch.set_num_threads(1)

from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

DATA = Path(__file__).resolve().parents[2] / "data"
GIB = 1 << 30
MAX_LEN = 131_072 + 4_096
CHUNK = 8_192  # tokens one prefill step computes (chunked_prefill_size)
UNIQUE_IDS = 1 << 30  # token ids from here on belong to one request only


def bytes_per_token(name):
    model = json.loads((DATA / "models" / f"{name}.json").read_text())
    other = {"layer_types", "full_attention_interval", "hybrid_override_pattern", "text_config"}
    assert not other & set(model), "full attention only"
    head_dim = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    return 4 * model["num_key_value_heads"] * head_dim * model["num_hidden_layers"]


def make_allocator(tokens, page):
    if page == 1:
        return TokenToKVPoolAllocator(tokens, torch.bfloat16, "cpu", None, False)
    allocator = PagedTokenToKVPoolAllocator(
        tokens // page * page, page, torch.bfloat16, "cpu", None, False
    )
    allocator.use_triton_kernels = False  # its torch path: Triton has no CPU target
    return allocator


class Engine:
    def __init__(self, tokens, page, most_live=64):
        self.page = page
        self.allocator = make_allocator(tokens, page)
        self.rows = ReqToTokenPool(most_live + 1, MAX_LEN, "cpu", False)
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page,
                tree_components=(ComponentType.FULL,),
            )
        )

    def request(self, name, tokens):
        return SimpleNamespace(
            rid=name,
            origin_input_ids=tokens,
            full_untruncated_fill_ids=tokens,
            kv=ReqKvInfo(),
            extra_key=None,
            cache_salt=None,
            priority=0,
            session=None,
            session_id=None,
            kv_rotation_base=None,
            lock=None,
            last_node=None,
            finished=lambda: False,
        )

    def fits(self, start, end):
        need = -(-end // self.page) * self.page - -(-start // self.page) * self.page
        return need <= self.allocator.available_size() + self.tree.evictable_size()

    def extend(self, request, start, end):
        """Slots for tokens [start, end), written into the request's row and published."""
        row = request.kv.req_pool_idx
        if self.page == 1:
            evict_from_tree_cache(self.tree, end - start)
            slots = self.allocator.alloc(end - start)
        else:
            evict_from_tree_cache(self.tree, end - start + self.page)
            before, after = torch.tensor([start]), torch.tensor([end])
            last = (
                self.rows.req_to_token[row, start - 1 : start].long()
                if start
                else torch.tensor([-1])
            )
            slots = self.allocator.alloc_extend(before, before, after, after, last, end - start)
        assert slots is not None
        self.rows.write((row, slice(start, end)), slots.int())
        request.kv.kv_allocated_len = end
        self.tree.checkpoint(request, up_to=end)

    def admit(self, request):
        """Look up, reserve and publish the whole prompt; hit tokens, or None and nothing held."""
        tokens = request.origin_input_ids
        key = RadixKey(tokens, limit=len(tokens) - 1)  # one token is left for the logits
        match = self.tree.match_prefix(MatchPrefixParams(key=key))
        hit = match.device_prefix_len
        request.lock = self.tree.lock(match.last_device_node)
        if not self.fits(hit, len(tokens)):
            self.tree.unlock(request.lock)
            return None
        request.last_node = match.last_device_node
        self.rows.alloc([request])
        request.kv.cache_protected_len = hit
        self.rows.write(
            (request.kv.req_pool_idx, slice(0, hit)),
            self.tree.path_device_indices(match.last_device_node)[:hit].int(),
        )
        for start in range(hit, len(tokens), CHUNK):
            self.extend(request, start, min(start + CHUNK, len(tokens)))
        return hit

    def grow(self, request, token_ids):
        start = len(request.full_untruncated_fill_ids)
        end = start + len(token_ids)
        if not self.fits(start, end):
            return False
        request.full_untruncated_fill_ids = request.full_untruncated_fill_ids + token_ids
        self.extend(request, start, end)
        return True

    def release(self, request):
        kv = request.kv
        self.tree.free_kv_row(kv, [(kv.cache_protected_len, kv.kv_allocated_len)])
        self.tree.unlock(request.lock)
        self.tree.on_release(request, checkpointed=True)
        self.rows.free(request)
        kv.mark_kv_released()


def now():
    return time.perf_counter_ns()


def quiet_gc():
    gc.collect()
    gc.freeze()
    gc.disable()


def draw(emit, page):
    held_count, rounds = 1_000, 200_000
    for batch in (1, 64):
        samples = []
        for repeat in range(6):
            allocator = make_allocator(4_096 * page, page)
            held = [allocator.alloc(page) for _ in range(held_count)]
            rng = random.Random(repeat)
            order = [rng.randrange(held_count) for _ in range(rounds)]
            if batch > 1:
                order = [rng.sample(range(held_count), batch) for _ in range(rounds // batch)]
            quiet_gc()
            start = now()
            if batch == 1:
                for i in order:
                    allocator.free(held[i])
                    held[i] = allocator.alloc(page)
            else:
                for chosen in order:
                    allocator.free(torch.cat([held[i] for i in chosen]))
                    for i, block in zip(chosen, allocator.alloc(batch * page).split(page)):
                        held[i] = block
            samples.append((now() - start) / (len(order) * batch))
            gc.enable()
        case = f"{type(allocator).__name__} P={page}, 4096 pages, 1000 held, CPU tensors, gc off"
        emit(
            "draw",
            case,
            "pair_ns" if batch == 1 else "pair_ns_batch64",
            statistics.median(samples[1:]),
            "ns",
        )


def prompt(emit, model, page, budget=64 * GIB):
    tokens = array("q", range(131_072))
    engine = Engine(budget // bytes_per_token(model), page)
    samples = {"cold_us": [], "release_us": [], "warm_us": []}
    for repeat in range(6):
        engine.tree.reset()
        engine.allocator.clear()
        request = engine.request(f"cold{repeat}", tokens)
        again = engine.request(f"warm{repeat}", tokens)
        quiet_gc()
        t0 = now()
        miss = engine.admit(request)
        t1 = now()
        engine.release(request)
        t2 = now()
        hit = engine.admit(again)
        t3 = now()
        gc.enable()
        engine.release(again)
        assert miss == 0 and hit is not None
        for metric, took in zip(samples, (t1 - t0, t2 - t1, t3 - t2)):
            samples[metric].append(took / 1e3)
    case = (
        f"{model} P={page} 131072 tokens, chunks of {CHUNK}, {budget // GIB} GiB, CPU tensors, "
        f"gc off; warm hit {hit} tokens, release not in warm"
    )
    emit("prompt", case, "hash_us", None, "us", why="the tree compares tokens; nothing is hashed")
    for metric, values in samples.items():
        emit("prompt", case, metric, statistics.median(values[1:]), "us")


def replay(emit, model, page, trace, limit, budget=64 * GIB, most_live=64):
    size = {
        "mooncake_conversation": 512,
        "mooncake_synthetic": 512,
        "rtp_llm_online": 1024,
        "agent_sessions": 16,
    }[trace]
    with gzip.open(DATA / "traces" / f"{trace}.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    total = len(rows)
    rows = [row for row in rows[:limit] if row["input_length"]]  # an empty prompt is refused
    engine = Engine(budget // bytes_per_token(model), page, most_live)
    live, offsets, next_id = deque(), np.arange(size), UNIQUE_IDS
    prompt_tokens = hit_tokens = refused = cut_short = spent = 0

    def retire():
        nonlocal next_id, cut_short
        request, output = live.popleft()
        if output and not engine.grow(request, array("q", range(next_id, next_id + output))):
            cut_short += 1
        next_id += output
        engine.release(request)

    quiet_gc()
    for index, row in enumerate(rows):
        length = row["input_length"]
        ids = (np.array(row["hash_ids"], dtype=np.int64)[:, None] * size + offsets).ravel()[:length]
        tokens = array("q", ids.tobytes())
        missing = length - len(tokens)  # a tail without a hash id is nobody else's
        tokens.extend(range(next_id, next_id + missing))
        next_id += missing
        start = now()
        request = engine.request(str(index), tokens)
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
        f"{model} P={page} {trace} in file order{part}, R={most_live}, {budget // GIB} GiB, "
        f"chunks of {CHUNK}, CPU tensors, gc off"
    )
    note = f"{cut_short} retired requests could not grow by their whole output"
    emit("replay", case, "hit_tokens_pct", 100 * hit_tokens / prompt_tokens, "%", note=note)
    emit("replay", case, "refused", refused, "requests")
    emit("replay", case, "us_per_request", spent / 1e3 / len(rows), "us")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default="all", choices=["draw", "prompt", "replay", "all"])
    parser.add_argument("--model", default="llama-3.1-70b")
    parser.add_argument("--page", type=int, default=1)
    parser.add_argument("--trace", default="mooncake_conversation")
    parser.add_argument("--rows", type=int, help="replay only the first ROWS requests")
    parser.add_argument("--out", type=argparse.FileType("a"), default="-")
    args = parser.parse_args()

    def emit(workload, case, metric, value, unit, **extra):
        value = value if value is None else round(value, 3)
        print(
            json.dumps(
                {
                    "system": f"sglang {version('sglang')}",
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

    wanted = {args.workload} if args.workload != "all" else {"draw", "prompt", "replay"}
    if "draw" in wanted:
        draw(emit, args.page)
    if "prompt" in wanted:
        prompt(emit, args.model, args.page)
    if "replay" in wanted:
        replay(emit, args.model, args.page, args.trace, args.rows)


if __name__ == "__main__":
    main()
