"""`/v1/models` lists the methods that the server answers by, and no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from planned_kit import planned_lm
from serving import CHAT, serving
from tiny_lms import tiny_lm

from stretto import LM
from stretto.dialects import DIALECTS
from stretto.methods import DIFFUSION, EVICTING, METHODS

WINDOW = "diffusion,window=24,block=8"


def without_extras() -> LM:
    """Of an engine that gives logits and nothing else."""
    lm = tiny_lm("pasta")
    lm.engine.refusal = lambda extra: "it gives logits alone"  # type: ignore[attr-defined]
    return lm


MODELS: dict[str, tuple[Callable[[], LM], list[str]]] = {
    "plain": (tiny_lm, [*METHODS]),
    "pasta": (lambda: tiny_lm("pasta"), ["pasta", *METHODS]),
    "planned": (planned_lm, ["planned", *METHODS]),
    "window": (lambda: planned_lm(window=24, block=8), [WINDOW]),
    "no template": (lambda: tiny_lm(chat=False), [m for m in METHODS if m != "sot"]),
    "no extras": (without_extras, ["pasta", *(m for m in METHODS if m != "paged_h2o")]),
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_methods_of_a_model_are_those_that_it_answers_by(kind: str) -> None:
    make, expected = MODELS[kind]
    others = [d for d in DIALECTS if d != "plain"] + [DIFFUSION, WINDOW]
    with serving(make(), max_tokens=8) as served:
        (model,) = served.ask("/v1/models")[2]["data"]
        listed = model["stretto"]["methods"]
        assert listed == expected
        assert listed[0] == served.lm.find_method().name
        path, asked = CHAT, served.chat(max_tokens=24)
        if not served.lm.has_chat_template:
            path, asked = "/v1/completions", {"model": asked["model"], "prompt": "hi"}
        for name in dict.fromkeys((*METHODS, *others)):
            extension = {"method": name} | ({"budget": 256} if name in EVICTING else {})
            status, _, body = served.ask(path, asked | {"stretto": extension})
            assert (status == 200) == (name in listed), (name, body)
