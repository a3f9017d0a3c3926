"""The planned experiment, from made problems to quality against time, as resumable stages.

    python benchmarks/planned/reproduce.py --work build/planned

A stage runs the commands that `--list` prints, each of which goes on where it was killed. What a
stage made is kept in the results folder, so a stage that is there already is not run again: delete
its folder to run it anew, and those of the stages that read it. `--quick` runs everything in
miniature, in folders of its own, on models that have learnt nothing; `--full` learns for longer,
and is asked more.
"""

from __future__ import annotations

import sys
from pathlib import Path

from stages import FULL, NORMAL, QUICK, stages_of

from stretto.bench.experiment import reproduce

SIZES = {"normal": NORMAL, "quick": QUICK, "full": FULL}

if __name__ == "__main__":
    sys.exit(reproduce(__doc__, Path(__file__).resolve().parent, SIZES, stages_of))
