"""The annotator `likelihood`: exact decisions with a stub model, one pass against plain ones."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_model
from hypothesis import given, settings
from test_units import markdown
from tiny_lms import tiny_tokenizer

from stretto.data.annotators import Annotation, Refusal, get_annotator
from stretto.data.likelihood import DEFAULT_MAX_LOSS, LikelihoodAnnotator, likelihood_annotator
from stretto.data.likelihood_loss import best_topic, is_code, loss_of
from stretto.data.likelihood_plan import Move, Rules
from stretto.data.likelihood_scorer import LogProbs, ModelScorer
from stretto.data.likelihood_views import Sheet, first_views, pair_views, plan_views, prepare
from stretto.data.markup import chunks_of, stripped
from stretto.data.units import cut_units
from stretto.dialects import get_dialect
from stretto.dialects.pasta import PastaSettings
from stretto.dialects.tags import TAG_FORMS
from stretto.dialects.words import WordsVocabulary
from stretto.errors import InvalidInput, ModelUnavailable
from stretto.trace import visible

KNOWN, UNKNOWN, KEY_UNKNOWN = -0.1, -1.5, -9.0


class KeyScorer:
    """A model that knows a word KEYn only if it sees it, and nothing else of interest."""

    name = "keys"
    max_positions = 5000

    def __init__(self) -> None:
        self.vocabulary = WordsVocabulary({})
        self.num_sheets = 0

    def prompt_ids(self, prompt: str) -> list[int]:
        return self.vocabulary.encode(f"Q: {prompt}\nA:")

    def score(self, sheets: Sequence[Sheet]) -> list[list[LogProbs]]:
        self.num_sheets += len(sheets)
        return [[self._read(sheet, r.segment) for r in sheet.readings] for sheet in sheets]

    def _read(self, sheet: Sheet, number: int) -> LogProbs:
        segments = sheet.trace.segments
        own = segments[number]
        found = []
        for i, token in enumerate(own.tokens):
            word = self._word(token)
            if not word.startswith("KEY"):
                found.append(UNKNOWN)
                continue
            seen = {
                self._word(t)
                for s in segments
                for j, t in enumerate(s.tokens)
                if visible(own, i, s, j) and not (s is own and j >= i)
            }
            found.append(KNOWN if word in seen else KEY_UNKNOWN)
        return np.array(found, dtype=np.float32)

    def _word(self, token: int) -> str:
        return self.vocabulary.decode([token]).strip().strip(".,:")


def annotator(**rules: Any) -> LikelihoodAnnotator:
    return LikelihoodAnnotator(KeyScorer(), Rules(**{"max_loss": 0.08, **rules}))


def part(i: int, name: str, *words: str, filler: int = 30) -> str:
    """An item with a name, some words of its own, and keys."""
    own = [f"{name.lower()}{k}" for k in range(filler)]
    return f"\n\n{i}. **{name}**: It {' '.join([*own, *words])}."


def texts(found: Annotation | Refusal) -> list[str]:
    assert isinstance(found, Annotation)
    return [chunk.content or "" for chunk in chunks_of(found.text)]


def annotate(response: str, **rules: Any) -> str:
    found = annotator(**rules).annotate("Why?", response)
    assert isinstance(found, Annotation)
    assert stripped(found.text) == response
    return found.text


INDEPENDENT = "Some reasons:" + "".join(
    part(i, n) for i, n in enumerate(["Alpha", "Beta", "Gamma"], 1)
)
CHAIN = "Step by step:" + "".join(
    part(i, n, f"KEY{i - 1}", "gives", f"KEY{i}", "now KEY0" if i < 2 else f"KEY{i - 1}")
    for i, n in enumerate(["Alpha", "Beta", "Gamma"], 1)
)


def test_independent_parts_are_promised_without_a_sync() -> None:
    text = annotate(INDEPENDENT)
    chunks = chunks_of(text)
    assert [c.topic for c in chunks] == ["1. Alpha", "2. Beta", "3. Gamma"]
    assert "".join(c.content or "" for c in chunks) == INDEPENDENT.removeprefix("Some reasons:")
    assert "<sync/>" not in text
    words = WordsVocabulary({})
    for chunk in chunks:
        num_tokens = len(words.encode(chunk.content or ""))
        assert num_tokens <= chunk.tokens < num_tokens + 10
        assert chunk.tokens % 10 == 0


def test_a_chain_is_left_as_it_is() -> None:
    assert annotate(CHAIN) == CHAIN


def test_all_is_promised_if_any_loss_is_allowed() -> None:
    assert len(chunks_of(annotate(CHAIN, max_loss=100))) >= 2


def test_a_conclusion_that_needs_the_parts_waits_for_them() -> None:
    parts = [part(i, n, f"KEY{i}") for i, n in enumerate(["Alpha", "Beta", "Gamma"], 1)]
    end = "\n\nSo we have KEY1 and KEY3 at last."
    response = "Some reasons:" + "".join(parts) + end
    assert annotate(response).endswith(f"</async><sync/>{end}")
    free = response.replace(end, "\n\nSo we have what we want at last.")
    assert "<sync/>" not in annotate(free)


def test_a_part_that_needs_only_its_neighbour_shares_its_chunk() -> None:
    parts = [
        part(1, "Alpha"), part(2, "Beta"), part(3, "Gamma", "KEY1"),
        part(4, "Delta", "KEY1", "KEY1", "KEY1"), part(5, "Epsilon"), part(6, "Zeta"),
    ]  # fmt: skip
    found = annotator().annotate("Why?", "Some reasons:" + "".join(parts))
    assert parts[2] + parts[3] in texts(found)
    assert {parts[0], parts[1], parts[4], parts[5]} <= set(texts(found))


def test_what_a_plan_hides_beyond_the_outline_is_read_before_it_is_written() -> None:
    """Short items stand whole in the outline, but not in a chunk that is still to be written."""
    short = "".join(f"\n- short thing KEY{i}" for i in range(1, 7))
    section = f"## First\n\nHere:{short}"
    end = "\n\n## Second\n\n" + " ".join(f"word{i}" for i in range(40)) + " KEY1 KEY2 KEY3 KEY4."
    found = annotator(promise_margin=0, min_saving=0).annotate("Why?", section + end)
    assert isinstance(found, Annotation)
    assert stripped(found.text) == section + end
    assert found.details["revisions"] >= 1
    assert max(u["plan_loss"] for u in found.details["units"]) <= 0.08
    for at, chunk in enumerate(texts(found)):
        if "KEY1" in chunk and at:
            assert "short thing" not in "".join(texts(found)[:at])


def test_details_say_what_was_measured_and_decided() -> None:
    found = annotator().annotate("Why?", CHAIN)
    assert isinstance(found, Annotation)
    units = found.details["units"]
    assert [u["kind"] for u in units] == ["lead", "item", "item", "item"]
    gain = 2 * (KNOWN - KEY_UNKNOWN)  # KEY1 twice; the second use is visible in its own item
    assert units[2]["gain"] == pytest.approx(gain / 2, abs=1e-3)
    excess = (KNOWN - KEY_UNKNOWN - 2.0) / units[2]["counted"]
    assert units[2]["counted"] > 20
    assert units[2]["loss"] == pytest.approx(excess, abs=1e-3)
    assert {u["place"] for u in units} == {"main"}
    assert found.details["steps"] == found.details["sequential_steps"]


def test_steps_are_those_of_the_trace() -> None:
    found = annotator().annotate("Why?", INDEPENDENT)
    assert isinstance(found, Annotation)
    vocabulary = WordsVocabulary(TAG_FORMS)
    parsed = get_dialect("pasta").parse_text(found.text, vocabulary, PastaSettings(), "")
    assert parsed.trace.critical_path_steps == found.details["steps"]


def test_what_cannot_be_annotated_is_refused_with_a_reason() -> None:
    stub = annotator()
    cases = {"": "empty-response", "a <sync/> b": "tags-in-response", "w " * 6000: "too-long"}
    for response, code in cases.items():
        found = stub.annotate("Why?", response)
        assert isinstance(found, Refusal)
        assert found.reasons[0].startswith(f"{code}: ")


@settings(max_examples=60, deadline=None)
@given(markdown)
def test_any_markdown_keeps_every_byte(text: str) -> None:
    for max_loss in (0.0, 100.0):
        found = annotator(max_loss=max_loss, min_tokens=2, min_saving=0).annotate("Why?", text)
        if isinstance(found, Refusal):
            continue
        vocabulary = WordsVocabulary(TAG_FORMS)
        parsed = get_dialect("pasta").parse_text(found.text, vocabulary, PastaSettings(), "")
        assert parsed.text == text
        assert parsed.issues == ()


# -- losses and topics -----------------------------------------------------------------------------


def prepared(response: str) -> Any:
    scorer = KeyScorer()
    return prepare(scorer.prompt_ids("Why?"), response, scorer.vocabulary)


def test_markers_the_first_word_after_the_topic_and_shared_wording_do_not_count() -> None:
    same = "it is the very same wording as 1234 was before"
    parts = prepared(f"1. **A**: x {same}\n2. **B**: y {same} new").parts
    second = parts[1]
    zeros = np.zeros(len(second.ids), np.float32)
    lost = loss_of(second, parts[:1], zeros, zeros - 5)
    shared = len(same.split()) - 1  # but for the number
    assert lost.num_counted == len(second.ids) - second.num_marker - 1 - shared
    assert lost.gain == pytest.approx(5 * lost.num_counted)
    assert lost.rate == pytest.approx(3 * lost.num_counted / 20)


def test_a_topic_is_what_the_child_could_not_guess() -> None:
    response = "One.\n\nIn addition, you can perform a sensitivity analysis of it all, and rest."
    unit = prepared(response).parts[1]
    words = response[unit.unit.start :].split()
    nats = {"sensitivity": 8.0, "analysis": 4.0}
    alone = np.array([-nats.get(w, 0.1) for w in words], np.float32)
    topic = best_topic(response, unit, alone, lambda text: len(text.split()))
    assert topic == "sensitivity analysis"


def test_code_is_no_topic() -> None:
    assert is_code("x = 1;\nfoo(x);\n}")
    assert is_code("def f(x):\n    return x")
    assert not is_code("A text; with marks.\nAnd so on.")
    code = "".join(
        f"\n\nint f{i}(int a) {{\n  return a + {i}; // {'c ' * 30}\n}}" for i in range(4)
    )
    assert "<promise" not in annotate("Code:" + code)


# -- one pass against plain ones -------------------------------------------------------------------


def tiny_scorer(kind: str = "llama") -> ModelScorer:
    tokenizer = tiny_tokenizer()
    model = tiny_model(kind, vocab_size=len(tokenizer), max_position_embeddings=2048)
    return ModelScorer(copy.deepcopy(model), tokenizer, name=f"tiny-{kind}")


RESPONSE = (
    "Intro here:\n\n1. **One**: first item text.\n2. **Two**: second item text.\n\n"
    "The end, which has some more words than that."
)


def plain_logprobs(scorer: ModelScorer, before: list[int], ids: list[int]) -> Any:
    tokens = torch.tensor([before + ids])
    with torch.inference_mode():
        logits = scorer._model(input_ids=tokens).logits[0].float().log_softmax(-1)
    rows = range(len(before) - 1, len(before) + len(ids) - 1)
    return logits[list(rows), ids].numpy()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_views_read_in_one_pass_are_plain_causal_passes(kind: str) -> None:
    scorer = tiny_scorer(kind)
    work = prepare(scorer.prompt_ids("Why?"), RESPONSE, scorer.vocabulary)
    views = first_views(work)
    sheet, readings = pair_views(work, range(4))
    moves = [Move("main"), Move("start"), Move("main"), Move("main", sync=True)]
    heads = [p.outline for p in work.parts]
    planned, plan_readings = plan_views(work, moves, heads)
    found, near, exact = scorer.score([views.sheet, sheet, planned])
    parts, root = work.parts, work.prompt_ids

    def joined(pieces: Sequence[list[int]]) -> list[int]:
        return root + [t for piece in pieces for t in piece]

    whole, outline = [p.ids for p in parts], heads
    assert [p.is_hidden for p in parts] == [False, True, True, True]
    assert views.blind == [None, None, views.blind[2], views.blind[3]]
    for i in (2, 3):
        full, blind = views.full[i], views.blind[i]
        assert full is not None
        assert blind is not None
        close(found[full], plain_logprobs(scorer, joined(whole[:i]), whole[i]))
        close(found[blind], plain_logprobs(scorer, joined(outline[:i]), whole[i]))
    assert set(readings) == {3}
    close(near[readings[3]], plain_logprobs(scorer, joined([*outline[:2], whole[2]]), whole[3]))
    assert set(plan_readings) == {2}
    close(exact[plan_readings[2]], plain_logprobs(scorer, joined(outline[:2]), whole[2]))


def close(one: Any, other: Any) -> None:
    np.testing.assert_allclose(one, other, atol=2e-4)


def test_a_model_annotates_from_end_to_end_and_the_same_each_time() -> None:
    scorer = tiny_scorer()
    tool = LikelihoodAnnotator(scorer, Rules(max_loss=100, min_tokens=4))
    found = tool.annotate("Why?", RESPONSE)
    assert isinstance(found, Annotation)
    assert stripped(found.text) == RESPONSE
    assert "<promise" in found.text
    assert tool.annotate("Why?", RESPONSE) == found


# -- the threshold ---------------------------------------------------------------------------------

ROOT = Path(__file__).parents[1]


def test_the_default_threshold_and_the_table_in_the_docs_are_what_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = json.loads((ROOT / "benchmarks/results/likelihood/threshold.json").read_text())
    assert report["chosen_max_loss"] == DEFAULT_MAX_LOSS
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "pasta"))
    from choose_thresholds import table_of

    docs = (ROOT / "docs" / "likelihood.md").read_text()
    assert "\n".join(table_of(report)) in docs


def test_known_dependence_is_the_same_each_time_and_shares_nothing_between_splits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "pasta"))
    from known_dependence import response_of, synthetic

    made = {
        split: [response_of(*known) for known in synthetic(split, 5)]
        for split in ("validation", "test")
    }
    assert made["test"] == [response_of(*known) for known in synthetic("test", 5)]
    assert not {text for text, _ in made["validation"]} & {text for text, _ in made["test"]}
    for text, ends in made["test"]:
        parts = cut_units(text)
        for at, _ in ends:
            assert sum(u.start <= at < u.end for u in parts) == 1


# -- asking for it ---------------------------------------------------------------------------------


def test_bad_settings_and_models_are_refused_in_words() -> None:
    with pytest.raises(InvalidInput, match="max_loss is -1"):
        likelihood_annotator(max_loss=-1)
    with pytest.raises(InvalidInput, match="unit"):
        likelihood_annotator(unit=0)
    with pytest.raises(ModelUnavailable, match="no model at"):
        get_annotator("likelihood", {"model_name": "/no/such/folder"})


@pytest.mark.embedded
def test_the_embedded_model_tells_a_chain_from_a_list() -> None:
    tool = likelihood_annotator()
    chain = (
        "Let's work it out step by step:\n\n1. **Cost of the pens**: 14 pens at 3 dollars each "
        "cost 14 * 3 = 42 dollars in total.\n\n2. **Change**: Tom pays with 100 dollars, so he "
        "gets back 100 - 42 = 58 dollars from the shop.\n\n3. **Split**: The 58 dollars are split "
        "among 2 friends, so each gets 58 / 2 = 29 dollars.\n\nSo each friend gets 29 dollars."
    )
    question = (
        "A shop sells pens at 3 dollars. Tom buys 14, pays with a 100 dollar note and splits the "
        "change among 2 friends. How much does each get?"
    )
    facts = (
        "- **Mercury**: It is the smallest planet and the closest to the Sun, and a year there "
        "lasts 88 days.\n- **Venus**: It has a thick atmosphere of carbon dioxide and is the "
        "hottest planet, at 465 degrees.\n- **Mars**: It is called the red planet because of iron "
        "oxide on its surface, and it has two moons."
    )
    kept = tool.annotate(question, chain)
    freed = tool.annotate("Tell me about planets: Mercury, Venus, Mars.", facts)
    assert isinstance(kept, Annotation)
    assert isinstance(freed, Annotation)
    assert kept.text == chain
    assert [c.topic for c in chunks_of(freed.text)] == ["Mercury", "Venus", "Mars"]
