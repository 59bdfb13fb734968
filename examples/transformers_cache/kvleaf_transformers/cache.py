"""The `past_key_values` that a model is given: transformers' own cache classes over the arena.

Layers keep no tensor between forwards. Before one, `ArenaCache.bind` tells them the rows; an
attention layer then writes new entries to their slots and hands back what the table reaches; a
state layer hands out the live states, in place where there is one row.
"""

import torch
from kvleaf import AttentionLeaf
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from kvleaf_transformers.arena import Arena
from kvleaf_transformers.batch import Batch
from kvleaf_transformers.places import LayerPlaces, Place, Places


class _Entries:
    """One layer's keys and values in the arena: [blocks + 1, slots, heads, dim] each.

    A latent entry is one vector of two parts, which the model hands over as keys and values of
    one head.
    """

    def __init__(self, arena: Arena, place: Place, dtype: torch.dtype):
        self.leaf: AttentionLeaf = place.leaf
        leaf, self.dtype = place.leaf, dtype
        slots = leaf.slots_per_page()
        widths = leaf.head_dim, leaf.value_head_dim
        begin = place.index * slots * leaf.kv_heads * sum(widths) * dtype.itemsize
        keys = arena.view(leaf.leaf_id, dtype, (slots, leaf.kv_heads, widths[0]), begin)
        begin += slots * leaf.kv_heads * widths[0] * dtype.itemsize
        values = arena.view(leaf.leaf_id, dtype, (slots, leaf.kv_heads, widths[1]), begin)
        self.keys, self.values = keys, values

    def _parts(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views as wide as the model's keys."""
        if self.values.shape[-1] == 0 and width < self.keys.shape[-1]:
            return self.keys[..., :width], self.keys[..., width:]
        return self.keys, self.values

    def write(
        self, where: tuple[torch.Tensor, torch.Tensor], keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """keys and values [rows, heads, tokens, dim] to (blocks, slots), each [rows * tokens]."""
        for into, states in zip(self._parts(keys.shape[-1]), (keys, values)):
            entries = states.transpose(1, 2).flatten(0, 1)
            if entries.shape[1:] != into.shape[2:] or entries.dtype != self.dtype:
                raise ValueError(
                    f"leaf {self.leaf.leaf_id} holds {tuple(into.shape[2:])} {self.dtype} a token, "
                    f"the model hands over {tuple(entries.shape[1:])} {entries.dtype}"
                )
            into[where] = entries

    def read(
        self, blocks: torch.Tensor, slots: torch.Tensor, width: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [rows, heads, entries, dim] at blocks and slots [rows, entries]."""
        keys, values = self._parts(self.keys.shape[-1] if width is None else width)
        return keys[blocks, slots].transpose(1, 2), values[blocks, slots].transpose(1, 2)


class _Paged:
    """An attention layer whose entries lie in pages. Mixed into transformers' dynamic layers."""

    def place(self, arena: Arena, place: Place, dtype: torch.dtype) -> None:
        self.entries = _Entries(arena, place, dtype)
        self.span: int = getattr(self, "sliding_window", 0)
        self.batch: Batch | None = None

    def update(self, key_states, value_states, *args, **kwargs):
        leaf = self.entries.leaf
        self.entries.write(self.batch.targets(leaf), key_states, value_states)
        columns = self.batch.columns(leaf, self.span)
        return self.entries.read(columns.blocks, columns.slots, key_states.shape[-1])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        columns = self.batch.columns(self.entries.leaf, self.span)
        return columns.blocks.shape[1], columns.first

    def get_seq_length(self) -> int:
        return self.batch.past if self.batch is not None else 0


class _Recurrent:
    """A layer with a state in the arena. Mixed into transformers' linear attention layers."""

    def place_state(self, arena: Arena, place: Place) -> None:
        self.state_leaf = place.leaf
        offset = 0
        self.slabs: dict[str, torch.Tensor] = {}  # [blocks + 1, *shape] each
        for slab in place.leaf.slabs:
            dtype = getattr(torch, slab.dtype)
            self.slabs[slab.name] = arena.view(
                place.leaf.leaf_id, dtype, slab.shape, offset + place.index * slab.bytes
            )
            offset += place.leaf.layers * slab.bytes
        self.device = arena.bytes.device
        if "conv" in self.slabs:
            self.dtype = self.slabs["conv"].dtype
            self.conv_kernel_size[0] = self.slabs["conv"].shape[-1]

    def bind_state(self, batch: Batch) -> None:
        """The states of the rows. One row's is the arena's memory itself; several are a copy."""
        self.blocks = batch.state_blocks(self.state_leaf)
        one = len(self.blocks) == 1
        rows = slice(int(self.blocks[0]), int(self.blocks[0]) + 1) if one else self.blocks
        for name, holders, initialized in (
            ("conv", self.conv_states, self.is_conv_states_initialized),
            ("recurrent", self.recurrent_states, self.is_recurrent_states_initialized),
        ):
            if name in self.slabs:
                holders[0] = self.slabs[name][rows]
                initialized[0] = True
        self.has_previous_state[0] = batch.has_past

    def store_state(self) -> None:
        """Several rows' states go back to where they live."""
        for name, holders in (("conv", self.conv_states), ("recurrent", self.recurrent_states)):
            if name in self.slabs:
                if len(self.blocks) > 1:
                    self.slabs[name][self.blocks] = holders[0]
                holders[0] = None


class PagedLayer(_Paged, DynamicLayer):
    """Full attention."""


class PagedWindowLayer(_Paged, DynamicSlidingWindowLayer):
    """Attention within a window or chunk: the mask is transformers', the reach is the leaf's."""


class StateLayer(_Recurrent, LinearAttentionLayer):
    """A recurrent state, or nothing: transformers gives this class to an MLP layer as well."""


class HybridLayer(_Recurrent, _Paged, LinearAttentionAndFullAttentionLayer):
    """A state beside full attention."""


class HybridWindowLayer(_Recurrent, _Paged, LinearAttentionAndSlidingWindowAttentionLayer):
    """A state beside attention within a window."""


class CrossLayer(DynamicLayer):
    """Keys and values of an encoder's output: written by the first forward, then read."""

    def place(self, arena: Arena, place: Place, dtype: torch.dtype) -> None:
        self.entries = _Entries(arena, place, dtype)
        self.batch: Batch | None = None

    def update(self, key_states, value_states, *args, **kwargs):
        leaf, batch = self.entries.leaf, self.batch
        if key_states.shape[-2] != batch.encoder_tokens:
            raise ValueError(
                f"leaf {leaf.leaf_id}: the encoder gave {key_states.shape[-2]} tokens, the request "
                f"was admitted with {batch.encoder_tokens}"
            )
        blocks, slots = batch.encoder_columns(leaf)
        self.entries.write((blocks.flatten(), slots.flatten()), key_states, value_states)
        return self.entries.read(blocks, slots)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0

    def get_seq_length(self) -> int:
        filled = self.batch is not None and self.batch.encoder_filled
        return self.batch.encoder_tokens if filled else 0

    # What the model reads where the entries are there already.
    @property
    def keys(self):
        return self.entries.read(*self.batch.encoder_columns(self.entries.leaf))[0]

    @property
    def values(self):
        return self.entries.read(*self.batch.encoder_columns(self.entries.leaf))[1]

    @property
    def is_initialized(self) -> bool:
        return self.get_seq_length() > 0

    # transformers' base class sets these in its constructor; there is nothing to keep.
    @keys.setter
    def keys(self, value): ...

    @values.setter
    def values(self, value): ...

    @is_initialized.setter
    def is_initialized(self, value): ...


class ArenaCache(Cache):
    """One model's cache over the arena. Serves one forward at a time: bind, forward, store."""

    def __init__(self, layers: list):
        super().__init__(layers=layers)
        self._paged = [layer for layer in layers if isinstance(layer, (_Paged, CrossLayer))]
        self._states = [layer for layer in layers if getattr(layer, "slabs", None)]

    @staticmethod
    def of_text(arena: Arena, places: Places, dtype: torch.dtype) -> "ArenaCache":
        """All that layers keep of the text; layers that attend to an encoder alone keep that."""
        return ArenaCache([_layer(arena, layer, places, dtype) for layer in places.layers])

    @staticmethod
    def of_encoder(arena: Arena, places: Places, dtype: torch.dtype) -> "ArenaCache":
        """What the layers of a decoder keep of the encoder, beside the text."""
        layers = [CrossLayer() for _ in places.layers]
        for layer, of in zip(layers, places.layers):
            layer.place(arena, of.cross, dtype)
        return ArenaCache(layers)

    def bind(self, batch: Batch) -> None:
        """The next forward is that of these rows."""
        for layer in self._paged:
            layer.batch = batch
        for layer in self._states:
            layer.bind_state(batch)

    def store(self) -> None:
        """The forward is done."""
        for layer in self._states:
            layer.store_state()


def _layer(
    arena: Arena, places: LayerPlaces, all_places: Places, dtype: torch.dtype
) -> DynamicLayer | LinearAttentionCacheLayerMixin:
    attention, state, cross = places.attention, places.state, places.cross
    if attention is None and cross is not None:
        layer = CrossLayer()
        layer.place(arena, cross, dtype)
        return layer
    if attention is None:
        layer = StateLayer()
    elif attention.leaf.group_id.pattern.tail_begin(1 << 30) == 0:
        layer = HybridLayer() if state else PagedLayer()
    else:
        window = all_places.window
        layer = HybridWindowLayer(window) if state else PagedWindowLayer(window)
    if attention is not None:
        layer.place(arena, attention, dtype)
    if state is not None:
        layer.place_state(arena, state)
    return layer
