"""`train sft`: rows of annotated answers in, a model that writes such answers out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.data.rows import PromptBook, Reject
from stretto.data.settings import hold_to
from stretto.data.store import line_of
from stretto.dialects import get_dialect
from stretto.errors import InvalidInput
from stretto.files import write_atomically
from stretto.methods.diffusion import Window
from stretto.models.adapters import Base
from stretto.train.config import DEFAULT_SLACK, SftConfig
from stretto.train.examples import Example, ExampleMaker
from stretto.train.lengths import LENGTHS, relabel
from stretto.train.loop import Finished, Loop, LoopSettings, Report
from stretto.train.lora import Lora
from stretto.train.noise import most_tokens
from stretto.train.objective import Objective, Validation
from stretto.train.packing import BatchSize, PackedSteps, Steps, pack
from stretto.train.planned import LossWeights, Planned
from stretto.train.renewed import Renewed, Turns
from stretto.train.rows import (
    Gathered,
    RowEncoder,
    TrainingRow,
    fingerprint,
    read_training_rows,
    split_rows,
)
from stretto.train.saved import is_saved
from stretto.train.schedule import Schedule
from stretto.train.supervised import Supervised
from stretto.train.trainee import Trainee, open_trainee
from stretto.train.workers import Workers, joined

DEFAULT_BATCH_TOKENS = 8192
CONFIG, ENVIRONMENT, REJECTS, SUMMARY = (
    "config.json", "environment.json", "rejects.jsonl", "summary.json",
)  # fmt: skip


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start. `maker` made the examples; `num_tokens` is the most that a
    model computes of them in an epoch, copies of blocks included."""

    trainee: Trainee
    maker: ExampleMaker
    train: Gathered
    valid: Gathered
    num_tokens: int
    steps: Steps
    settings: LoopSettings


