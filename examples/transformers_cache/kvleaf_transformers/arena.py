"""The memory itself: one tensor of bytes, tiled as kvleaf's geometry says."""

import math
from collections.abc import Iterable, Sequence

import torch
from kvleaf import Geometry


class Arena:
    """All pages of all leaves. Block b of a leaf lies at base_offset + b * page_stride.

    Block 0 of every leaf is the null block: zeros that are read where nothing is held, never
    written.
    """

    def __init__(self, geometry: Geometry, device: torch.device | str = "cpu"):
        self.geometry = geometry
        self._leaves = {leaf.name: leaf for leaf in geometry.leaves}
        size = -(-geometry.arena_bytes // 16) * 16  # so that it is a whole number of any element
        self.bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        self._pages = {
            name: self.view(name, torch.uint8, (leaf.bytes_per_page,))
            for name, leaf in self._leaves.items()
        }

    def view(
        self, leaf: str, dtype: torch.dtype, shape: Sequence[int], offset: int = 0
    ) -> torch.Tensor:
        """[blocks + 1, *shape] of dtype: what lies `offset` bytes into each page; no copy."""
        where = self._leaves[leaf]
        itemsize = dtype.itemsize
        if offset + math.prod(shape) * itemsize > where.bytes_per_page:
            raise ValueError(
                f"leaf {leaf}: {math.prod(shape)} elements of {dtype} at byte {offset} do not "
                f"fit its page of {where.bytes_per_page} bytes"
            )
        for name, value in (
            ("base_offset + offset", where.base_offset + offset),
            ("page_stride", where.page_stride),
        ):
            if value % itemsize:
                raise ValueError(
                    f"leaf {leaf}: {name} is {value}, no multiple of the {itemsize} bytes of "
                    f"{dtype}"
                )
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        return self.bytes.view(dtype).as_strided(
            (where.blocks + 1, *shape),
            (where.page_stride // itemsize, *strides),
            (where.base_offset + offset) // itemsize,
        )

    def copy(self, copies: Iterable[tuple[str, int, int]]) -> None:
        """(leaf, src, dst) each. All sources are read before any target is written."""
        by_leaf: dict[str, list[tuple[int, int]]] = {}
        for leaf, src, dst in copies:
            by_leaf.setdefault(leaf, []).append((src, dst))
        read = {
            leaf: self._pages[leaf][[src for src, _ in pairs]] for leaf, pairs in by_leaf.items()
        }
        for leaf, pairs in by_leaf.items():
            self._pages[leaf][[dst for _, dst in pairs]] = read[leaf]

    def clear(self, fills: Iterable[tuple[str, int]]) -> None:
        """(leaf, block) each: zeros."""
        by_leaf: dict[str, list[int]] = {}
        for leaf, block in fills:
            by_leaf.setdefault(leaf, []).append(block)
        for leaf, blocks in by_leaf.items():
            self._pages[leaf][blocks] = 0
