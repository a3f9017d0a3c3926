"""`stretto data check` and `stretto data stats`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli import data_options

if TYPE_CHECKING:
    from stretto.data.check import Checker
    from stretto.data.rows import Annotated as AnnotatedRow
    from stretto.data.rows import Answer

BAR = 40
Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="JSONL of rows.")]
Dialect = Annotated[str, typer.Option(help="pasta, planned, apar, tip or pasta+tip.")]
Registers = Annotated[
    int | None, typer.Option(metavar="N", help="Registers there are; else as the model's card.")
]


def check(
    files: Files,
    *,
    dialect: Dialect = "pasta",
    tokenizer: data_options.Tokenizer = None,
    unit: data_options.Unit = 10,
    registers: Registers = None,
    as_json: data_options.AsJson = False,
) -> None:
    """Say which annotated rows are not fit for training, and why.

    A line per such row. Exits with 3 if there is one.
    """
    from dataclasses import asdict

    from stretto.cli.data_progress import Progress
    from stretto.cli.output import one_line, write_json, write_line
    from stretto.data.check import CheckReport, check_file, load_checker

    data_options.check(registers=registers)
    checker = load_checker(tokenizer, dialect=dialect, unit=unit, num_registers=registers)
    report = CheckReport()
    with Progress() as progress:
        for file in files:
            for fault in check_file(file, checker):
                report.num_rows += 1
                progress.update(f"{report.num_rows} rows, {len(report.faults)} not fit")
                if fault is None:
                    continue
                report.faults.append(fault)
                if not as_json:
                    reasons = "; ".join(fault.reasons)
                    write_line(one_line(f"{fault.file}:{fault.line} {fault.key} {reasons}"))
    result = report.to_json()
    if as_json:
        write_json(result | {"faults": [asdict(fault) for fault in report.faults]})
    else:
        data_options.show(result, as_json=False)
    raise typer.Exit(3 if report.faults else 0)


def stats(
    files: Files,
    *,
    dialect: Dialect = "pasta",
    tokenizer: data_options.Tokenizer = None,
    unit: data_options.Unit = 10,
    as_json: data_options.AsJson = False,
) -> None:
    """Say what annotated rows, or sampled answers, amount to: promises, lengths, speedup.

    Exits with 3 if rows could not be read with the tokenizer; they are counted.
    """
    from stretto.cli.output import say, write_json
    from stretto.data.check import load_checker
    from stretto.data.stats import DEFINITIONS, facts_of, summary
    from stretto.errors import InvalidInput

    checker = load_checker(tokenizer, dialect=dialect, unit=unit)
    facts, num_failed = [], 0
    for file in files:
        for row in _rows(file, checker):
            try:
                facts.append(facts_of(row, checker))
            except InvalidInput as error:
                num_failed += 1
                say(f"stretto: {file}: {row.key}: {error}")
    result = summary(facts) | {"failed": num_failed}
    if as_json:
        write_json(result | {"definitions": DEFINITIONS})
    else:
        _show(result)
    raise typer.Exit(3 if num_failed else 0)


def _rows(file: Path, checker: Checker) -> list[AnnotatedRow] | list[Answer]:
    from stretto.data import rows
    from stretto.errors import InvalidInput

    if data_options.holds_answers(file):
        if checker.dialect != "pasta":
            raise InvalidInput(f"{file} holds sampled answers, which are read as pasta alone")
        return rows.read_rows(file, rows.Answer)
    return rows.read_rows(file, rows.Annotated)


def _show(result: dict[str, Any]) -> None:
    from stretto.cli.output import write_line

    bars = result.pop("speedup_histogram")
    data_options.show(result, as_json=False)
    write_line("speedup of rows")
    most = max([1, *bars.values()])
    for name, count in bars.items():
        write_line(f"  {name:>8}  {'#' * round(BAR * count / most)} {count}")
