"""The PASTA experiment from instruction data to a quality-speed frontier, as resumable stages.

    python benchmarks/pasta/reproduce.py --data DATA --work build/pasta

`DATA` holds `instruct/*.jsonl` and `eval/alpaca_eval_400.jsonl`; its text is written to the work
folder only. A stage runs the commands that `--list` prints, each of which goes on where it was
killed. What a stage made is kept in the results folder, so a stage that is there already is not
run again: delete its folder to run it anew, and of stages that share one (`eval`) that one too.
`--quick` runs everything in miniature, in folders of its own; `--full` adds the rest of the grid.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from stages import FULL, NORMAL, QUICK, Stage, stages_of

from stretto.bench.machine import describe_machine
from stretto.files import write_atomically

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "pasta"
DONE = "stage.json"


@dataclass(frozen=True)
class Folders:
    """`work`: everything, private. `results`: what is kept of finished stages."""

    work: Path
    results: Path

    def is_done(self, stage: Stage) -> bool:
        return (self.results / stage.name / DONE).is_file()

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


def run(stage: Stage, folders: Folders) -> None:
    """Runs a stage's commands in order; ends the program at the first that fails."""
    (folders.work / stage.folder).mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    for command in stage.commands:
        print(f"  {shlex.join(command)}", file=sys.stderr, flush=True)
        code = subprocess.run(_runnable(command), cwd=folders.work, check=False).returncode
        if code not in (0, 3):  # 3: some rows were left out, and counted
            print(f"stage {stage.name} failed with {code}; the same command goes on there")
            sys.exit(1 if code > 0 else 130)
    facts = {
        "stage": stage.name,
        "commands": [shlex.join(c) for c in stage.commands],
        "seconds_of_last_run": round(time.perf_counter() - began, 1),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": describe_machine(),
    }
    if stage.keeps:
        folders.keep(stage, facts)


def _runnable(command: tuple[str, ...]) -> list[str]:
    """The command under this very Python."""
    if command[0] == "stretto":
        return [sys.executable, "-m", "stretto", *command[1:]]
    return [sys.executable, str(HERE / command[1]), *command[2:]]


def link_to(link: Path, data: Path) -> None:
    """Commands run in the work folder and call the data `data`: no path of a machine in them."""
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_symlink():
        link.unlink()
    link.symlink_to(data, target_is_directory=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with instruct/ and eval/")
    parser.add_argument("--work", type=Path, required=True, help="folder for everything private")
    parser.add_argument("--results", type=Path, help=f"what is kept [default: {RESULTS.name}/]")
    parser.add_argument("--until", metavar="STAGE", help="end after this stage")
    parser.add_argument("--list", action="store_true", help="print the stages and their commands")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="all stages in under ten minutes")
    size.add_argument("--full", action="store_true", help="more lambdas, rounds and prompts")
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else FULL if arguments.full else NORMAL
    data = arguments.data.expanduser().resolve()
    wanted = [data / "instruct", data / "eval" / "alpaca_eval_400.jsonl"]
    if missing := [str(p) for p in wanted if not p.exists()]:
        print(f"no {' and no '.join(missing)}; name the folder that holds them with --data")
        return 2
    stages = stages_of(sizes)
    if arguments.until is not None and arguments.until not in [s.name for s in stages]:
        print(f"no stage {arguments.until!r}; --list prints them")
        return 2
    work = arguments.work.resolve()
    link_to(work / "data", data)
    results = arguments.results or (work / "kept" if arguments.quick else RESULTS)
    folders = Folders(work, results.resolve())
    for number, stage in enumerate(stages, start=1):
        state = "done" if folders.is_done(stage) else f"about {stage.minutes} minutes"
        print(f"{number}/{len(stages)} {stage.name}: {state}", file=sys.stderr, flush=True)
        if arguments.list:
            for command in stage.commands:
                print(shlex.join(command))
        elif stage.keeps and folders.is_done(stage):
            folders.restore(stage)
        else:
            run(stage, folders)
        if stage.name == arguments.until:
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
