"""Memory for weights, in huge pages where the system gives them, and for keys and values.

A pass reads hundreds of megabytes of weights; in pages of 4 KiB each takes an address translation
of its own. A pool of keys and values is in small pages: it has a row for each layer and head, so
that one token would be given a huge page of each, hundreds of megabytes that are cleared first.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 * 2**20
CHUNK_BYTES = 32 * HUGE_PAGE_BYTES
ALIGNMENT = 64
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory has huge pages of its own rules


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A zero-filled tensor, which takes memory as it is written to, a small page at a time. Raises
    `MemoryError` if there is not so much address space."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return _mapped(num_bytes)[:num_bytes].view(dtype).view(*shape)


class Arena:
    """Gives out memory piece by piece, so that small tensors share huge pages. A piece lives on
    its own; there is no giving back but of all that share a chunk."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def copy_of(self, values: Tensor) -> Tensor:
        """A contiguous copy that begins at a cache line."""
        num_bytes = values.numel() * values.element_size()
        if self._used + num_bytes > len(self._chunk):
            self._chunk, self._used = _mapped(max(num_bytes, CHUNK_BYTES), huge=True), 0
        piece = self._chunk[self._used : self._used + num_bytes]
        self._used += num_bytes + -num_bytes % ALIGNMENT
        return piece.view(values.dtype).view(values.shape).copy_(values)


def _mapped(num_bytes: int, *, huge: bool = False) -> Tensor:
    """Zeroed bytes, at least so many, that begin at a page."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        memory = mmap.mmap(-1, num_bytes + -num_bytes % HUGE_PAGE_BYTES, flags=PRIVATE)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{num_bytes} bytes cannot be had: {error}") from error
    name = "MADV_HUGEPAGE" if huge else "MADV_NOHUGEPAGE"
    if (advice := getattr(mmap, name, None)) is not None:
        with suppress(OSError):  # a kernel without huge pages: small ones do
            memory.madvise(advice)
    return torch.frombuffer(memory, dtype=torch.uint8)
