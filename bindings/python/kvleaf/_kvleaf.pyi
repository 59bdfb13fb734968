"""kvleaf in C++. Import `kvleaf`."""

from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Mapping,
    Sequence
)
import enum
import os
from typing import Any

import numpy
import numpy.typing


def _set_leak_warnings(on: bool) -> None: ...

def _tell_signatures(of_call: object, of_bound_call: object) -> None: ...

class KVError(Exception):
    """
    Base of all errors of this library. Whoever raises one has changed nothing.
    """

class InvalidArgument(KVError, ValueError):
    """A value that no call with these arguments could accept."""

class GeometryError(KVError, ValueError):
    """
    Pages that cannot be tiled in the budget. least_budget: bytes that would start, 0 if none would; blamed_leaf: the leaf that is in the way.
    """

    least_budget: int = 0

    blamed_leaf: str = ''

class PoolExhausted(KVError, MemoryError):
    """
    Memory that is not there now. Wait, preempt or refuse; nothing has changed.
    """

class BlockError(KVError, ValueError):
    """
    A block that the call may not touch: null, foreign, free already, of another leaf.
    """

class InvariantError(KVError, RuntimeError):
    """A broken equation: a bug. The object refuses all further work."""

class RequestError(KVError, ValueError):
    """
    A request that is unknown, known already, in the wrong state, or a length that it cannot have.
    """

class StepError(KVError, ValueError):
    """
    A step that was not begun, was settled already, or is not the oldest one in flight.
    """

class PlanShapeError(KVError, ValueError):
    """A batch or array whose shape does not fit what it is for."""

class DeviceError(KVError, RuntimeError):
    """A CUDA device that is not there, or what its runtime reports."""

class ConfigError(KVError, ValueError):
    """
    A model configuration that cannot be read: names the key and what is accepted.
    """

class AccessPattern:
    """
    Which tokens' entries must still be held to compute token n, with n tokens computed:
    [0, head) and [tail_begin(n), n). A value.
    """

    @staticmethod
    def full() -> AccessPattern:
        """All earlier tokens."""

    @staticmethod
    def window(tokens: int, sinks: int = 0) -> AccessPattern:
        """The last `tokens` tokens, the query counted, and the first `sinks`."""

    @staticmethod
    def chunk(tokens: int) -> AccessPattern:
        """From the last multiple of `tokens`."""

    @staticmethod
    def point() -> AccessPattern:
        """A state: what ends at n, and valid only there."""

    @staticmethod
    def encoder() -> AccessPattern:
        """All of the encoder's tokens, whatever n is."""

    @staticmethod
    def none() -> AccessPattern:
        """No tokens: scratch."""

    @staticmethod
    def custom(head: int = 0, tail_begin: Callable[[int], int] | None = None, ahead: int = 0) -> AccessPattern:
        """
        tail_begin(n) gives the first token of [tail_begin, n) that computing token n still needs; it
        never decreases. ahead=1: entry i is computed from token i + 1 as well. The function is called
        once for each n when a BlockManager is made, and is kept as long as the pattern is.
        """

    def reach(self, n: int, tokens_per_page: int, encoder_tokens: int = 0) -> list[int]:
        """
        Sorted slots that are still needed to compute token n, the partly filled one included.
        """

    def most_slots(self, tokens_per_page: int, num_slots: int, step_tokens: int = 1) -> int:
        """
        The most slots held at once while num_slots slots are filled, at most step_tokens tokens planned
        and not yet settled.
        """

    def tail_begin(self, n: int) -> int:
        """First token of the tail with n tokens computed."""

    @property
    def head(self) -> int:
        """Leading tokens that are always needed."""

    @property
    def ahead(self) -> int:
        """Tokens after its own that an entry is computed from."""

    def __eq__(self, arg: object, /) -> bool: ...

    def __ne__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

    def __reduce_ex__(self, protocol: object) -> str: ...

class KVCacheGroupId:
    """
    Leaves with the same access pattern and the same way of writing: reused, advanced and evicted
    together. writing: 'append', 'in_place', 'write_once' or 'private'.
    """

    def __init__(self, name: str, pattern: AccessPattern, writing: str) -> None: ...

    @staticmethod
    def full() -> KVCacheGroupId: ...

    @staticmethod
    def sliding_window(window: int, sinks: int = 0) -> KVCacheGroupId: ...

    @staticmethod
    def chunked(chunk: int) -> KVCacheGroupId: ...

    @staticmethod
    def state(name: str = 'state') -> KVCacheGroupId: ...

    @staticmethod
    def encoder(name: str = 'encoder') -> KVCacheGroupId: ...

    @staticmethod
    def scratch(name: str = 'scratch') -> KVCacheGroupId: ...

    @property
    def name(self) -> str: ...

    @property
    def pattern(self) -> AccessPattern: ...

    @property
    def writing(self) -> str: ...

    def __eq__(self, arg: object, /) -> bool: ...

    def __ne__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

    def __reduce_ex__(self, protocol: object) -> str: ...

class RowDelta:
    """
    What became of one batch row since its leaf's arrays were last written.
    """

    def __init__(self, *, new_owner: bool = False, padding: bool = False, first_changed_slot: int = 0, blocks: Sequence[int] = (), computed: int = 0, new_tokens: int = 0, read_block: int = 0, write_block: int = 0, boundary_blocks: Sequence[int] = ()) -> None: ...

    @property
    def new_owner(self) -> bool:
        """Another request than before, or none was there: write the whole row."""

    @property
    def padding(self) -> bool:
        """A dummy row: null everywhere, length 1, writes nowhere."""

    @property
    def first_changed_slot(self) -> int:
        """Slots before it hold what they held."""

    @property
    def blocks(self) -> list[int]:
        """
        Blocks of the slots from first_changed_slot to the end of the row; 0 where null.
        """

    @property
    def computed(self) -> int:
        """Tokens computed before this step."""

    @property
    def new_tokens(self) -> int:
        """Tokens this step computes."""

    @property
    def read_block(self) -> int:
        """States: the block this step reads its state from."""

    @property
    def write_block(self) -> int:
        """States: the block it writes to; equal when in place."""

    @property
    def boundary_blocks(self) -> list[int]:
        """
        States emitted inside a step: the blocks that receive the state at each page boundary that
        the step reaches before its end; 0 where none is wanted.
        """

