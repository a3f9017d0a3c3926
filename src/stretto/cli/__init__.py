"""The command line. Verbs import what is heavy inside their functions, so `--help` is quick."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from stretto.cli import bench, chat, data, demo, doctor, eval_app, model, run, serve, trace, train
from stretto.cli.trace_export import export

DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
FILE_IS_REFUSED = (
    *DISK_IS_FULL, errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR,
    errno.ENOTEMPTY, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP,
)  # fmt: skip
"""What the system says of files that only their owner can put right."""

app = typer.Typer(
    name="stretto",
    help="Run self-orchestrating language models: threads that decode in parallel.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(run.run)
app.command()(chat.chat)
app.command()(serve.serve)
trace.app.command()(export)
app.add_typer(trace.app, name="trace")
app.add_typer(model.app, name="model")
app.add_typer(bench.app, name="bench")
app.add_typer(data.app, name="data")
app.add_typer(eval_app.app, name="eval")
app.add_typer(train.app, name="train")
app.add_typer(demo.app, name="demo")
app.command()(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        from stretto import __version__

        typer.echo(f"stretto {__version__}")
        raise typer.Exit


@app.callback()
def stretto(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it."),
    ] = False,
) -> None:
    """Run self-orchestrating language models: threads that decode in parallel."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status.

    0 done, 1 failed, 2 asked for wrongly, 3 some items failed, 130 interrupted. An error that a
    user can do something about is one line on stderr; any other keeps its traceback.
    """
    from stretto.cli.output import forget_empty_size, open_streams, say
    from stretto.errors import StrettoError

    open_streams()
    forget_empty_size()
    command = typer.main.get_command(app)
    try:
        code = command.main(arguments, prog_name="stretto", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except StrettoError as error:
        say(f"stretto: error: {error}")
        return error.exit_code
    except typer.TyperException as error:
        return _usage_error(error)
    except (BrokenPipeError, typer.Abort):
        return 1
    except OSError as error:
        if (told := _told(error)) is None:
            raise
        say(f"stretto: error: {told}")
        return 1
    finally:
        _let_go_of_stdout()


def _told(error: OSError) -> str | None:
    """What a user can do something about, in words; None for an error that is our bug."""
    if error.filename is not None and error.errno in FILE_IS_REFUSED:
        names = (error.filename2, error.filename)  # the second one is where it was to be moved to
        name = os.fsdecode(next(name for name in names if name is not None))
        return f"cannot use {name!a}: {error.strerror}; put that right or name another"
    if error.filename is None and error.errno in DISK_IS_FULL:
        return f"cannot write to standard output: {error.strerror}; free some space"
    return None


def _usage_error(error: Any) -> int:
    """Says what was wrong with the arguments, and where the right ones are listed."""
    from stretto.cli.output import say

    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "stretto"
    message = error.format_message()
    if message:
        end = "" if message.endswith("?") else f"; see `{path} --help`"
        say(f"stretto: error: {message.rstrip('.')}{end}")
    return int(getattr(error, "exit_code", 2))


def _let_go_of_stdout() -> None:
    """What stdout refuses now it would refuse again, noisily, when Python ends."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
