"""What the verbs of `stretto bench` share: checks of options, the model, and the result folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.params import MAX_SEED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from stretto.bench.journal import Journal
    from stretto.bench.program import Target
    from stretto.bench.report import Rows
    from stretto.bench.source import Source
    from stretto.lm import LM

Pairs = Annotated[int, typer.Option(help="Interleaved pairs after the warm-up; few say little.")]
Seed = Annotated[
    int, typer.Option(min=0, max=MAX_SEED, help="Of the tokens, random weights, and the bootstrap.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Write raw pairs, summary, plot, run.json here.")
]
RandomShape = Annotated[
    bool,
    typer.Option("--random-shape", help="Random weights of a 0.5B shape instead of --model."),
]


def numbers(option: str, text: str, low: int = 1) -> list[int]:
    """Whole numbers between commas, each at least `low`, without repetitions."""
    from stretto.errors import InvalidInput

    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < low:
        raise InvalidInput(
            f"{option} is {text!r}; give whole numbers of at least {low}, such as 2,4"
        )
    return list(dict.fromkeys(found))


def words(option: str, text: str) -> list[str]:
    """Names between commas, without repetitions."""
    from stretto.errors import InvalidInput

    found = [part.strip() for part in text.split(",")]
    if not all(found):
        raise InvalidInput(f"{option} is {text!r}; give names between commas")
    return list(dict.fromkeys(found))


def check(low: int = 1, **values: int | None) -> None:
    from stretto.errors import InvalidInput

    for name, value in values.items():
        if value is not None and value < low:
            raise InvalidInput(f"--{name.replace('_', '-')} must be at least {low}, got {value}")


def check_different(targets: Sequence[Target]) -> None:
    from stretto.errors import InvalidInput

    names = [target.dtype for target in targets]
    if len(set(names)) < len(names):
        raise InvalidInput(f"--dtype comes to {', '.join(names)}; name each once")


@dataclass(frozen=True)
class Place:
    """Where a benchmark runs: weights, dtype, engine, device and threads, as asked for."""

    source: Source
    dtype: str
    engine: str
    device: str
    threads: int | None

    @classmethod
    def of(
        cls, model: str, is_random: bool, seed: int, *, dtype: str, engine: str,
        device: str = "cpu", threads: int | None = None,
    ) -> Place:  # fmt: skip
        from stretto.bench.source import Source

        return cls(Source(model, is_random, seed), dtype, engine, device, threads)

    def lm(self) -> LM:
        """The model by name, ready to answer prompts."""
        from stretto.cli.answer import load
        from stretto.lm import DEFAULT_POOL_SLOTS

        return load(
            self.source.name,
            dtype=self.dtype,
            device=self.device,
            engine=self.engine,
            threads=self.threads,
            pool_slots=DEFAULT_POOL_SLOTS,
            page_size=1,
            offline=False,
        )

    def target(self, room: tuple[int, int], dtype: str | None = None) -> Target:
        return self.source.target(
            dtype=dtype or self.dtype,
            engine=self.engine,
            device=self.device,
            threads=self.threads,
            room=room,
        )


def prepare(out: Path | None) -> None:
    if out is not None:
        from stretto.bench.report import prepare_folder

        prepare_folder(out)


def start_journal(
    out: Path | None, name: str, place: Place, settings: dict[str, Any], targets: Sequence[Target]
) -> Journal:
    """Where measured cells are kept; those of the same settings, revision, versions, environment,
    and engine and dtype of the `targets`, as they came to be, count."""
    from dataclasses import asdict

    from stretto.bench.journal import Journal
    from stretto.bench.machine import describe_machine

    machine = describe_machine(place.device)
    sides = [{"engine": target.engine.name, "dtype": target.dtype} for target in targets]
    heading = {"benchmark": name, "settings": settings, "place": asdict(place), "sides": sides}
    return Journal(out, heading | {"machine": machine}, progress, revision=machine["revision"])


def describe(
    name: str, target: Target, settings: dict[str, Any], definitions: dict[str, str],
    machine: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """What `run.json` holds: enough to know what was measured, and to do it again."""
    import shlex
    import sys
    from datetime import UTC, datetime

    return {
        "benchmark": name,
        "command": shlex.join(["stretto", *sys.argv[1:]]),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": target.name,
        "engine": target.engine.name,
        "dtype": target.dtype,
        "settings": settings,
        "machine": machine,
        "definitions": definitions,
    }


def save(
    out: Path, rows: Rows, records: Rows, figure: Figure, run: dict[str, Any], *,
    raw: str = "pairs", **tables: Rows,
) -> None:  # fmt: skip
    from stretto.bench import report

    try:
        report.save(out, rows, records, figure, run, raw=raw, **tables)
    except OSError as error:
        from stretto.errors import InvalidInput

        raise InvalidInput(
            f"cannot write to --out {str(out)!r} ({error.strerror}); make room there, or name "
            "another folder"
        ) from error
    progress(f"wrote {out}")


def progress(line: str) -> None:
    from stretto.cli.output import say

    say(line)


def show(result: object, text: str) -> None:
    """The result as JSON if there is one, else the text."""
    from stretto.cli.output import write_json, write_text

    if result is None:
        write_text(text + "\n")
    else:
        write_json(result)