class KVLeafRegion:
    """
    One addressable region of the cache pool, and the one class to derive from for a kind of memory that
    is not here. Four declarations make a leaf: its memory (bytes_per_page, stride_alignment,
    tokens_per_page), its reach and its way of writing (both of group_id), and its inputs (the methods
    below, all of which a subclass may override). leaf_id is unique in a cache.
    stride_alignment: bytes that a padded page stride must be a multiple of; None: packed pages.
    tokens_per_page: None: the page_tokens of its cache.
    """

    def __init__(self, leaf_id: str, group_id: KVCacheGroupId, bytes_per_page: int, *, stride_alignment: int | None = None, tokens_per_page: int | None = None) -> None: ...

    @property
    def leaf_id(self) -> str: ...

    @property
    def group_id(self) -> KVCacheGroupId: ...

    @property
    def bytes_per_page(self) -> int:
        """Bytes of data in one page."""

    @property
    def stride_alignment(self) -> int | None:
        """Bytes that a padded page stride is a multiple of; None: packed pages."""

    @property
    def tokens_per_page(self) -> int | None:
        """Tokens that one page covers; None: the page_tokens of its cache."""

    @property
    def cacheable(self) -> bool:
        """
        Whether blocks are addressed by content. False makes the leaf invisible to all that is keyed on a
        hash; it still draws from the pool and counts against admission.
        """

    @property
    def layers(self) -> int:
        """
        Layers of the model that this leaf serves, for reports; 0 when it does not say.
        """

    @property
    def rollback(self) -> int:
        """
        States only: live states that one request keeps beside the first, for draft tokens.
        """

    @property
    def state_kernel(self) -> str:
        """
        States only: 'in_place' (one block is read and written) or 'in_out' (a read row and a write row).
        """

    @property
    def emits_in_chunk(self) -> bool:
        """
        States only: whether the kernel emits its state at page boundaries inside a step.
        """

    @property
    def stages_live_span(self) -> bool:
        """
        Whether num_blocks counts the slots that hold a block, not those from slot 0: a compact table.
        """

    def slots_per_page(self, tokens_per_page: int | None = None) -> int:
        """
        Entries that a page stores: fewer than its tokens for compressed attention.
        """

    def blocks_to_reserve(self, num_blocks: int, *, enable_prefix_caching: bool, step_tokens: int = 1, tokens_per_page: int | None = None) -> int:
        """
        Most blocks that one request holds while it fills num_blocks slots, at most step_tokens tokens
        planned and not yet settled; never one too few. Without prefix caching it is what a request cannot
        do without; with it, what caching holds at best effort is added.
        tokens_per_page: None: the leaf's own, else that of the cache that asked last, else 16.
        """

    def staged_input_shapes(self, batch_size: int, num_blocks: int) -> dict[str, tuple[tuple[int, ...], numpy.dtype[Any]]]:
        """
        Shape and dtype of each input that a forward stages. Called once at the widest bounds and per
        forward with those of the batch; shapes do not shrink as either grows.
        num_blocks: slots that the deepest row of the batch reaches.
        """

    def write_staged_inputs(self, plans: Sequence[Sequence[int]], into: Mapping[str, numpy.typing.NDArray[Any]]) -> None:
        """
        Writes every entry of the arrays for one forward. plans: per batch row, the blocks in slot order;
        0, the null block, where nothing is reached. Raises PlanShapeError for an array that is missing or
        too small.
        """

    def write_staged_delta(self, rows: Sequence[RowDelta], into: Mapping[str, numpy.typing.NDArray[Any]]) -> None:
        """
        Writes what changed since the arrays were last written by this leaf. A subclass that overrides
        write_staged_inputs and not this one is asked for a full rewrite each time.
        """

    def bound_row_span(self, block: int) -> dict[str, range]:
        """
        The rows that one block occupies, per bound input; empty for a leaf reached through a table.
        """

    def bound_row_copies(self, src: int, dst: int) -> dict[str, tuple[range, range]]:
        """The rows to copy between, per bound input; empty for the same leaves."""

    def bind(self, page_stride: int) -> None:
        """Told the page stride in bytes once a geometry is chosen."""

    def __repr__(self) -> str: ...

    def __reduce_ex__(self, protocol: object) -> str: ...

class AttentionLeaf(KVLeafRegion):
    """
    What the attention leaves share: a page holds, per layer, its keys [slots, kv_heads, head_dim] and then
    its values [slots, kv_heads, value_head_dim]. The stride alignment is one token's row. Derive from it
    for a new kind of text attention. table: 'dense' (block_table int32 [batch, columns]) or 'csr' (indptr,
    indices, last_page_len).
    """

    def __init__(self, leaf_id: str, group_id: KVCacheGroupId, *, layers: int, kv_heads: int, head_dim: int, value_head_dim: int | None = None, dtype: object, tokens_per_page: int, slots_per_page: int | None = None, table: str = 'dense') -> None: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def value_head_dim(self) -> int: ...

    @property
    def dtype(self) -> str:
        """Name of the element type, 'bfloat16'."""

    @property
    def table(self) -> str: ...

class FullAttentionLeaf(AttentionLeaf):
    """Attends to all earlier tokens. Holds one block per page of the text."""

    def __init__(self, leaf_id: str, *, layers: int, kv_heads: int, head_dim: int, value_head_dim: int | None = None, dtype: object, tokens_per_page: int, slots_per_page: int | None = None, table: str = 'dense') -> None: ...

class LatentAttentionLeaf(AttentionLeaf):
    """
    One entry of `width` elements per token and layer, shared by all heads (MLA); also indexer keys. Full
    reach.
    """

    def __init__(self, leaf_id: str, *, layers: int, width: int, dtype: object, tokens_per_page: int, slots_per_page: int | None = None, table: str = 'dense') -> None: ...

class SlidingWindowLeaf(AttentionLeaf):
    """
    Attends to the last `window` tokens, the query counted, and to the first `sinks`. Blocks come back from
    the front while the request runs. compact: stage only the sinks and the live span, with first_slot
    int32 [batch].
    """

    def __init__(self, leaf_id: str, *, window: int, sinks: int = 0, compact: bool = False, layers: int, kv_heads: int, head_dim: int, value_head_dim: int | None = None, dtype: object, tokens_per_page: int, slots_per_page: int | None = None, table: str = 'dense') -> None: ...

    @property
    def window(self) -> int: ...

    @property
    def sinks(self) -> int: ...

    @property
    def compact(self) -> bool: ...

class ChunkedAttentionLeaf(AttentionLeaf):
    """Attends to its own chunk: from the last multiple of `chunk` tokens."""

    def __init__(self, leaf_id: str, *, chunk: int, layers: int, kv_heads: int, head_dim: int, value_head_dim: int | None = None, dtype: object, tokens_per_page: int, slots_per_page: int | None = None, table: str = 'dense') -> None: ...

class CrossAttentionLeaf(AttentionLeaf):
    """
    Keys and values of an encoder's output: written whole before the first decode, identified by the encoder
    input's digest and length, shared by all requests with the same input, and whole or absent.
    """

    def __init__(self, leaf_id: str, *, layers: int, kv_heads: int, head_dim: int, value_head_dim: int | None = None, dtype: object, tokens_per_page: int, table: str = 'dense', group: str = 'encoder') -> None: ...

class ScalesLeaf(AttentionLeaf):
    """
    The scales of a quantised leaf, one for `granularity` values, in pages of their own but of the same
    group: a slot whose values or scales are missing is a hit for neither. Its id is that of the values'
    leaf with '.scales'.
    """

    def __init__(self, values_leaf: AttentionLeaf, *, granularity: int, dtype: object) -> None: ...

class Slab:
    """One array of a state: its name, its shape in one layer, its dtype."""

    def __init__(self, name: str, shape: Sequence[int], dtype: object) -> None: ...

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    @property
    def bytes(self) -> int:
        """Bytes of one layer."""

    def __repr__(self) -> str: ...

    def __reduce_ex__(self, protocol: object) -> str: ...

class RecurrentStateLeaf(KVLeafRegion):
    """
    Layers whose memory of the past is one state of fixed size, overwritten by every step. A page holds the
    slabs one after another, each with all its layers. kernel: 'in_place' or 'in_out'; rollback: live states
    kept for draft tokens; table: 'blocks' (int32 [batch]) or 'rows' (int32 [layers, batch], one slab only);
    tokens_per_page: the distance of boundaries, None: the page_tokens of its cache.
    """

    def __init__(self, leaf_id: str, *, layers: int, slabs: Sequence[Slab], kernel: str = 'in_place', rollback: int = 0, in_chunk: bool = False, table: str = 'blocks', tokens_per_page: int | None = None, group: str = 'state') -> None: ...

    @property
    def slabs(self) -> list[Slab]: ...

    @property
    def in_chunk(self) -> bool: ...

    @property
    def table(self) -> str: ...

class ScratchLeaf(KVLeafRegion):
    """
    Memory of one request that no other ever reads: one block from the first step to release. Never cached.
    """

    def __init__(self, leaf_id: str, *, bytes_per_page: int, stride_alignment: int | None = 1, group: str = 'scratch') -> None: ...

