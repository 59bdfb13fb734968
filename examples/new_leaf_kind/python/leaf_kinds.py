"""Two kinds of memory that kvleaf does not know, served by

kvleaf replay TRACE --model CONFIG.json --leaf-module leaf_kinds.py
"""

import kvleaf
import numpy as np
from kvleaf import AccessPattern, KVCacheGroupId, KVLeafRegion


class RetrievalIndexLeaf(KVLeafRegion):
    """A request's own index for retrieval, which grows by segments of the text.

    A page holds one segment: `centroids` vectors of `width` float16 and the tokens they stand for.
    Staged: "segments" int32 [batch, columns] and "segment_count" int32 [batch].
    """

    def __init__(self, leaf_id, *, segment, centroids, width):
        group = KVCacheGroupId("retrieval", AccessPattern.full(), "append")
        super().__init__(
            leaf_id,
            group,
            centroids * (width * 2 + 4),
            stride_alignment=4,
            tokens_per_page=segment,
        )

    def staged_input_shapes(self, batch_size, num_blocks):
        return {
            "segments": ((batch_size, num_blocks), np.int32),
            "segment_count": ((batch_size,), np.int32),
        }

    def write_staged_inputs(self, plans, into):
        into["segments"][:] = 0
        for row, blocks in enumerate(plans):
            into["segments"][row, : len(blocks)] = blocks
            into["segment_count"][row] = len(blocks)

    def write_staged_delta(self, rows, into):
        segments = into["segments"]
        for i, row in enumerate(rows):
            first = 0 if row.padding else row.first_changed_slot
            blocks = [] if row.padding else row.blocks
            end = first + len(blocks)
            segments[i, first:end] = blocks
            segments[i, end:] = 0
            into["segment_count"][i] = end


class MemoryTokensLeaf(KVLeafRegion):
    """Memory tokens: one entry stands for `every` tokens of the text, and all are kept.

    A page covers `slots` entries, so `every` · `slots` tokens; slot mappings count entries.
    Staged as the base class does: "block_table" int32 [batch, columns].
    """

    def __init__(self, leaf_id, *, every=64, slots=4, layers, width):
        group = KVCacheGroupId("memory", AccessPattern.full(), "append")
        super().__init__(
            leaf_id,
            group,
            layers * slots * width * 2,
            stride_alignment=width * 2,
            tokens_per_page=every * slots,
        )
        self._slots = slots

    def slots_per_page(self, tokens_per_page):
        return self._slots


def new_kinds():
    return [
        RetrievalIndexLeaf("retrieval", segment=256, centroids=8, width=128),
        MemoryTokensLeaf("memory", layers=4, width=1024),
    ]


def leaves(model_leaves: list[kvleaf.KVLeafRegion], tokens_per_page: int):
    """What is served: the model's own leaves, and the new ones beside them."""
    return [*model_leaves, *new_kinds()]
