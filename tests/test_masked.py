"""Checkpoints of masked diffusion that others have trained: a card is all that they need."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model
from tiny_lms import tiny_lm, tiny_tokenizer

from stretto import LM, SamplingParams
from stretto.completion import Completion
from stretto.data.check import Checker
from stretto.errors import InvalidInput, Unsupported
from stretto.masks import dense_mask
from stretto.tokens import ModelCard
from stretto.train.trainee import make_trainee

KINDS = ("llama", "qwen2")
CONVENTIONS = ("shifted", "aligned")
PROMPT = "What is it?"
WINDOW = 12
WAYS: dict[str, dict[str, Any]] = {
    "entropy": {},
    "fewer passes": {"steps_ratio": 0.4},
    "confidence": {"order": "confidence", "steps_ratio": 0.5},
    "threshold": {"threshold": 0.13},
}


def masked_lm(convention: str = "shifted", kind: str = "llama", **options: Any) -> LM:
    lm = tiny_lm("masked", kind, settings={"convention": convention}, **options)
    assert lm.card.convention == convention
    return lm


def written(completion: Completion) -> list[int]:
    """The ids of the window."""
    (block,) = (s for s in completion.trace.segments if s.kind == "block")
    return [t for t, o in zip(block.tokens, block.origins, strict=True) if o == "sampled"]


@torch.no_grad()
def reference(
    lm: LM, params: SamplingParams, *, is_prompt_causal: bool = False
) -> tuple[list[int], int]:
    """The window's ids and how many passes wrote them: masked diffusion as it is published, the
    whole sequence in each pass, and nothing of the package but the model."""
    prompt, mask = lm.encode(lm.chat(PROMPT)), lm.card.control["mask"]
    ids = torch.tensor([[*prompt, *[mask] * params.max_tokens]])
    visible = torch.ones(ids.shape[1], ids.shape[1]).bool()
    if is_prompt_causal:
        visible[: len(prompt)] = visible[: len(prompt)].tril()
    for number in itertools.count(1):
        left = (ids[0] == mask).nonzero()[:, 0]
        if not len(left):
            return ids[0, len(prompt) :].tolist(), number - 1
        logits = lm.model(input_ids=ids, attention_mask=visible[None, None]).logits[0].float()
        rows = logits[left - 1 if lm.card.convention == "shifted" else left]
        rows[:, [mask, *lm.vocabulary.spare_ids]] = -torch.inf
        probabilities = rows.softmax(-1)
        likely, tokens = probabilities.max(-1)
        scores = -torch.special.entr(probabilities).sum(-1)
        if params.order == "confidence":
            scores = likely
        chosen = scores.argsort(descending=True, stable=True)
        if params.threshold is None:
            passes = -(-params.max_tokens * int(params.steps_ratio * 10) // 10)
            due = number * params.max_tokens // passes
            chosen = chosen[: due - (params.max_tokens - len(left))]
        elif (likely >= params.threshold).any():
            chosen = (likely >= params.threshold).nonzero()[:, 0]
        else:
            chosen = chosen[:1]
        ids[0, left[chosen]] = tokens[chosen]
    raise AssertionError


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("way", WAYS)
def test_a_window_is_written_as_masked_diffusion_writes_it(
    kind: str, convention: str, way: str
) -> None:
    lm = masked_lm(convention, kind)
    params = SamplingParams(max_tokens=WINDOW, temperature=0, **WAYS[way])
    completion = lm.generate(PROMPT, params)[0]
    ids, num_passes = reference(lm, params)
    assert written(completion) == ids
    assert completion.usage.sequential_steps == num_passes
    assert 1 < num_passes <= WINDOW
    assert (completion.method, completion.usage.prompt_tokens) == (
        "masked",
        len(lm.encode(lm.chat(PROMPT))),
    )


def test_prompt_and_answer_are_one_segment_that_sees_itself_both_ways() -> None:
    lm = masked_lm()
    prompt = lm.encode(lm.chat(PROMPT))
    trace = lm.generate(PROMPT, SamplingParams(max_tokens=4))[0].trace
    first, block = trace.segments
    assert (first.kind, list(first.tokens)) == ("causal", prompt)
    assert (block.kind, block.role, len(block)) == ("block", "answer", len(prompt) + 4)
    assert list(block.positions) == list(range(len(prompt) + 4))
    visible = dense_mask(trace)[len(prompt) :]
    assert not visible[:, : len(prompt)].any()
    assert visible[:, len(prompt) :].all()


@torch.no_grad()
@pytest.mark.parametrize("engine", ["hf", "fused"])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_rows_are_those_of_one_pass_over_all(
    convention: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pass of the window, every token masked; under a causal prompt it would differ."""
    lm = masked_lm(convention, engine=engine, head_dim=16)
    prompt = lm.encode(lm.chat(PROMPT))
    passes: list[torch.Tensor] = []
    forward = lm.engine.forward

    def kept(runs: Any) -> Any:
        passes.append(forward(runs).clone())
        return passes[-1]

    monkeypatch.setattr(lm.engine, "forward", kept)
    lm.generate(PROMPT, SamplingParams(max_tokens=WINDOW))
    ids = torch.tensor([[*prompt, *[lm.card.control["mask"]] * WINDOW]])
    visible = torch.ones(ids.shape[1], ids.shape[1]).bool()
    causal = visible.clone()
    causal[: len(prompt)] = causal[: len(prompt)].tril()
    first = len(prompt) - int(convention == "shifted")
    gaps = []
    for mask in (visible, causal):
        logits = lm.model(input_ids=ids, attention_mask=mask[None, None]).logits[0]
        gaps.append(float((logits[first : first + WINDOW] - passes[1]).abs().max()))
    assert gaps[0] < 1e-4
    assert gaps[1] > 1e-2


