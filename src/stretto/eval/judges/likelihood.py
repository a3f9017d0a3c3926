"""Judge `likelihood`: how likely a reference model finds an answer, its length taken out.

A proxy, not an opinion: it tells fluent, on-topic text from broken text at no cost, and cannot tell
a true statement from a false one. What it measures of an answer's rendered text is the mean
log-prob a token, given the prompt in the reference model's chat template. Three faults of that mean
are mended: tokens that repeat a long run of the same answer are not counted (loops would look
likely); the effect of length, estimated from answers to the same prompts, is subtracted; and since
a mean cannot see what is missing, an answer shorter than what it is held against pays for it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from stretto.eval.judges.base import Comparison, Identity, Measure, Question, Verdict
from stretto.eval.judges.scale import Gap, Scale
from stretto.eval.judges.standard import Point, length_slope, standardised

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.lm import LM

REPEAT_TOKENS = 8
"""A token that ends a run of this many tokens seen before in the same answer is not counted."""

WORST_BREVITY = -3.0
"""Of `brevity`, in deviations of the score: a quarter of the length, or less."""

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
        settings = {
            "repeat_tokens": REPEAT_TOKENS,
            "length": "pooled slope on log tokens, ridge 1",
            "brevity": f"1 - r/c, from {WORST_BREVITY:g}",
        }
        self._identity = str(Identity("likelihood", f"{lm.name}#{mark}", settings))

    @property
    def identity(self) -> str:
        return self._identity

    def measure(self, questions: Sequence[Question]) -> Iterator[list[Measure] | None]:
        """`logprob`: the mean over counted tokens, null if there are none. `num_tokens`: those that
        fit the model's positions; `num_repeated`: those of them that are not counted; `cut`: tokens
        that do not fit. `against`: counted tokens of the baseline's answer, null if there is none.
        """
        for question in questions:
            found = self._measured([(question.prompt, text) for text in question.candidates])
            against = self._num_counted(question.opponents.get("baseline"))
            yield [{**measure, "against": against} for measure in found]

    def _num_counted(self, text: str | None) -> int | None:
        return None if text is None else repeated(self._lm.vocabulary.encode(text)).count(False)

    def qualities(self, measured: Sequence[Sequence[Measure]]) -> list[list[float | None]]:
        """Length-controlled log-probs, standardised within each question (mean 0, deviation 1; 0
        for all where they do not differ), plus `brevity` against the baseline. None for an answer
        that is empty, or of which nothing fits the model's positions after the prompt."""
        points = [[_point(m) for m in row] for row in measured]
        slope = length_slope([[p for p in row if p is not None] for row in points])
        return [
            [
                None if z is None else z + brevity(length(m), m.get("against"))
                for z, m in zip(standardised(own, slope), row, strict=True)
            ]
            for own, row in zip(points, measured, strict=True)
        ]

    def compare(self, comparisons: Sequence[Comparison]) -> list[Verdict | None]:
        """The likelier answer is better, length taken out by the slope over all comparisons.

        The preference is that of a `Scale` over all comparisons: tanh(d/s + e), d the difference, s
        its root mean square, e the difference in `brevity` of each against the other. No verdict
        where the prompt leaves no room for either answer.
        """
        texts = [(c.prompt, t) for c in comparisons for t in (c.a, c.b)]
        found = self._measured(texts)
        pairs = list(zip(found[::2], found[1::2], strict=True))
        gaps = [_gap(a, b) for a, b in pairs]
        scale = Scale.of([gap for gap in gaps if gap is not None])
        return [_verdict(a, b, gap, scale) for (a, b), gap in zip(pairs, gaps, strict=True)]

    def close(self) -> None:
        pass

    # -- measuring -----------------------------------------------------------------------------

    def _measured(self, texts: Sequence[tuple[str, str]]) -> list[Measure]:
        rows = [self._row(prompt, text) for prompt, text in texts]
        measures = [_measure([], [], cut) for _, _, cut in rows]
        read = [i for i, (_, ids, _) in enumerate(rows) if ids]
        order = sorted(read, key=lambda i: len(rows[i][0]) + len(rows[i][1]))
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

    A row is prompt ids, answer ids, and how many more the answer has. Rows are padded on the right,
    where causal attention does not look.
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


def brevity(num_tokens: int, against: int | None) -> float:
    """0 for an answer at least as long as what it is held against, else 1 - r/c: -1 for half of
    it, -2 for a third, never below `WORST_BREVITY`. The logarithm of BLEU's brevity penalty
    (Papineni et al. 2002)."""
    if against is None or num_tokens >= against:
        return 0.0
    return max(WORST_BREVITY, 1 - against / num_tokens) if num_tokens else WORST_BREVITY


def counted(measure: Measure) -> int:
    """Tokens of an answer that were read and do not repeat it."""
    return int(measure["num_tokens"] - measure["num_repeated"])


def length(measure: Measure) -> int:
    """Tokens of an answer that do not repeat it, all that were not read taken for such."""
    return counted(measure) + int(measure["cut"])


def _measure(ids: list[int], logprobs: list[float], cut: int) -> Measure:
    flags = repeated(ids)
    kept = [value for value, again in zip(logprobs, flags, strict=True) if not again]
    mean = sum(kept) / len(kept) if kept else None
    return {"logprob": mean, "num_tokens": len(ids), "num_repeated": sum(flags), "cut": cut}


def _point(measure: Measure) -> Point | None:
    value = measure.get("logprob")
    return None if value is None else Point(float(value), math.log(counted(measure)))


def _gap(a: Measure, b: Measure) -> Gap | None:
    ours, other = _point(a), _point(b)
    if ours is None or other is None:
        return None
    short = brevity(length(a), length(b)) - brevity(length(b), length(a))
    return Gap(ours.value - other.value, ours.log_length - other.log_length, short)


def _verdict(a: Measure, b: Measure, gap: Gap | None, scale: Scale) -> Verdict | None:
    """An empty answer is worse than any other, for sure. None for two of which neither is empty
    and nothing was read."""
    if gap is None:
        empty = [not length(m) for m in (a, b)]
        if not any(empty):
            return None
        return Verdict.of(float(empty[1]) - float(empty[0]), {"empty": empty})
    details = {
        "a": a["logprob"], "b": b["logprob"], "log_length": gap.log_length,
        "length_slope": scale.slope, "gap": scale.rest(gap), "brevity": gap.brevity,
    }  # fmt: skip
    return Verdict.of(scale.preference(gap), details)
