"""`stretto data`: answers, annotations, and what is wrong with them."""

from __future__ import annotations

import typer

from stretto.cli.data_annotate import annotate
from stretto.cli.data_check import check, stats
from stretto.cli.data_convert import convert
from stretto.cli.data_graphs import graphs
from stretto.cli.data_problems import problems, registers
from stretto.cli.data_sample import sample

app = typer.Typer(no_args_is_help=True, help="Make and check data for training.")


@app.callback()
def data() -> None:
    """Make and check data for training."""


app.command()(sample)
app.command()(annotate)
app.command()(convert)
app.command()(problems)
app.command()(graphs)
app.command()(registers)
app.command()(check)
app.command()(stats)
