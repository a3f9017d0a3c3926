"""`stretto demo`: see a dialect at work on a small model."""

from __future__ import annotations

import typer

from stretto.cli.demo_planned import planned
from stretto.cli.demo_tip import tip

app = typer.Typer(no_args_is_help=True, help="See a dialect at work on a small model.")


@app.callback()
def demo() -> None:
    """See a dialect at work on a small model."""


app.command()(tip)
app.command()(planned)
