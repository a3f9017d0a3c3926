"""The planned experiment, from made problems to quality against time, as resumable stages.

    python benchmarks/planned/reproduce.py --work build/planned

A stage runs the commands that `--list` prints, each of which goes on where it was killed. What a
stage made is kept in the results folder, so a stage that is there already is not run again: delete
its folder to run it anew, and those of the stages that read it. `--quick` runs everything in
miniature, in folders of its own, on models that have learnt nothing; `--full` takes a larger model
and more problems.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from stages import FULL, NORMAL, QUICK, stages_of

from stretto.bench.stages import Folders, work_through
from stretto.errors import UnknownName

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "planned"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for everything")
    parser.add_argument("--results", type=Path, help=f"what is kept [default: {RESULTS.name}/]")
    parser.add_argument("--until", metavar="STAGE", help="end after this stage")
    parser.add_argument("--list", action="store_true", help="print the stages and their commands")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="all stages in under ten minutes")
    size.add_argument("--full", action="store_true", help="more of everything")
    given = parser.parse_args()
    sizes = QUICK if given.quick else FULL if given.full else NORMAL
    work = given.work.resolve()
    if given.quick or given.full:
        work = work / ("quick" if given.quick else "full")
    results = given.results or (RESULTS if sizes is NORMAL else work / "kept")
    folders = Folders(work, results.resolve())
    stages, until = stages_of(sizes), given.until
    try:
        return work_through(stages, folders, HERE, until=until, only_list=given.list)
    except UnknownName as error:
        print(error)
        return 2


if __name__ == "__main__":
    sys.exit(main())