class PageSpec:
    """
    What the pool must know of a leaf; a KVLeafRegion serves as one. stride_alignment: None: packed, the
    stride is bytes_per_page; 1: any padding. weight: expected share of data bytes, divided by the sum.
    floor, ceiling: live blocks that are always kept obtainable, and never exceeded.
    """

    def __init__(self, name: str, bytes_per_page: int, stride_alignment: int | None = None, weight: float = 1.0, floor: int = 0, ceiling: int | None = None, *, one_per_request: bool = False) -> None: ...

    @property
    def name(self) -> str: ...

    @property
    def bytes_per_page(self) -> int: ...

    @property
    def stride_alignment(self) -> int | None: ...

    @property
    def weight(self) -> float: ...

    @property
    def floor(self) -> int: ...

    @property
    def ceiling(self) -> int | None: ...

    @property
    def one_per_request(self) -> bool: ...

    def __eq__(self, arg: object, /) -> bool: ...

    def __ne__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

    def __reduce_ex__(self, protocol: object) -> str: ...

class LeafGeometry:
    """
    One leaf's view of the arena: block b lies at
    base_offset + b * page_stride; real blocks are 1 to blocks.
    """

    @property
    def name(self) -> str: ...

    @property
    def bytes_per_page(self) -> int:
        """Bytes of data."""

    @property
    def page_stride(self) -> int:
        """Bytes from a block to the next."""

    @property
    def ratio(self) -> int:
        """Blocks in one huge block."""

    @property
    def base_offset(self) -> int:
        """Byte of the arena where block 0 begins."""

    @property
    def blocks(self) -> int: ...

    @property
    def floor(self) -> int: ...

    @property
    def ceiling(self) -> int | None: ...

    @property
    def page_class(self) -> int:
        """Leaves of one number share huge blocks."""

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class Geometry:
    """
    How one arena of bytes is tiled: a null region, huge block 0, huge block 1 and so on. A huge block
    serves one page class at a time and holds `ratio` of its blocks. Immutable, a value.
    """

    @staticmethod
    def by_hand(pages: Iterable[PageSpec | KVLeafRegion], *, huge_bytes: int, huge_blocks: int, ratios: Sequence[int], alignment: int = 1) -> Geometry:
        """
        A geometry of your choice; ratios: blocks per huge block, one per page. Raises GeometryError where a
        ratio does not divide huge_bytes into strides that hold the page and meet its alignment.
        """

    @property
    def budget_bytes(self) -> int: ...

    @property
    def arena_bytes(self) -> int:
        """Null region and huge blocks."""

    @property
    def null_bytes(self) -> int:
        """The null region: readable zeros."""

    @property
    def huge_bytes(self) -> int: ...

    @property
    def huge_blocks(self) -> int: ...

    @property
    def cost(self) -> float:
        """
        Share of the budget that padding, remainders and half-used huge
        blocks take: what plan_geometry minimises.
        """

    @property
    def leaves(self) -> list[LeafGeometry]: ...

    def byte_range(self, leaf: str, block: int) -> tuple[int, int]:
        """
        (begin, end) of one block's data in the arena, end = begin + bytes_per_page.
        """

    def huge_block_of(self, leaf: str, block: int) -> int:
        """Index of the huge block that a block lies in."""

    def resized(self, huge_blocks: int) -> Geometry:
        """The same tiling with another number of huge blocks."""

    def __eq__(self, arg: object, /) -> bool: ...

    def __ne__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

    def __reduce_ex__(self, protocol: object) -> str: ...

def plan_geometry(budget_bytes: int, pages: Iterable[PageSpec | KVLeafRegion], *, max_huge_bytes: int | None = None, alignment: int = 256) -> Geometry:
    """
    The cheapest geometry for these pages in this budget: the exact minimum of its cost over every huge block
    up to max_huge_bytes (None: 128 MiB, the largest page, or the least that packed leaves force, whichever is
    most). alignment: of the null region, in bytes. Raises GeometryError, with the least budget and the leaf
    to blame, when none fits.
    """

class LeafStats:
    """What a pool holds of one leaf."""

    @property
    def live(self) -> int:
        """Blocks with a reference."""

    @property
    def cached(self) -> int:
        """Blocks without one that can still be found."""

    @property
    def clean(self) -> int:
        """
        Blocks of its page class that hold nothing: the same figure for each
        leaf of the class.
        """

    @property
    def padding_bytes(self) -> int:
        """Bytes between data and stride, live and cached blocks."""

    @property
    def evicted(self) -> int:
        """Blocks, since construction."""

    def __repr__(self) -> str: ...

class PoolStats:
    """What a pool holds: huge blocks, and blocks per leaf."""

    @property
    def huge_blocks(self) -> int:
        """Huge blocks in service: empty + claimed + idle."""

    @property
    def empty(self) -> int:
        """Huge blocks owned by nobody."""

    @property
    def claimed(self) -> int:
        """Huge blocks with a live block."""

    @property
    def idle(self) -> int:
        """Owned huge blocks with cached blocks only."""

    @property
    def retyped(self) -> int:
        """Huge blocks taken from one page class for another, since construction."""

    @property
    def leaves(self) -> dict[str, LeafStats]: ...

    def __repr__(self) -> str: ...

class BlockPool:
    """
    Blocks of every leaf out of one arena of huge blocks. It moves no bytes and knows no tokens. Every block
    of an owned huge block is live (referenced), cached (unreferenced but committed: it can be found, and is
    evicted when memory is short) or clean. Leaves go by name. One thread owns a pool.
    """

    def __init__(self, geometry: Geometry, *, max_huge_blocks: int | None = None) -> None:
        """
        max_huge_blocks: how far resize may grow it; None: not beyond the geometry.
        """

    @property
    def geometry(self) -> Geometry: ...

    def allocate(self, leaf: str, hint: int | None = None, fate: str = 'cache') -> int | None:
        """
        One block, live with one reference; None when the joint rule refuses it. hint: the huge block that this
        request last took from, ignored when useless. fate: 'cache' for what is meant to stay findable,
        'request' for what is gone with its request.
        """

    def allocate_many(self, leaf: str, n: int, hint: int | None = None, fate: str = 'cache') -> list[int] | None:
        """n blocks, or None and nothing taken."""

    def allocate_all(self, demand: dict[str, int], fate: str | dict[str, str] = 'cache') -> dict[str, list[int]] | None:
        """
        Blocks of several leaves: all, or None and nothing changed. fate: one for all, or per leaf.
        """

    def can_allocate(self, demand: dict[str, int]) -> bool:
        """What allocate_all would answer; no side effect."""

    def free(self, leaf: str, block: int) -> None:
        """
        Returns one reference. The last makes the block cached if committed, else clean.
        """

    def free_many(self, leaf: str, blocks: Iterable[int]) -> None:
        """One reference of each."""

    def touch(self, leaf: str, block: int, value: int | None = None) -> None:
        """
        One more reference; makes a cached block live. A clean block cannot be touched.
        """

    def touch_many(self, leaf: str, blocks: Iterable[int], value: int | None = None) -> None:
        """One more reference of each."""

    def references(self, leaf: str, block: int) -> int: ...

    def commit(self, leaf: str, block: int, key: bytes, value: int | None = None) -> None:
        """
        Makes a live block findable under a key of 16 bytes. value: its place in the order of eviction, least
        first; None: the time of the call.
        """

    def commit_many(self, leaf: str, blocks: Iterable[int], keys: Sequence[bytes]) -> None:
        """The same of several, one key each."""

    def revalue(self, leaf: str, block: int, value: int) -> None:
        """Another place in the order of eviction for a committed block."""

    def uncommit(self, leaf: str, block: int) -> None:
        """
        No longer findable: a cached block becomes clean, a live one stays live.
        """

    def committed(self, leaf: str, block: int) -> bool: ...

    def find(self, leaf: str, key: bytes) -> int | None:
        """The block committed under this key, if any; no reference is taken."""

    def on_evict(self, callback: Callable[[str, int, bytes], object] | None) -> None:
        """
        callback(leaf, block, key) is called once per evicted block, after it ceased to be findable. It may
        call uncommit, revalue and what only asks. What it raises reaches the caller of the allocation, which
        then has taken nothing. None: no callback.
        """

    def plan_compaction(self, leaf: str, max_bytes: int) -> list[tuple[str, int, int]]:
        """
        Copies (leaf, src, dst), of at most max_bytes, that would empty a huge block of the leaf's page class;
        changes nothing.
        """

    def move(self, leaf: str, src: int, dst: int) -> None:
        """
        All that is known of src belongs to dst. Call it after the bytes were copied.
        """

    def resize(self, huge_blocks: int) -> list[tuple[int, int]]:
        """
        Another number of huge blocks. Gives byte ranges that may be unmapped (shrinking) or must be mapped
        (growing). Raises PoolExhausted where live blocks are in the way.
        """

    def stats(self) -> PoolStats: ...

    def audit(self) -> None:
        """
        Recounts everything from scratch. Raises InvariantError naming the first broken equation; from then on
        the pool refuses all work.
        """

    @property
    def metadata_bytes(self) -> int:
        """Bytes of the pool's own records."""

    def __reduce_ex__(self, protocol: object) -> str: ...

