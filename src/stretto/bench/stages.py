"""Experiments as stages: commands in order, what is kept of each, and nothing done twice.

A stage's commands run in a work folder, each of which must go on where it was killed. What is kept
goes into a results folder with a last file that says so; a stage that is there is not run again,
and what it kept is put back for the stages after it.
"""

from __future__ import annotations

import gzip
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.errors import UnknownName
from stretto.files import parse_json, write_atomically

Command = tuple[str, ...]
"""A command line that begins with `stretto`, or with `python` and one of the experiment's own
scripts."""

DONE = "stage.json"
SOME_LEFT_OUT = 3
INTERRUPTED = 130


@dataclass(frozen=True)
class Stage:
    """Commands in order, run in the work folder. `keeps`: files and folders under the stage's
    folder that are kept with the results; a stage that keeps nothing is run every time. `within`:
    the folder, where it is not of the stage's name: stages that go on with one another's work.
    `minutes`: about what it takes."""

    name: str
    minutes: int
    commands: tuple[Command, ...]
    keeps: tuple[str, ...] = ()
    within: str | None = None

    @property
    def folder(self) -> str:
        return self.name if self.within is None else self.within


@dataclass(frozen=True)
class Folders:
    """`work`: everything, private. `results`: what is kept of finished stages."""

    work: Path
    results: Path

    def is_done(self, stage: Stage) -> bool:
        """Whether all that the stage keeps is there. One of which something was lost is run again:
        the stages after it would miss it."""
        is_told = (self.results / stage.name / DONE).is_file()
        return is_told and all(_is_there(self.results / stage.folder / n) for n in stage.keeps)

    def is_of_other_commands(self, stage: Stage) -> bool:
        """Whether what is kept of a finished stage was made with other commands than its own."""
        kept = parse_json((self.results / stage.name / DONE).read_bytes())
        return bool(kept.get("commands") != [shlex.join(c) for c in stage.commands])

    def restore(self, stage: Stage) -> None:
        """Puts the kept files of a finished stage where the stages after it look for them."""
        kept, into = self.results / stage.folder, self.work / stage.folder
        for path in sorted(p for p in kept.rglob("*") if p.is_file() and p.name != DONE):
            name = path.relative_to(kept)
            target = into / (name.with_suffix("") if path.suffix == ".gz" else name)
            if target.exists():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            data = path.read_bytes()
            write_atomically(target, gzip.decompress(data) if path.suffix == ".gz" else data)

    def keep(self, stage: Stage, facts: dict[str, object]) -> None:
        """Copies what the stage keeps; its last file says that all are there."""
        made, into = self.work / stage.folder, self.results / stage.folder
        for name in stage.keeps:
            source = made / name
            files = [p for p in source.rglob("*") if p.is_file()] if source.is_dir() else [source]
            for path in files:
                target = into / path.relative_to(made)
                target.parent.mkdir(parents=True, exist_ok=True)
                data = path.read_bytes()
                if path.suffix == ".jsonl":
                    target = target.with_name(target.name + ".gz")
                    data = gzip.compress(data, mtime=0)
                write_atomically(target, data)
        done = self.results / stage.name / DONE
        done.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(done, (json.dumps(facts, indent=2) + "\n").encode())


def _is_there(path: Path) -> bool:
    """A file, packed or not, or a folder with a file in it."""
    if path.is_dir():
        return any(p.is_file() and p.name != DONE for p in path.rglob("*"))
    return path.is_file() or path.with_name(f"{path.name}.gz").is_file()


def work_through(
    stages: Sequence[Stage],
    folders: Folders,
    scripts: Path,
    *,
    until: str | None = None,
    only: Sequence[str] = (),
    only_list: bool = False,
) -> int:
    """Runs stages in order, or prints their commands; the exit status.

    `scripts`: the folder of the experiment's own scripts. Ends after stage `until`, and at the
    first command that fails. With `only`, no others are run, so that several processes can share
    the work; what finished ones kept is put back all the same. Raises `UnknownName` for a stage
    that there is not.
    """
    names = [stage.name for stage in stages]
    for name in only if until is None else (*only, until):
        if name not in names:
            raise UnknownName("stage", name, names)
    for number, stage in enumerate(stages, start=1):
        is_passed_over = bool(only) and stage.name not in only
        if is_passed_over and not folders.is_done(stage):
            continue
        state = _state(stage, folders)
        print(f"{number}/{len(stages)} {stage.name}: {state}", file=sys.stderr, flush=True)
        if only_list:
            for command in stage.commands:
                print(shlex.join(command))
        elif is_passed_over or (stage.keeps and folders.is_done(stage)):
            folders.restore(stage)
        elif code := run(stage, folders, scripts):
            print(f"stage {stage.name} failed with {code}; the same command goes on there")
            return 1 if code > 0 else INTERRUPTED
        if stage.name == until:
            break
    return 0


def _state(stage: Stage, folders: Folders) -> str:
    if not folders.is_done(stage):
        return f"about {stage.minutes} minutes"
    if folders.is_of_other_commands(stage):
        return f"done, by other commands; delete {folders.results / stage.name} to run it anew"
    return "done"


def run(stage: Stage, folders: Folders, scripts: Path) -> int:
    """Runs a stage's commands in order and keeps what it keeps; 0, or the status of the first
    command that fails."""
    from stretto.bench.machine import describe_machine

    (folders.work / stage.folder).mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    for command in stage.commands:
        print(f"  {shlex.join(command)}", file=sys.stderr, flush=True)
        line = runnable(command, scripts)
        code = subprocess.run(line, cwd=folders.work, check=False).returncode
        if code not in (0, SOME_LEFT_OUT):  # some rows were left out, and counted
            return code
    if stage.keeps:
        facts: dict[str, object] = {
            "stage": stage.name,
            "commands": [shlex.join(c) for c in stage.commands],
            "seconds_of_last_run": round(time.perf_counter() - began, 1),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": describe_machine(),
        }
        folders.keep(stage, facts)
    return 0


def runnable(command: Command, scripts: Path) -> list[str]:
    """The command under this very Python."""
    if command[0] == "stretto":
        return [sys.executable, "-m", "stretto", *command[1:]]
    return [sys.executable, str(scripts / command[1]), *command[2:]]
