"""The block mask of engine `flex`, kept in place: which blocks of slots each tile of rows reads.

Lists and masks lie in tensors that are allocated once. A pass writes to them only what has changed
in the views since the tile was last used, and a few numbers per tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from stretto.errors import Unsupported
from stretto.masks import MaskMod

TILE_ROWS = 128
"""Rows of a tile where some run has several; also FlexAttention's own block of queries."""


def page_size_error(block_size: int, reason: str) -> Unsupported:
    return Unsupported(
        f"engine 'flex' needs pages of whole blocks of {block_size} slots, {reason}; set the page "
        f"size to {block_size} or a multiple of it"
    )


class BlockList:
    """The blocks of slots one view sees, in the order of a row of `kv_indices`.

    It stands in for a cursor's bitmap: to show or hide slots is to show or hide their blocks, which
    are right as wholes since a block holds one segment. `changes` are the (place, block) touched.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: list[int] = []
        self.places: dict[int, int] = {}
        self.changes: list[tuple[int, int]] = []

    def __setitem__(self, slots: list[int], shown: bool) -> None:
        for block in dict.fromkeys(slot // self.block_size for slot in slots):
            if shown and block not in self.places:
                self.places[block] = len(self.blocks)
                self.changes.append((len(self.blocks), block))
                self.blocks.append(block)
            elif not shown and block in self.places:
                place, last = self.places.pop(block), self.blocks.pop()
                if last != block:
                    self.blocks[place], self.places[last] = last, place
                self.changes.append((place, block))


class Tables:
    """What FlexAttention reads, for up to `num_tiles` tiles over `num_blocks` blocks.

    A row attends to a slot iff its tile lists the slot's block, and the slot lies in another
    segment's written part, or in the tile's own segment no later than `row_last`. Block
    `num_blocks - 1` is scratch: padding writes there and sees it, so that no row sees nothing.
    """

    def __init__(self, num_tiles: int, num_blocks: int, block_size: int, device: Any) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.num_tiles, self.num_blocks, self.block_size = num_tiles, num_blocks, block_size
        self.scratch = scratch = num_blocks - 1
        self.kv_num_blocks = zeros(num_tiles, 1, 1) + 1
        self.kv_indices = zeros(num_tiles, 1, 1, num_blocks)
        self.kv_indices[..., 0] = scratch
        self.listed = zeros(num_tiles, num_blocks).bool()
        self.listed[:, scratch] = True
        self.tile_owner = zeros(num_tiles) + scratch
        self.row_last = zeros(num_tiles, TILE_ROWS)
        self.block_facts = zeros(3, num_blocks)  # index of first and last token, owner
        self.block_facts[2] = scratch
        # no block is full: all go through the mask. But C++ is not generated without these
        self._no_full = zeros(num_tiles, 1, 1), zeros(num_tiles, 1, 1, num_blocks)
        self._held: list[tuple[BlockList | None, int]] = [(None, 0)] * num_tiles
        self._staged: list[tuple[int, int, list[int]]] = []
        self._cleared: list[int] = []
        self._indices: list[tuple[int, int, int]] = []
        self._listings: list[tuple[int, int, bool]] = []
        self._facts: dict[int, tuple[int, int, int]] = {}
        self._masks: dict[tuple[int, int], BlockMask] = {}
        self.mask_mod = self._mask_mod()

    def _mask_mod(self) -> MaskMod:
        size, listed, facts = self.block_size, self.listed, self.block_facts
        owner, row_last = self.tile_owner, self.row_last
        # a lambda, since FlexAttention traces it and no checker of types may wrap it
        return lambda tile, head, row, slot: (
            listed[tile, slot // size]
            & (
                facts[0, slot // size] + slot % size
                <= torch.where(
                    facts[2, slot // size] == owner[tile],
                    row_last[tile, row],
                    facts[1, slot // size],
                )
            )
        )

    def mask(self, num_tiles: int, tile_rows: int) -> BlockMask:
        """The block mask of the first tiles: views of these tables, made once per size."""
        key = num_tiles, tile_rows
        if key not in self._masks:
            no_counts, no_blocks = self._no_full
            self._masks[key] = BlockMask(
                seq_lengths=(tile_rows, self.num_blocks * self.block_size),
                kv_num_blocks=self.kv_num_blocks[:num_tiles],
                kv_indices=self.kv_indices[:num_tiles],
                full_kv_num_blocks=no_counts[:num_tiles],
                full_kv_indices=no_blocks[:num_tiles],
                q_num_blocks=None,
                q_indices=None,
                full_q_num_blocks=None,
                full_q_indices=None,
                BLOCK_SIZE=(TILE_ROWS, self.block_size),
                mask_mod=self.mask_mod,
            )
        return self._masks[key]

    def describe(self, slots: list[int], start: int, stop: int) -> None:
        """Notes which tokens of a segment lie in the blocks of its tokens `start`…`stop`.

        `slots`: the segment's. Raises `Unsupported` if a block is not the segment's alone.
        """
        size = self.block_size
        for first in range(start - start % size, stop, size):
            last = min(first + size, stop) - 1
            if slots[first] % size or slots[last] - slots[first] != last - first:
                raise page_size_error(size, "but a segment starts or breaks within one")
            self._facts[slots[first] // size] = first, last, slots[0] // size

    def start(self) -> None:
        """Before a pass. If the last one broke off midway, no tile's list is trusted any more."""
        if self._staged:
            self._forget()
            self._held = [(None, 0)] * self.num_tiles

    def stage(self, blocks: BlockList, owner: int, lasts: list[int]) -> None:
        """The pass's next tile: its list is `blocks` as it is now, taken over by what differs."""
        tile = len(self._staged)
        self._staged.append((len(blocks.blocks), owner, lasts))
        held, version = self._held[tile]
        changes = blocks.changes[version:]
        if held is not blocks:
            self._cleared.append(tile)
            changes = list(enumerate(blocks.blocks))
        for place, block in changes:
            if place < len(blocks.blocks):
                self._indices.append((tile, place, blocks.blocks[place]))
            self._listings.append((tile, block, block in blocks.places))
        self._held[tile] = blocks, len(blocks.changes)

    def upload(self, num_tiles: int, tile_rows: int) -> None:
        """Writes what has changed, and the numbers of the staged tiles, padded to `num_tiles`."""

        def put(values: Sequence[Any]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.listed.device)

        if self._cleared:
            self.listed[put(self._cleared)] = False
        if self._indices:
            tile, place, block = put(self._indices).T
            self.kv_indices[tile, 0, 0, place] = block
        if self._listings:
            tile, block, shown = put(self._listings).T
            self.listed[tile, block] = shown.bool()
        if self._facts:
            self.block_facts[:, put(list(self._facts))] = put(list(self._facts.values())).T
        padding = num_tiles - len(self._staged)
        counts, owners, lasts = zip(*self._staged, *padding * [(1, self.scratch, [0])], strict=True)
        self.kv_num_blocks[:num_tiles, 0, 0] = put(counts)
        self.tile_owner[:num_tiles] = put(owners)
        filled = [last + [last[-1]] * (tile_rows - len(last)) for last in lasts]
        self.row_last[:num_tiles, :tile_rows] = put(filled)
        self._forget()

    def _forget(self) -> None:
        self._staged, self._cleared, self._indices, self._listings = [], [], [], []
        self._facts = {}
