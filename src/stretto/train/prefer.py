"""Preference training as an objective of the loop: BoNBoN over pairs of sampled answers.

A pair's two answers stay in one batch, since the loss couples them. Reference log-probs are those
of the model that training starts from; they are computed once, before the first step, and kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from stretto.data.rows import Answer, Row
from stretto.data.settings import hold_to
from stretto.data.store import Store
from stretto.errors import InvalidInput
from stretto.files import beside
from stretto.train.batches import Batch
from stretto.train.bonbon import DEFAULT_ALPHA, bonbon_loss, margin_of
from stretto.train.examples import Example, ExampleMaker
from stretto.train.logprobs import sequence_logprobs, token_logprobs
from stretto.train.objective import Outcome
from stretto.train.packing import Pack, pack
from stretto.train.pairs import Pair
from stretto.train.targets import CLASSES
from stretto.train.workers import Workers

ALONE = Workers()


@dataclass(frozen=True, eq=False)
class PairExample:
    """A pair ready for training: both answers as traces, and the margin to reach."""

    best: Example
    worst: Example
    margin: float

    def __len__(self) -> int:
        """Tokens of both, prompts included."""
        return len(self.best) + len(self.worst)


@dataclass(frozen=True, eq=False)
class PairBatch:
    """Pairs laid end to end: best, worst, best, worst, ..."""

    batch: Batch
    reference: Float[Tensor, "pairs 2"]
    margin: Float[Tensor, "pairs"]

    @property
    def num_tokens(self) -> int:
        return self.batch.num_tokens

    def to(self, device: torch.device | str) -> PairBatch:
        return replace(
            self,
            batch=self.batch.to(device),
            reference=self.reference.to(device),
            margin=self.margin.to(device),
        )


@dataclass(frozen=True)
class Preference:
    """The BoNBoN loss, a term a pair. A group is one pair.

    `reference`: log-probs of the reference by example key. Metrics: `bonbon.BonbonLoss.metrics`.
    """

    pairs: Sequence[PairExample]
    reference: Mapping[str, float]
    alpha: float = DEFAULT_ALPHA

    def batch(self, numbers: Pack) -> PairBatch:
        pairs = [self.pairs[number] for number in numbers]
        known = [[self.reference[e.key] for e in (p.best, p.worst)] for p in pairs]
        return PairBatch(
            batch=Batch.of([example for p in pairs for example in (p.best, p.worst)]),
            reference=torch.tensor(known),
            margin=torch.tensor([p.margin for p in pairs]),
        )

    def outcome(self, model: Any, batch: PairBatch) -> Outcome:
        policy = sequence_logprobs(model, batch.batch).view(-1, 2)
        found = bonbon_loss(
            *policy.unbind(1), *batch.reference.unbind(1), margin=batch.margin, alpha=self.alpha
        )
        count = len(policy)
        metrics = {name: (value * count, float(count)) for name, value in found.metrics().items()}
        return Outcome(found.loss * count, float(count), metrics)


# -- examples --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnusablePair:
    """A pair that cannot be learnt from, and why."""

    prompt_id: str
    reason: str


def pair_examples(
    pairs: Iterable[Pair],
    answers: Sequence[Answer],
    maker: ExampleMaker,
    prompt_ids: Callable[[Answer], Sequence[int]],
    *,
    margin: float | None = None,
) -> tuple[list[PairExample], list[UnusablePair]]:
    """Examples of all pairs that were made, and those that cannot be used.

    A pair's margin is `margin_of` its number of candidates, or `margin` for all. Raises
    `InvalidInput` for a pair whose answers are not there, `Unsupported` for a model that does not
    learn from the ids of answers, and what `prompt_ids` raises.
    """
    maker.check_answers()
    known = {(a.prompt_id, a.sample): a for a in answers}
    made: list[PairExample] = []
    unusable: list[UnusablePair] = []
    for pair in pairs:
        if pair.best is None or pair.worst is None:
            continue
        try:
            best, worst = known[pair.prompt_id, pair.best], known[pair.prompt_id, pair.worst]
        except KeyError as error:
            raise InvalidInput(
                f"answer {error.args[0][0]}/{error.args[0][1]} of a pair is in no file of answers; "
                "give the answers that the pairs were made of"
            ) from None
        prompts = [prompt_ids(answer) for answer in (best, worst)]
        try:
            examples = [_example(maker, *both) for both in zip(prompts, (best, worst), strict=True)]
        except InvalidInput as error:
            unusable.append(UnusablePair(pair.prompt_id, str(error)))
            continue
        wanted = margin_of(pair.num_candidates) if margin is None else margin
        made.append(PairExample(examples[0], examples[1], wanted))
    return made, unusable


def _example(maker: ExampleMaker, ids: Sequence[int], answer: Answer) -> Example:
    if len(ids) != answer.num_prompt_tokens:
        raise InvalidInput(
            f"the prompt of answer {answer.key} has {len(ids)} tokens here and had "
            f"{answer.num_prompt_tokens} where it was sampled; it is of another tokenizer or "
            "chat template"
        )
    example = maker.from_answer(ids, answer)
    if not example.num_targets:
        raise InvalidInput(f"answer {answer.key} has no token to learn from")
    return example


# -- the reference ---------------------------------------------------------------------------------


class Reference(Row):
    """The log-prob of an answer under the reference: a sum over `num_targets` tokens.

    `drift`: how much more likely, in nats, its drawn tokens are here than the sampler recorded;
    near 0 if the reference is the model that sampled, with the engine's precision. Null if nothing
    was recorded.
    """

    kind: ClassVar[str] = "reference"
    id: str
    logprob: float
    num_targets: int
    drift: float | None = None

    @property
    def key(self) -> str:
        return self.id


def reference_logprobs(
    model: Any,
    examples: Sequence[Example],
    path: Path,
    *,
    identity: dict[str, Any],
    pack_tokens: int,
    recorded: Mapping[str, float] | None = None,
    report: Callable[[int, int], None] | None = None,
    known: Collection[str] = (),
    workers: Workers = ALONE,
) -> dict[str, Reference]:
    """Log-probs of examples under the model as it is, from the file where it has them; of those
    that are not `known`, in other files, this process's share. All that the file has then.

    Which examples share a pass is a function of all of them, never of what was computed before a
    kill or by whom: the same numbers come out. `identity` says whose they are; a file of another
    reference raises `InvalidInput`. `recorded`: `recorded_logprob` of an example's answer, by key.
    `report` is told how many of how many.
    """
    wanted = list({e.key: e for e in examples}.values())
    with Store(path, Reference) as store:
        hold_to(beside(path, "run.json"), identity, str(path))
        there = {*known, *store.rows}
        packs = pack(range(len(wanted)), lambda k: len(wanted[k]), pack_tokens)
        own = [[wanted[k] for k in numbers] for numbers in packs]
        left = [part for part in own if any(e.key not in there for e in part)]
        share = [part for _, part in workers.share(left)]
        total = len(store) + sum(e.key not in there for part in share for e in part)
        was_training = model.training
        model.eval()
        try:
            for part in share:
                for row in _references(model, part, recorded or {}):
                    if row.key not in there:
                        store.add(row)
                if report is not None:
                    report(len(store), total)
        finally:
            model.train(was_training)
        return dict(store.rows)


@torch.no_grad()
def _references(
    model: Any, examples: Sequence[Example], recorded: Mapping[str, float]
) -> list[Reference]:
    batch = Batch.of(examples).to(model.device)
    tokens = token_logprobs(model, batch).double()
    drawn = batch.classes != CLASSES.index("end")
    rows = []
    for number, example in enumerate(examples):
        own = batch.owner == number
        known = recorded.get(example.key)
        drift = None if known is None else float(tokens[own & drawn].sum()) - known
        rows.append(
            Reference(
                id=example.key,
                logprob=float(tokens[own].sum()),
                num_targets=int(own.sum()),
                drift=drift,
            )
        )
    return rows


def recorded_logprob(answer: Answer) -> float | None:
    """The sampler's log-prob of all tokens it drew freely; None where it was not kept."""
    if answer.logprobs is None:
        return None
    drawn = [v for v, o in zip(answer.logprobs, answer.origins, strict=True) if o == "s"]
    return math.fsum(v for v in drawn if v is not None) if None not in drawn else None
