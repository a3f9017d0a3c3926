"""Pictures of a trace: who sees whom, token by token, and threads as lanes over steps.

Both are read off the trace alone: the matrix asks `trace.visible` for every pair of tokens, the
lanes take measured steps where there are any, else those that follow from the trace's structure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stretto.trace import Segment, Trace, derived_steps, is_prompt, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195")
"""Forked threads, in turn: told apart with any colour vision (Okabe and Ito, 2008)."""
MAIN_COLOUR, PROMPT_COLOUR = "#3C4650", "#A9B0B7"
PAPER, INK, FAINT, HIDDEN = "#FFFFFF", "#20262C", "#C9CED3", "#F1F3F5"
MAX_TOKEN_LABELS = 64
"""Traces of more tokens are labelled by segment only."""
DPI = 160


def thread_colours(trace: Trace) -> dict[str, str]:
    """A colour per thread: dark grey for one without a parent, then the palette in turn."""
    forked = [t.name for t in trace.threads if t.parent is not None]
    colours = {t.name: MAIN_COLOUR for t in trace.threads if t.parent is None}
    return colours | {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(forked)}


def visibility(trace: Trace) -> NDArray[np.bool_]:
    """`visible` of every pair of tokens, flat, segment after segment: queries x keys."""
    flat = [(s, i) for s in trace.segments for i in range(len(s))]
    found = [visible(query, i, key, j) for query, i in flat for key, j in flat]
    return np.array(found, dtype=np.bool_).reshape(len(flat), len(flat))


def step_rows(trace: Trace) -> list[list[int | None]]:
    """The step of each token, one list a segment: measured, or derived if nothing was measured."""
    measured = [list(s.steps) for s in trace.segments]
    is_measured = any(step is not None for row in measured for step in row)
    return measured if is_measured else derived_steps(trace)


@dataclass(frozen=True, slots=True)
class ForkMark:
    """`child` forks after its parent's step `step` (0: before its first)."""

    parent: str
    child: str
    step: int


@dataclass(frozen=True, slots=True)
class JoinMark:
    """`parent` sees `child` from segment `segment` on; the child's last step was `step`."""

    parent: str
    child: str
    segment: int
    step: int


@dataclass(frozen=True, slots=True)
class EvictMark:
    """From segment `segment` on, which begins after step `step`, `thread` lacks `evicted`."""

    thread: str
    evicted: int
    segment: int
    step: int


Mark = ForkMark | JoinMark | EvictMark


def marks(trace: Trace) -> list[Mark]:
    """Forks, joins and evictions, as the `sees` sets of consecutive segments of a thread tell."""
    rows = step_rows(trace)
    found: list[Mark] = []
    for thread in trace.threads:
        own = trace.of_thread(thread.name)
        if own and thread.parent is not None:
            seen = [k for k in own[0].sees if trace.segments[k].thread == thread.parent]
            step = _last_step(trace, rows, thread.parent, max(seen, default=-1))
            found.append(ForkMark(thread.parent, thread.name, step))
        for before, after in itertools.pairwise(own):
            found += _changes(trace, rows, before, after)
    return found


def _changes(
    trace: Trace, rows: list[list[int | None]], before: Segment, after: Segment
) -> Iterator[Mark]:
    """What a thread sees more or less of in its segment `after` than at the end of `before`."""
    known = before.sees | {before.id}
    joined = {trace.segments[k].thread for k in after.sees - known} - {after.thread}
    for child in sorted(joined):
        step = _last_step(trace, rows, child, len(rows))
        yield JoinMark(after.thread, child, after.id, step)
    for evicted in sorted(known - after.sees):
        step = _last_step(trace, rows, after.thread, before.id)
        yield EvictMark(after.thread, evicted, after.id, step)


def _last_step(trace: Trace, rows: list[list[int | None]], thread: str, until: int) -> int:
    """The last step a thread had taken by the end of its segment `until`; 0 for none."""
    segments = [s for s in trace.of_thread(thread) if s.id <= until]
    return max((step for s in segments for step in rows[s.id] if step is not None), default=0)


