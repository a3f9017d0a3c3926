"""How `stretto trace show` looks to people: lanes, visibility, segments, figures and issues."""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from stretto.dialects.base import Issue, Parsed, Vocabulary
from stretto.trace import Segment, Trace, derived_steps, live_tokens

MAX_LANES, MAX_SEGMENTS, MAX_MATRIX, MAX_ISSUES = 40, 100, 40, 50
EXCERPT = 32  # code points on either side of what an issue is about
TEXT, CONTROL, WAITING = "#", "+", "."
STYLES = {TEXT: "green", CONTROL: "magenta", WAITING: "dim"}


def print_view(dialect: str, parsed: Parsed, vocabulary: Vocabulary, source: str) -> None:
    """Print the view to stdout: in colour on a terminal unless NO_COLOR. What stdout's
    encoding lacks, and control characters, are escaped."""
    console = Console(
        highlight=False,
        soft_wrap=True,
        force_terminal=sys.stdout.isatty(),
        color_system=None if os.environ.get("NO_COLOR") else "auto",
    )
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    view = _View(parsed, vocabulary, source, console, is_plain=encoding != "utf8")
    for line in view.lines(dialect):
        console.print(line)


class _View:
    def __init__(
        self, parsed: Parsed, vocabulary: Vocabulary, source: str, console: Console, is_plain: bool
    ) -> None:
        self.trace: Trace = parsed.trace
        self.issues = parsed.issues
        self.source = source
        self.width = console.width
        self.is_plain = is_plain
        self.vocabulary = vocabulary

    def lines(self, dialect: str) -> Iterator[Text]:
        yield from self.figures(dialect)
        yield from self.lanes()
        yield from self.segments()
        yield from self.matrix()
        yield from self.problems()

    # -- parts ---------------------------------------------------------------------------------

    def figures(self, dialect: str) -> Iterator[Text]:
        trace, live = self.trace, live_tokens(self.trace)
        yield Text(
            f"{dialect}: {trace.num_tokens} tokens, {trace.num_text_tokens} of them text,"
            f" in {trace.critical_path_steps} steps; parallelism {trace.parallelism:.2f}",
            style="bold",
        )
        yield Text(
            f"live tokens: mean {live.mean:.1f}, peak {live.peak}; without the prompt:"
            f" mean {live.generated_mean:.1f}, peak {live.generated_peak}"
        )

    def lanes(self) -> Iterator[Text]:
        """One line a thread, one column a step (or a few)."""
        num_steps = self.trace.critical_path_steps
        if not num_steps:
            return
        names = [t.name for t in self.trace.threads]
        margin = max(len(name) for name in names[:MAX_LANES]) + 2
        scale = -(-num_steps // max(20, self.width - margin - 2))
        unit = "step" if scale == 1 else f"{scale} steps"
        yield Text()
        yield Text(
            f"threads, a column is {unit} ({TEXT} text, {CONTROL} control, {WAITING} waiting)",
            style="bold",
        )
        drawn = self._drawn_by_thread()
        for name in names[:MAX_LANES]:
            yield Text(name.ljust(margin)) + self._lane(drawn.get(name, []), scale)
        yield from _more(len(names) - MAX_LANES, "threads")

    def segments(self) -> Iterator[Text]:
        header = ("id", "thread", "role", "tokens", "positions", "sees", "text")
        shown = self.trace.segments[:MAX_SEGMENTS]
        rows = [self._segment_row(s) for s in shown]
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header) - 1)]
        yield Text()
        yield Text("segments", style="bold")
        for row in [header, *rows]:
            cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True)]
            yield Text("  ".join([*cells, row[-1]]), style="dim" if row is header else "")
        yield from _more(len(self.trace.segments) - MAX_SEGMENTS, "segments")

    def matrix(self) -> Iterator[Text]:
        segments = self.trace.segments
        if not 1 < len(segments) <= MAX_MATRIX:
            return
        yield Text()
        yield Text("who sees whom (a row sees a column; its own tokens: \\)", style="bold")
        yield Text("    " + "".join(f"{s.id % 100:>3}" for s in segments), style="dim")
        for s in segments:
            cells = [("\\" if k == s.id else "#" if k in s.sees else ".") for k in range(s.id + 1)]
            cells += ["#" if k in s.sees else "." for k in range(s.id + 1, len(segments))]
            yield Text(f"{s.id:>3} ", style="dim") + Text("".join(f"{c:>3}" for c in cells))

    def problems(self) -> Iterator[Text]:
        if not self.issues:
            return
        starts = [0, *(i + 1 for i, c in enumerate(self.source) if c == "\n")]
        yield Text()
        yield Text(f"issues: {len(self.issues)}", style="bold")
        for issue in self.issues[:MAX_ISSUES]:
            yield from self._problem(issue, starts)
        yield from _more(len(self.issues) - MAX_ISSUES, "issues")

    # -- pieces --------------------------------------------------------------------------------

    def _drawn_by_thread(self) -> dict[str, list[tuple[int, bool]]]:
        """Of each thread, the steps it drew a token at and whether that token is text."""
        drawn: dict[str, list[tuple[int, bool]]] = {}
        rows = derived_steps(self.trace)
        for segment, row in zip(self.trace.segments, rows, strict=True):
            of_thread = drawn.setdefault(segment.thread, [])
            for step, markup in zip(row, segment.markup, strict=True):
                if step is not None:
                    of_thread.append((step, not markup))
        return drawn

    def _lane(self, drawn: Sequence[tuple[int, bool]], scale: int) -> Text:
        columns: dict[int, str] = {}
        for step, is_text in drawn:
            column = (step - 1) // scale
            if is_text or column not in columns:
                columns[column] = TEXT if is_text else CONTROL
        lane = Text()
        first, last = min(columns, default=0), max(columns, default=-1)
        lane.append(" " * first)
        for column in range(first, last + 1):
            mark = columns.get(column, WAITING)
            lane.append(mark, style=STYLES[mark])
        return lane

    def _segment_row(self, segment: Segment) -> tuple[str, ...]:
        positions = f"{segment.positions[0]}..{segment.positions[-1]}"
        start = self.vocabulary.decode(segment.tokens[:EXCERPT])
        text = self._escape(start[:EXCERPT])
        if len(start) > EXCERPT or len(segment) > EXCERPT:
            text += "..."
        sees = _ranges(sorted(segment.sees)) or "-"
        if len(sees) > EXCERPT:
            sees = f"{len(segment.sees)} segments"
        return (
            str(segment.id), segment.thread, segment.role, str(len(segment)), positions, sees, text
        )  # fmt: skip

    def _problem(self, issue: Issue, starts: list[int]) -> Iterator[Text]:
        line = bisect_right(starts, issue.at)
        start = starts[line - 1]
        end = starts[line] - 1 if line < len(starts) else len(self.source)
        yield Text(f"  {issue.code} at {issue.at} (line {line}, column {issue.at - start + 1})")
        before = self._escape(self.source[max(start, issue.at - EXCERPT) : issue.at])
        after = self._escape(self.source[issue.at : min(end, issue.at + EXCERPT)].rstrip("\r"))
        yield Text(f"    {before}{after}", style="dim")
        yield Text(f"    {' ' * cell_len(before)}^", style="red")

    def _escape(self, text: str) -> str:
        """Text safe to print: control characters (and beyond ASCII, where plain) as escapes."""
        return "".join(c if self._is_safe(c) else ascii(c)[1:-1] for c in text)

    def _is_safe(self, c: str) -> bool:
        return c.isprintable() and (c.isascii() or not self.is_plain)


def _ranges(ids: Iterable[int]) -> str:
    """`0-2,5` for 0, 1, 2, 5."""
    runs: list[list[int]] = []
    for i in ids:
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _more(count: int, what: str) -> Iterator[Text]:
    if count > 0:
        yield Text(f"  ... and {count} more {what}; --json has all", style="dim")
