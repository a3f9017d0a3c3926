"""The PASTA experiment from instruction data to a quality-speed frontier, as resumable stages.

    python benchmarks/pasta/reproduce.py --data DATA --work build/pasta

`DATA` holds `instruct/*.jsonl`, `eval/vicuna_80_prompts.jsonl`, `eval/alpaca_eval_400.jsonl` and
another model's answers to the same prompts; its text is written to the work folder only. A stage
runs the commands that `--list` prints, each of which goes on where it was killed. What a stage made
is kept in the results folder, so a stage that is there already is not run again: delete its folder
to run it anew, and of stages that share one (`eval`) that one too.
`--quick` runs everything in miniature, in folders of its own; `--full` adds the rest of the grid.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from stages import FULL, NORMAL, QUICK, REFERENCES, VICUNA, stages_of

from stretto.bench.stages import Folders, work_through
from stretto.errors import UnknownName

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "pasta"


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
    names = ("data/instruct", VICUNA, *REFERENCES)
    wanted = [data / Path(name).relative_to("data") for name in names]
    if missing := [str(p) for p in wanted if not p.exists()]:
        print(f"no {' and no '.join(missing)}; name the folder that holds them with --data")
        return 2
    work = arguments.work.resolve()
    link_to(work / "data", data)
    results = arguments.results or (work / "kept" if arguments.quick else RESULTS)
    folders = Folders(work, results.resolve())
    stages, until = stages_of(sizes), arguments.until
    try:
        return work_through(stages, folders, HERE, until=until, only_list=arguments.list)
    except UnknownName as error:
        print(error)
        return 2


if __name__ == "__main__":
    sys.exit(main())
