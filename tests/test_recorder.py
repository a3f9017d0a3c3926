"""The recorder's prompt, which is placed in one go, against token after token."""

from __future__ import annotations

import pytest

from stretto.effects import Cut, Place
from stretto.recorder import MAIN, Recorder


def one_by_one(prompt: list[int], limit: int | None, cuts: tuple[int, ...]) -> Recorder:
    recorder = Recorder([], "prompt", limit)
    main = recorder.threads[MAIN]
    for i, token in enumerate(prompt):
        if i in cuts:
            recorder.cut(main, Cut())
        recorder.place(main, Place(token, "prompt", markup=True))
    recorder.cut(main, Cut(role="answer"))
    return recorder


@pytest.mark.parametrize("limit", [None, 4, 100])
@pytest.mark.parametrize("cuts", [(), (0,), (2, 3), (5, 1, 99), (6,)])
@pytest.mark.parametrize("length", [0, 1, 6])
def test_a_prompt_is_its_tokens_one_by_one(
    length: int, cuts: tuple[int, ...], limit: int | None
) -> None:
    prompt = list(range(10, 10 + length))
    expected, found = one_by_one(prompt, limit, cuts), Recorder(prompt, "answer", limit, cuts)
    assert found.freeze() == expected.freeze()
    own, other = found.threads[MAIN], expected.threads[MAIN]
    assert own.unfed == other.unfed
    assert (own.next_position, own.changes, own.role) == (
        other.next_position, other.changes, other.role
    )  # fmt: skip
    counts = [(r.num_placed, r.num_unfed, r.entries_touched) for r in (found, expected)]
    assert counts[0] == counts[1]
    assert [s.steps for s in found.segments] == [s.steps for s in expected.segments]
