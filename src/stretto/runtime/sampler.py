"""Drawing tokens. Random numbers come from a counter, never from global state or schedule order."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep everything.

    Order: repetition penalty (Keskar et al. 2019, section 4.1), temperature, top-k, top-p.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0


def uniform(seed: int, sample: int, thread: str, *counter: int | str) -> float:
    """The random number in [0, 1) of a token of a thread of sample `sample`, by its counter: its
    index, and what else tells it from another draw of the same thread."""
    key = "/".join(map(str, (seed, sample, thread, *counter))).encode()
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def draw(
    logits: Float[Tensor, "vocab"],
    sampling: Sampling,
    number: float,
    seen: set[int] | None = None,
) -> int:
    """Draws a token id from float32 logits, illegal ones already at -inf.

    `number` in [0, 1) picks from the distribution by its cumulative sum in id order; `seen` are
    the ids that the repetition penalty is about. Ties go to the lowest id when greedy. This is
    the specification of `quick.quick_draw`, which is what decodes.
    """
    if sampling.repetition_penalty != 1.0 and seen:
        logits = penalised(logits, sampling.repetition_penalty, seen)
    if sampling.temperature == 0:
        return int(logits.argmax())
    scaled = (logits.double() - logits.max()) / sampling.temperature  # no infinity but of illegals
    if 0 < sampling.top_k < len(scaled):
        kth = torch.topk(scaled, sampling.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < kth, -torch.inf)
    probabilities = torch.softmax(scaled, dim=-1)
    if sampling.top_p < 1:
        probabilities = _nucleus(probabilities, sampling.top_p)
    cumulative = probabilities.cumsum(dim=-1)
    target = torch.tensor(number * float(cumulative[-1]), dtype=cumulative.dtype)
    index = int(torch.searchsorted(cumulative, target, right=True))
    return min(index, int(probabilities.nonzero()[-1]))


def penalised(
    logits: Float[Tensor, "vocab"], penalty: float, seen: set[int]
) -> Float[Tensor, "vocab"]:
    """A copy with the penalty applied to the `seen` ids; what is at -inf stays there."""
    index = torch.from_numpy(np.fromiter(seen, dtype=np.int64, count=len(seen)))
    values = logits[index].double()
    limit = torch.finfo(logits.dtype).max  # a legal token stays legal, an illegal one illegal
    changed = torch.where(values > 0, values / penalty, values * penalty).clamp(-limit, limit)
    logits = logits.clone()
    logits[index] = changed.masked_fill(values == -torch.inf, -torch.inf).to(logits.dtype)
    return logits


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Keeps the fewest most likely tokens whose probabilities sum to at least `top_p`."""
    ordered, index = probabilities.sort(descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    drop = index[before >= top_p]
    drop = drop[drop != index[0]]
    return probabilities.index_fill(0, drop, 0.0)
