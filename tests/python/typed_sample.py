"""Every public name of kvleaf, used once, with the types that its stubs promise.

`mypy --strict` checks the types, running it that they are true, and a test that no name is left
out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kvleaf
import kvleaf.testing
import numpy as np
from kvleaf import AccessPattern, KVCacheGroupId, KVLayerSpec, RowDelta


def ints(*values: int) -> None:
    assert all(isinstance(value, int) and not isinstance(value, bool) for value in values), values


def texts(*values: str) -> None:
    assert all(isinstance(value, str) for value in values), values


def flags(*values: bool) -> None:
    assert all(isinstance(value, bool) for value in values), values


def tensors(*values: kvleaf.Tensor) -> None:
    assert all(isinstance(value, kvleaf.Tensor) for value in values), values


# ---- leaves ----------------------------------------------------------------------------------

patterns: list[AccessPattern] = [
    AccessPattern.full(),
    AccessPattern.window(64, sinks=4),
    AccessPattern.chunk(32),
    AccessPattern.point(),
    AccessPattern.encoder(),
    AccessPattern.none(),
    AccessPattern.custom(head=1, tail_begin=lambda n: n // 2, ahead=0),
]
for pattern in patterns:
    ints(pattern.head, pattern.ahead, pattern.tail_begin(9), *pattern.reach(40, 16))
    ints(pattern.most_slots(16, 8, step_tokens=4))

groups: list[KVCacheGroupId] = [
    KVCacheGroupId.full(),
    KVCacheGroupId.sliding_window(64, sinks=0),
    KVCacheGroupId.chunked(32),
    KVCacheGroupId.state(),
    KVCacheGroupId.encoder(),
    KVCacheGroupId.scratch(),
    KVCacheGroupId("mine", patterns[-1], "append"),
]
for group in groups:
    texts(group.name, group.writing)
    flags(group.pattern == patterns[0])


class Mine(kvleaf.KVLeafRegion):
    """A kind of somebody else's."""

    def blocks_to_reserve(
        self,
        num_blocks: int,
        *,
        enable_prefix_caching: bool,
        step_tokens: int = 1,
        tokens_per_page: int | None = None,
    ) -> int:
        return num_blocks

    def staged_input_shapes(
        self, batch_size: int, num_blocks: int
    ) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        return super().staged_input_shapes(batch_size, num_blocks)

    def write_staged_inputs(
        self, plans: Sequence[Sequence[int]], into: Mapping[str, np.ndarray[Any, Any]]
    ) -> None:
        super().write_staged_inputs(plans, into)

    def write_staged_delta(
        self, rows: Sequence[RowDelta], into: Mapping[str, np.ndarray[Any, Any]]
    ) -> None:
        for row in rows:
            flags(row.new_owner, row.padding)
            ints(row.first_changed_slot, row.computed, row.new_tokens, *row.blocks)
            ints(row.read_block, row.write_block, *row.boundary_blocks)
        super().write_staged_delta(rows, into)

    def bound_row_span(self, block: int) -> dict[str, range]:
        return {}

    def bound_row_copies(self, src: int, dst: int) -> dict[str, tuple[range, range]]:
        return {}

    def bind(self, page_stride: int) -> None:
        ints(page_stride)


mine = Mine("mine", KVCacheGroupId.full(), 1024, stride_alignment=1, tokens_per_page=16)
full = kvleaf.FullAttentionLeaf(
    "full", layers=1, kv_heads=1, head_dim=8, dtype=np.float32, tokens_per_page=16
)
window = kvleaf.SlidingWindowLeaf(
    "window", window=64, layers=1, kv_heads=1, head_dim=8, dtype="float16", tokens_per_page=16
)
quantised = kvleaf.ChunkedAttentionLeaf(
    "chunk", chunk=32, layers=1, kv_heads=1, head_dim=8, dtype="float8_e4m3", tokens_per_page=16
)
scales = kvleaf.ScalesLeaf(quantised, granularity=8, dtype="float32")
slab = kvleaf.Slab("s", (2, 4), "float32")
state = kvleaf.RecurrentStateLeaf("state", layers=1, slabs=[slab], tokens_per_page=16)
latent = kvleaf.LatentAttentionLeaf(
    "latent", layers=1, width=8, dtype="bfloat16", tokens_per_page=16
)
cross = kvleaf.CrossAttentionLeaf(
    "cross", layers=1, kv_heads=1, head_dim=8, dtype="float32", tokens_per_page=16
)
scratch = kvleaf.ScratchLeaf("scratch", bytes_per_page=64)
leaves: list[kvleaf.KVLeafRegion] = [mine, full, window, quantised, scales, state, latent, scratch]

