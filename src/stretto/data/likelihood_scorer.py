"""The reference model behind annotator `likelihood`: log-probs of the tokens of laid-out views."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stretto.data.likelihood_views import Sheet
from stretto.dialects.base import Vocabulary

LogProbs = NDArray[np.float32]

BATCH_TOKENS = 4096
"""Tokens of all views in one pass."""


class Scorer(Protocol):
    """Gives log-probs under some model. `max_positions`: the longest view it can read."""

    name: str
    vocabulary: Vocabulary
    max_positions: int

    def prompt_ids(self, prompt: str) -> list[int]:
        """A prompt as the model's chat template has it, up to where the answer begins."""
        ...

    def score(self, sheets: Sequence[Sheet]) -> list[list[LogProbs]]:
        """For each sheet, for each of its readings, a log-prob for each token (nats)."""
        ...


class ModelScorer:
    """A Hugging Face causal LM and its fast tokenizer, already in memory; neither is changed.

    Raises `Unsupported` for an architecture whose masks are not known to be honoured.
    """

    def __init__(self, model: Any, tokenizer: Any, *, name: str = "wrapped") -> None:
        from stretto.engines.hf import check_supported
        from stretto.tokens import HFVocabulary

        check_supported(model.config)
        self.name = name
        self.max_positions = int(model.config.max_position_embeddings)
        self.vocabulary: Vocabulary
        rows = int(model.get_output_embeddings().weight.shape[0])
        vocabulary = HFVocabulary.from_tokenizer(tokenizer, control={}, forms={}, size=rows)
        self.vocabulary = vocabulary
        self._chat = vocabulary.encode_chat
        self._model = model.eval()

    @classmethod
    def load(
        cls, name_or_path: str | None = None, *, dtype: str = "bfloat16", device: str = "cpu",
        offline: bool | None = None,
    ) -> ModelScorer:  # fmt: skip
        """The embedded model, a folder, a GGUF file or a hub name. Raises as `LM.load` does."""
        from stretto.models import EMBEDDED_MODEL, load_hf, resolve

        resolved = resolve(
            EMBEDDED_MODEL if name_or_path is None else name_or_path, offline=offline
        )
        model, tokenizer = load_hf(resolved.path, dtype=dtype, device=device)
        return cls(model, tokenizer, name=resolved.name)

    def prompt_ids(self, prompt: str) -> list[int]:
        return self._chat([{"role": "user", "content": prompt}])

    def score(self, sheets: Sequence[Sheet]) -> list[list[LogProbs]]:
        found: list[list[LogProbs]] = [[] for _ in sheets]
        for numbers in _batches([sheet.num_tokens for sheet in sheets]):
            for number, logprobs in zip(
                numbers, self._pass([sheets[n] for n in numbers]), strict=True
            ):
                found[number] = logprobs
        return found

    def _pass(self, sheets: Sequence[Sheet]) -> list[list[LogProbs]]:
        """One pass over sheets laid end to end, none of which sees another."""
        import torch

        from stretto.train.batches import Batch
        from stretto.train.head import Head, masked_logprobs
        from stretto.train.legal import UNMASKED, LegalTable
        from stretto.train.logprobs import hidden_states

        table = LegalTable()
        batch = Batch.of([_example(sheet, table) for sheet in sheets])
        rows, targets = _rows(sheets)
        if not rows:
            return [[] for _ in sheets]
        device = self._model.device
        with torch.inference_mode():
            states = hidden_states(self._model, batch.to(device))
            picked = states[torch.tensor(rows, device=device)]
            wanted = torch.tensor(targets, device=device)
            legal = torch.full((len(rows),), UNMASKED)
            logprobs = masked_logprobs(picked, Head.of(self._model), wanted, legal, table)
        return _split(sheets, logprobs.cpu().numpy())


def _batches(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Numbers of sheets for one pass each: of like size, up to `BATCH_TOKENS` together."""
    batch: list[int] = []
    total = 0
    for number in sorted(range(len(sizes)), key=lambda n: (sizes[n], n)):
        if batch and total + sizes[number] > BATCH_TOKENS:
            yield batch
            batch, total = [], 0
        batch.append(number)
        total += sizes[number]
    if batch:
        yield batch


def _example(sheet: Sheet, table: Any) -> Any:
    """A sheet as a flat example without targets."""
    import torch

    from stretto.masks import flat_positions, flat_tokens
    from stretto.train.examples import IGNORE, Example

    segments = sheet.trace.segments
    sees = torch.zeros(len(segments), len(segments), dtype=torch.bool)
    for s in segments:
        sees[s.id, sorted(s.sees)] = True
    ids = flat_tokens(sheet.trace)
    nothing = torch.full_like(ids, IGNORE)
    lengths = torch.tensor([len(s) for s in segments])
    return Example(
        key="",
        ids=ids,
        positions=flat_positions(sheet.trace),
        segment=torch.repeat_interleave(torch.arange(len(segments)), lengths),
        sees=sees,
        is_block=torch.zeros(len(segments), dtype=torch.bool),
        targets=nothing,
        classes=nothing,
        legal=nothing,
        follows=nothing,
        table=table,
        num_illegal=0,
        in_span=torch.zeros_like(ids, dtype=torch.bool),
    )


def _rows(sheets: Sequence[Sheet]) -> tuple[list[int], list[int]]:
    """Over all readings, the flat rows that predict and the ids that they are to predict."""
    rows: list[int] = []
    targets: list[int] = []
    start = 0
    for sheet in sheets:
        segments = sheet.trace.segments
        ends = np.cumsum([len(s) for s in segments])
        for reading in sheet.readings:
            tokens = segments[reading.segment].tokens
            first = start + int(ends[reading.segment]) - len(tokens)
            rows += [start + int(ends[reading.after]) - 1, *range(first, first + len(tokens) - 1)]
            targets += tokens
        start += int(ends[-1])
    return rows, targets


def _split(sheets: Sequence[Sheet], flat: LogProbs) -> list[list[LogProbs]]:
    found = []
    at = 0
    for sheet in sheets:
        mine = []
        for reading in sheet.readings:
            size = len(sheet.trace.segments[reading.segment])
            mine.append(flat[at : at + size])
            at += size
        found.append(mine)
    return found