class Admission:
    """What a manager answers to a prompt."""

    @property
    def hit_tokens(self) -> int:
        """Leading tokens that need not be computed."""

    @property
    def lost(self) -> dict[str, int]:
        """
        What each group cost: tokens by which the hit would be longer if it lacked nothing.
        """

    @property
    def reason(self) -> str:
        """Why nothing hit, or what ended the hit."""

    @property
    def next_stop(self) -> int | None:
        """Where the next chunk should end, in tokens."""

    @property
    def encoder_cached(self) -> bool:
        """The encoder's pages are there already: no encoder run is needed."""

    def __repr__(self) -> str: ...

class Step:
    """A forward that was begun."""

    @property
    def id(self) -> int: ...

    @property
    def served(self) -> list[Any]:
        """Requests, in the order given."""

    @property
    def refused(self) -> dict[Any, PoolExhausted]:
        """Requests that did not fit, and why; these changed nothing."""

    @property
    def copies(self) -> list[tuple[str, int, int]]:
        """(leaf_id, src, dst), to run before the forward, in any order."""

    @property
    def zero_fills(self) -> list[tuple[str, int]]:
        """(leaf_id, block), to run before the forward."""

    def __repr__(self) -> str: ...

class Event:
    """What became findable, or no longer is."""

    @property
    def kind(self) -> str:
        """'stored', 'removed' or 'cleared'."""

    @property
    def group(self) -> str: ...

    @property
    def leaf(self) -> str: ...

    @property
    def key(self) -> bytes:
        """Chained page key, 16 bytes."""

    @property
    def parent_key(self) -> bytes:
        """Key of the page before it; zeros at the root."""

    @property
    def tokens(self) -> int:
        """Tokens covered up to the page's end."""

    def __repr__(self) -> str: ...

class GroupStats:
    """What one group cost."""

    @property
    def group(self) -> str: ...

    @property
    def lost_tokens(self) -> int:
        """By which it shortened joint hits, summed over admissions."""

class ManagerStats:
    """What a manager holds, and what it did since construction."""

    @property
    def pool(self) -> PoolStats: ...

    @property
    def groups(self) -> dict[str, GroupStats]: ...

    @property
    def requests(self) -> int:
        """Live requests."""

    @property
    def admitted(self) -> int:
        """Resumed ones not counted."""

    @property
    def resumed(self) -> int:
        """Admissions of preempted requests."""

    @property
    def refused(self) -> int:
        """Admissions."""

    @property
    def prompt_tokens(self) -> int:
        """Of admitted requests, counted once."""

    @property
    def hit_tokens(self) -> int:
        """Of those, what hits gave."""

    @property
    def step_refusals(self) -> int:
        """Rows refused by begin_step."""

    @property
    def preemptions(self) -> int: ...

    @property
    def committed_pages(self) -> int:
        """Pages of the tree, now findable."""

    @property
    def segments(self) -> int:
        """Nodes of the prefix tree."""

    @property
    def twins(self) -> int:
        """Blocks returned because their page was findable already."""

    @property
    def checkpoints(self) -> int:
        """Published."""

    @property
    def checkpoints_skipped(self) -> int:
        """For want of room."""

    @property
    def quarantined(self) -> int:
        """Blocks waiting for a step to settle, now."""

    @property
    def steps_in_flight(self) -> int: ...

    @property
    def metadata_bytes(self) -> int:
        """Pool, tree and rows."""

