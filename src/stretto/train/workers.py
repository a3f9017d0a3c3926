"""One process or several: what `torchrun` started, and sums over them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stretto.train.objective import Tally


@dataclass(frozen=True)
class Workers:
    """The processes of a run. Packs are dealt out in turn; only the first writes files."""

    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[Any]) -> list[tuple[int, Any]]:
        """This process's items, with their numbers among all."""
        return [(k, items[k]) for k in range(self.rank, len(items), self.count)]

    def sum_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor becomes its sum over the processes; all give tensors of the same shapes."""
        if self.count > 1:
            for tensor in tensors:
                torch.distributed.all_reduce(tensor)

    def sum_tally(self, tally: Tally) -> Tally:
        """The tally of all processes together, each number exact."""
        if self.count == 1:
            return tally
        total = Tally()
        own = [tally.loss, tally.num_terms, tally.num_tokens, tally.shares]
        for loss, num_terms, num_tokens, shares in self._gather(own):
            total.loss += loss
            total.num_terms += num_terms
            total.num_tokens += num_tokens
            for name, (value, weight) in shares.items():
                before = total.shares.get(name, (0.0, 0.0))
                total.shares[name] = before[0] + value, before[1] + weight
        return total

    def _gather(self, value: Any) -> list[Any]:
        """Each process's JSON value."""
        device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.count, dtype=torch.long, device=device)
        sizes[self.rank] = len(data)
        torch.distributed.all_reduce(sizes)
        table = torch.zeros(self.count, int(sizes.max()), dtype=torch.uint8, device=device)
        table[self.rank, : len(data)] = data.to(device)
        torch.distributed.all_reduce(table)
        rows = zip(table.cpu(), sizes.tolist(), strict=True)
        return [json.loads(bytes(row[:size].tolist())) for row, size in rows]

    def wait(self) -> None:
        if self.count > 1:
            torch.distributed.barrier()


@contextmanager
def joined(device: str) -> Iterator[Workers]:
    """The processes that `torchrun` started, for models on a device: over NCCL on GPUs, each
    having its own as "cuda", else over gloo. This one alone if there are no others."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1 or torch.distributed.is_initialized():
        yield Workers()
        return
    on_gpus = device.startswith("cuda") and torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.distributed.init_process_group("nccl" if on_gpus else "gloo")
    try:
        yield Workers(torch.distributed.get_rank(), count)
    finally:
        torch.distributed.destroy_process_group()
