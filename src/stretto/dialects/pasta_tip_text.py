"""Dialect `pasta+tip`, written down: annotated text or ids to a trace.

Its text form is what `pasta_text.to_text` writes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from stretto.dialects.base import Parsed, Vocabulary
from stretto.dialects.outline import outline
from stretto.dialects.pasta import PastaSettings
from stretto.dialects.pasta_text import Replay, in_order, promise_ids
from stretto.dialects.registers import BEFORE, RunWriter, Steps, register_tags
from stretto.dialects.tags import id_tags, text_tags
from stretto.dialects.tip import TipSettings
from stretto.recorder import OpenThread
from stretto.trace import text_runs


def parse_text(
    text: str, vocabulary: Vocabulary, pasta: PastaSettings, tip: TipSettings, prompt: str = ""
) -> Parsed:
    """What an annotated text means. Total: raises for no text that the vocabulary can encode."""
    promises = list(text_tags(text, pasta.unit))
    spans = [(tag.start, tag.end) for tag in promises]
    tags, unknown = register_tags(text, tip.num_registers, spans)
    starts = [tag.start for tag in tags]
    parts, issues = outline(promises, len(text))
    replay, writer = _begin(vocabulary.encode(prompt), vocabulary, pasta, tip)

    def write(thread: OpenThread, start: int, end: int) -> None:
        inside = tags[bisect_left(starts, start) : bisect_left(starts, end)]
        writer.write_text(thread, text, start, end, inside)

    replay.run(parts, write, lambda tag: promise_ids(tag, vocabulary, pasta.unit))
    found = in_order([*unknown, *issues, *replay.issues, *writer.issues])
    return Parsed(replay.trace(), "".join(writer.shown), found)


def parse_ids(
    prompt_ids: Sequence[int], ids: Sequence[int], vocabulary: Vocabulary,
    pasta: PastaSettings, tip: TipSettings,
) -> Parsed:  # fmt: skip
    """What a serialised response means; either layout. `at` of an issue is an index into `ids`.

    Total: any ids of the vocabulary have a meaning.
    """
    tags, unfinished = id_tags(ids, vocabulary, pasta.unit)
    parts, issues = outline(tags, len(ids))
    replay, writer = _begin(list(prompt_ids), vocabulary, pasta, tip)
    replay.run(
        parts,
        lambda thread, start, end: writer.write_ids(thread, ids[start:end], start),
        lambda tag: list(ids[tag.start : tag.end]),
    )
    trace = replay.trace()
    text = "".join(vocabulary.decode(run) for run in text_runs(trace))
    return Parsed(trace, text, in_order([*unfinished, *issues, *replay.issues, *writer.issues]))


def _begin(
    prompt: list[int], vocabulary: Vocabulary, pasta: PastaSettings, tip: TipSettings
) -> tuple[Replay, RunWriter]:
    replay = Replay(prompt, vocabulary, pasta, BEFORE)
    steps = Steps(vocabulary, tip.num_registers, grace=tip.grace)
    return replay, RunWriter(replay.recorder, vocabulary, steps)