class BlockManager:
    """
    Requests, their rows of blocks in every leaf, and what they share. A request id is any hashable.
    Everything is a transaction: what raises or is refused has changed nothing. Steps may overlap; they settle
    in order. One thread owns a manager; it releases the GIL in long calls, and a call from another thread
    meanwhile raises KVError.
    """

    def __init__(self, leaves: Iterable[KVLeafRegion], budget_bytes: int | None, *, page_tokens: int = 16, max_len: int, max_step_tokens: int = 8192, max_steps_in_flight: int = 2, geometry: Geometry | None = None, expected_tokens: int = 2048, enable_prefix_caching: bool = True, retention: str | int = 'tail', eviction: str = 'value', hash: str = 'xxh3_128', seed: int | None = None, events: bool = False) -> None:
        """
        budget_bytes: of the arena; None where a geometry is given. page_tokens: boundaries are multiples of it,
        and so are the pages of all leaves. max_len: tokens of the longest request. max_step_tokens: most tokens
        that one request computes in one step. geometry: of pages named like the leaves; None: planned for
        requests of expected_tokens. retention: 'tail', 'dense', 'spaced' or every how many tokens a boundary is
        kept; eviction: 'value' or 'lru'; hash: 'xxh3_128' (a random seed unless given) or 'sha256', of the keys
        in events; events: record them for take_events.
        """

    @property
    def leaves(self) -> list[KVLeafRegion]: ...

    @property
    def geometry(self) -> Geometry: ...

    @property
    def pool(self) -> BlockPool: ...

    @property
    def page_tokens(self) -> int: ...

    @property
    def max_len(self) -> int: ...

    @property
    def max_step_tokens(self) -> int: ...

    @property
    def max_steps_in_flight(self) -> int: ...

    def longest_request(self) -> int:
        """
        Tokens of the longest request that an empty pool serves, in chunks of max_step_tokens; at most max_len.
        """

    def tokens_per_page(self, leaf_id: str) -> int: ...

    def admit(self, request: Hashable, tokens: Iterable[int] | numpy.typing.NDArray[numpy.integer[Any]], *, salt: bytes | str = b'', adapter: str = '', encoder: tuple[bytes | str | int, int] | tuple[bytes | str | int, int, int] | None = None, media: Sequence[tuple[int, int, bytes | str | int] | tuple[int, int, bytes | str | int, bool]] = (), priority: int = 0, guarantee: int | None = None, addressable: int | None = None, partial: bool = False) -> Admission:
        """
        Finds the longest prefix that every leaf can resume, claims it, and answers whether the rest of the
        prompt would fit; allocates nothing more than the blocks of an encoder that is not cached. tokens: ids
        as a list or an integer array. encoder=(digest, tokens, at=0): identity, length, and the text position
        from which the text depends on it. media=[(offset, length, digest, whole=False)]. An int digest counts
        as its decimal digits. guarantee: tokens that it may grow to, in steps of up to page_tokens, without ever
        being refused memory. addressable: leading tokens that may be matched or committed; None: all. partial:
        a hit may copy the common part of a page. Raises PoolExhausted when it cannot be admitted now.
        """

    def probe(self, tokens: Iterable[int] | numpy.typing.NDArray[numpy.integer[Any]], *, salt: bytes | str = b'', adapter: str = '', encoder: tuple[bytes | str | int, int] | tuple[bytes | str | int, int, int] | None = None, media: Sequence[tuple[int, int, bytes | str | int] | tuple[int, int, bytes | str | int, bool]] = (), priority: int = 0, guarantee: int | None = None, addressable: int | None = None, partial: bool = False) -> Admission:
        """What admit would answer; claims nothing."""

    def append(self, request: Hashable, tokens: Iterable[int] | numpy.typing.NDArray[numpy.integer[Any]]) -> None:
        """
        Ids that became known (sampled); they may come after their step was begun.
        """

    def next_stop(self, request: Hashable) -> int | None:
        """
        Where the next chunk should end, in tokens, so that what a kept boundary needs can be committed.
        """

    def encoder_filled(self, request: Hashable) -> None:
        """
        The encoder's pages of this request are written; planning a decode before is an error.
        """

    def release(self, request: Hashable, keep: bool = True, addressable: int | None = None) -> None:
        """
        Ends a request. keep=False: nothing of it stays findable beyond what others share; addressable: nothing
        past it. In flight: its blocks come back when the steps that use them have settled.
        """

    def preempt(self, request: Hashable) -> None:
        """
        Returns its blocks and keeps what is committed. Resumed by admit with the same id and all its tokens.
        """

    def begin_step(self, batch: Iterable[tuple[Hashable, int]]) -> Step:
        """
        Draws blocks for the next tokens of each (request, new_tokens), in order; a request that does not fit is
        refused alone and changes nothing. Raises RequestError, with nothing changed, for a request that is
        unknown or there twice, 0 tokens, past max_len, more than max_step_tokens, an end inside a `whole` item;
        StepError when max_steps_in_flight are in flight.
        """

    def settle(self, step: int, kept: dict[Any, int] = {}) -> None:
        """
        The device is done with the oldest step: commits what is computed and known, frees what is out of reach.
        kept: {request: tokens of this step that stand} for rejected drafts.
        """

    def abandon(self, step: int) -> dict[Any, int]:
        """
        The device work failed: nothing of this step or of steps begun after it is committed. Gives the length
        that each of their requests goes back to.
        """

    def take_events(self) -> list[Event]:
        """
        Recorded since the last call, in order. Empty unless the manager was made with events=True.
        """

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """
        The child shares the parent's full pages and gets its own partly filled page, state and scratch, or
        PoolExhausted is raised.
        """

    def rewind(self, request: Hashable, tokens: int) -> None:
        """
        Keeps the first tokens. Raises RequestError, naming the nearest shorter length that works, where reach
        or state is no longer held there.
        """

    def reset_cache(self) -> None:
        """
        Drops every commit; running requests go on and publish nothing computed before.
        """

    def blocks(self, request: Hashable, leaf_id: str) -> list[int]:
        """Blocks in slot order, 0 where nothing is held."""

    def live_block(self, request: Hashable, leaf_id: str) -> int | None:
        """The block of a state or scratch; None before the first step."""

    def length(self, request: Hashable) -> int:
        """Tokens known."""

    def computed(self, request: Hashable) -> int:
        """Tokens of settled steps."""

    def planned(self, request: Hashable) -> int:
        """Tokens of settled steps and of those in flight."""

    def __contains__(self, request: Hashable, /) -> bool: ...

    def stats(self) -> ManagerStats: ...

    def audit(self) -> None:
        """
        Recounts everything from scratch. Raises InvariantError naming the first broken equation.
        """

    def __reduce_ex__(self, protocol: object) -> str: ...

class StepPlan:
    """
    One forward's inputs. Arrays are views, without a copy, on the planner's host set for this step: they are
    valid until the planner comes round to the same set, max_steps_in_flight plans later, and asking a plan for
    them after that raises StepError. A view keeps the planner alive.
    """

    @property
    def step(self) -> int:
        """Id of the step that was begun."""

    @property
    def batch(self) -> int:
        """Rows, dummy rows included."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, one per dummy row."""

    @property
    def rows(self) -> list[Any]:
        """The served requests in row order."""

    @property
    def refused(self) -> dict[Any, PoolExhausted]:
        """Requests that left the batch, and why."""

    @property
    def copies(self) -> list[tuple[str, int, int]]:
        """(leaf_id, src, dst), to run before the forward, in any order."""

    @property
    def zero_fills(self) -> list[tuple[str, int]]:
        """(leaf_id, block), to run before the forward."""

    @property
    def arrays(self) -> dict[str, dict[str, numpy.typing.NDArray[Any]]]:
        """{leaf_id: {key: array}}, narrowed to this batch."""

    @property
    def slot_mapping(self) -> dict[str, numpy.typing.NDArray[numpy.int64]]:
        """
        {leaf_id: [num_tokens] int64}: block * slots_per_page + slot in the page; -1 is padding. Only of
        leaves that are written token by token.
        """

    @property
    def seq_lens(self) -> numpy.typing.NDArray[numpy.int32]:
        """[batch] int32"""

    @property
    def cu_seqlens_q(self) -> numpy.typing.NDArray[numpy.int32]:
        """[batch + 1] int32"""

    @property
    def dirty(self) -> dict[str, dict[str, list[tuple[int, int]]]]:
        """
        {leaf_id: {key: [(begin, end)]}}: bytes of the array, counted from its first element, that differ
        from the previous plan.
        """

    @property
    def changes(self) -> dict[str, dict[str, tuple[numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.int32]]]]:
        """
        {leaf_id: {key: (rows, columns, values)}}: the same entry by entry, for scatter_table. Of int32 arrays of
        at most two dimensions.
        """

    def __repr__(self) -> str: ...

class StepPlanner:
    """
    One call per forward: reserves for a whole batch and writes what the forward reads. It owns one host set of
    arrays per step in flight, sized once, at fixed addresses, used in turn. A row that still belongs to the
    same request is extended, not rewritten.
    """

    def __init__(self, manager: BlockManager, *, max_batch: int, max_step_tokens: int) -> None:
        """
        max_batch: rows, dummy rows included; max_step_tokens: tokens of all rows together.
        """

    @property
    def manager(self) -> BlockManager: ...

    @property
    def max_batch(self) -> int: ...

    @property
    def max_step_tokens(self) -> int: ...

    def plan(self, batch: Iterable[tuple[Hashable, int]], pad_to: int | None = None) -> StepPlan:
        """
        begin_step for (request, new_tokens) in row order, plus the arrays. pad_to: batch size to fill with dummy
        rows (one query token, length 1, slot -1, null blocks). Raises what begin_step raises, and
        PlanShapeError beyond the bounds; what a leaf written in Python raises comes out as it is. Nothing has
        changed then.
        """

    def settle(self, step: int, kept: dict[Any, int] = {}) -> None:
        """As the manager's."""

    def abandon(self, step: int) -> dict[Any, int]:
        """As the manager's."""

    def __reduce_ex__(self, protocol: object) -> str: ...

