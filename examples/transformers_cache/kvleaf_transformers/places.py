"""Which layer of a model keeps what, and where: transformers' layers to kvleaf's leaves."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import kvleaf
import torch
from kvleaf import AccessPattern, KVLeafRegion
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, get_layer_types_and_kwargs

# What transformers' layer types keep. Layers of "mlp" and "moe" keep nothing.
ATTENTION = {
    "full_attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    "hybrid": "full",
    "hybrid_sliding": "window",
}
STATE = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
NOTHING = {"mlp", "moe"}


@dataclass(frozen=True)
class Place:
    """One layer's part of a leaf's page."""

    leaf: KVLeafRegion
    index: int  # among the layers of the leaf


@dataclass
class LayerPlaces:
    """What one layer of the model keeps; several, one or nothing."""

    attention: Place | None = None
    state: Place | None = None
    cross: Place | None = None


@dataclass
class Places:
    """Of every layer that the model's cache has."""

    layers: list[LayerPlaces]
    leaves: list[KVLeafRegion]
    window: int | None = field(default=None)  # as transformers' sliding layers are told it

    @staticmethod
    def of(config: PreTrainedConfig, leaves: Sequence[KVLeafRegion]) -> "Places":
        """Deals out each leaf's layers in the order in which the model has layers of its kind."""
        types, kwargs = layer_types(config)
        dealers = {
            kind: _Dealer(kind, leaves) for kind in ("full", "window", "chunk", "state", "cross")
        }
        cross_only, both = cross_layers(config)
        layers = []
        for layer, name in enumerate(types):
            places = LayerPlaces()
            if layer in cross_only:
                places.cross = dealers["cross"].deal(layer)
                layers.append(places)
                continue
            if name not in ATTENTION and name not in STATE and name not in NOTHING:
                raise ValueError(f"layer {layer} is of the unknown type {name!r}")
            if name in ATTENTION:
                places.attention = dealers[ATTENTION[name]].deal(layer)
            if name in STATE:
                places.state = dealers["state"].deal(layer)
            if layer in both:
                places.cross = dealers["cross"].deal(layer)
            layers.append(places)
        for dealer in dealers.values():
            dealer.require_all_dealt()
        return Places(layers, list(leaves), kwargs.get("sliding_window"))


class _Dealer:
    """Hands out the places of the leaves of one kind, in order."""

    def __init__(self, kind: str, leaves: Sequence[KVLeafRegion]):
        self.kind = kind
        of_kind = [leaf for leaf in leaves if kind_of(leaf) == kind]
        if (
            kind != "state" and len(of_kind) > 1
        ):  # states of one shape may be split into equal leaves
            raise ValueError(
                f"{[leaf.leaf_id for leaf in of_kind]} are all of kind {kind}: which layers "
                "are whose cannot be told from the order of layers"
            )
        self.places = [Place(leaf, i) for leaf in of_kind for i in range(leaf.layers)]
        self.dealt = 0

    def deal(self, layer: int) -> Place:
        if self.dealt == len(self.places):
            raise ValueError(
                f"layer {layer} is layer {self.dealt + 1} of kind {self.kind}; the leaves "
                f"have {self.dealt}"
            )
        self.dealt += 1
        return self.places[self.dealt - 1]

    def require_all_dealt(self) -> None:
        if self.dealt != len(self.places):
            raise ValueError(
                f"the leaves hold {len(self.places)} layers of kind {self.kind}, the "
                f"model has {self.dealt}"
            )


def kind_of(leaf: KVLeafRegion) -> str:
    group = leaf.group_id
    if group.writing == "in_place":
        return "state"
    if group.writing == "write_once":
        return "cross"
    if group.pattern == AccessPattern.full():
        return "full"
    return "window" if isinstance(leaf, kvleaf.SlidingWindowLeaf) else "chunk"


def layer_types(config: PreTrainedConfig) -> tuple[list[str], dict]:
    """As transformers' own caches see them: one type per layer that keeps something of its own."""
    return get_layer_types_and_kwargs(config.get_text_config(decoder=True))


def cross_layers(config: PreTrainedConfig) -> tuple[set[int], set[int]]:
    """Layers that attend to an encoder alone, and those that attend to it beside the text."""
    decoder = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        return set(), set(range(decoder.num_hidden_layers))
    return set(getattr(decoder, "cross_attention_layers", None) or ()), set()


def leaves_of(
    model: PreTrainedModel, *, page_tokens: int = 16, budget_bytes: int | None = None
) -> list[KVLeafRegion]:
    """The leaves of a model, from its own configuration, in the model's dtype.

    States are laid out as this release of transformers keeps them: it holds one column more of
    a convolution than the next token needs, and may order the axes of a recurrent state
    differently. What it hands over is seen in a forward of two tokens over its own cache.
    """
    leaves = kvleaf.leaves_from_config(
        model.config.to_dict(),
        tokens_per_page=page_tokens,
        dtype=str(model.dtype).removeprefix("torch."),
        budget_bytes=budget_bytes,
    )
    if not any(kind_of(leaf) == "state" for leaf in leaves):
        return leaves
    slabs = _slabs_of(model)
    return [
        kvleaf.RecurrentStateLeaf(
            leaf.leaf_id,
            layers=leaf.layers,
            slabs=_checked(leaf, slabs),
            tokens_per_page=page_tokens,
        )
        if kind_of(leaf) == "state"
        else leaf
        for leaf in leaves
    ]


def _slabs_of(model: PreTrainedModel) -> list[kvleaf.Slab]:
    """What every state layer of the model keeps; all keep the same."""
    with torch.no_grad():
        ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
        cache = DynamicCache(config=model.config)
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    found: dict[str, kvleaf.Slab] = {}
    for number, layer in enumerate(cache.layers):
        for name in ("conv", "recurrent"):
            states = getattr(layer, f"{name}_states", {})
            if len(states) > 1:
                raise ValueError(
                    f"layer {number} keeps {len(states)} {name} states; at most one is served"
                )
            if states.get(0) is None:
                continue
            state = states[0]
            slab = kvleaf.Slab(
                name, tuple(state.shape[1:]), str(state.dtype).removeprefix("torch.")
            )
            other = found.setdefault(name, slab)
            if (other.shape, other.dtype) != (slab.shape, slab.dtype):
                raise ValueError(f"layer {number} keeps {slab}, an earlier one {other}")
    return list(found.values())


def _checked(leaf: kvleaf.RecurrentStateLeaf, slabs: list[kvleaf.Slab]) -> list[kvleaf.Slab]:
    """The slabs, if they hold what the configuration says and at most a column more."""
    for ours, theirs in zip(leaf.slabs, slabs):
        width = theirs.shape[-1]
        same = math.prod(ours.shape) == math.prod(theirs.shape)
        wider = ours.name == "conv" and math.prod(ours.shape) * width == math.prod(theirs.shape) * (
            width - 1
        )
        if ours.name != theirs.name or not (same or wider):
            raise ValueError(f"leaf {leaf.leaf_id} holds {ours}, the model keeps {theirs}")
    if len(leaf.slabs) != len(slabs):
        raise ValueError(f"leaf {leaf.leaf_id} holds {leaf.slabs}, the model keeps {slabs}")
    return slabs