def test_requests_share_passes_and_write_what_they_write_alone() -> None:
    lm = masked_lm()
    params = SamplingParams(max_tokens=WINDOW, temperature=0)
    prompts = [PROMPT, "And what is that, if it is not this?", "Why?"]
    together = [written(c) for c in lm.generate(prompts, params)]
    assert together == [written(lm.generate(prompt, params)[0]) for prompt in prompts]


def test_the_same_seed_draws_the_same() -> None:
    lm = masked_lm()
    params = SamplingParams(max_tokens=WINDOW, temperature=1.0, seed=3)
    texts = [written(lm.generate(PROMPT, p)[0]) for p in (params, params, replace(params, seed=4))]
    assert texts[0] == texts[1] != texts[2]


# -- where an answer ends --------------------------------------------------------------------------


def forced(lm: LM, ids: list[int], **settings: Any) -> Completion:
    """A window that is made to hold these ids."""
    params = SamplingParams(max_tokens=len(ids), **settings)

    def script(thread: str, index: int) -> int | None:
        return None if thread == "main" else ids[index]

    return lm.submit(PROMPT, params, script=script).finish()


def test_what_is_written_ends_at_the_first_end_of_sequence() -> None:
    lm = masked_lm()
    end, a, b = min(lm.vocabulary.end_ids), *lm.vocabulary.encode("a"), *lm.vocabulary.encode("b")
    completion = forced(lm, [a, b, end, a, end, b])
    assert (completion.text, completion.finish_reason) == ("ab", "stop")
    assert written(completion) == [a, b, end, a, end, b]
    assert (completion.usage.completion_tokens, completion.usage.control_tokens) == (2, 4)
    whole = forced(lm, [a, b, a])
    assert (whole.text, whole.finish_reason) == ("aba", "length")


def test_behind_an_end_the_rest_is_filled_at_once() -> None:
    lm = masked_lm()
    end = min(lm.vocabulary.end_ids)
    passes = set()
    for seed in range(6):
        completion = forced(lm, [end] * 6, order="random", seed=seed, early_finish=True)
        (block,) = (s for s in completion.trace.segments if s.kind == "block")
        assert list(block.tokens[-6:]) == [end] * 6
        assert completion.text == ""
        passes.add(completion.usage.sequential_steps)
    assert min(passes) < 6
    assert forced(lm, [end] * 6, order="random").usage.sequential_steps == 6


def test_a_window_is_no_longer_than_the_positions_that_are_left() -> None:
    lm = masked_lm(pool_slots=4096)
    room = lm.engine.max_positions - len(lm.encode(lm.chat(PROMPT)))
    completion = lm.generate(PROMPT, SamplingParams(max_tokens=10**5, threshold=0.0))[0]
    assert len(written(completion)) == room
    assert completion.usage.sequential_steps == 1


# -- cards -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_with_a_card_is_loaded_and_run(kind: str, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    tiny_model(kind, vocab_size=len(tokenizer), eos_token_id=None).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    card = {
        "format": 1, "dialect": "masked", "control": {"mask": tokenizer.mask_token_id},
        "tokens": {"mask": "<|mask|>"}, "convention": "aligned",
    }  # fmt: skip
    (tmp_path / "stretto.json").write_text(json.dumps(card))
    lm = LM.load(tmp_path, dtype="float32", pool_slots=256)
    params = SamplingParams(max_tokens=WINDOW, temperature=0)
    assert written(lm.generate(PROMPT, params)[0]) == reference(lm, params)[0]
    (tmp_path / "stretto.json").write_text(json.dumps({**card, "convention": None}))
    with pytest.raises(InvalidInput, match="needs a convention: shifted or aligned"):
        LM.load(tmp_path)


def test_what_such_a_model_cannot_do_is_refused_by_name() -> None:
    lm = masked_lm()
    for method in ("sequential", "sot", "window,budget=8", "dense"):
        with pytest.raises(Unsupported, match="one of dialect masked and means nothing otherwise"):
            lm.generate(PROMPT, method=method)
    with pytest.raises(InvalidInput, match="unknown method 'diffusion'"):
        lm.generate(PROMPT, method="diffusion,window=8")
    for settings, message in (
        ({"convention": "aligned"}, "trained as 'shifted'"),
        ({"variant": "dense"}, "dialect masked has none"),
        ({"length_scale": 2.0}, "length_scale 2.0 is not read by method 'masked'"),
        ({"max_forks": 2}, "max_forks 2 is not read by method 'masked'"),
    ):
        with pytest.raises(Unsupported, match=message):
            lm.generate(PROMPT, SamplingParams(**settings))
    with pytest.raises(InvalidInput, match="dialect masked has no variant 'dense'"):
        ModelCard.describe("masked", {"mask": 1}, lm.tokenizer.backend_tokenizer, variant="dense")
    with pytest.raises(Unsupported, match="writes no annotations: there is nothing to check"):
        Checker(lm.vocabulary, dialect="masked")
    with pytest.raises(Unsupported, match="dialect masked is of models that others have trained"):
        make_trainee(tiny_model("llama"), tiny_tokenizer(), dialect="masked")


def test_a_model_without_an_end_of_sequence_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    model = tiny_model("llama", vocab_size=len(tokenizer), eos_token_id=None)
    with pytest.raises(Unsupported, match="has no end of sequence"):
        LM.wrap(model, tokenizer, dialect="masked", settings={"convention": "aligned"})