# -- drawing on axes -------------------------------------------------------------------------------


def draw_matrix(axes: Any, trace: Trace, labels: Sequence[str] | None = None) -> None:
    """The visibility matrix: a cell is filled, in the key's thread's colour, if its row sees it.

    `labels`: one string a token, in the trace's order; shown if there are few enough.
    """
    from matplotlib.colors import to_rgb

    sees = visibility(trace)
    num_tokens = len(sees)
    colours = _token_colours(trace)
    image = np.empty((num_tokens, num_tokens, 3))
    image[:] = to_rgb(HIDDEN)
    if num_tokens:
        image[sees] = np.array([to_rgb(c) for c in colours])[np.nonzero(sees)[1]]
    if num_tokens:
        axes.imshow(image, interpolation="nearest", aspect="equal")
    if num_tokens <= MAX_TOKEN_LABELS:
        lines = np.arange(-0.5, num_tokens)
        axes.hlines(lines, -0.5, num_tokens - 0.5, color=PAPER, linewidth=0.6)
        axes.vlines(lines, -0.5, num_tokens - 0.5, color=PAPER, linewidth=0.6)
    bounds = np.cumsum([0, *(len(s) for s in trace.segments)]) - 0.5
    axes.hlines(bounds, -0.5, num_tokens - 0.5, color=INK, linewidth=0.7)
    axes.vlines(bounds, -0.5, num_tokens - 0.5, color=INK, linewidth=0.7)
    _label_matrix(axes, trace, bounds, labels)


def draw_lanes(axes: Any, trace: Trace) -> None:
    """Threads as lanes, a filled box per drawn token (pale: annotation), over steps.

    An arrow down is a fork, an arrow up a join, a dotted line a wait, a cross an eviction.
    """
    rows, colours = step_rows(trace), thread_colours(trace)
    lanes = {t.name: -i for i, t in enumerate(trace.threads)}
    for segment, row in zip(trace.segments, rows, strict=True):
        for step, is_markup in zip(row, segment.markup, strict=True):
            if step is not None:
                _box(axes, step, lanes[segment.thread], colours[segment.thread], is_markup)
    for thread, lane in lanes.items():
        own = [step for s in trace.of_thread(thread) for step in rows[s.id] if step is not None]
        _draw_waits(axes, own, lane, colours[thread])
    for mark in marks(trace):
        _draw_mark(axes, mark, lanes, colours)
    last = max((step for row in rows for step in row if step is not None), default=0)
    axes.set_xlim(0.2, last + 1.2)
    axes.set_ylim(min(lanes.values(), default=0) - 0.6, 0.6)
    _plain_spines(axes)
    axes.set_xlabel("step (one forward pass over all open threads)", color=INK, fontsize=9)
    axes.set_yticks(list(lanes.values()), [_lane_label(t.name, t.topic) for t in trace.threads])
    for tick, name in zip(axes.get_yticklabels(), lanes, strict=True):
        tick.set_color(colours[name])


def _token_colours(trace: Trace) -> list[str]:
    colours = thread_colours(trace)
    return [
        PROMPT_COLOUR if is_prompt(s) else colours[s.thread]
        for s in trace.segments
        for _ in range(len(s))
    ]


def _label_matrix(
    axes: Any, trace: Trace, bounds: NDArray[np.float64], labels: Sequence[str] | None
) -> None:
    colours = [INK if c == PROMPT_COLOUR else c for c in _token_colours(trace)]
    starts = np.cumsum([0, *(len(s) for s in trace.segments)])
    middles = (bounds[:-1] + bounds[1:]) / 2
    names = [f"{s.id} {'prompt' if is_prompt(s) else s.thread}" for s in trace.segments]
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.set_xticks(middles, names, rotation=90, fontsize=7.5)
    for tick, start in zip(axes.get_xticklabels(), starts, strict=False):
        tick.set_color(colours[start])
    if labels is not None and len(labels) <= MAX_TOKEN_LABELS:
        axes.set_yticks(range(len(labels)), [_shown(label) for label in labels], fontsize=6.5)
        ticks = zip(axes.get_yticklabels(), colours, strict=True)
    else:
        axes.set_yticks(middles, names, fontsize=7.5)
        ticks = zip(axes.get_yticklabels(), [colours[i] for i in starts[:-1]], strict=True)
    for tick, colour in ticks:
        tick.set_color(colour)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _shown(label: str) -> str:
    label = label.strip(" ").replace("\n", "\\n")
    return label if len(label) <= 20 else label[:19] + "…"


