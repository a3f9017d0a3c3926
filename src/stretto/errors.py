"""The errors a user may meet: each says what happened, names the value, and gives one way out.

Everything here derives from `StrettoError`; the command line prints its message on one line and
exits with `exit_code`. Any other exception is a bug of ours and keeps its traceback.
"""

SOME_FAILED, INTERRUPTED = 3, 130
"""Exit statuses that are no errors: some items failed and are named; Ctrl-C."""


class StrettoError(Exception):
    """Base of all errors meant for users. `exit_code` is the command line's exit status."""

    exit_code = 1


class InvalidInput(StrettoError):
    """What was asked for cannot be done as asked: a bad value, file, model or setting."""

    exit_code = 2


class UnknownName(InvalidInput):
    """A name that is not in a closed list; the message suggests the nearest one."""

    def __init__(self, what: str, name: object, known: list[str]) -> None:
        import difflib

        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
        super().__init__(f"unknown {what} {name!r}; {hint}")
        self.name = name


class ModelUnavailable(InvalidInput):
    """A model's files are missing, incomplete, corrupt or of an unsupported kind."""


class PromptTooLong(InvalidInput):
    """A prompt does not fit the model's positions or the pool; the message has both numbers."""


class Unsupported(InvalidInput):
    """A combination this version refuses by name rather than computing something else silently."""
