"""What the verbs of `stretto train` share: progress, summaries, estimates."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from stretto.cli.data_options import worded
from stretto.cli.output import interruptible, is_live, say, write_json, write_line
from stretto.errors import INTERRUPTED, SOME_FAILED

if TYPE_CHECKING:
    from stretto.train.config import SftConfig

ESTIMATE_TOKENS = 10_000_000
"""Of an estimate without data: what is said is per so many tokens an epoch."""

TARGET_SHARE = 0.75
"""Of an estimate without data: about what answers are of prompts with answers."""


def is_first() -> bool:
    """Whether this is the process that writes and tells, of those that `torchrun` started."""
    return os.environ.get("RANK", "0") == "0"


OF_LORA = ("rank", "alpha", "targets", "dropout")


def how_of(*, lora: bool, full: bool) -> str | None:
    """What is trained, as flags say it; None where neither is given."""
    from stretto.errors import InvalidInput

    if lora and full:
        raise InvalidInput("--lora and --full are both given; leave one out")
    return "lora" if lora else "full" if full else None


def check_lora(how: str | None, given: Mapping[str, Any]) -> None:
    """Raises `InvalidInput` for an option of a LoRA that is given where all weights are trained."""
    from stretto.errors import InvalidInput

    for name in OF_LORA:
        if how == "full" and given.get(name) is not None:
            raise InvalidInput(f"--{name} is of a LoRA, and all weights are trained; leave it out")


def plain_values(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Flags as settings: paths become strings."""
    plain: dict[str, Any] = {}
    for name, value in changes.items():
        if isinstance(value, Path):
            plain[name] = str(value)
        elif isinstance(value, list):
            plain[name] = [str(item) for item in value]
        else:
            plain[name] = value
    return plain


def progress(quiet: bool) -> Callable[[Mapping[str, Any]], None] | None:
    """Says each line of the metrics on stderr: on a terminal in place, elsewhere as it comes."""
    if quiet:
        return None
    live = is_live(sys.stderr)

    def report(line: Mapping[str, Any]) -> None:
        if line["kind"] == "valid":
            parts = [f"{k.removeprefix('loss_')} {v:.3f}" for k, v in line.items() if "loss" in k]
            say(f"validation after step {line['step']}: {', '.join(parts)}")
            return
        rate = line["tokens"] / line["seconds"] if line["seconds"] else 0.0
        text = (
            f"step {line['step']}/{line['of']}: loss {line['loss']:.3f}, norm "
            f"{line['grad_norm']:.2f}, lr {line['lr']:.2e}, {rate:.0f} tokens/s"
        )
        if live:
            end = "\n" if line["step"] == line["of"] else ""
            print(f"\r\x1b[K{text}", end=end, file=sys.stderr, flush=True)
        else:
            say(text)

    return report


def run_sft(config: SftConfig, *, as_json: bool, quiet: bool) -> None:
    """Trains, and says how it went. Exits with 130 where Ctrl-C stopped it at a checkpoint, and
    with 3 where rows were left out."""
    from stretto.train.sft import train_sft

    with interruptible() as pressed:
        summary = train_sft(config, report=progress(quiet), should_stop=pressed)
    if is_first():
        _show(summary, as_json)
    if not summary["is_complete"]:
        say(f"stopped after step {summary['steps']}; the same command goes on")
        raise typer.Exit(INTERRUPTED)
    if summary["train"]["rejected"] or summary["valid"]["rejected"]:
        say(f"rows were left out: see {summary['out']}/rejects.jsonl")
        raise typer.Exit(SOME_FAILED)


def _show(summary: Mapping[str, Any], as_json: bool) -> None:
    """One JSON object; or counts on stderr, and the model on stdout."""
    if as_json:
        write_json(summary)
        return
    for name in ("train", "valid"):
        say(f"{name}: " + ", ".join(f"{k} {worded(v)}" for k, v in summary[name].items()))
    if summary["model"] is not None:
        write_line(summary["model"])


def show_estimate(found: Mapping[str, Any], *, as_json: bool) -> None:
    """Prints what a run would take."""
    if as_json:
        write_json(found)
        return
    for name, value in found.items():
        write_line(f"{name:<20} {shown_figure(name, value)}")


def estimate_of(config: SftConfig) -> dict[str, Any]:
    """The estimate of a run, with what it is based on. With data it is read and counted; without,
    it is per `ESTIMATE_TOKENS` an epoch. A recipe's `architecture` stands for weights that are not
    here."""
    from stretto.dialects import DialectSettings, get_dialect
    from stretto.train.estimate import Shape, estimate, measure_flops
    from stretto.train.lora import Lora
    from stretto.train.sft import prepare

    tokens, share, steps = ESTIMATE_TOKENS, TARGET_SHARE, None
    if config.architecture is not None:
        shape = Shape.of_config(config.architecture)
    if config.architecture is None or config.data:
        shape, tokens, share, steps = _from_data(config, prepare)
    registers = {} if config.registers is None else {"num_registers": config.registers}
    settings = DialectSettings.given(registers)
    forms = {} if config.baseline else get_dialect(config.dialect).forms(settings)
    lora = Lora(config.rank, config.alpha, config.targets, config.dropout)
    result = estimate(
        shape,
        lora=lora if config.how == "lora" else None,
        new_rows=len(forms),
        num_tokens=round(tokens * config.epochs),
        target_share=share,
        pack_tokens=config.pack_tokens,
        weight_bytes=2 if config.dtype == "bfloat16" else 4,
        flops_per_s=measure_flops(config.dtype),
    )
    basis = {"model": config.model, "how": config.how, "tokens_per_epoch": tokens}
    return {**basis, "is_counted": steps is not None, "steps": steps, **result.as_dict()}


def _from_data(config: SftConfig, prepare: Any) -> tuple[Any, int, float, int | None]:
    from stretto.models import load_hf, resolve
    from stretto.train.estimate import Shape

    if not config.data:
        model, _ = load_hf(resolve(config.model, offline=True).path)
        return Shape.of_model(model), ESTIMATE_TOKENS, TARGET_SHARE, None
    prepared = prepare(config)
    share = prepared.train.counts()["targets"] / prepared.num_tokens
    shape = Shape.of_model(_without_lora(prepared.trainee))
    return shape, prepared.num_tokens, share, prepared.steps.num_steps


def _without_lora(trainee: Any) -> Any:
    return trainee.model.unload() if trainee.how == "lora" else trainee.model


def shown_figure(name: str, value: Any) -> str:
    """A figure of an estimate for people, in the unit that its name says."""
    if name.endswith("_bytes") and value is not None:
        return f"{value / 2**30:.2f} GiB" if value > 2**28 else f"{value / 2**20:.2f} MiB"
    if name.endswith("_hours") and value is not None:
        return f"{value:.2f} h" if value > 0.1 else f"{60 * value:.1f} min"
    if name.endswith("_flops"):
        return f"{value:.2e}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
