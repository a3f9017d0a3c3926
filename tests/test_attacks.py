"""What ends an answer in the middle, and values nobody should give: everything stays whole."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
from tiny_lms import tiny_lm

from stretto import SamplingParams


class Interrupt:
    """A trace function that raises KeyboardInterrupt at the n-th line of Stretto's own code."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if "/stretto/" not in frame.f_code.co_filename:
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
