"""Judge `likelihood`: how likely a reference model finds an answer, its length taken out.

A proxy, not an opinion: it tells fluent, on-topic text from broken text at no cost, and cannot tell
a true statement from a false one. What it measures of an answer's rendered text is the mean
log-prob a token, given the prompt in the reference model's chat template. Two known faults of that
mean are taken out: tokens that repeat a long run of the same answer are not counted (loops would
look likely), and the effect of length, estimated from answers to the same prompts, is subtracted.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from stretto.eval.judges.base import Comparison, Identity, Measure, Question, Verdict
from stretto.eval.judges.standard import Point, adjusted, length_slope, standardised

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.lm import LM

REPEAT_TOKENS = 8
"""A token that ends a run of this many tokens seen before in the same answer is not counted."""

DEFAULT_BATCH_TOKENS = 2048
LOGITS_ROWS = 256


class LikelihoodJudge:
    """Judges by the model of an `LM` (its Hugging Face model; threads are not used).

    `batch_tokens` bounds prompt and answer tokens of a pass, padding included.
    """

    def __init__(
        self, lm: LM, *, batch_tokens: int = DEFAULT_BATCH_TOKENS, max_tokens: int | None = None
    ) -> None:
        self._lm = lm
        self._model = lm.model
        self._batch_tokens = batch_tokens
        room = int(lm.engine.max_positions)
        self._max_tokens = room if max_tokens is None else min(room, max_tokens)
        mark = weights_fingerprint(self._model)
        settings = {"repeat_tokens": REPEAT_TOKENS, "length": "pooled slope on log tokens, ridge 1"}
        self._identity = str(Identity("likelihood", f"{lm.name}#{mark}", settings))

    @property
    def identity(self) -> str:
        return self._identity

    def measure(self, questions: Sequence[Question]) -> Iterator[list[Measure] | None]:
        """`logprob`: the mean over counted tokens. `num_tokens`: all; `num_repeated`: those not
        counted; `cut`: tokens beyond the model's positions, not counted either."""
        for question in questions:
            texts = [(question.prompt, text) for text in question.candidates]
            yield self._measured(texts)

    def qualities(self, measured: Sequence[Sequence[Measure]]) -> list[list[float | None]]:
        """Length-controlled log-probs, standardised within each question: mean 0, deviation 1.

        0 for all where they do not differ; None for an empty answer.
        """
        points = [[_point(m) for m in row] for row in measured]
        slope = length_slope([[p for p in row if p is not None] for row in points])
        return [standardised(row, slope) for row in points]

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict | None]:
        """The likelier answer is better, length taken out by the slope over all comparisons; the
        confidence of a difference d is tanh(d / s), s the root mean square difference."""
        texts = [(c.prompt, t) for c in comparisons for t in (c.a, c.b)]
        points = [_point(m) for m in self._measured(texts)]
        pairs = list(zip(points[::2], points[1::2], strict=True))
        whole = [[a, b] for a, b in pairs if a is not None and b is not None]
        slope = length_slope(whole)
        gaps = [adjusted(a, slope) - adjusted(b, slope) for a, b in whole]
        scale = math.sqrt(sum(g * g for g in gaps) / len(gaps)) if gaps else 0.0
        verdicts: list[Verdict | None] = []
        for a, b in pairs:
            if a is None or b is None:
                verdicts.append(_empty_verdict(a, b))
                continue
            gap = adjusted(a, slope) - adjusted(b, slope)
            preference = math.tanh(gap / scale) if scale else 0.0
            details = {"a": a.value, "b": b.value, "length_slope": slope, "gap": gap}
            verdicts.append(Verdict.of(preference, details))
        return verdicts

    def close(self) -> None:
        pass

    # -- measuring -----------------------------------------------------------------------------

    def _measured(self, texts: Sequence[tuple[str, str]]) -> list[Measure]:
        rows = [self._row(prompt, text) for prompt, text in texts]
        measures: list[Measure] = [{} for _ in rows]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]) + len(rows[i][1]))
        for batch in self._batches(order, rows):
            found = token_logprobs(self._model, [rows[i] for i in batch])
            for i, logprobs in zip(batch, found, strict=True):
                measures[i] = _measure(rows[i][1], logprobs, rows[i][2])
        return measures

    def _row(self, prompt: str, text: str) -> tuple[list[int], list[int], int]:
        """Prompt ids, answer ids that fit, and how many do not."""
        before = self._lm.encode(self._lm.chat(prompt))
        ids = self._lm.vocabulary.encode(text)
        room = max(0, self._max_tokens - len(before))
        return before, ids[:room], max(0, len(ids) - room)

    def _batches(
        self, order: Sequence[int], rows: Sequence[tuple[list[int], list[int], int]]
    ) -> Iterator[list[int]]:
        batch: list[int] = []
        for i in order:  # rising lengths: the newest is the widest
            width = len(rows[i][0]) + len(rows[i][1])
            if batch and width * (len(batch) + 1) > self._batch_tokens:
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch


def token_logprobs(
    model: Any, rows: Sequence[tuple[list[int], list[int], int]]
) -> list[list[float]]:
    """The float32 log-prob of each answer token given all before it, one list a row.

    Rows are padded on the right, where causal attention does not look.
    """
    import torch

    width = max(len(before) + len(ids) for before, ids, _ in rows)
    first = max(0, min(len(before) for before, _, _ in rows) - 1)
    tokens = torch.zeros((len(rows), width), dtype=torch.long)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for i, (before, ids, _) in enumerate(rows):
        size = len(before) + len(ids)
        tokens[i, :size] = torch.tensor([*before, *ids])
        mask[i, :size] = 1
    device = model.device
    with torch.inference_mode():
        logits = model(
            input_ids=tokens.to(device),
            attention_mask=mask.to(device),
            use_cache=False,
            logits_to_keep=torch.arange(first, width, device=device),
        ).logits
        return [
            _picked(logits[i, len(before) - 1 - first :], ids)
            for i, (before, ids, _) in enumerate(rows)
        ]


def _picked(logits: Tensor, ids: list[int]) -> list[float]:
    """Log-probs of `ids`, row j predicting ids[j]; in parts, since a float32 copy is large."""
    import torch

    found: list[float] = []
    for at in range(0, len(ids), LOGITS_ROWS):
        wanted = torch.tensor(ids[at : at + LOGITS_ROWS], device=logits.device)
        part = logits[at : at + len(wanted)].float()
        chosen = part.gather(-1, wanted[:, None])[:, 0]
        found += (chosen - part.logsumexp(-1)).tolist()
    return found


def weights_fingerprint(model: Any) -> str:
    """12 hex digits of a sample of every weight, as bfloat16: the same for copies and dtypes."""
    import torch

    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        flat = weight.detach().reshape(-1)
        step = max(1, flat.numel() // 64)
        sample = flat[::step][:64].to(torch.bfloat16).float().cpu()
        digest.update(name.encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:12]


def repeated(ids: Sequence[int], size: int = REPEAT_TOKENS) -> list[bool]:
    """Whether each token ends a run of `size` tokens that has ended at an earlier token too."""
    seen: set[tuple[int, ...]] = set()
    flags = [False] * min(len(ids), size - 1)
    for end in range(size, len(ids) + 1):
        run = tuple(ids[end - size : end])
        flags.append(run in seen)
        seen.add(run)
    return flags


def _measure(ids: list[int], logprobs: list[float], cut: int) -> Measure:
    flags = repeated(ids)
    counted = [value for value, again in zip(logprobs, flags, strict=True) if not again]
    mean = sum(counted) / len(counted) if counted else None
    return {"logprob": mean, "num_tokens": len(ids), "num_repeated": sum(flags), "cut": cut}


def _point(measure: Measure) -> Point | None:
    value = measure.get("logprob")
    if value is None:
        return None
    counted = measure["num_tokens"] - measure["num_repeated"]
    return Point(float(value), math.log(counted))


def _empty_verdict(a: Point | None, b: Point | None) -> Verdict:
    """An empty answer is worse than any other, for sure."""
    preference = float(a is not None) - float(b is not None)
    return Verdict.of(preference, {"empty": [a is None, b is None]})
