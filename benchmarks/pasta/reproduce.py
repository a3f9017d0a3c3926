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

import sys
from pathlib import Path

from stages import FULL, NORMAL, QUICK, REFERENCES, VICUNA, stages_of

from stretto.bench.experiment import carry_out, parser_of

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "pasta"


def link_to(link: Path, data: Path) -> None:
    """Commands run in the work folder and call the data `data`: no path of a machine in them."""
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_symlink():
        link.unlink()
    link.symlink_to(data, target_is_directory=True)


def main() -> int:
    parser = parser_of(__doc__, RESULTS)
    parser.add_argument("--data", type=Path, required=True, help="folder with instruct/ and eval/")
    asked = parser.parse_args()
    sizes = QUICK if asked.quick else FULL if asked.full else NORMAL
    data = asked.data.expanduser().resolve()
    names = ("data/instruct", VICUNA, *REFERENCES)
    wanted = [data / Path(name).relative_to("data") for name in names]
    if missing := [str(p) for p in wanted if not p.exists()]:
        print(f"no {' and no '.join(missing)}; name the folder that holds them with --data")
        return 2
    work = asked.work.resolve() / ("quick" if asked.quick else "")
    link_to(work / "data", data)
    results = asked.results or (work / "kept" if asked.quick else RESULTS)
    return carry_out(stages_of(sizes), work, results, HERE, asked)


if __name__ == "__main__":
    sys.exit(main())
