"""Budgets on trained weights: random ones do not show what goes wrong when sinks are lost, or
when positions do not fit what is left."""

from __future__ import annotations

import pytest

from stretto import LM, SamplingParams
from stretto.runtime.events import Token

pytestmark = pytest.mark.embedded

TEXT = (
    "The history of the lighthouse is long. In the ancient world, fires were lit on hilltops to "
    "guide sailors home. As ports grew, people raised towers so that the light could be seen from "
    "farther away. The most famous of these stood at Alexandria, and was counted among the wonders "
    "of the world. For centuries it burned wood, and later oil. In the Middle Ages, monks kept "
    "lights along dangerous coasts. With the rise of trade across the Atlantic in the eighteenth "
    "century, many new lighthouses were built, and engineers learned how to set a tower on a rock "
    "that the sea covers at every tide."
)


def test_sinks_hold_a_trained_model_together_and_a_window_alone_does_not() -> None:
    """Mean log-prob of a text under a budget of 32 tokens, where all of it is long exceeded."""
    lm = LM.load(
        "smollm2-135m-instruct", dtype="bfloat16", pool_slots=512, extras=["attention mass"]
    )
    ids = lm.vocabulary.encode(TEXT)

    def mean(method: str) -> float:
        params = SamplingParams(max_tokens=len(ids))
        stream = lm.submit(
            "The history", params, method=method, raw=True, script=lambda thread, i: ids[i]
        )
        found = stream.finish().events
        logprobs = [e.logprob for e in found if isinstance(e, Token) and e.logprob is not None]
        assert len(logprobs) == len(ids)
        return sum(logprobs[50:]) / len(logprobs[50:])

    dense, window = mean("dense"), mean("window,budget=32")
    for kept in ("streaming_llm,budget=32", "streaming_llm,budget=32,reindexed",
                 "paged_h2o,budget=32,page_tokens=4"):  # fmt: skip
        found = mean(kept)
        assert dense - 0.8 < found < dense + 0.1
        assert found > window + 0.3
    assert mean("random_evict,budget=32") < window
