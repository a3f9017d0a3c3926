"""One round's training: pairs and answers in, a trained model out, in a folder that resumes."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.data.rows import Answer, read_rows
from stretto.data.settings import hold_to
from stretto.data.store import Store, line_of
from stretto.errors import InvalidInput
from stretto.eval.judges.base import write_judges
from stretto.files import write_atomically
from stretto.params import check_seed
from stretto.train.bonbon import DEFAULT_ALPHA
from stretto.train.packing import BatchSize, PackedSteps
from stretto.train.pairs import Pair
from stretto.train.prefer import (
    PairExample,
    Preference,
    Reference,
    pair_examples,
    recorded_logprob,
    reference_logprobs,
)
from stretto.train.rows import fingerprint

if TYPE_CHECKING:
    from stretto.train.examples import ExampleMaker
    from stretto.train.loop import Finished, Loop, Report
    from stretto.train.schedule import Schedule
    from stretto.train.workers import Workers

UNUSABLE = "unusable.jsonl"
REFERENCES = "reference*.jsonl"
DRIFT = 0.3
"""Nats, times the root of an answer's tokens: rounding in bfloat16 adds up to less; an answer whose
log-prob differs more from the sampler's was hardly sampled by this model."""


@dataclass(frozen=True)
class PreferSettings:
    """How a round is trained. `margin` None: each pair's from its number of candidates."""

    schedule: Schedule
    alpha: float = DEFAULT_ALPHA
    margin: float | None = None
    epochs: float = 1.0
    pairs_per_step: int = 8
    pack_tokens: int = 4096
    max_grad_norm: float | None = 1.0
    weight_decay: float = 0.0
    max_steps: int | None = None
    checkpoint_every: int | None = 20
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)


@dataclass(frozen=True)
class Trained:
    """How it went. `drift`: of the answers that had the sampler's log-probs, the largest
    difference in nats; `drifted` is how many differ by more than `DRIFT` allows."""

    finished: Finished
    num_pairs: int
    unusable: Mapping[str, str] = field(default_factory=dict)
    drift: float | None = None
    drifted: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": self.finished.num_steps,
            "is_complete": self.finished.is_complete,
            "trained_pairs": self.num_pairs,
            "unusable_pairs": len(self.unusable),
            "drift": self.drift,
            "drifted_answers": self.drifted,
            "metrics": dict(self.finished.metrics),
        }


@dataclass(frozen=True, eq=False)
class Learner:
    """A model ready to train, which is the one that sampled the answers, and how rows become its
    examples. `identity` says which model it is; all processes of `workers` have the same."""

    model: Any
    maker: ExampleMaker
    prompt_ids: Callable[[Answer], Sequence[int]]
    identity: Mapping[str, Any]
    workers: Workers


@dataclass(frozen=True)
class Hooks:
    """What a run tells while it works, and whether it is to stop; each None for nothing."""

    report: Report | None = None
    report_reference: Callable[[int, int], None] | None = None
    should_stop: Callable[[], bool] | None = None


NO_HOOKS = Hooks()


def train_on_pairs(
    learner: Learner,
    pairs: Sequence[Pair],
    answers: Sequence[Answer],
    folder: Path,
    settings: PreferSettings,
    *,
    hooks: Hooks = NO_HOOKS,
) -> Trained:
    """Trains the learner's model in place, without dropout, so that it begins as its reference.

    The folder gets `reference.jsonl`, `unusable.jsonl`, and what the loop writes; the same call
    over it goes on where it was killed. One that was begun with another model, other data or
    settings raises `InvalidInput`, and so do pairs of which none can be learnt from.
    """
    switch_off_dropout(learner.model)
    made, unusable = pair_examples(
        pairs, answers, learner.maker, learner.prompt_ids, margin=settings.margin
    )
    reasons = {u.prompt_id: u.reason for u in unusable}
    if not made:
        raise InvalidInput(
            f"none of {len(pairs)} prompts has a pair to learn from ({_why(pairs, reasons)}); "
            + next(iter(reasons.values()), "sample more answers or score them otherwise")
        )
    folder.mkdir(parents=True, exist_ok=True)
    if learner.workers.is_first:
        _write_unusable(folder / UNUSABLE, reasons)
    recorded = {a.key: v for a in answers if (v := recorded_logprob(a)) is not None}
    reference = _reference(learner, made, folder, settings, recorded=recorded, hooks=hooks)
    finished = _loop(learner, made, reference, folder, settings, hooks=hooks).run()
    drifts = [(abs(r.drift), r.num_targets) for r in reference.values() if r.drift is not None]
    return Trained(
        finished=finished,
        num_pairs=len(made),
        unusable=reasons,
        drift=max((drift for drift, _ in drifts), default=None),
        drifted=sum(drift > DRIFT * math.sqrt(tokens) for drift, tokens in drifts),
    )


