"""`stretto model new`: a tiny model with random weights and a vocabulary of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from stretto.cli.output import say, write_json, write_line

Shape = Annotated[
    str, typer.Argument(metavar="SHAPE", help="tiny-1m, tiny-2m, tiny-3m or tiny-5m.")
]
Out = Annotated[Path, typer.Option(help="New folder of the model.", metavar="DIR")]
Vocabulary = Annotated[
    Path | None, typer.Option(help="Symbols: a JSON list of strings.", metavar="FILE")
]
Rows = Annotated[
    list[Path] | None,
    typer.Option(help="Rows whose characters are the symbols; repeatable.", metavar="FILE"),
]
DialectName = Annotated[str, typer.Option("--dialect", help="What it is to write.")]
Registers = Annotated[int | None, typer.Option(help="Of a dialect that has them.", metavar="N")]
Seed = Annotated[int, typer.Option(help="Of the random weights.", metavar="N")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def new(
    shape: Shape,
    *,
    out: Out,
    vocabulary: Vocabulary = None,
    rows: Rows = None,
    dialect: DialectName = "plain",
    registers: Registers = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Make a tiny model with random weights, to be trained from scratch, and print its folder."""
    from stretto.errors import InvalidInput
    from stretto.models.tiny import new_tiny, shape_of
    from stretto.models.tiny_tokens import learn_symbols, read_symbols

    shape_of(shape)
    if (vocabulary is None) == (not rows):
        raise InvalidInput(
            "a vocabulary is a list of symbols or learnt from rows; give one of --vocabulary and "
            "--rows"
        )
    symbols = learn_symbols(rows or []) if vocabulary is None else read_symbols(vocabulary)
    settings = {} if registers is None else {"num_registers": registers}
    if settings and "tip" not in dialect.split("+"):
        raise InvalidInput(f"dialect {dialect} has no registers; leave --registers out")
    folder = out.expanduser()
    made = new_tiny(folder, shape, symbols, dialect=dialect, settings=settings, seed=seed)
    facts: dict[str, Any] = {
        "path": str(folder),
        "shape": shape,
        "num_parameters": made.num_trained,
        "dialect": dialect,
        "num_symbols": len(symbols),
        "vocab_size": made.vocabulary.size,
        "seed": seed,
    }
    if as_json:
        write_json(facts)
        return
    say(
        f"{made.num_trained:,} parameters, {len(symbols)} symbols, "
        f"{made.vocabulary.size} ids in all"
    )
    write_line(str(folder))