for leaf in [*leaves, cross]:
    texts(leaf.leaf_id, leaf.group_id.name, leaf.state_kernel)
    ints(leaf.bytes_per_page, leaf.layers, leaf.rollback, leaf.slots_per_page(16))
    ints(leaf.stride_alignment or 0, leaf.tokens_per_page or 0)
    ints(leaf.blocks_to_reserve(4, enable_prefix_caching=True, tokens_per_page=16))
    flags(leaf.cacheable, leaf.emits_in_chunk, leaf.stages_live_span)
    texts(*leaf.staged_input_shapes(2, 4), *leaf.bound_row_span(1), *leaf.bound_row_copies(1, 2))
attention: list[kvleaf.AttentionLeaf] = [full, window, quantised, scales, latent, cross]
for leaf in attention:
    ints(leaf.kv_heads, leaf.head_dim, leaf.value_head_dim)
    texts(leaf.dtype, leaf.table)
ints(window.window, window.sinks, slab.bytes, *slab.shape, len(state.slabs))
flags(window.compact, state.in_chunk)
texts(slab.name, slab.dtype, state.table)
RowDelta(new_owner=True, blocks=[1, 2], new_tokens=20)
notes: list[str] = kvleaf.testing.check_leaf(
    lambda: kvleaf.ScratchLeaf("scratch", bytes_per_page=64), histories=1
)
texts(*notes)

# ---- geometry, arena, pool -------------------------------------------------------------------

page = kvleaf.PageSpec("a", 96, 16, weight=1.0, floor=0, ceiling=None, one_per_request=False)
texts(page.name)
ints(page.bytes_per_page, page.stride_alignment or 0, page.floor, page.ceiling or 0)
flags(page.one_per_request)
by_hand = kvleaf.Geometry.by_hand([page], huge_bytes=192, huge_blocks=4, ratios=[2])
geometry = kvleaf.plan_geometry(1 << 16, [page, kvleaf.PageSpec("b", 64, 1)])
for tiling in (by_hand, geometry, geometry.resized(3)):
    ints(tiling.budget_bytes, tiling.arena_bytes, tiling.null_bytes, tiling.huge_bytes)
    ints(tiling.huge_blocks, *tiling.byte_range("a", 1), tiling.huge_block_of("a", 1))
    cost: float = tiling.cost + page.weight
    view: kvleaf.LeafGeometry
    for view in tiling.leaves:
        texts(view.name)
        ints(view.bytes_per_page, view.page_stride, view.ratio, view.base_offset, view.blocks)
        ints(view.floor, view.ceiling or 0, view.page_class)

arena = kvleaf.Arena.host(geometry)
arena = kvleaf.Arena.over(arena.geometry, arena.bytes)
tensors(arena.bytes, arena.page("a", 1), arena.view("a", "float16", (6, 8), offset=0))
texts(arena.device, repr(arena))
ints(*arena.__dlpack_device__())
ranges = kvleaf.Arena.host(geometry)
ints(ranges.unmap([(0, 64)]), ranges.map([(0, 64)]))
for make_arena in (kvleaf.Arena.pinned, kvleaf.Arena.cuda):
    try:
        make_arena(geometry)
    except kvleaf.DeviceError as error:
        texts(str(error))
kvleaf.copy_pages(arena, geometry, [("a", 0, 1)])
kvleaf.zero_pages(arena, geometry, [("a", 1)])

pool = kvleaf.BlockPool(geometry)
evicted: list[tuple[str, int, bytes]] = []
pool.on_evict(lambda leaf, block, key: evicted.append((leaf, block, key)))
block = pool.allocate("a", hint=None, fate="request")
many = pool.allocate_many("a", 2)
both = pool.allocate_all({"a": 1, "b": 2}, fate={"a": "cache"})
flags(pool.can_allocate({"a": 1}), pool.geometry == geometry)
assert block is not None and many is not None and both is not None
ints(block, *many, *both["b"], pool.references("a", block), pool.metadata_bytes)
pool.commit("a", block, bytes(16), value=3)
pool.revalue("a", block, 4)
flags(pool.committed("a", block))
found: int | None = pool.find("a", bytes(16))
pool.commit_many("a", many, [b"%016d" % i for i in many])
pool.touch("a", block)
pool.touch_many("a", many)
for _ in range(2):
    pool.free("a", block)
    pool.free_many("a", many)
pool.uncommit("a", block)
resized: list[tuple[int, int]] = pool.resize(geometry.huge_blocks)
counted: kvleaf.PoolStats = pool.stats()
ints(counted.huge_blocks, counted.empty, counted.claimed, counted.idle, counted.retyped)
held: kvleaf.LeafStats
for held in counted.leaves.values():
    ints(held.live, held.cached, held.clean, held.padding_bytes, held.evicted)
pool.audit()

