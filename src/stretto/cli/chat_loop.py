"""The chat of `stretto chat`: questions are answered with the history, commands are obeyed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from stretto.cli.answer import (
    Interrupted,
    Job,
    PlainView,
    Player,
    SilentView,
    View,
    told,
    view_for,
)
from stretto.cli.chat_turns import Conversation, Turn
from stretto.cli.output import (
    check_writable,
    interruptible,
    json_bytes,
    say,
    write_file,
    write_json,
)
from stretto.errors import INTERRUPTED, SOME_FAILED, InvalidInput, StrettoError, UnknownName

if TYPE_CHECKING:
    from stretto.completion import Completion
    from stretto.lm import LM, Prompt
    from stretto.methods import Method
    from stretto.params import SamplingParams

log = logging.getLogger("stretto.chat")
PATIENCE = 2
"""Ctrl-C during one answer: so many presses only cancel it, the next one ends the process."""


@dataclass(frozen=True)
class Settings:
    """What a chat was asked for. `params` hold for each answer anew, as in a server's requests."""

    params: SamplingParams
    method: str = "auto"
    system: str | None = None
    as_json: bool = False
    quiet: bool = False


class Source(Protocol):
    """Where messages come from. One that is no terminal has nobody who could try again."""

    is_terminal: bool

    def read(self) -> str | None: ...


