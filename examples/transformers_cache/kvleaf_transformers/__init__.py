"""A cache for Hugging Face transformers in kvleaf's memory, and an engine that serves with it.

arena    the bytes of all leaves, as one torch tensor, and typed views of a leaf's pages
places   which layer of a model keeps what, in which leaf
batch    the rows of one forward: where they read and write
cache    ArenaCache: the `past_key_values` that the model is given
models   what a forward of each kind of model is called with
engine   Engine: many requests, chunked prefill, reuse, forks, preemption, steps in flight
"""

from kvleaf_transformers.arena import Arena
from kvleaf_transformers.cache import ArenaCache
from kvleaf_transformers.engine import Engine, Request, Result
from kvleaf_transformers.models import EncoderInput
from kvleaf_transformers.places import Places, leaves_of

__all__ = [
    "Arena",
    "ArenaCache",
    "EncoderInput",
    "Engine",
    "Places",
    "Request",
    "Result",
    "leaves_of",
]
