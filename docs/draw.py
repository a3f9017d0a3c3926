"""Draws the pictures of the documentation: `python docs/draw.py [--out DIR] [NAME ...]`.

Every picture is drawn by `stretto.pictures` from a trace: of an annotated text written here, or
of effects applied here. No model is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from stretto import pictures
from stretto.dialects import get_dialect
from stretto.dialects.pasta import PastaSettings
from stretto.dialects.words import WordsVocabulary
from stretto.effects import Cut, Evict, Fork, Join, Place
from stretto.recorder import MAIN, Recorder
from stretto.trace import Segment, Thread, Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
HERE = Path(__file__).resolve().parent / "pictures"


def parsed(text: str, prompt: str) -> tuple[Trace, list[str]]:
    """The trace of a pasta text over words, and the text of each of its tokens."""
    dialect = get_dialect("pasta")
    vocabulary = WordsVocabulary(dialect.control_forms)
    trace = dialect.parse_text(text, vocabulary, PastaSettings(), prompt).trace
    return trace, [vocabulary.decode([token]) for s in trace.segments for token in s.tokens]


def triangle() -> tuple[Trace, list[str]]:
    text = (EXAMPLES / "triangle.txt").read_text(encoding="utf-8")
    return parsed(text, "How long is AB?")


def tea() -> tuple[Trace, list[str]]:
    text = (EXAMPLES / "tea.txt").read_text(encoding="utf-8")
    return parsed(text, "How do I make good tea?")


def overview() -> Figure:
    trace, _ = tea()
    return pictures.overview_figure(trace)


def pasta_matrix() -> Figure:
    return pictures.matrix_figure(*triangle())


def pasta_lanes() -> Figure:
    return pictures.lanes_figure(triangle()[0])


def effects() -> Figure:
    """What each effect does to the matrix, each on the smallest trace that shows it."""
    from matplotlib.figure import Figure

    panels = {
        "Fork: siblings are blind": _forks(),
        "Join: main sees them": _joins(),
        "Evict: later rows forget": _evicts(),
        "Denoise: a block, both ways": _block(),
    }
    figure = Figure(figsize=(12, 3.6), layout="constrained", facecolor=pictures.PAPER)
    for axes, (title, trace) in zip(figure.subplots(1, 4), panels.items(), strict=True):
        pictures.draw_matrix(axes, trace)
        axes.set_title(title, fontsize=11, color=pictures.INK)
    return figure


def _write(recorder: Recorder, name: str, count: int) -> None:
    for _ in range(count):
        recorder.place(recorder.threads[name], Place(0))


def _forked() -> Recorder:
    recorder = Recorder([0] * 3, "main")
    _write(recorder, MAIN, 2)
    for number in (1, 2):
        recorder.fork(recorder.threads[MAIN], Fork(f"{MAIN}.{number}"))
        _write(recorder, f"{MAIN}.{number}", 3)
    _write(recorder, MAIN, 2)
    return recorder


def _forks() -> Trace:
    return _forked().freeze()


def _joins() -> Trace:
    recorder = _forked()
    children = (f"{MAIN}.1", f"{MAIN}.2")
    for child in children:
        recorder.close(recorder.threads[child], "stop")
    recorder.join(recorder.threads[MAIN], Join(children))
    _write(recorder, MAIN, 2)
    return recorder.freeze()


def _evicts() -> Trace:
    recorder = Recorder([0] * 3, "main")
    main = recorder.threads[MAIN]
    _write(recorder, MAIN, 3)
    first = main.own.handle
    recorder.cut(main, Cut())
    _write(recorder, MAIN, 3)
    recorder.apply(main, Evict(first))
    _write(recorder, MAIN, 3)
    return recorder.freeze()


def _block() -> Trace:
    """Written out by hand: two blocks that see the prompt and what main wrote before them."""
    rows = [("main", "causal", 3, ()), ("main", "causal", 2, (0,))]
    rows += [("main.1", "block", 3, (0, 1)), ("main.2", "block", 3, (0, 1))]
    rows += [("main", "causal", 2, (0, 1, 2, 3))]
    segments = []
    for i, (thread, kind, count, sees) in enumerate(rows):
        origin = "prompt" if i == 0 else "sampled"
        segments.append(
            Segment(
                id=i,
                thread=thread,
                kind=kind,  # type: ignore[arg-type]
                role="",
                sees=frozenset(sees),
                tokens=(0,) * count,
                positions=tuple(range(count)),
                origins=(origin,) * count,  # type: ignore[arg-type]
                markup=(False,) * count,
                steps=(None,) * count,
            )
        )
    names = [("main", None), ("main.1", "main"), ("main.2", "main")]
    threads = tuple(Thread(name, parent, None, None) for name, parent in names)
    return Trace(tuple(segments), threads)


PICTURES: dict[str, Callable[[], Figure]] = {
    "overview": overview,
    "pasta-matrix": pasta_matrix,
    "pasta-lanes": pasta_lanes,
    "effects": effects,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the pictures of the documentation.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PICTURES))
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write to")
    arguments = parser.parse_args()
    for name in arguments.names or PICTURES:
        if name not in PICTURES:
            parser.error(f"no picture {name!r}; there are: {', '.join(PICTURES)}")
        path = arguments.out / f"{name}.png"
        pictures.save(PICTURES[name](), path)
        print(path)


if __name__ == "__main__":
    main()