def _box(axes: Any, step: int, lane: int, colour: str, is_markup: bool) -> None:
    from matplotlib.patches import Rectangle

    face = colour + "55" if is_markup else colour
    box = Rectangle((step - 0.43, lane - 0.26), 0.86, 0.52, facecolor=face, edgecolor="none")
    axes.add_patch(box)


def _draw_waits(axes: Any, steps: Sequence[int], lane: int, colour: str) -> None:
    """A dotted line over the steps between two of a thread's at which it drew no token."""
    for before, after in itertools.pairwise(steps):
        if after > before + 1:
            span = [before + 0.55, after - 0.55]
            axes.plot(span, [lane, lane], ":", color=colour, linewidth=1.8)


def _draw_mark(axes: Any, mark: Mark, lanes: dict[str, int], colours: dict[str, str]) -> None:
    arrow = {"arrowstyle": "-|>", "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}
    match mark:
        case ForkMark(parent, child, step):
            start, end = (step + 0.5, lanes[parent] - 0.3), (step + 0.5, lanes[child] + 0.0)
            axes.annotate("", end, start, arrowprops=arrow | {"color": colours[child]})
        case JoinMark(parent, child, _, step):
            start, end = (step + 0.5, lanes[child]), (step + 0.5, lanes[parent] - 0.3)
            axes.annotate("", end, start, arrowprops=arrow | {"color": colours[child]})
        case EvictMark(thread, _, _, step):
            at = (step + 0.5, lanes[thread] + 0.42)
            axes.plot(*at, "x", color=INK, markersize=6, markeredgewidth=1.6, clip_on=False)


def _lane_label(name: str, topic: str | None) -> str:
    return name if topic is None else f"{name}\n{_shown(topic)}"


def _plain_spines(axes: Any) -> None:
    axes.tick_params(length=0, labelsize=8.5, colors=INK)
    axes.set_axisbelow(True)
    axes.xaxis.grid(True, color=FAINT, linewidth=0.4)
    for spine in axes.spines.values():
        spine.set_visible(False)


# -- whole figures ---------------------------------------------------------------------------------


def matrix_figure(trace: Trace, labels: Sequence[str] | None = None) -> Figure:
    """The visibility matrix as a figure of its own."""
    figure = _figure(7.2, 6.4)
    draw_matrix(figure.add_subplot(), trace, labels)
    return figure


def lanes_figure(trace: Trace) -> Figure:
    """The lanes as a figure of its own, as high as there are threads."""
    figure = _figure(9, 1.1 + 0.5 * len(trace.threads))
    draw_lanes(figure.add_subplot(), trace)
    return figure


def overview_figure(trace: Trace, labels: Sequence[str] | None = None) -> Figure:
    """Lanes on the left, the matrix on the right."""
    figure = _figure(12, 4.4)
    left, right = figure.subplots(1, 2, width_ratios=[1.25, 1])
    draw_lanes(left, trace)
    left.set_title("when: threads over steps", fontsize=11, color=INK, loc="left")
    draw_matrix(right, trace, labels)
    right.set_xticks([])
    right.set_title("what: a row sees the filled columns", fontsize=11, color=INK, loc="left")
    return figure


def save(figure: Figure, path: Path) -> None:
    """Writes a figure, PNG or SVG by the path's suffix, without a date in it."""
    metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    figure.savefig(path, dpi=DPI, facecolor=PAPER, metadata=metadata)


def _figure(width: float, height: float) -> Figure:
    """A figure in inches on light paper, which also reads well on a dark page."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor=PAPER)