def train_sft(
    config: SftConfig,
    *,
    report: Report | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """Trains and saves a model; the summary, which is also written to the run's folder.

    The folder `config.out` gets the settings, the environment, `metrics.jsonl`, `checkpoints/`,
    `rejects.jsonl` and, at the end, `model/`: an adapter's or a model's folder. The same settings
    over the same folder go on where it stopped. Under `torchrun` all processes call this.
    Raises `InvalidInput` before anything is trained if settings or data do not fit.
    """
    if config.out is None:
        raise InvalidInput("no folder for the run; name one with --out")
    out = Path(config.out).expanduser()
    with joined(config.device) as workers:
        prepared = prepare(config)
        if workers.is_first:
            _open_folder(out, config, prepared)
        workers.wait()
        validation = _validation(prepared, config)
        loop = Loop(
            prepared.trainee.model,
            _objective(prepared, config, prepared.train.examples),
            prepared.steps,
            prepared.settings,
            out,
            validation=validation,
            workers=workers,
            report=report,
            should_stop=should_stop,
        )
        finished = loop.run()
        return _finish(out, prepared, finished, workers)


def prepare(config: SftConfig, trainee: Trainee | None = None) -> Prepared:
    """Reads data, loads the model (unless it is given) and plans the steps. Writes nothing."""
    if not config.data:
        raise InvalidInput("no data to train on; name files with --data")
    rows = read_training_rows(_paths(config.data))
    valid = read_training_rows(_paths(config.valid)) if config.valid else []
    if config.valid_share:
        rows, valid = split_rows(rows, config.valid_share, config.seed)
    book = PromptBook.read(_paths(config.prompts), prompt_field=config.prompt_field)
    trainee = open_for(config) if trainee is None else trainee
    encoder = _encoder(config, trainee, book)
    gathered, held_out = encoder.gather(rows), encoder.gather(valid)
    _check_apart(rows, valid)
    if not gathered.examples:
        raise InvalidInput("no row is left to train on; see the reasons with `stretto data check`")
    tokens = config.batch_tokens
    if config.batch is None and tokens is None:
        tokens = DEFAULT_BATCH_TOKENS
    lengths = _lengths(gathered.examples, encoder.maker)
    packed = PackedSteps(
        lengths,
        BatchSize(groups=config.batch, tokens=tokens),
        pack_tokens=config.pack_tokens,
        epochs=config.epochs,
        seed=config.seed,
        max_steps=config.max_steps,
    )
    has_turns = encoder.maker.blocks is not None
    steps = Turns(packed, lengths, config.pack_tokens) if has_turns else packed
    settings = _loop_settings(config, trainee.base, gathered, held_out)
    return Prepared(trainee, encoder.maker, gathered, held_out, sum(lengths), steps, settings)


def open_for(config: SftConfig) -> Trainee:
    """The trainee that a run's settings ask for."""
    settings: dict[str, Any] = {}
    if config.lengths is not None:
        settings = dict(LENGTHS[config.lengths])
    if config.lengths == "fixed":
        settings["fixed_length"] = config.fixed_length
    own: dict[str, Any] = {"num_registers": config.registers, "grace": config.grace}
    own |= {"variant": config.variant, "convention": config.convention}
    settings |= {name: value for name, value in own.items() if value is not None}
    dialect = "plain" if config.baseline else config.dialect
    if get_dialect(dialect).variants:
        settings |= {"window": config.window, "block": config.block}  # None too: it learns to plan
    return open_trainee(
        config.model,
        dialect=dialect,
        settings=settings,
        how=config.how,
        lora=Lora(config.rank, config.alpha, config.targets, config.dropout),
        asked=sorted({"rank", "alpha", "targets", "dropout"} & config.model_fields_set),
        init=config.init,
        dtype=config.dtype,
        device=config.device,
        seed=config.seed,
    )


# -- internals -------------------------------------------------------------------------------------


def _lengths(examples: Sequence[Example], maker: ExampleMaker) -> list[int]:
    """The tokens that a model computes of each example, with copies of its blocks."""
    if maker.blocks is None:
        return [len(e) for e in examples]
    return [most_tokens(e) for e in examples]


def _window(config: SftConfig) -> Window | None:
    return None if config.window is None else Window.of(config.window, config.block)


def _paths(names: list[str]) -> list[Path]:
    return [Path(name).expanduser() for name in names]


def _encoder(config: SftConfig, trainee: Trainee, book: PromptBook) -> RowEncoder:
    vocabulary, unit = trainee.vocabulary, trainee.card.unit
    renew = config.lengths is not None
    return RowEncoder(
        maker=trainee.maker(),
        encode_prompt=trainee.encode_prompt,
        book=book,
        baseline=config.baseline,
        window=_window(config),
        relabel=(lambda text: relabel(text, vocabulary, unit)) if renew else None,
        max_tokens=config.max_tokens,
    )


def _check_apart(rows: list[TrainingRow], valid: list[TrainingRow]) -> None:
    both = {r.prompt_id for r in rows} & {r.prompt_id for r in valid}
    if both:
        raise InvalidInput(
            f"{len(both)} prompts are in the training and the validation data, e.g. {min(both)}; "
            "take them out of one"
        )


def _loop_settings(
    config: SftConfig, base: Base | None, train: Gathered, valid: Gathered
) -> LoopSettings:
    what = {**config.resolved, "data": fingerprint(train.examples)}
    what |= {"valid": fingerprint(valid.examples), "prompts": None}
    what |= {"base": None if base is None else base.fingerprint}
    return LoopSettings(
        schedule=Schedule(config.lr, config.schedule, config.warmup),
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        valid_every=config.valid_every,
        checkpoint_every=config.checkpoint_every,
        seed=config.seed,
        fingerprint=json.dumps(what, sort_keys=True),
    )


def _validation(prepared: Prepared, config: SftConfig) -> Validation | None:
    examples = prepared.valid.examples
    if not examples:
        return None
    lengths = _lengths(examples, prepared.maker)
    packs = pack(range(len(examples)), lambda e: lengths[e], config.pack_tokens)
    return Validation(_objective(prepared, config, examples), packs)


def _objective(prepared: Prepared, config: SftConfig, examples: Sequence[Example]) -> Objective:
    """What a run minimises over its examples: of a model that writes blocks two losses, else
    one."""
    card, blocks = prepared.trainee.card, prepared.maker.blocks
    if blocks is None:
        return Supervised(examples)
    slack = DEFAULT_SLACK if config.slack is None else config.slack
    weights = (1.0 if w is None else w for w in (config.plan_weight, config.span_weight))
    return Planned(
        Renewed(examples, prepared.maker, slack, card.unit),
        mask=blocks.mask,
        shifted=card.convention == "shifted",
        weights=LossWeights(*weights),
        seed=config.seed,
    )


def _open_folder(out: Path, config: SftConfig, prepared: Prepared) -> None:
    from stretto.train.environment import environment

    hold_to(out / CONFIG, config.resolved, f"{out}")
    is_saved(out / "model")  # raises now rather than after hours
    facts = json.dumps(environment(config.device), indent=2) + "\n"
    write_atomically(out / ENVIRONMENT, facts.encode())
    rejects: list[Reject] = [*prepared.train.rejects, *prepared.valid.rejects]
    lines = [line_of(reject.model_dump(exclude_none=True)) for reject in rejects]
    write_atomically(out / REJECTS, b"".join(lines))


def _finish(out: Path, prepared: Prepared, finished: Finished, workers: Workers) -> dict[str, Any]:
    trainee, folder = prepared.trainee, out / "model"
    summary: dict[str, Any] = {
        "out": str(out),
        "model": None,
        "steps": finished.num_steps,
        "is_complete": finished.is_complete,
        "trained_parameters": trainee.num_trained,
        "train": prepared.train.counts(),
        "valid": prepared.valid.counts(),
        "last": _without_times(finished.metrics),
        "valid_loss": _without_times(finished.valid) if finished.valid else None,
    }
    if finished.is_complete:
        summary["model"] = str(folder)
        if workers.is_first and not is_saved(folder):
            trainee.save(folder)
    if workers.is_first:
        write_atomically(out / SUMMARY, (json.dumps(summary, indent=2) + "\n").encode())
    workers.wait()
    return summary


def _without_times(metrics: Mapping[str, Any]) -> dict[str, Any]:
    times = ("seconds", "tokens", "step", "of", "num_packs", "lr", "grad_norm")
    return {name: value for name, value in metrics.items() if name not in times}