class ModelLeaves:
    """What model_from_config makes of a model."""

    @property
    def leaves(self) -> list[KVLeafRegion]: ...

    @property
    def layers_of(self) -> dict[str, list[int]]:
        """
        By leaf id, the layers of the model whose entries it holds, ascending: the layer at index i lies i-th in
        each page. Layers that read another's entries are not among them.
        """

    @property
    def model_type(self) -> str: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def dtype(self) -> str:
        """Of the weights."""

    @property
    def max_len(self) -> int | None:
        """
        Positions that the model was made for; None: the configuration does not say.
        """

    @property
    def encoder_tokens(self) -> int | None:
        """Most of one request; None: no encoder."""

    def __repr__(self) -> str: ...

    def __reduce_ex__(self, protocol: object) -> str: ...

def model_from_config(path_or_dict: str | os.PathLike[str] | dict[str, Any], *, tokens_per_page: int = 16, dtype: object = None, kv_dtype: object = None, tensor_parallel: int = 1, budget_bytes: int | None = None, expected_tokens: int = 2048) -> ModelLeaves:
    """
    As leaves_from_config, with which layers of the model lie in which leaf.
    """

def leaves_from_config(path_or_dict: str | os.PathLike[str] | dict[str, Any], *, tokens_per_page: int = 16, dtype: object = None, kv_dtype: object = None, tensor_parallel: int = 1, budget_bytes: int | None = None, expected_tokens: int = 2048) -> list[KVLeafRegion]:
    """
    The leaves of a model from its config.json, or from a dict of the same: one per group and page shape.
    dtype: of the model; None: the config's. kv_dtype: of keys, values and latents; None: the model's.
    tensor_parallel: ranks that divide the heads; the leaves are those of one. Given a budget, the layers of a
    large state leaf are split into equal leaves where the geometry for requests of expected_tokens costs
    less. Raises ConfigError that names the key and what is accepted.
    """

class KVPages:
    """
    All pages of one attention leaf, block 0 first: for each layer its keys [slots, kv_heads, key_dim] and then
    its values [slots, kv_heads, value_dim]. A view: it keeps the memory alive.
    """

    def __init__(self, memory: Any, *, layers: int, slots: int, kv_heads: int, key_dim: int, value_dim: int | None = None, dtype: object, page_stride: int | None = None) -> None:
        """
        memory: a writable array on the host that begins with block 0, the null block. slots: entries of a page.
        value_dim: None for that of keys, 0 where values are the first elements of keys. page_stride: bytes from
        a block to the next, None for packed pages. Raises InvalidArgument where no page fits.
        """

    @staticmethod
    def of(leaf: AttentionLeaf, geometry: Geometry, arena: Any) -> KVPages:
        """
        The pages of `leaf` in an arena that is tiled by `geometry`: arena_bytes of memory on the host.
        """

    @property
    def layers(self) -> int: ...

    @property
    def slots(self) -> int:
        """Entries of a page."""

    @property
    def kv_heads(self) -> int: ...

    @property
    def key_dim(self) -> int: ...

    @property
    def value_dim(self) -> int:
        """0: values are part of keys."""

    @property
    def page_stride(self) -> int:
        """Bytes from a block to the next."""

    @property
    def blocks(self) -> int:
        """Real blocks: 1 to this."""

    @property
    def dtype(self) -> str: ...

    def __repr__(self) -> str: ...

    def __reduce_ex__(self, protocol: object) -> str: ...

def copy_pages(arena: Any, geometry: Geometry, copies: Iterable[tuple[str, int, int]]) -> None:
    """
    Carries out plan.copies: (leaf_id, src, dst), in any order. arena: a writable array of geometry.arena_bytes on
    the host. Raises InvalidArgument, having written nothing, for a block that does not exist, the null block as
    destination, or a list whose order would matter.
    """

def zero_pages(arena: Any, geometry: Geometry, fills: Iterable[tuple[str, int]]) -> None:
    """Carries out plan.zero_fills: (leaf_id, block). Raises as copy_pages."""

def append_kv(k: Any, v: Any | None, slot_mapping: Any, pages: KVPages | Any, *, layer: int = 0, scales: KVPages | None = None, scale_slot_mapping: Any | None = None) -> None:
    """
    Writes new entries of one layer by slot mapping; -1 is skipped.
      k, v          [tokens, kv_heads, dim] float32, float16 or bfloat16, or the type of the pages; v is None where
                    pages store no values. uint16 is taken for the bits of bfloat16, or of the pages' own 16-bit type
      slot_mapping  [tokens] int64, as plan.slot_mapping has it
      pages         a KVPages, or an array [blocks, 2, slots, kv_heads, dim] or [blocks, layers, 2, slots, kv_heads, dim]
      scales        of quantised pages, with the slot mapping of the scales leaf; without them values are rounded,
                    and int8 needs them
    Raises InvalidArgument, having written nothing, for shapes and types that do not fit, the null block, or a
    block beyond the last.
    """

def gather_kv(pages: KVPages | Any, slot_mapping: Any, *, layer: int = 0, dtype: object = None, scales: KVPages | None = None, scale_slot_mapping: Any | None = None) -> tuple[numpy.typing.NDArray[Any], numpy.typing.NDArray[Any] | None]:
    """
    The reverse of append_kv: new arrays k and v, [tokens, kv_heads, dim]; zeros where the mapping is -1 or names
    the null block. dtype: None for that of the pages, float32 with scales. v is None where pages store no values.
    """

def scatter_table(table: numpy.typing.NDArray[numpy.int32], rows: Any, columns: Any, values: Any) -> None:
    """
    table[rows[i], columns[i]] = values[i], as plan.changes lists them; all int32. An array of one dimension has one
    column. A row of -1 is skipped. Raises InvalidArgument, having written nothing, for a place outside the table.
    """

def paged_attention(q: Any, pages: KVPages | Any, block_table: Any, seq_lens: Any, cu_seqlens_q: Any, *, layer: int = 0, scale: float | None = None, window: int | None = None, sinks: int = 0, chunk: int | None = None, causal: bool = True, first_slot: Any | None = None, sink_slots: int = 0, latent_width: int | None = None, scales: KVPages | None = None, scale_table: Any | None = None) -> numpy.typing.NDArray[Any]:
    """
    Plain attention through tables, the reference for kernels: [tokens, query_heads, value width], of the type of q.
      q             [tokens, query_heads, key_dim]; query head h reads KV head h / (query_heads / kv_heads)
      block_table   [rows, columns] int32; seq_lens [rows] and cu_seqlens_q [rows + 1] int32, as a plan has them
      scale         of the products of query and key; None: 1 / sqrt(key_dim)
      window, sinks, chunk, causal   which keys a query sees; not causal: all seq_lens of them (cross attention)
      first_slot, sink_slots         of a compact table
      latent_width  where pages store no values: how many elements of a key are its value
    Raises InvalidArgument for shapes that do not fit and for keys in reach that the table does not hold.
    """

def _check_leaf(make_leaf: Callable[[], KVLeafRegion], *, page_tokens: int, max_len: int | None, seed: int, histories: int) -> tuple[bool, str, list[str], list[str]]: ...

def _command(arguments: list[str], load: Callable[[str, list[KVLeafRegion], int], Iterable[KVLeafRegion]]) -> int: ...

