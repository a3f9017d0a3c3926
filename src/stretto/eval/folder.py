"""The folder of a run: its settings, environments, rows, verdicts, and what is computed of them.

`config.json` decides what is measured and is written first; `environment.json` has an entry for
each process that measured; `rows.jsonl` grows row by row; `summary.json`, `prompts.csv` and
`means.csv` are computed of these at the end, and again after judging.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stretto.data.rows import read_rows
from stretto.errors import InvalidInput
from stretto.eval.rows import EvalRow, VerdictRow
from stretto.eval.settings import checked
from stretto.files import parse_json, write_atomically

CONFIG, ENVIRONMENT, ROWS, SUMMARY = (
    "config.json", "environment.json", "rows.jsonl", "summary.json",
)  # fmt: skip
JsonObject = dict[str, Any]


@dataclass(frozen=True)
class Verdicts:
    """What one judge said of a run's prompts, by their ids. `judge`: its identity."""

    judge: str
    preferences: Mapping[str, float | None]
    details: Mapping[str, JsonObject] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return self.judge.partition(":")[0]


@dataclass(frozen=True)
class Run:
    """A finished run as read from its folder; `name` is the folder's."""

    path: Path
    config: JsonObject
    rows: tuple[EvalRow, ...]
    verdicts: Verdicts | None = None

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def has_scores(self) -> bool:
        return bool(self.config["task"]["has_scores"])

    @property
    def num_samples(self) -> int:
        return int(self.config["sampling"]["samples"])

    def check_single(self, what: str) -> None:
        """Raises `InvalidInput` for a run of several samples a prompt, which cannot be `what`."""
        if self.num_samples > 1:
            raise InvalidInput(
                f"{self.path} has {self.num_samples} answers to each prompt, and is not {what}; "
                "make a run without --n"
            )

    @property
    def has_baseline(self) -> bool:
        return self.config["baseline"] is not None


def start(out: Path, config: JsonObject) -> None:
    """Begins the run, or goes on with it. Raises `InvalidInput` if the folder is of another run,
    naming the first setting that differs."""
    config = json.loads(json.dumps(config))
    there = out / CONFIG
    if not there.exists():
        if (out / ROWS).exists():
            raise InvalidInput(f"{out} has rows but no {CONFIG}; name another --out")
        write_json(there, config)
        return
    difference = first_difference(checked(read_json(there), there), config)
    if difference is not None:
        raise InvalidInput(
            f"{out} is a run of other settings ({difference}); name another --out, or the same "
            "settings"
        )


def add_environment(out: Path, environment: JsonObject) -> int:
    """Keeps what a process measures with; returns the number of its entry."""
    entries = read_environment(out) if (out / ENVIRONMENT).exists() else []
    write_json(out / ENVIRONMENT, [*entries, environment])
    return len(entries)


def check_environment(out: Path, rows: Iterable[EvalRow]) -> None:
    """Raises `InvalidInput` if rows were measured by a process that is not told of: the file was
    lost, and what comes now would be taken for it."""
    known = len(read_environment(out)) if (out / ENVIRONMENT).exists() else 0
    count = sum(row.process >= known for row in rows)
    if count:
        raise InvalidInput(
            f"{out / ENVIRONMENT} does not tell of the process that measured {count} rows; put it "
            "back, or name another --out"
        )


def note_environment(out: Path, process: int, notes: JsonObject) -> None:
    """Adds to the entry of a process."""
    entries = read_environment(out)
    entries[process] = entries[process] | notes
    write_json(out / ENVIRONMENT, entries)


def read_environment(out: Path) -> list[JsonObject]:
    """The entries of all processes that measured a run. Raises `InvalidInput` if they are not what
    is written there."""
    path = out / ENVIRONMENT
    entries = read_json(path)
    if not isinstance(entries, list) or not all(map(_is_environment, entries)):
        raise InvalidInput(
            f"{path} is not what stretto eval run writes; put it back as it was, or run it "
            "again with another --out"
        )
    return entries


def _is_environment(entry: Any) -> bool:
    machine = entry.get("machine") if isinstance(entry, dict) else None
    if not isinstance(machine, dict) or not isinstance(machine.get("revision", 0), str | None):
        return False
    speed = entry.get("throughput")
    names = ("answers", "tokens", "text_tokens", "seconds", "batch")
    return speed is None or (
        isinstance(speed, dict) and all(isinstance(speed.get(n), int | float) for n in names)
    )


