"""Dialect `tip`, written down: annotated text or ids to a trace, and a trace to its text form."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.dialects.base import Parsed, Vocabulary
from stretto.dialects.registers import BEFORE, RunWriter, Steps, register_tags
from stretto.dialects.tip import TipSettings
from stretto.recorder import MAIN, Recorder
from stretto.trace import Trace, text_runs


def parse_text(
    text: str, vocabulary: Vocabulary, settings: TipSettings, prompt: str = ""
) -> Parsed:
    """What an annotated text means. Total: raises for no text that the vocabulary can encode."""
    tags, issues = register_tags(text, settings.num_registers)
    recorder, writer = _begin(vocabulary.encode(prompt), vocabulary, settings)
    writer.write_text(recorder.threads[MAIN], text, 0, len(text), tags)
    found = sorted([*issues, *writer.issues], key=lambda issue: issue.at)
    return Parsed(recorder.freeze(), "".join(writer.shown), tuple(found))


def parse_ids(
    prompt_ids: Sequence[int], ids: Sequence[int], vocabulary: Vocabulary, settings: TipSettings
) -> Parsed:
    """What a response of these ids means. `at` of an issue is an index into `ids`.

    Total: any ids of the vocabulary have a meaning.
    """
    recorder, writer = _begin(list(prompt_ids), vocabulary, settings)
    writer.write_ids(recorder.threads[MAIN], ids, 0)
    trace = recorder.freeze()
    text = "".join(vocabulary.decode(run) for run in text_runs(trace))
    return Parsed(trace, text, tuple(writer.issues))


def _begin(
    prompt: list[int], vocabulary: Vocabulary, settings: TipSettings
) -> tuple[Recorder, RunWriter]:
    recorder = Recorder(prompt, BEFORE, settings.max_positions)
    steps = Steps(vocabulary, settings.num_registers, grace=settings.grace)
    return recorder, RunWriter(recorder, vocabulary, steps)


def to_text(trace: Trace, vocabulary: Vocabulary) -> tuple[str, dict[tuple[int, int], int]]:
    """The annotated text of a trace, and where tokens stand in it.

    Offsets are in code points and keyed by (segment id, token index). They are exact for registers,
    also those that are text; other tokens have the offset of the run they stand in.
    """
    registers = set(vocabulary.control.values())
    pieces: list[str] = []
    offsets: dict[tuple[int, int], int] = {}
    run: list[int] = []
    length = 0
    for segment in trace.response:
        for index, token in enumerate(segment.tokens):
            if run and token in registers:
                pieces.append(vocabulary.decode(run))
                length += len(pieces[-1])
                run = []
            offsets[segment.id, index] = length
            run.append(token)
            if token in registers:
                pieces.append(vocabulary.decode(run))
                length += len(pieces[-1])
                run = []
    pieces.append(vocabulary.decode(run))
    return "".join(pieces), offsets
