"""An experiment as a command: the options that every one has, and its stages as they are asked for.

An experiment is a folder with a `stages.py`, scripts, and a `reproduce.py` that calls these.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from stretto.bench.stages import Folders, Stage, work_through
from stretto.errors import StrettoError, UnknownName

S = TypeVar("S")


def told(main: Callable[[], int]) -> int:
    """The exit status of a script whose `main` this is. What a user can do something about, such as
    a file that is missing, locked or none of ours, is one line on stderr, and no traceback."""
    try:
        return main()
    except StrettoError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.filename is None:
            raise
        name = error.filename2 or error.filename
        print(
            f"error: cannot use {str(name)!a}: {error.strerror}; put that right or name another",
            file=sys.stderr,
        )
        return 1


def parser_of(description: str | None, results: Path) -> argparse.ArgumentParser:
    """Options `work`, `results`, `until`, `only`, `list`, `quick`, `full`; an experiment may add
    its own.

    `description`: the module's own words. `results`: where results go if nothing is asked for.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for everything private")
    parser.add_argument("--results", type=Path, help=f"what is kept [default: {results.name}/]")
    parser.add_argument("--until", metavar="STAGE", help="end after this stage")
    parser.add_argument(
        "--only", metavar="STAGE", action="append", default=[],
        help="run this stage alone, where what it reads is there; may be given several times",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the stages and their commands")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="all stages in under ten minutes")
    size.add_argument("--full", action="store_true", help="more of everything")
    return parser


def reproduce(
    description: str | None,
    scripts: Path,
    sizes: Mapping[str, S],
    stages_of: Callable[[S], list[Stage]],
) -> int:
    """All of an experiment that reads nothing but its own folder `scripts`: parses the command
    line, and runs the stages of its `sizes` by name: normal, quick, full. The latter two, which
    are no results, have work folders of their own. Returns the exit status."""
    normal = scripts.parent / "results" / scripts.name
    asked = parser_of(description, normal).parse_args()
    size = "quick" if asked.quick else "full" if asked.full else "normal"
    work = asked.work.resolve()
    results = asked.results or normal
    if size != "normal":
        work /= size
        results = asked.results or work / "kept"
    return carry_out(stages_of(sizes[size]), work, results, scripts, asked)


def carry_out(
    stages: Sequence[Stage], work: Path, results: Path, scripts: Path, asked: argparse.Namespace
) -> int:
    """Runs or lists the stages as `parser_of` was asked, in this work folder, with results here;
    the exit status. An unknown stage is told in one line."""
    folders = Folders(work, results.resolve())
    try:
        return work_through(
            stages, folders, scripts, until=asked.until, only=asked.only, only_list=asked.list
        )
    except UnknownName as error:
        print(error)
        return 2