def load_run(path: Path, judge: str | None = None) -> Run:
    """A run from its folder, with the verdicts of the `judge` of that kind, or of the only judge.

    Raises `InvalidInput` for what is no run or not finished, and where it is not clear whose
    verdicts are meant.
    """
    return replace(unjudged_run(path), verdicts=read_verdicts(path, judge))


def unjudged_run(path: Path) -> Run:
    """A run from its folder, whatever verdicts there are. Raises as `load_run`."""
    config = read_config(path)
    rows = sorted(read_eval_rows(path), key=lambda row: (row.number, row.sample))
    samples = config["sampling"]["samples"]
    wanted = config["task"]["num_prompts"] * samples
    what = "prompts" if samples == 1 else "answers"
    if len(rows) < wanted:
        raise InvalidInput(
            f"{path} is not finished ({len(rows)} of {wanted} {what}); run its command again"
        )
    if len(rows) > wanted:
        raise InvalidInput(
            f"{path / ROWS} has {len(rows)} rows for {wanted} {what}; run its command again "
            "with another --out"
        )
    return Run(path, config, tuple(rows))


def put_in_order(path: Path) -> None:
    """Puts the rows in a run's folder in the order of its prompts: those that share passes come in
    as they are done. Whoever calls holds the file's lock."""
    file = path / ROWS
    lines = [line for line in file.read_bytes().split(b"\n") if line.strip()]
    in_order = sorted(lines, key=_place)
    if in_order != lines:
        write_atomically(file, b"".join(line + b"\n" for line in in_order))


def _place(line: bytes) -> tuple[int, int]:
    row = parse_json(line)
    return row["number"], row.get("sample", 0)


def read_eval_rows(path: Path) -> list[EvalRow]:
    """The rows of a run's folder. Raises `InvalidInput` for one that comes twice."""
    rows = read_rows(path / ROWS, EvalRow)
    keys = Counter(row.key for row in rows)
    twice = [key for key, count in keys.items() if count > 1]
    if twice:
        raise InvalidInput(
            f"{path / ROWS} has row {twice[0]} twice ({len(twice)} such); take out all but one"
        )
    return rows


def read_config(path: Path) -> JsonObject:
    """Raises `InvalidInput` if the folder is no run's."""
    if not (path / CONFIG).is_file():
        raise InvalidInput(f"{path} is no run's folder: it has no {CONFIG}; see stretto eval run")
    return checked(read_json(path / CONFIG), path / CONFIG)


def read_verdicts(path: Path, judge: str | None) -> Verdicts | None:
    files = {p.name.split(".")[1]: p for p in sorted(path.glob("verdicts.*.jsonl"))}
    if judge is not None and judge not in files:
        raise InvalidInput(
            f"{path} has no verdicts of a judge {judge!r}; run stretto eval judge with it first"
        )
    if judge is None and len(files) > 1:
        raise InvalidInput(f"{path} was judged by {', '.join(files)}; name one with --judge")
    if not files:
        return None
    file = files[judge] if judge is not None else next(iter(files.values()))
    rows = read_rows(file, VerdictRow)
    judges = {row.judge for row in rows}
    if len({row.key for row in rows}) < len(rows):
        raise InvalidInput(f"{file} has two verdicts on one prompt; judge the run again")
    if len(judges) != 1:
        raise InvalidInput(f"{file} has verdicts of {len(judges)} judges; judge the run again")
    preferences = {row.prompt_id: row.preference for row in rows}
    return Verdicts(judges.pop(), preferences, {row.prompt_id: row.details for row in rows})


def write_verdicts(path: Path, kind: str, rows: Sequence[VerdictRow]) -> None:
    """All verdicts of a judge at once: some judges weigh every prompt against all others."""
    lines = [json.dumps(row.model_dump(exclude_none=True), ensure_ascii=False) for row in rows]
    write_atomically(path / f"verdicts.{kind}.jsonl", "".join(f"{li}\n" for li in lines).encode())


def first_difference(
    one: Any, two: Any, name: str = "", where: tuple[str, str] = ("there", "here")
) -> str | None:
    """The first place at which two JSON values differ, as "sampling.seed is 1 there and 2 here"."""
    if isinstance(one, dict) and isinstance(two, dict):
        for key in [*one, *(k for k in two if k not in one)]:
            place = f"{name}.{key}" if name else key
            difference = first_difference(one.get(key), two.get(key), place, where)
            if difference is not None:
                return difference
        return None
    if one == two:
        return None
    return f"{name} is {json.dumps(one)} {where[0]} and {json.dumps(two)} {where[1]}"


def read_json(path: Path) -> Any:
    try:
        return parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidInput(f"cannot read {path} ({error}); run its command again") from None


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=2) + "\n"
    write_atomically(path, text.encode())
