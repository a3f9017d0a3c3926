"""Steps of thought as they come and go, from events alone, and how a terminal shows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.text import Text

from stretto.cli.demo_screen import Screen
from stretto.cli.output import escaped
from stretto.runtime.events import Evicted, Token

if TYPE_CHECKING:
    from stretto.runtime.events import Event

LIVE, FREED = "█", "░"
GONE = "dim strike"
SCALE_TOKENS = 32
"""The bar grows by this many tokens at a time, so that it does not shake."""
GAP = 3
SPARE_ROWS = 7
"""Screen rows beside prompt and steps."""


@dataclass
class Step:
    """A register and what follows it up to the next one; `register` is None before the first.
    `gone_at`: the index of the step that took its register over; None while it is seen."""

    register: int | None
    text: str = ""
    num_tokens: int = 0
    gone_at: int | None = None


class Board:
    """The steps so far, and how many tokens are live. `registers`: control ids to numbers."""

    def __init__(self, num_prompt_tokens: int, registers: Mapping[int, int]) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.steps: list[Step] = []
        self._registers = registers
        self._numbers: dict[int, int] = {}
        self._leaving: list[Step] = []

    @property
    def num_dense(self) -> int:
        """Tokens that dense decoding would hold now."""
        return self.num_prompt_tokens + sum(step.num_tokens for step in self.steps)

    @property
    def num_live(self) -> int:
        """Tokens that what comes next sees."""
        live = (step.num_tokens for step in self.steps if step.gone_at is None)
        return self.num_prompt_tokens + sum(live)

    def take(self, events: Sequence[Event]) -> bool:
        """Brings the board up to date; whether anything on it changed."""
        before = self.num_dense, self.num_live
        for event in events:
            if isinstance(event, Token):
                self._write(event)
            elif isinstance(event, Evicted) and event.segment in self._numbers:
                self._let_go(self.steps[self._numbers[event.segment]])
        return before != (self.num_dense, self.num_live)

    def _write(self, event: Token) -> None:
        register = self._registers.get(event.token) if event.markup else None
        if register is not None or not self.steps:
            for step in self._leaving:
                step.gone_at = len(self.steps)
            self._leaving = []
            self.steps.append(Step(register))
        self._numbers[event.segment] = len(self.steps) - 1
        self.steps[-1].text += event.text
        self.steps[-1].num_tokens += 1

    def _let_go(self, step: Step) -> None:
        """The step leaves for the one that takes its register over: the last one, or the next."""
        last = self.steps[-1]
        if last is not step and last.register == step.register:
            step.gone_at = len(self.steps) - 1
        else:
            self._leaving.append(step)

    def whole_lines(self, is_over: bool) -> list[str]:
        """A line for each step but the last, which may go on until all is over."""
        return [self.line(number) for number in range(len(self.steps) - (not is_over))]

    def line(self, number: int) -> str:
        """A step in words, with what it let go of and the tokens that were live at its end."""
        step = self.steps[number]
        gone = [k for k, other in enumerate(self.steps) if other.gone_at == number]
        lets_go = f", lets go of step {', '.join(str(k + 1) for k in gone)}" if gone else ""
        so_far = self.steps[: number + 1]
        live = sum(s.num_tokens for s in so_far if s.gone_at is None or s.gone_at > number)
        dense = sum(s.num_tokens for s in so_far)
        prompt = self.num_prompt_tokens
        held = f"live {prompt + live} of {prompt + dense} tokens"
        return f"step {number + 1}  {_name(step)} {escaped(step.text)}  {held}{lets_go}"

    def to_json(self) -> list[dict[str, Any]]:
        """The steps in order; `gone_at` is the index of the step that took the register over."""
        return [
            {
                "register": step.register,
                "text": step.text,
                "num_tokens": step.num_tokens,
                "gone_at": step.gone_at,
            }
            for step in self.steps
        ]


class LiveBoard(Screen):
    """A board on a terminal, drawn anew at each token. `wait` is called after each drawing."""

    def __init__(
        self, console: Console, board: Board, prompt: str, *, wait: Callable[[], None]
    ) -> None:
        self._board = board
        super().__init__(console, prompt, wait=wait)

    def render(self) -> Group:
        """The prompt, the last screenful of steps in columns, and the bar."""
        width, height = self._console.size
        prompt = Text(self._prompt, style="bold").wrap(self._console, width)
        rows = max(1, height - SPARE_ROWS - len(prompt))
        return Group(*prompt, "", *self._grid(width)[-rows:], "", *self._bar(width))

    def _grid(self, width: int) -> list[Text]:
        cells = [_cell(step) for step in self._board.steps]
        widest = GAP + max((cell.cell_len for cell in cells), default=0)
        per_line = max(1, width // widest)
        lines = []
        for start in range(0, len(cells), per_line):
            line = Text(no_wrap=True, overflow="ellipsis")
            for cell in cells[start : start + per_line]:
                line.append_text(cell)
                line.append(" " * (widest - cell.cell_len))
            lines.append(line)
        return lines

    def _bar(self, width: int) -> list[Text]:
        board = self._board
        dense, live = board.num_dense, board.num_live
        scale = -(-max(1, dense) // SCALE_TOKENS) * SCALE_TOKENS
        room = max(8, width - 2)
        filled, whole = round(room * live / scale), round(room * dense / scale)
        bar = Text(LIVE * filled, style="green", no_wrap=True)
        bar.append(FREED * (whole - filled), style="dim")
        words = f"live KV {live} tokens; dense decoding holds {dense} ({1 - live / dense:.0%} less)"
        return [bar, Text(words, no_wrap=True, overflow="ellipsis")]


def _name(step: Step) -> str:
    return "--" if step.register is None else f"r{step.register}"


def _cell(step: Step) -> Text:
    cell = Text(f"{_name(step)} ", style="cyan")
    cell.append(escaped(step.text))
    if step.gone_at is not None:
        cell.stylize(GONE)
    return cell
