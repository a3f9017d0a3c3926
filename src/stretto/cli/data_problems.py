"""`stretto data problems` and `stretto data registers`: steps, what they read, and registers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stretto.cli import data_options
from stretto.errors import SOME_FAILED

if TYPE_CHECKING:
    from stretto.data.rows import Row

Policy = Annotated[
    str,
    typer.Option(
        "--labels", help="liveness, stack, round-robin, random, or none for no registers."
    ),
]
Registers = Annotated[int, typer.Option(metavar="N", help="Registers there are.")]
Slack = Annotated[
    int, typer.Option(metavar="N", help="Of liveness: steps live 0 to N steps longer, at random.")
]
Grace = Annotated[bool, typer.Option("--grace", help="A register sees the step it takes over.")]
Shift = Annotated[
    bool, typer.Option("--shift", help="In each row registers count from another one on.")
]
Seed = Annotated[int, typer.Option(help="Of all that is drawn.")]
Out = Annotated[Path, typer.Option(metavar="FILE", help="Annotated rows, JSONL, whole or not.")]


def problems(
    *,
    task: Annotated[
        str, typer.Option(help="program, slots, tree, chain, dag, recall or countdown.")
    ],
    out: Out,
    num: Annotated[int, typer.Option(metavar="N", help="Problems, of all sizes in turn.")],
    size: Annotated[
        str, typer.Option(metavar="N|LOW-HIGH", help="Steps before the answer.")
    ] = "12-24",
    split: Annotated[str, typer.Option(help="train, valid or test.")] = "train",
    start: Annotated[int, typer.Option(metavar="N", help="Number of the first one.")] = 0,
    seed: Seed = 0,
    labels: Policy = "liveness",
    registers: Registers = 16,
    slack: Slack = 0,
    grace: Grace = False,
    shift: Shift = False,
    graphs: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what steps read, too, JSONL.")
    ] = None,
    as_json: data_options.AsJson = False,
    quiet: data_options.Quiet = False,
) -> None:
    """Make problems with known dependence graphs, solved, each step in a register.

    The same command makes the same file. Exits with 3 if problems need more registers than there
    are whatever is done; they are in FILE.rejects.jsonl.
    """
    from stretto.cli.data_progress import Progress
    from stretto.data.labels import Labels, Tally
    from stretto.problems import draw
    from stretto.problems.rows import graph_of, rows_of

    data_options.check(num=num)
    data_options.check(low=0, start=start)
    chosen = Labels(labels, registers, slack, grace, seed, shift)
    sizes = draw.parse_sizes(size)
    found, tally = Files(out, [] if graphs is None else [graphs]), Tally()
    with Progress(quiet=quiet) as progress:
        drawn = draw.problems(task, sizes, num, split=split, seed=seed, start=start)
        for problem, row in rows_of(drawn, chosen, tally):
            found.add(row)
            if graphs is not None:
                found.add_to(graphs, graph_of(problem))
            progress.update(f"{tally.num_rows} of {num} problems")
    found.write()
    data_options.show(tally.to_json() | {"file": str(out)}, as_json)
    raise typer.Exit(SOME_FAILED if tally.dropped else 0)


def registers(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="JSONL of responses.")],
    *,
    graphs: Annotated[Path, typer.Option(metavar="FILE", help="What their steps read, JSONL.")],
    out: Out,
    prompts: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Prompts of rows without; repeatable.")
    ] = None,
    prompt_field: data_options.PromptField = None,
    response_field: data_options.ResponseField = None,
    labels: Policy = "liveness",
    registers: Registers = 16,
    slack: Slack = 0,
    grace: Grace = False,
    shift: Shift = False,
    seed: Seed = 0,
    no_follow: Annotated[
        bool, typer.Option("--no-follow", help="Steps need not read the one before.")
    ] = False,
    tokenizer: data_options.Tokenizer = None,
    no_prompts: data_options.NoPrompts = False,
    as_json: data_options.AsJson = False,
    quiet: data_options.Quiet = False,
) -> None:
    """Write each step of responses to a register, from graphs of what their steps read.

    Exits with 3 if responses were left out; they are in FILE.rejects.jsonl with reasons.
    """
    from stretto.cli.data_annotate import read_items
    from stretto.cli.data_progress import Progress
    from stretto.data.check import load_checker
    from stretto.data.graphs import Graph, keyed, labelled_item
    from stretto.data.labels import Labels, Tally
    from stretto.data.rows import Reject, read_rows

    chosen = Labels(labels, registers, slack, grace, seed, shift)
    found, tally = Files(out, [*files, *(prompts or ()), graphs]), Tally()
    known = keyed(read_rows(graphs, Graph))
    items, left_out = read_items(
        files,
        prompts or [],
        prompt_field=prompt_field,
        response_field=response_field,
        chosen=data_options.selection("0-100", None, None),
        keep_unfinished=False,
    )
    count = load_checker(tokenizer, dialect="plain").count
    settings = {"follow": not no_follow, "keep_prompt": not no_prompts}
    with Progress(quiet=quiet) as progress:
        for item in items:
            row = labelled_item(item, known.get(item.key), chosen, count, **settings)
            found.add(row)
            if isinstance(row, Reject):
                tally.drop(row.reasons[0])
            else:
                tally.add(row.details)
            progress.update(f"{tally.num_rows} of {len(items)} responses")
    found.write()
    data_options.show(tally.to_json() | {"left_out": left_out, "file": str(out)}, as_json)
    raise typer.Exit(SOME_FAILED if tally.dropped else 0)


class Files:
    """Rows for `out`, for its rejects beside it, and for other files, written at the end.

    Raises `InvalidInput` if one of the `others`, which are read or written too, is one of the two.
    """

    def __init__(self, out: Path, others: Iterable[Path]) -> None:
        from stretto.files import beside

        self._out = out
        self._rejects = beside(out, "rejects.jsonl")
        _check_apart([out, self._rejects], others)
        self._rows: dict[Path, list[Row]] = {self._rejects: [], out: []}

    def add(self, row: Row) -> None:
        """A row of `out`, or a reject."""
        self.add_to(self._rejects if row.kind == "reject" else self._out, row)

    def add_to(self, path: Path, row: Row) -> None:
        self._rows.setdefault(path, []).append(row)

    def write(self) -> None:
        """Each file whole, `out` last. Raises `InvalidInput` before any is written if one is there
        and holds anything else; rejects are replaced."""
        from stretto.cli.output import write_file
        from stretto.data.store import line_of

        data = {
            path: b"".join(line_of(row.model_dump(exclude_none=True)) for row in rows)
            for path, rows in self._rows.items()
        }
        for path, content in data.items():
            if path != self._rejects:
                _check_free(path, content)
        for path, content in sorted(data.items(), key=lambda item: item[0] == self._out):
            if content or path != self._rejects or path.exists():
                write_file(path, content)


def _check_apart(written: Sequence[Path], others: Iterable[Path]) -> None:
    from stretto.errors import InvalidInput

    own = {path.resolve() for path in written}
    for path in others:
        if path.resolve() in own:
            names = " and ".join(map(str, written))
            raise InvalidInput(f"{path} is one of {names}, which are written; name another file")


def _check_free(path: Path, data: bytes) -> None:
    from stretto.cli.output import check_writable
    from stretto.errors import InvalidInput

    check_writable(path, "file")
    if path.is_file() and path.read_bytes() != data:
        raise InvalidInput(f"{path} is there and holds something else; name another file")