class Tensor:
    """
    A view of memory: of a cache, or taken over by from_dlpack. It computes nothing. numpy() and indexing give
    NumPy views, __dlpack__ hands it to PyTorch, JAX, CuPy and the like; none of them copies, and all of them
    keep the memory alive. Once its cache was reset, or a step's arrays serve a later step, a view is stale and
    hands out nothing any more. NumPy knows no bfloat16 and float8: numpy() gives ml_dtypes' types where that
    package is installed, and __array_interface__ (numpy.asarray) always the bits, as uint16 or uint8.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements."""

    @property
    def dtype(self) -> str: ...

    @property
    def device(self) -> str: ...

    @property
    def ndim(self) -> int: ...

    @property
    def size(self) -> int:
        """Elements."""

    @property
    def contiguous(self) -> bool: ...

    @property
    def stale(self) -> bool: ...

    @property
    def data_ptr(self) -> int:
        """Address of the first element."""

    def numpy(self) -> numpy.typing.NDArray[Any]:
        """A NumPy view. Raises StepError of a stale tensor."""

    def permuted(self, *order: int) -> Tensor:
        """The dimensions in another order, without a copy."""

    @staticmethod
    def from_dlpack(source: object) -> Tensor:
        """
        A view of another framework's tensor, without a copy. Raises InvalidArgument for an element type or device
        without a name here.
        """

    @property
    def __array_interface__(self) -> dict[str, Any]: ...

    def __array__(self, dtype: object = None, copy: object = None) -> Any: ...

    def __dlpack__(self, *, stream: object = None, max_version: object = None, dl_device: object = None, copy: object = None) -> Any: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, key: Any) -> Any:
        """As of numpy()."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """As of numpy()."""

    def __repr__(self) -> str: ...

    def __reduce_ex__(self, protocol: object) -> str: ...

class Arena:
    """
    The bytes that a geometry tiles: host(), pinned(), cuda(), or over() memory that somebody else made. Read and
    written through tensors; all of them keep the memory. The arena itself writes nothing. As a whole it speaks
    DLPack too: uint8 [arena_bytes].
    """

    @staticmethod
    def host(geometry: Geometry) -> Arena:
        """
        Zeroed host memory, aligned to huge pages where the system has them, bound to no NUMA node, and backed where
        it is first touched. Raises KVError where the system refuses.
        """

    @staticmethod
    def pinned(geometry: Geometry) -> Arena:
        """
        Zeroed host memory that a CUDA device reads fast. Raises DeviceError, with the runtime's message, where there
        is none, or where kvleaf was built without CUDA.
        """

    @staticmethod
    def cuda(geometry: Geometry, device: int = 0) -> Arena:
        """Zeroed memory of a CUDA device. Raises DeviceError as pinned()."""

    @staticmethod
    def over(geometry: Geometry, memory: object) -> Arena:
        """
        In a NumPy array, or what speaks DLPack: uint8, one dimension, contiguous, at least arena_bytes, on any
        device; kept as long as it is used. Its null region must be zeros.
        """

    @property
    def geometry(self) -> Geometry: ...

    @property
    def device(self) -> str: ...

    @property
    def bytes(self) -> Tensor:
        """All of it, uint8 [arena_bytes]."""

    def view(self, leaf: str, dtype: object = 'uint8', shape: Sequence[int] | None = None, *, offset: int = 0) -> Tensor:
        """
        The pages of a leaf, [blocks + 1, *shape]: a block id is an index, and 0 is the null page of zeros. shape:
        elements of one page; None: all of them in one dimension. offset: bytes in the page where they begin.
        strides[0] is the page stride. Raises InvalidArgument for what does not fit a page.
        """

    def page(self, leaf: str, block: int) -> Tensor:
        """The data of one block, uint8 [bytes_per_page]."""

    def unmap(self, ranges: Iterable[tuple[int, int]]) -> int:
        """
        Gives memory of these ranges back to the system, as BlockPool.resize names them when it shrinks. Of host()
        only. Touching it ends the process. Gives the bytes that changed hands: whole pages of the system.
        """

    def map(self, ranges: Iterable[tuple[int, int]]) -> int:
        """Takes memory for ranges that were unmapped; it reads as zeros."""

    def __dlpack__(self, **how: object) -> Any: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...

    def __repr__(self) -> str: ...

    def __reduce_ex__(self, protocol: object) -> str: ...

class KVCacheMode(enum.Enum):
    """How a KVCache keeps its entries."""

    slotted = 0
    """Each slot owns max_len entries of every layer; no table, no reuse."""

    paged = 1
    """
    Entries lie in pages of one pool, found through tables; prefixes are reused.
    """

class KVCacheConfig:
    """What a KVCache is made for."""

    def __init__(self, num_layers: int, max_seqs: int, max_len: int, mode: KVCacheMode | str = KVCacheMode['paged'], page_tokens: int = 16, budget_bytes: int | None = None, dtype: object = 'bfloat16', device: str = 'cpu', max_encoder_len: int = 0, enable_prefix_caching: bool = True, *, max_step_tokens: int | None = None, retention: str | int = 'tail') -> None:
        """
        max_seqs: slots; max_len: tokens of one. page_tokens: prefixes are reused at multiples of it.
        budget_bytes: of the pool; None: what lets every slot reach max_len. dtype: of keys, values and latents.
        max_encoder_len: encoder tokens of one slot, needed for cross attention. max_step_tokens: of all rows of
        one step together; None: max_seqs * max_len, at most the larger of max_len and 32,768.
        """

    @property
    def num_layers(self) -> int: ...

    @property
    def max_seqs(self) -> int: ...

    @property
    def max_len(self) -> int: ...

    @property
    def mode(self) -> KVCacheMode: ...

    @property
    def page_tokens(self) -> int: ...

    @property
    def budget_bytes(self) -> int | None: ...

    @property
    def dtype(self) -> str: ...

    @property
    def device(self) -> str: ...

    @property
    def max_encoder_len(self) -> int: ...

    @property
    def enable_prefix_caching(self) -> bool: ...

    @property
    def max_step_tokens(self) -> int:
        """0: not given."""

    def __repr__(self) -> str: ...

    def __reduce_ex__(self, protocol: object) -> str: ...

class KVLayerSpec:
    """
    What one layer of a model keeps between tokens, in the numbers of one rank.
    """

    @staticmethod
    def attention(kv_heads: int, head_dim: int, window: int | None = None, sinks: int = 0, chunk: int | None = None, *, value_head_dim: int | None = None) -> KVLayerSpec:
        """
        Keys and values of the text: of all tokens, of the last `window` (the query counted) and the first `sinks`,
        or of the query's own chunk.
        """

    @staticmethod
    def latent(width: int) -> KVLayerSpec:
        """
        One entry of `width` elements per token, for all heads, keys and values (MLA).
        """

    @staticmethod
    def shared(layer: int) -> KVLayerSpec:
        """Keeps nothing: reads what an earlier layer keeps."""

    @staticmethod
    def state(conv: Iterable[tuple[int, int]] = (), heads: int = 0, k_dim: int = 0, v_dim: int = 0, dtype: object = 'float32', *, conv_dtype: object = None) -> KVLayerSpec:
        """
        A state of fixed size: convolution windows (dim, inputs kept) and a recurrent slab [heads, k_dim, v_dim].
        conv_dtype: of the windows; None: dtype.
        """

    @staticmethod
    def cross_attention(kv_heads: int, head_dim: int) -> KVLayerSpec:
        """Keys and values of an encoder's tokens."""

    @staticmethod
    def none() -> KVLayerSpec:
        """Keeps nothing."""

    def __add__(self, other: KVLayerSpec) -> KVLayerSpec:
        """A layer that keeps both."""

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

    def __reduce_ex__(self, protocol: object) -> str: ...