halves = kvleaf.BlockPool(by_hand)  # two blocks to a huge block
three = halves.allocate_many("a", 3)
assert three is not None
halves.free("a", three[0])
moves: list[tuple[str, int, int]] = halves.plan_compaction("a", 1 << 12)
for moved, src, dst in moves:
    halves.move(moved, src, dst)
assert len(moves) == 1

# ---- requests and planner --------------------------------------------------------------------

manager = kvleaf.BlockManager(leaves, 1 << 22, max_len=512, retention="tail", events=True)
planner = kvleaf.StepPlanner(manager, max_batch=2, max_step_tokens=64)
ints(manager.page_tokens, manager.max_len, manager.max_step_tokens, manager.max_steps_in_flight)
ints(manager.longest_request(), manager.tokens_per_page("full"), len(manager.leaves))
ints(manager.geometry.arena_bytes, manager.pool.metadata_bytes)
ints(planner.max_batch, planner.max_step_tokens)
flags(planner.manager is manager)
probed: kvleaf.Admission = manager.probe(np.arange(40))
admission = manager.admit(("a", 1), np.arange(40), media=[(0, 4, b"x")], priority=1)
ints(admission.hit_tokens, probed.hit_tokens, admission.next_stop or 0, *admission.lost.values())
texts(str(admission.reason))
flags(admission.encoder_cached)
plan: kvleaf.StepPlan = planner.plan([(("a", 1), 32)], pad_to=2)
ints(plan.step, plan.batch, plan.num_tokens)
rows: list[object] = list(plan.rows)
width: int = plan.arrays["full"]["block_table"].shape[1]
first: int = int(plan.slot_mapping["full"][0]) + int(plan.seq_lens[0]) + int(plan.cu_seqlens_q[1])
refused: dict[object, kvleaf.PoolExhausted] = plan.refused
copies: list[tuple[str, int, int]] = plan.copies
fills: list[tuple[str, int]] = plan.zero_fills
dirty: list[tuple[int, int]] = plan.dirty["full"]["block_table"]
changes = plan.changes["full"]["block_table"]
kvleaf.scatter_table(np.zeros((2, width), np.int32), *changes)
planner.settle(plan.step, kept={("a", 1): 32})
planner.abandon(planner.plan([(("a", 1), 8)]).step)
step: kvleaf.Step = manager.begin_step([(("a", 1), 8)])
ints(step.id, len(step.served), len(step.refused), len(step.copies), len(step.zero_fills))
manager.settle(step.id)
lengths: dict[object, int] = manager.abandon(manager.begin_step([]).id)
manager.append(("a", 1), [7, 8])
ints(manager.length(("a", 1)), manager.computed(("a", 1)), manager.planned(("a", 1)))
ints(*manager.blocks(("a", 1), "full"), manager.live_block(("a", 1), "state") or 0)
stop: int | None = manager.next_stop(("a", 1))
manager.fork(("a", 1), "b")
manager.settle(manager.begin_step([("b", 1)]).id)
manager.rewind("b", manager.computed("b"))
manager.preempt("b")
manager.release(("a", 1), keep=True)
event: kvleaf.Event
for event in manager.take_events():
    texts(event.kind, event.group, event.leaf)
    ints(event.tokens)
    keys: tuple[bytes, bytes | None] = event.key, event.parent_key
numbers: kvleaf.ManagerStats = manager.stats()
ints(numbers.requests, numbers.admitted, numbers.resumed, numbers.refused, numbers.prompt_tokens)
ints(numbers.hit_tokens, numbers.step_refusals, numbers.preemptions, numbers.committed_pages)
ints(numbers.segments, numbers.twins, numbers.checkpoints, numbers.checkpoints_skipped)
ints(numbers.quarantined, numbers.steps_in_flight, numbers.metadata_bytes, numbers.pool.empty)
lost: kvleaf.GroupStats
for name, lost in numbers.groups.items():
    texts(name, lost.group)
    ints(lost.lost_tokens)
manager.reset_cache()
manager.audit()

encoding = kvleaf.BlockManager([full, cross], 1 << 20, max_len=512)
encoding.admit("c", [1, 2, 3], encoder=(b"picture", 20))
encoding.encoder_filled("c")

# ---- kernels ---------------------------------------------------------------------------------

memory = kvleaf.Arena.host(manager.geometry)
pages = kvleaf.KVPages.of(full, manager.geometry, memory)
bare = kvleaf.KVPages(
    np.zeros(4 * 1024, np.uint8), layers=1, slots=16, kv_heads=1, key_dim=8, dtype="float32"
)
for some in (pages, bare):
    ints(some.layers, some.slots, some.kv_heads, some.key_dim, some.value_dim)
    ints(some.page_stride, some.blocks)
    texts(some.dtype)