class Chat:
    """One chat. `run` reads messages until they end."""

    def __init__(self, lm: LM, settings: Settings, source: Source) -> None:
        self.conversation = Conversation(settings.system)
        self.method = settings.method
        self.num_failed = 0
        self._lm = lm
        self._settings = settings
        self._source = source
        self._saved: set[Path] = set()
        self._commands: dict[str, tuple[Callable[[str], None], str, str]] = {
            "help": (self._help, "", "this list"),
            "method": (self._set_method, "[NAME]", "say or set the method of the next answers"),
            "compare": (self._compare, "", "answer the last question sequentially too"),
            "save": (self._save, "FILE", "write the conversation as JSON"),
            "clear": (self._clear, "", "forget the conversation"),
            "quit": (self._help, "", "end the chat, as the end of input does"),
        }

    def run(self) -> int:
        """Answers and obeys until the messages end; the exit status. On a terminal an error is
        told and the chat goes on; in a pipe, too, and the status tells that there were some."""
        while True:
            try:
                message = self._source.read()
                if message is None or message.strip() == "/quit":
                    break
                self._take(message)
            except StrettoError as error:
                say(f"stretto: error: {error}")
                self.num_failed += 1
            except (Interrupted, KeyboardInterrupt) as press:
                if not self._source.is_terminal:
                    return INTERRUPTED
                if isinstance(press, KeyboardInterrupt):
                    say("/quit or the end of input (Ctrl-D) ends the chat")
        return SOME_FAILED if self.num_failed and not self._source.is_terminal else 0

    def _take(self, message: str) -> None:
        if not message.strip():
            return
        if message.startswith("/") and not message.startswith("//"):
            self._obey(message[1:])
        else:
            self._ask(message[1:] if message.startswith("//") else message)

    # -- answers -------------------------------------------------------------------------------

    def _ask(self, prompt: str) -> None:
        """Answers a question. What there is of an answer that was interrupted stays."""
        asked, params = self.conversation.messages(prompt), self._params(self.method)
        with interruptible(PATIENCE) as is_interrupted:
            player = Player(self._lm, self._view(asked, self.method), is_interrupted)
            try:
                with failures_told():
                    player.generate(asked, params, method=self.method, raw=False)
            except Interrupted:
                if player.first is not None and player.first.text:
                    self._note(prompt, player.first)
                raise
            assert player.first is not None
            self._note(prompt, player.first)  # a press of Ctrl-C that comes now loses nothing

    def _note(self, prompt: str, completion: Completion) -> None:
        """The turn is part of the conversation; its figures are told."""
        turn = Turn(prompt, completion)
        self.conversation.turns.append(turn)
        if self._settings.as_json:
            write_json(turn.to_json())
        self._summarise(completion)

    def _summarise(self, completion: Completion, baseline: Completion | None = None) -> None:
        from stretto.cli.summary import summary_lines

        if not (self._settings.quiet or self._settings.as_json):
            for line in summary_lines(completion, self._settings.params, baseline, pairs=1):
                say(line)

    def _view(self, prompt: Prompt, method: str) -> View:
        """Live on a terminal that is also typed at; else plain, or nothing beside JSON."""
        settings = self._settings
        if self._source.is_terminal:
            job = Job(
                prompt, settings.params, method, as_json=settings.as_json, quiet=settings.quiet
            )
            return view_for(self._lm, job)
        return SilentView() if settings.as_json else PlainView(settings.params.stop)

    # -- commands ------------------------------------------------------------------------------

    def _obey(self, line: str) -> None:
        name, _, argument = line.strip().partition(" ")
        if name not in self._commands:
            known = [f"/{known}" for known in self._commands]
            raise UnknownName("command", f"/{name}", known)
        obey, takes, _ = self._commands[name]
        if argument.strip() and not takes:
            raise InvalidInput(f"/{name} takes nothing, got {argument.strip()!a}; leave it out")
        obey(argument.strip())

    def _help(self, _: str) -> None:
        for name, command in self._commands.items():
            takes, meaning = command[1:]
            say(f"{f'/{name} {takes}'.strip()}: {meaning}")
        say("A line that ends with \\ goes on in the next one; // begins a message with a slash.")
        say("Ctrl-C cancels an answer; what there is of it stays. A third press ends the chat.")

    def _set_method(self, name: str) -> None:
        from stretto.tokens.asked import unread

        asked = self._lm.find_method(name or self.method)
        self.method = name or self.method
        unused = self._settings.params.set_of(unread(asked))
        say(f"method {asked.name}" + (f", without {', '.join(unused)}" if unused else ""))

    def _params(self, method: str) -> SamplingParams:
        """The chat's settings; once it has gone over to another method than it began with, without
        those that this one does not read."""
        from stretto.tokens.asked import unread

        params = self._settings.params
        asked, first = (self._lm.find_method(name) for name in (method, self._settings.method))
        return params if asked.name == first.name else params.without(unread(asked))

    def _clear(self, _: str) -> None:
        self.conversation.turns.clear()

    def _save(self, name: str) -> None:
        if not name:
            raise InvalidInput("/save needs the name of a file; give one: /save chat.json")
        path = Path(name).expanduser()
        check_writable(path, "/save")
        if path.is_file() and path.resolve() not in self._saved:
            raise InvalidInput(f"{name!a} exists and is not of this chat; name another file")
        write_file(path, json_bytes(self.conversation.to_json(self._lm.name)))
        self._saved.add(path.resolve())
        num_turns = len(self.conversation.turns)
        say(f"saved {num_turns} {'turn' if num_turns == 1 else 'turns'} in {name}")

    def _compare(self, _: str) -> None:
        """Answers the last question by the method and sequentially, and shows the latter."""
        from stretto.comparison import compare

        if not self.conversation.turns:
            raise InvalidInput("there is no answer to compare yet; ask something first")
        turn = self.conversation.turns[-1]
        method = turn.completion.method
        if method == "sequential":
            raise InvalidInput("the last answer was sequential already; /method names another")
        asked = self.conversation.before_last().messages(turn.prompt)
        if self._source.is_terminal and not self._settings.quiet:
            say(f"sequential, as {method} answers beside it, unseen; each once to warm up")
        with interruptible(PATIENCE) as is_interrupted:
            sides = _Sides(self._lm, self._view(asked, "sequential"), is_interrupted)
            try:
                with failures_told():
                    params = self._params(method)
                    ours, baseline = compare(sides, asked, params, method=method)
            except Interrupted:
                say("interrupted; there is nothing to compare")
                raise
        if self._settings.as_json:
            compared = {"answer": ours.to_json(), "sequential": baseline.to_json()}
            write_json({"prompt": turn.prompt, "compared": compared})
        self._summarise(ours, baseline)


@contextmanager
def failures_told() -> Iterator[None]:
    """What an answer fails with, as an error that is told on one line, so that the chat goes on:
    even a bug of ours, whose traceback is logged. What stdout refuses stays as it is."""
    try:
        yield
    except (Interrupted, StrettoError, OSError):
        raise
    except Exception as error:
        if isinstance(limit := told(error), StrettoError):
            raise limit from None
        log.exception("an answer failed")
        raise StrettoError(
            f"decoding failed: {type(error).__name__}: {error}; ask again, or /save the chat"
        ) from None


class _Sides:
    """What `compare` asks: the first sequential answer is shown, the others are not."""

    def __init__(self, lm: LM, view: View, is_interrupted: Callable[[], bool]) -> None:
        self._plain = Player(lm, view, is_interrupted)
        self._other = Player(lm, SilentView(), is_interrupted)

    def generate(
        self, prompt: Prompt, params: SamplingParams, /, *, method: str | Method, raw: bool
    ) -> list[Completion]:
        player = self._plain if method == "sequential" else self._other
        return player.generate(prompt, params, method=method, raw=raw)