class StepIndices:
    """
    The index tensors of one step, on the host: views on the cache's memory, for a batch in the order given. Valid
    until the step after next was prepared; then its tensors are stale.
    """

    @property
    def batch(self) -> int:
        """Sequences."""

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""

    @property
    def max_seqlen_q(self) -> int: ...

    @property
    def max_seqlen_k(self) -> int: ...

    @property
    def slot_ids(self) -> Tensor:
        """[batch] int32"""

    @property
    def cu_seqlens_q(self) -> Tensor:
        """[batch + 1] int32"""

    @property
    def cu_seqlens_k(self) -> Tensor:
        """[batch + 1] int32, of seq_lens"""

    @property
    def past_lens(self) -> Tensor:
        """[batch] int32: tokens before this step"""

    @property
    def seq_lens(self) -> Tensor:
        """[batch] int32: with it"""

    @property
    def encoder_lens(self) -> Tensor:
        """[batch] int32: encoder tokens; zeros without cross attention"""

    @property
    def positions(self) -> Tensor:
        """[num_tokens] int64: of each new token in its sequence"""

    def slot_mapping(self, layer: int | None = None, *, part: str = 'own') -> Tensor | None:
        """
        [num_tokens] int64: where a layer's entry of each new token goes. Paged: page * entries per page + entry in
        the page; slotted: slot * entries per slot + entry. None for a layer that is not written token by token.
        """

    def block_table(self, layer: int | None = None, *, part: str = 'own') -> Tensor | None:
        """
        [batch, columns] int32: the pages of each sequence, 0 where none is reached. layer may be left out where all
        layers share one table. None in a slotted cache.
        """

    def csr(self, layer: int | None = None, *, part: str = 'own') -> tuple[Tensor, Tensor, Tensor] | None:
        """
        The same as (indptr [batch + 1], indices [indptr[batch]], last_page_len [batch]), int32.
        """

    def __repr__(self) -> str: ...

    def __reduce_ex__(self, protocol: object) -> str: ...

class KVCache:
    """
    The whole cache of one model, in slots. An attention implementation appends to and attends through the tensors
    it hands out. One step at a time: prepare_step begins one, and the next call that changes the cache takes its
    forward for done; where it failed, call abandon_step. What raises has changed nothing. One thread owns a cache.
    """

    @staticmethod
    def make(config: KVCacheConfig, layer_specs: Iterable[KVLayerSpec], *, memory: object = None) -> KVCache:
        """
        One spec per layer. memory: what to lay the cache in, uint8 [memory_bytes] on a multiple of 256 bytes; None:
        its own. Warns where the budget does not let a sequence reach max_len.
        """

    @staticmethod
    def from_config(json: str | os.PathLike[str] | dict[str, Any], *, max_seqs: int, max_len: int | None = None, mode: KVCacheMode | str = KVCacheMode['paged'], page_tokens: int = 16, budget_bytes: int | None = None, dtype: object = None, device: str = 'cpu', max_encoder_len: int | None = None, enable_prefix_caching: bool = True, max_step_tokens: int | None = None, retention: str | int = 'tail') -> KVCache:
        """
        From a published config.json: its path, its text or a dict of it. max_len, max_encoder_len and dtype are the
        model's where they are None. Raises ConfigError that names the key and what is accepted.
        """

    @staticmethod
    def memory_bytes(config: KVCacheConfig, layer_specs: Iterable[KVLayerSpec]) -> int:
        """Bytes that make would lay the cache in."""

    def mode(self) -> KVCacheMode:
        """The serving mode it was built with."""

    @property
    def config(self) -> KVCacheConfig:
        """As given, with what was left out filled in."""

    @property
    def layer_specs(self) -> list[KVLayerSpec]: ...

    def longest_request(self) -> int:
        """Tokens of the longest sequence that the empty cache serves."""

    def admit(self, batch_idx: int, prompt_ids: object, addressable_len: int = -1, *, encoder_digest: str | bytes | int | None = None, encoder_len: int | None = None, salt: str | bytes = b'', adapter: str = '') -> int:
        """
        Paged only: binds the longest cached prefix into a fresh slot; returns the number of leading tokens whose
        entries are there, always less than all. addressable_len: leading tokens that may be matched; -1: all.
        encoder_digest: identity of the encoder's input; without one a cache with cross attention reuses nothing.
        encoder_len: its tokens; None: max_encoder_len are reserved, and fill says how many there are; 0: none.
        """

    def reserve(self, slot_ids: object, n_new_per_seq: Sequence[int]) -> Tensor:
        """
        Paged only: reserves this step's new tokens per slot; returns the write offset of each sequence before the
        advance, [n] int32. prepare_step of the very same rows then only describes that step.
        """

    def prepare_step(self, cu_seqlens_q: Sequence[int], past_len: Sequence[int], slot_ids: Sequence[int]) -> StepIndices:
        """
        Turns one step's host-side description into the index tensors of a variable-length forward; a paged cache
        also reserves the step's pages. cu_seqlens_q: [n + 1] from 0; past_len: what seq_lens says of each slot.
        Raises PoolExhausted where not all rows fit; none was served then.
        """

    def retire(self, batch_idx: int, full_token_ids: object, addressable_len: int = -1) -> None:
        """
        Paged only: ends a finished session and keeps its pages addressable for later admits; evict_batch is for the
        cancel or error path. full_token_ids: prompt and generated.
        """

    def evict_batch(self, batch_idx: int) -> None:
        """Frees a slot's stored entries; its seq_lens entry returns to 0."""

    def fill(self, layer: int, batch_idx: int, k: object, v: object) -> None:
        """
        Fills a cross-attention layer's keys and values for one slot in one call, [t_enc, kv_heads, head_dim] each:
        Tensors, NumPy arrays (of bfloat16: ml_dtypes', or its bits as uint16), or what speaks DLPack.
        """

    def keys(self, layer: int, *, part: str = 'own') -> Tensor:
        """
        The layer's storage: paged [pages + 1, entries, kv_heads, head_dim], page 0 the null page; slotted [max_seqs,
        entries, kv_heads, head_dim]. None where it has none. part: 'own', or of a layer that keeps several things
        'compressed', 'indexer', 'cross'.
        """

    def values(self, layer: int, *, part: str = 'own') -> Tensor:
        """As keys. None of latents."""

    def keys_values(self, layer: int, *, part: str = 'own') -> Tensor:
        """
        Both, [pages + 1, 2, entries, kv_heads, head_dim]; None where they differ in width.
        """

    def conv_state(self, layer: int, index: int = 0) -> Tensor:
        """
        The state layer's index-th convolution window, [max_seqs, dim, width]; None where it has none.
        """

    def recurrent_state(self, layer: int) -> Tensor:
        """
        The state layer's recurrent slab, [max_seqs, heads, k_dim, v_dim]; None where it has none.
        """

    def paged_block_table(self, layer: int | None = None, *, part: str = 'own') -> Tensor | None:
        """
        [max_seqs, max_blocks_per_seq] int32, a row per slot, kept up to date in place. layer may be left out where
        all layers share one table. None for a cache, or a layer, without pages.
        """

    def seq_lens(self) -> Tensor:
        """
        [max_seqs] int32: tokens that each slot holds, the step under way included.
        """

    def encoder_lens(self) -> Tensor:
        """[max_seqs] int32: encoder tokens that each slot holds."""

    def update_position(self, batch_idx: int, new_pos: int) -> None:
        """
        Sets a slot's effective length: shorter for rejected drafts, before any other call; longer in a slotted cache
        only. Raises RequestError, naming a length that works, where a window or a state of then is not held.
        """

    def reset(self) -> None:
        """
        Drops all stored entries of every slot and layer. Tensors handed out before are stale; arrays made of them
        keep the bytes of before, which the cache uses no more.
        """

    def next_stop(self, batch_idx: int) -> int | None:
        """
        Where a step should end so that a state can be resumed there, in tokens; None: anywhere.
        """

    def encoder_filled(self, batch_idx: int) -> bool:
        """
        False: the layers of cross attention still have to be filled for this slot.
        """

    def abandon_step(self) -> None:
        """
        The forward of the step prepared last failed: its slots go back to the deepest length at which everything is
        held. seq_lens says which.
        """

    def audit(self) -> None:
        """
        Recounts everything; raises InvariantError that names the first broken equation.
        """

    def __repr__(self) -> str: ...

    def __reduce_ex__(self, protocol: object) -> str: ...
