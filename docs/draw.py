"""Draws the pictures of the documentation: `python docs/draw.py [--out DIR] [NAME ...]`.

Every picture is drawn by `stretto.pictures` from a trace: of an annotated text written here, or
of effects applied here. No model is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stretto import pictures
from stretto.dialects import get_dialect
from stretto.dialects.pasta import PastaSession, PastaSettings
from stretto.dialects.pasta_masks import PastaMasks
from stretto.dialects.words import WordsVocabulary
from stretto.effects import Cut, Evict, Fork, Join, Place
from stretto.params import SamplingParams
from stretto.recorder import MAIN, Recorder
from stretto.runtime.pool import Pool
from stretto.runtime.request import Request
from stretto.runtime.scheduler import Scheduler
from stretto.trace import Segment, Thread, Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from stretto.runtime.views import Run

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
HERE = Path(__file__).resolve().parent / "pictures"
QUESTION = "How long is AB?"


def parsed(text: str, prompt: str) -> tuple[Trace, list[str]]:
    """The trace of a pasta text over words, and the text of each of its tokens."""
    dialect = get_dialect("pasta")
    vocabulary = WordsVocabulary(dialect.control_forms)
    trace = dialect.parse_text(text, vocabulary, PastaSettings(), prompt).trace
    return trace, [vocabulary.decode([token]) for s in trace.segments for token in s.tokens]


def triangle() -> tuple[Trace, list[str]]:
    text = (EXAMPLES / "triangle.txt").read_text(encoding="utf-8")
    return parsed(text, QUESTION)


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


def pool() -> Figure:
    """Which thread's tokens lie in which slot after each pass: a real request over a real pool."""
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure

    passes, colours = _decode_triangle()
    num_slots = 1 + max(slot for written in passes for slot in written)
    image = np.full((len(passes), num_slots, 3), to_rgb(pictures.HIDDEN))
    held: dict[int, str] = {}
    for row, written in enumerate(passes):
        for slot, colour in held.items():
            image[row, slot] = np.array(to_rgb(colour)) * 0.35 + 0.65
        for slot, name in written.items():
            held[slot] = colours[name]
            image[row, slot] = to_rgb(colours[name])
    figure = Figure(figsize=(9, 5.2), layout="constrained", facecolor=pictures.PAPER)
    axes = figure.add_subplot(xlabel="slot of the pool", ylabel="pass")
    axes.imshow(image, interpolation="nearest", aspect="auto")
    axes.vlines(np.arange(num_slots) - 0.5, -0.5, len(passes) - 0.5, pictures.PAPER, linewidth=0.6)
    axes.hlines(np.arange(len(passes)) - 0.5, -0.5, num_slots - 0.5, pictures.PAPER, linewidth=0.6)
    axes.tick_params(length=0, colors=pictures.INK)
    axes.spines[:].set_visible(False)
    for name, colour in colours.items():
        axes.plot([], [], "s", color=colour, label=name)
    axes.legend(loc="upper right", frameon=False)
    return figure


def _decode_triangle() -> tuple[list[dict[int, str]], dict[str, str]]:
    """Decodes the triangle with forced tokens: per pass, who wrote which slot; and colours."""
    dialect = get_dialect("pasta")
    words = WordsVocabulary(dialect.control_forms)
    text = (EXAMPLES / "triangle.txt").read_text(encoding="utf-8")
    trace = dialect.parse_text(text, words, PastaSettings(), QUESTION).trace
    end = words.size
    forced: dict[str, list[int]] = {thread.name: [] for thread in trace.threads}
    for s in trace.segments:
        pairs = zip(s.tokens, s.origins, strict=True)
        forced[s.thread] += [token for token, origin in pairs if origin == "sampled"]
    for tokens in forced.values():
        tokens.append(end)
    engine = NoteTaker(vocab_size=end + 1)
    request = Request(
        words.encode(QUESTION),
        PastaSession(PastaMasks(words, PastaSettings().unit), PastaSettings()),
        SamplingParams(),
        decode=words.decode,
        end_ids=frozenset({end}),
        max_positions=engine.max_positions,
        script=lambda thread, index: forced[thread][index],
    )
    scheduler = Scheduler(engine, Pool(engine.num_slots))
    scheduler.submit(request)
    while scheduler.step():
        pass
    return engine.passes, {"prompt": pictures.PROMPT_COLOUR} | pictures.thread_colours(trace)


class NoteTaker:
    """An engine that computes nothing and notes, per pass, who wrote which slot."""

    name = "notes"
    batch_invariant = True
    max_positions = num_slots = 128

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.passes: list[dict[int, str]] = []

    def forward(self, runs: list[Run]) -> Tensor:
        import torch

        names = [(r, "prompt" if r.segment.role == "prompt" else r.segment.thread) for r in runs]
        self.passes.append({slot: name for run, name in names for slot in run.slots})
        return torch.zeros(sum(run.num_logits for run in runs), self.vocab_size)

    def copy_out(self, slots: list[int]) -> None:
        raise NotImplementedError

    def copy_in(self, slots: list[int], kept: None) -> None:
        raise NotImplementedError


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
    "pool": pool,
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