def switch_off_dropout(model: Any) -> None:
    """For good: a model that is held to log-probs must give the same ones again."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):  # a number, where attention is a function
            module.attention_dropout = 0.0


def _reference(
    learner: Learner,
    made: Sequence[PairExample],
    folder: Path,
    settings: PreferSettings,
    *,
    recorded: Mapping[str, float],
    hooks: Hooks,
) -> dict[str, Reference]:
    """Each process computes its share of what no file has, into a file of its own, so that none
    waits long for another; then all read all files."""
    examples = {e.key: e for pair in made for e in (pair.best, pair.worst)}
    crew = learner.workers
    identity = {**learner.identity, "answers": fingerprint(examples.values())[:16]}
    if crew.is_first:
        hold_to(folder / "reference.run.json", identity, str(folder))
        for path in folder.glob(REFERENCES):
            Store(path, Reference).close()  # cuts off what a kill has torn
    crew.wait()
    known = _known_references(folder)
    crew.wait()  # nobody writes before all have read
    if any(key not in known for key in examples):
        name = "reference.jsonl" if crew.is_first else f"reference.{crew.rank}.jsonl"
        reference_logprobs(
            learner.model,
            list(examples.values()),
            folder / name,
            identity=identity,
            pack_tokens=settings.pack_tokens,
            recorded=recorded,
            report=hooks.report_reference,
            known=known,
            workers=crew,
        )
    crew.wait()
    known = _known_references(folder)
    return {key: known[key] for key in examples}


def _known_references(folder: Path) -> dict[str, Reference]:
    paths = sorted(folder.glob(REFERENCES))
    return {row.key: row for path in paths for row in read_rows(path, Reference)}


def _loop(
    learner: Learner,
    made: Sequence[PairExample],
    reference: Mapping[str, Reference],
    folder: Path,
    settings: PreferSettings,
    *,
    hooks: Hooks,
) -> Loop:
    from stretto.train.loop import Loop, LoopSettings

    known = {key: row.logprob for key, row in reference.items()}
    steps = PackedSteps(
        [len(pair) for pair in made],
        BatchSize(groups=settings.pairs_per_step),
        pack_tokens=settings.pack_tokens,
        epochs=settings.epochs,
        seed=settings.seed,
        max_steps=settings.max_steps,
    )
    loop_settings = LoopSettings(
        schedule=settings.schedule,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        checkpoint_every=settings.checkpoint_every,
        seed=settings.seed,
        fingerprint=_fingerprint(made, settings, learner.identity),
    )
    return Loop(
        learner.model,
        Preference(made, known, settings.alpha),
        steps,
        loop_settings,
        folder,
        workers=learner.workers,
        report=hooks.report,
        should_stop=hooks.should_stop,
    )


def write_preference(folder: Path, *, before: Sequence[str], pairs: Sequence[Pair]) -> None:
    """Says in a model's folder who scored what it learnt from; `before`: its start model's judges.

    With lambda 0 no judge had a say.
    """
    judges = [*before, *(p.judge for p in pairs if p.judge is not None)]
    lambdas, variants = ({p.lam for p in pairs}, {p.variant for p in pairs})
    write_judges(folder, judges, {"lambda": sorted(lambdas), "variant": sorted(variants)})


def _fingerprint(
    made: Sequence[PairExample], settings: PreferSettings, identity: Mapping[str, Any]
) -> str:
    """Of all that a resumed run must have in common with the one before."""
    data = [[p.best.key, p.worst.key, p.margin, fingerprint((p.best, p.worst))] for p in made]
    values = asdict(settings)
    values.pop("checkpoint_every")
    text = json.dumps([data, values, dict(identity)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _write_unusable(path: Path, reasons: Mapping[str, str]) -> None:
    rows = ({"prompt_id": name, "reasons": [reason]} for name, reason in reasons.items())
    write_atomically(path, b"".join(map(line_of, rows)))


def _why(pairs: Sequence[Pair], reasons: Mapping[str, str]) -> str:
    counts = Counter([str(p.skipped) for p in pairs if p.skipped])
    counts["unusable"] = len(reasons)
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "no prompts"
