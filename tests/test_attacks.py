"""What ends an answer in the middle, and values nobody should give: everything stays whole."""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest
from tiny_lms import tiny_lm

from stretto import SamplingParams
from stretto.errors import InvalidInput
from stretto.lm import Stream


class Interrupt:
    """A trace function that raises KeyboardInterrupt at the n-th line of Stretto's own code.

    Not in lm.py: a tracer, unlike Ctrl-C, can strike where `with` has yet to release its lock.
    """

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        path = frame.f_code.co_filename
        if "/stretto/" not in path or path.endswith("/lm.py"):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def test_an_interrupt_anywhere_leaves_the_model_usable() -> None:
    lm = tiny_lm("pasta", pool_slots=128)
    params = SamplingParams(max_tokens=6, temperature=1.0)
    prompts = ["hello", "good bye"]
    expected = [answer.text for answer in lm.generate(prompts, params)]
    before = sys.gettrace()
    never = Interrupt(sys.maxsize)
    sys.settrace(never)
    lm.generate(prompts, params)
    sys.settrace(before)
    num_lines = sys.maxsize - never.left
    for at in range(1, num_lines, max(1, num_lines // 150)):
        neighbour = lm.submit("neighbour", params)
        sys.settrace(Interrupt(at))
        try:
            with pytest.raises(KeyboardInterrupt):
                lm.generate(prompts, params)
        finally:
            sys.settrace(before)
        assert [answer.text for answer in lm.generate(prompts, params)] == expected
        lm.scheduler.check_integrity()
        neighbour.close()
        assert neighbour.request.is_done
        assert neighbour.completion.timing.total_s >= 0
        assert lm.scheduler.pool.num_free_pages == lm.scheduler.pool.num_pages


def test_text_may_be_read_while_another_thread_decodes() -> None:
    lm = tiny_lm()
    errors: list[BaseException] = []

    def read(stream: Stream) -> None:
        try:
            while not stream.request.is_done:
                assert stream.text is not None
                time.sleep(1e-5)
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for seed in range(2):
            params = SamplingParams(max_tokens=200, temperature=1.0, seed=seed, stop=("zzz",))
            stream = lm.submit("hello", params)
            readers = [threading.Thread(target=read, args=(stream,)) for _ in range(3)]
            for reader in readers:
                reader.start()
            stream.finish()
            for reader in readers:
                reader.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors


@pytest.mark.parametrize(
    "prompt",
    [None, 5, b"x", [5], [None], [b"x"], [{}], [{"role": "user"}], [{"content": "x"}], [{1: 2}],
     [{"role": ["user"], "content": "x"}], [{"role": "user", "content": None}], [], [[]],
     [{"role": "user", "content": "x"}, "x"], "\ud800", "\0"[:0]],
)  # fmt: skip
def test_a_prompt_of_no_known_kind_is_refused(prompt: Any) -> None:
    lm = tiny_lm()
    prompts = prompt or [prompt]
    with pytest.raises(InvalidInput):
        lm.generate(prompts)
    assert not lm.scheduler.waiting


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 10**400), ("repetition_penalty", 10**400), ("top_p", -(10**400)),
     ("stop", None), ("stop", 5), ("stop", [b"x"]), ("stop_ids", None), ("stop_ids", 5),
     ("stop_ids", [[1]]), ("stop_ids", "ab"), ("seed", None), ("max_tokens", float("nan"))],
)  # fmt: skip
def test_a_parameter_of_no_known_kind_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=name.replace("stop_ids", "stop.id")):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "options",
    [{"pool_slots": 10**15}, {"pool_slots": 10**30}, {"pool_slots": 5.5}, {"page_size": 2000},
     {"page_size": 0}, {"page_size": None}],
)  # fmt: skip
def test_a_pool_that_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        tiny_lm(**options)
    with pytest.raises(InvalidInput, match="n must be a whole number"):
        tiny_lm().generate("x", n=1.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="unknown method None"):
        tiny_lm().generate("x", method=None)