entries = np.ones((3, 1, 8), np.float32)
slots = np.arange(16, 19)
kvleaf.append_kv(entries, entries, slots, bare)
back, other = kvleaf.gather_kv(bare, slots)
out = kvleaf.paged_attention(
    entries, bare, np.array([[1]], np.int32), np.array([3], np.int32), np.array([0, 3], np.int32)
)
assert (back == entries).all() and np.allclose(out, 1)

# ---- models ----------------------------------------------------------------------------------

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "max_position_embeddings": 128,
}
model: kvleaf.ModelLeaves = kvleaf.model_from_config(CONFIG, tokens_per_page=16)
ints(model.num_layers, model.max_len or 0, model.encoder_tokens or 0, *model.layers_of["full"])
texts(model.model_type, model.dtype, *(leaf.leaf_id for leaf in model.leaves))
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "config.json"
    path.write_text(str(CONFIG).replace("'", '"'), encoding="utf-8")
    ints(len(kvleaf.leaves_from_config(path, kv_dtype="fp8")))

# ---- the cache of one model ------------------------------------------------------------------

config = kvleaf.KVCacheConfig(5, 2, 64, max_encoder_len=8, dtype="float32")
ints(config.num_layers, config.max_seqs, config.max_len, config.page_tokens)
ints(config.budget_bytes or 0, config.max_encoder_len, config.max_step_tokens)
texts(config.dtype, config.device, config.mode.name)
flags(config.enable_prefix_caching, config.mode == kvleaf.KVCacheMode.paged)
specs: list[KVLayerSpec] = [
    KVLayerSpec.attention(1, 8, window=None) + KVLayerSpec.cross_attention(1, 8),
    KVLayerSpec.latent(16),
    KVLayerSpec.shared(0),
    KVLayerSpec.state(conv=[(4, 3)], heads=2, k_dim=4, v_dim=4),
    KVLayerSpec.none(),
]
ints(kvleaf.KVCache.memory_bytes(config, specs))
cache = kvleaf.KVCache.make(config, specs)
flags(cache.mode() is not kvleaf.KVCacheMode.slotted, cache.config.dtype == "float32")
ints(len(cache.layer_specs), cache.longest_request())
hit: int = cache.admit(0, np.arange(20, dtype=np.int32), encoder_digest="d", encoder_len=4)
cache.fill(0, 0, np.ones((4, 1, 8), np.float32), np.ones((4, 1, 8), np.float32))
flags(cache.encoder_filled(0))
wanted: int | None = cache.next_stop(0)
tensors(cache.reserve([0], [20]))
indices: kvleaf.StepIndices = cache.prepare_step([0, 20], [0], [0])
ints(indices.batch, indices.num_tokens, indices.max_seqlen_q, indices.max_seqlen_k)
tensors(indices.slot_ids, indices.cu_seqlens_q, indices.cu_seqlens_k, indices.past_lens)
tensors(indices.seq_lens, indices.encoder_lens, indices.positions)
for maybe in (
    indices.slot_mapping(0),
    indices.block_table(0, part="cross"),
    cache.keys(0),
    cache.values(0, part="cross"),
    cache.keys_values(0),
    cache.conv_state(3, 0),
    cache.recurrent_state(3),
    cache.paged_block_table(0),
):
    assert maybe is not None
    tensors(maybe, maybe.permuted(*reversed(range(maybe.ndim))))
    ints(*maybe.shape, *maybe.strides, maybe.ndim, maybe.size, maybe.data_ptr, len(maybe))
    texts(maybe.dtype, maybe.device)
    flags(maybe.contiguous, maybe.stale)
    array: np.ndarray[Any, Any] = maybe.numpy()
    tensors(kvleaf.Tensor.from_dlpack(maybe))
csr = indices.csr(0)
assert csr is not None
tensors(*csr, cache.seq_lens(), cache.encoder_lens())
cache.abandon_step()
cache.prepare_step([0, 20], [0], [0])
cache.update_position(0, 20)
cache.retire(0, np.arange(20, dtype=np.int32))
cache.evict_batch(1)
cache.audit()
cache.reset()
kvleaf.KVCache.from_config(CONFIG, max_seqs=1)

# ---- errors ----------------------------------------------------------------------------------

errors: list[type[kvleaf.KVError]] = [
    kvleaf.InvalidArgument,
    kvleaf.GeometryError,
    kvleaf.PoolExhausted,
    kvleaf.BlockError,
    kvleaf.InvariantError,
    kvleaf.RequestError,
    kvleaf.StepError,
    kvleaf.PlanShapeError,
    kvleaf.DeviceError,
    kvleaf.ConfigError,
]
try:
    kvleaf.plan_geometry(1, [page])
except kvleaf.GeometryError as error:
    ints(error.least_budget)
    texts(error.blamed_leaf)
