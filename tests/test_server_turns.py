"""A request of many samples leaves room to others: when they are admitted, and when they start."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from serving import CHAT, endless, scripted, serving, slowed, wait_until
from tiny_lms import tiny_lm

from stretto.server import Settings, create_app
from stretto.server.errors import ApiError

NUM = 40


def test_a_quarter_is_for_requests_of_one_sample() -> None:
    engine = create_app(tiny_lm(), Settings(max_requests=8)).state.engine
    first = engine.admit(4)
    with pytest.raises(ApiError, match=r"4 samples .* 3 more .* limit of 6 for a request of"):
        engine.admit(3)
    several = engine.admit(2)
    singles = [engine.admit(1) for _ in range(2)]
    with pytest.raises(ApiError, match="limit of 8; try again") as full:
        engine.admit(1)
    assert (full.value.status, full.value.code) == (429, "queue_full")
    first.release()
    assert engine.num_admitted == 4
    for ticket in (several, *singles):
        ticket.release()
    assert engine.num_admitted == 0


@pytest.mark.parametrize(("limit", "most"), [(1, 1), (3, 3), (4, 3), (8, 6), (256, 192)])
def test_how_many_samples_a_request_may_have(limit: int, most: int) -> None:
    assert Settings(max_requests=limit).max_samples == most


def test_what_is_asked_after_many_samples_does_not_wait_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm = tiny_lm("pasta", pool_slots=128)
    queue, queued = lm.queue, []

    def queueing(stream: Any) -> None:
        queue(stream)
        queued.append(stream.request)

    monkeypatch.setattr(lm, "queue", queueing)
    with (
        serving(lm) as served, scripted(lm, endless), slowed(lm, 0.005),
        ThreadPoolExecutor(1) as crowd,
    ):  # fmt: skip
        many = served.chat("a", n=NUM, max_tokens=30, temperature=0)
        asked = crowd.submit(served.ask, CHAT, many)
        wait_until(lambda: len(lm.scheduler.running) > 2 and bool(lm.scheduler.waiting))
        num_waiting = int(number(served.ask("/metrics")[2], "stretto_waiting"))
        assert num_waiting > NUM // 2  # those that are held are counted
        status, _, answer = served.ask(CHAT, served.chat("b", max_tokens=2, temperature=0))
        assert (status, answer["usage"]["completion_tokens"]) == (200, 2)
        assert not asked.done()
        status, _, answer = asked.result()
        assert (status, len(answer["choices"])) == (200, NUM)
        assert len({choice["message"]["content"] for choice in answer["choices"]}) == 1
        served.check_idle()
    assert len(queued) == NUM + 1
    started = sorted(queued, key=lambda request: request.timing.first_token)
    place = next(i for i, request in enumerate(started) if request.params.max_tokens == 2)
    assert place <= NUM // 2, place  # those that ran when it was asked, and as many
    assert served.engine.num_held == 0


def test_samples_that_nobody_waits_for_are_not_held() -> None:
    lm = tiny_lm("pasta", pool_slots=320)
    with serving(lm, deadline_s=0.3) as served, scripted(lm, endless), slowed(lm, 0.02):
        status, _, body = served.ask(CHAT, served.chat("a", n=NUM, max_tokens=200))
        assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
        served.check_idle()
        wait_until(lambda: served.engine.num_held == 0)
        ended = 'stretto_samples_total{finish_reason="cancelled"}'
        wait_until(lambda: number(served.ask("/metrics")[2], ended) == NUM)


def number(text: bytes, series: str) -> float:
    lines = text.decode().splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(f"{series} ")), 0.0)
