"""What rounded weights cost: perplexity and greedy agreement over texts, against float32."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stretto.bench.pairs import NUM_RESAMPLES, Report, rounded
from stretto.errors import InvalidInput
from stretto.recorder import MAIN, Recorder
from stretto.runtime.memory import RequestMemory
from stretto.runtime.pool import Pool
from stretto.runtime.views import Run, View

if TYPE_CHECKING:
    from jaxtyping import Float
    from numpy.typing import NDArray
    from torch import Tensor

    from stretto.engines.base import Engine

REFERENCE = "hf float32"
SIDES = (REFERENCE, "hf bfloat16", "fused float32", "fused bfloat16", "fused int8")
"""Engine and dtype of each side; the first is what the others are compared with."""

DEFINITIONS = {
    "side": "engine and dtype; the same weights, rounded to that dtype",
    "perplexity": "exp of the mean negative log-likelihood of each token but the first of a "
    "window, given those before it in the window",
    "ratio": "perplexity / that of hf float32",
    "to_bf16": "perplexity / that of the same engine in bfloat16; null without one",
    "agreement": "share of tokens at which the most likely next token is that of hf float32",
    "kl": "mean Kullback-Leibler divergence of the next token, from hf float32, in nats",
    "low, high": "percentile bootstrap 95% interval over windows",
    "weight_mb": "10^6 bytes of weights that a pass reads",
    "window": "so many tokens in a row of one text; shorter texts are left out",
}


@dataclass(frozen=True)
class Scores:
    """Of each window: sums over its predicted tokens."""

    nll: NDArray[np.float64]
    agree: NDArray[np.float64]
    kl: NDArray[np.float64]


def read_texts(path: Path, field: str | None) -> list[str]:
    """The texts of a file: a field of each JSON line, or the whole file as one text.

    Raises `InvalidInput` for what cannot be read.
    """
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"cannot read {path}: {error}; name a UTF-8 file") from None
    if field is None:
        return [content]
    texts = []
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[field]
        except (ValueError, KeyError, TypeError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise InvalidInput(
                f"line {number} of {path} is no JSON object with a text {field!r}; correct it, or "
                "name another --field"
            )
        texts.append(text)
    return texts


def windows_of(texts: Sequence[list[int]], size: int, count: int) -> list[list[int]]:
    """The first `size` tokens of each text that is long enough, at most `count` of them; of a
    single text, one window after the other. Raises `InvalidInput` if there is none."""
    if len(texts) == 1:
        (only,) = texts
        found = [only[i : i + size] for i in range(0, len(only) - size + 1, size)]
    else:
        found = [ids[:size] for ids in texts if len(ids) >= size]
    if not found:
        raise InvalidInput(f"no text has {size} tokens; give longer texts or a smaller --window")
    return found[:count]


def logits_of(engine: Engine, ids: list[int]) -> Float[Tensor, "tokens vocab"]:
    """Logits after each token of a plain text, in one pass."""
    recorder = Recorder(ids, "main")
    thread = recorder.threads[MAIN]
    (segment,) = [s for s in recorder.segments if s.tokens]
    memory = RequestMemory()
    memory.extend(Pool(len(ids)), [{segment.handle: len(ids)}])
    slots = memory.slots[segment.handle].slots
    version = thread.unfed[0].view_version
    view = View(thread, memory)
    run = Run(view, version, segment, 0, ids, segment.positions, slots, tuple(range(len(ids))))
    return engine.forward([run])


def score(
    engines: dict[str, Engine], windows: Sequence[list[int]], report: Report
) -> dict[str, Scores]:
    """Scores of each side; `engines` has `REFERENCE`."""
    sums: dict[str, list[tuple[float, float, float]]] = {side: [] for side in engines}
    for number, ids in enumerate(windows, 1):
        base = torch.log_softmax(logits_of(engines[REFERENCE], ids)[:-1], dim=-1)
        targets = torch.tensor(ids[1:])[:, None]
        for side, engine in engines.items():
            own = base
            if side != REFERENCE:
                own = torch.log_softmax(logits_of(engine, ids)[:-1], dim=-1)
            nll = -own.gather(1, targets).double().sum()
            agree = (own.argmax(-1) == base.argmax(-1)).sum()
            kl = (base.exp() * (base - own)).double().sum()
            sums[side].append((float(nll), float(agree), float(kl)))
        if number % 8 == 0:
            report(f"{number} of {len(windows)} windows")
    return {side: Scores(*np.array(rows).T) for side, rows in sums.items()}


def summarise(
    scores: dict[str, Scores], window: int, weight_bytes: dict[str, int], seed: int
) -> list[dict[str, Any]]:
    """A row per side; `weight_bytes` of each."""
    tokens = window - 1
    base = scores[REFERENCE]
    rows = []
    for side, own in scores.items():
        engine = side.split()[0]
        half = scores.get(f"{engine} bfloat16")
        ratio = _interval((own.nll - base.nll) / tokens, seed)
        to_half = None if half is None else _interval((own.nll - half.nll) / tokens, seed)
        rows.append(
            rounded(
                {
                    "side": side,
                    "windows": len(own.nll),
                    "perplexity": math.exp(own.nll.mean() / tokens),
                    "ratio": math.exp(ratio[0]),
                    "low": math.exp(ratio[1]),
                    "high": math.exp(ratio[2]),
                    "to_bf16": None if to_half is None else math.exp(to_half[0]),
                    "to_bf16_low": None if to_half is None else math.exp(to_half[1]),
                    "to_bf16_high": None if to_half is None else math.exp(to_half[2]),
                    "agreement": own.agree.mean() / tokens,
                    "kl": max(0.0, own.kl.mean() / tokens),  # rounding can take it below
                    "weight_mb": weight_bytes[side] / 1e6,
                }
            )
        )
    return rows


def records_of(scores: dict[str, Scores], window: int) -> list[dict[str, Any]]:
    """One record per side and window: means over its tokens."""
    return [
        {
            "side": side,
            "window": number,
            "nll": own.nll[number] / (window - 1),
            "agreement": own.agree[number] / (window - 1),
            "kl": own.kl[number] / (window - 1),
        }
        for side, own in scores.items()
        for number in range(len(own.nll))
    ]


def _interval(values: NDArray[np.float64], seed: int) -> tuple[float, float, float]:
    """Mean, with the percentile bootstrap's 95% interval over windows."""
    rng = np.random.default_rng(seed)
    means = values[rng.integers(len(values), size=(NUM_RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(values.mean()), float(low), float(high)
