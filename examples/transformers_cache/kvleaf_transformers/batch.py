"""The rows of one forward: where each layer reads and writes in the arena.

A forward takes rows with the same number of new tokens. Their histories differ in length, so
they are aligned at their ends, as transformers pads: row b has `pads[b]` columns of nothing
before its first token, all rows end in column `past + new_tokens`, and the columns that a row
does not have come from the null block and are masked.
"""

from dataclasses import dataclass, field

import kvleaf
import numpy as np
import torch


@dataclass
class Step:
    """The arrays of a plan, for a forward on another thread: views, valid until it settles."""

    rows: list  # request ids
    starts: np.ndarray  # [batch] tokens computed before
    offsets: np.ndarray  # [batch + 1] of each row's first token in the slot mappings
    tables: dict[str, np.ndarray]  # leaf -> [batch, columns] block ids
    slots: dict[str, np.ndarray]  # leaf -> [tokens] block * slots_per_page + slot in the page
    states: dict[str, np.ndarray]  # leaf -> [batch] block ids
    copies: list[tuple[str, int, int]]
    zero_fills: list[tuple[str, int]]

    @staticmethod
    def of(plan: kvleaf.StepPlan) -> "Step":
        offsets = plan.cu_seqlens_q
        arrays = plan.arrays
        return Step(
            rows=plan.rows,
            starts=plan.seq_lens - np.diff(offsets),
            offsets=offsets,
            tables={leaf: a["block_table"] for leaf, a in arrays.items() if "block_table" in a},
            slots=plan.slot_mapping,
            states={leaf: a["state_rows"] for leaf, a in arrays.items() if "state_rows" in a},
            copies=plan.copies,
            zero_fills=plan.zero_fills,
        )


def pattern_of(leaf: kvleaf.KVLeafRegion) -> kvleaf.AccessPattern:
    return leaf.group_id.pattern


@dataclass
class Columns:
    """What a layer reads: the same for all layers of a leaf."""

    first: int  # column that the first entry stands in
    blocks: torch.Tensor  # [rows, entries]
    slots: torch.Tensor  # [rows, entries] in the block


@dataclass
class Batch:
    """Rows of a step that run as one forward."""

    step: Step
    rows: list[int]  # indices into step.rows
    new_tokens: int
    skip: int = 0  # of the rows' tokens in this step, computed by forwards before this one
    encoder_tokens: int = 0  # of every row; 0: no encoder
    encoder_filled: bool = False  # the encoder's pages of every row are written
    _columns: dict[str, Columns] = field(default_factory=dict)
    _targets: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self):
        self.starts = self.step.starts[self.rows].astype(np.int64) + self.skip
        self.past = int(self.starts.max())
        self.pads = self.past - self.starts

    @property
    def has_past(self) -> bool:
        """Whether the rows go on from states; rows of one forward agree in that."""
        return self.past > 0

    def position_ids(self) -> torch.Tensor:
        """[rows, new_tokens]"""
        return torch.from_numpy(self.starts)[:, None] + torch.arange(self.new_tokens)

    def attention_mask(self) -> torch.Tensor | None:
        """[rows, past + new_tokens], 0 where a row has no token; None where every row has all."""
        if not self.pads.any():
            return None
        columns = torch.arange(self.past + self.new_tokens)
        return (columns >= torch.from_numpy(self.pads)[:, None]).long()

    def columns(self, leaf: kvleaf.AttentionLeaf, span: int = 0) -> Columns:
        """The entries that the new tokens of each row can reach, and their own. At least `span`
        columns, if there are as many: with fewer than a window or chunk has, transformers may leave
        out its mask.
        """
        if leaf.leaf_id not in self._columns:
            pattern = pattern_of(leaf)
            if pattern.head:
                raise ValueError(
                    f"leaf {leaf.leaf_id} keeps {pattern.head} sinks; no mask reaches them"
                )
            begins = np.array([pattern.tail_begin(int(n)) for n in self.starts])
            first = int((self.pads + begins).min())
            first = max(0, min(first, self.past + self.new_tokens - span))
            # In front of what a row needs stands the null block, whose zeros are masked.
            tokens = np.arange(first, self.past + self.new_tokens) - self.pads[:, None]
            table = self.step.tables[leaf.leaf_id][self.rows]
            pages = np.maximum(tokens, 0) // leaf.tokens_per_page
            blocks = np.take_along_axis(table, pages, axis=1)
            blocks = np.where(tokens >= begins[:, None], blocks, 0)
            self._columns[leaf.leaf_id] = Columns(
                first,
                torch.from_numpy(blocks.astype(np.int64)),
                torch.from_numpy(tokens % leaf.tokens_per_page),
            )
        return self._columns[leaf.leaf_id]

    def targets(self, leaf: kvleaf.AttentionLeaf) -> tuple[torch.Tensor, torch.Tensor]:
        """(blocks, slots) [rows * new_tokens]: where the new entries go."""
        if leaf.leaf_id not in self._targets:
            mapping = self.step.slots[leaf.leaf_id]
            begins = self.step.offsets[self.rows] + self.skip
            slots = np.concatenate([mapping[b : b + self.new_tokens] for b in begins])
            per_page = leaf.slots_per_page()
            self._targets[leaf.leaf_id] = (
                torch.from_numpy(slots // per_page),
                torch.from_numpy(slots % per_page),
            )
        return self._targets[leaf.leaf_id]

    def encoder_columns(self, leaf: kvleaf.CrossAttentionLeaf) -> tuple[torch.Tensor, torch.Tensor]:
        """(blocks, slots) [rows, encoder_tokens]: where the encoder's entries lie."""
        tokens = np.arange(self.encoder_tokens)
        table = self.step.tables[leaf.leaf_id][self.rows]
        blocks = table[:, tokens // leaf.tokens_per_page].astype(np.int64)
        slots = np.broadcast_to(tokens % leaf.tokens_per_page, blocks.shape)
        return torch.from_numpy(blocks), torch.from_numpy(slots.copy())

    def state_blocks(self, leaf: kvleaf.RecurrentStateLeaf) -> torch.Tensor:
        """[rows]"""
        return torch.from_numpy(self.step.states[leaf.leaf_id][self.rows].astype(np.int64))
