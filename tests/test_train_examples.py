"""Examples: what a model is trained under is, mask by mask, what it runs under."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from conftest import tiny_model
from tiny_lms import tiny_lm

from stretto import LM, Completion, SamplingParams
from stretto.data.rows import Answer
from stretto.masks import dense_mask, flat_positions, flat_tokens
from stretto.runtime.events import Token
from stretto.tokens import ModelCard
from stretto.trace import is_drawn
from stretto.train.batches import Batch, model_masks
from stretto.train.examples import IGNORE, Example, ExampleMaker
from stretto.train.legal import UNMASKED
from stretto.train.logprobs import sequence_logprobs, token_logprobs
from stretto.train.targets import CLASSES
from stretto.train.unusable import TooLong, Unusable

WORDS = ["Paris", "is", "the", "capital", "of", "France", "and", "more"]
TEXT = (
    'Intro <promise topic="one thing" tokens="20"/><async>first part</async> and '
    '<promise topic="two" tokens="10"/><async>second</async><sync/>done'
)
PROMPT = "What is it?"
POLICIES = ("predicted", "overlap", "fixed")


def pasta_lm(policy: str = "predicted", kind: str = "llama") -> LM:
    lm = tiny_lm("pasta", kind)
    card = lm.card.model_copy(update={"policy": policy, "fixed_length": 7})
    return LM.wrap(lm.model, lm.tokenizer, card=card, pool_slots=1024)


def maker_of(lm: LM) -> ExampleMaker:
    return ExampleMaker(lm.vocabulary, lm.card, lm.engine.max_positions)


def prompt_ids(lm: LM, prompt: str = PROMPT) -> list[int]:
    return lm.encode(lm.chat(prompt))


def registers_lm(dialect: str, *, grace: bool, kind: str = "llama") -> LM:
    """A model of a dialect with three registers."""
    lm = tiny_lm("plain", kind)
    settings = {"num_registers": 3, "grace": grace}
    return LM.wrap(
        lm.model, lm.tokenizer, dialect=dialect, settings=settings, pool_slots=1024, page_size=4
    )


def random_text(rng: random.Random, dialect: str = "pasta") -> str:
    """An annotated text whose blocks stay under their caps."""
    parts: list[str] = []
    has_registers, has_promises = "tip" in dialect, "pasta" in dialect
    for _ in range(rng.randrange(1, 12 if has_registers else 7)):
        words = " ".join(rng.choices(WORDS, k=rng.randrange(0, 5)))
        if has_registers and rng.random() < 0.7:
            words = f"<reg_{rng.randrange(3)}>{words}"
        kind = rng.random() if has_promises else 1.0
        if kind < 0.5:
            topic = " ".join(rng.choices(WORDS, k=rng.randrange(0, 3)))
            tokens = rng.choice([10, 30, 250])
            parts.append(f'<promise topic="{topic}" tokens="{tokens}"/><async>{words}</async>')
        else:
            parts.append("<sync/>" if kind < 0.7 else words)
    return "".join(parts)


def run_forced(lm: LM, example_trace_of: str, prompt: str = PROMPT) -> Completion:
    """The runtime's own run, forced to draw what an annotated text says."""
    trace = maker_of(lm).parse(prompt_ids(lm, prompt), example_trace_of).trace
    drawn: dict[str, list[int]] = {}
    for s in trace.response:
        own = drawn.setdefault(s.thread, [])
        own += [t for t, origin in zip(s.tokens, s.origins, strict=True) if is_drawn(origin)]
    end = min(lm.vocabulary.end_ids)

    def script(thread: str, index: int) -> int:
        own = drawn.get(thread, [])
        return own[index] if index < len(own) else end

    params = SamplingParams(max_tokens=2000)
    return lm.submit(prompt, params, script=script).finish()


def answer_of(completion: Completion) -> Answer:
    tokens = [
        pair for s in completion.trace.response for pair in zip(s.tokens, s.origins, strict=True)
    ]
    return Answer(
        prompt_id="0" * 16,
        text=completion.text,
        finish_reason=completion.finish_reason,
        ids=[token for token, _ in tokens],
        origins="".join(origin[0] for _, origin in tokens),
        num_prompt_tokens=1,
        sequential_steps=1,
        completion_tokens=1,
        control_tokens=1,
    )


def recorded(completion: Completion) -> dict[tuple[str, int], float]:
    """The sampler's log-prob of each drawn token by (thread, place among its drawn ones)."""
    found: dict[tuple[str, int], float] = {}
    counts: dict[str, int] = {}
    for event in completion.events:
        if isinstance(event, Token) and is_drawn(event.origin):
            index = counts.get(event.thread, 0)
            counts[event.thread] = index + 1
            if event.logprob is not None:
                found[event.thread, index] = event.logprob
    return found


def learnt(lm: LM, example: Example, completion: Completion) -> dict[tuple[str, int], float]:
    """The trained log-prob of each target by the same name; the end of sequence has none."""
    logprobs = token_logprobs(lm.model, Batch.of([example])).tolist()
    by_row = dict(zip((example.targets != IGNORE).nonzero()[:, 0].tolist(), logprobs, strict=True))
    rows: dict[str, list[int]] = {}
    flat = 0
    found = {}
    for s in completion.trace.segments:
        for origin in s.origins:
            own = rows.setdefault(s.thread, [])
            before = [r for r in own if r >= 0]
            if is_drawn(origin):
                index = sum(r < 0 for r in own)
                if before and before[-1] in by_row:
                    found[s.thread, index] = by_row[before[-1]]
                own.append(-1)
            own.append(flat)
            flat += 1
    return found


# -- train(visibility) == run(visibility) ----------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(6))
def test_an_example_of_a_text_is_the_runtimes_own_trace(policy: str, seed: int) -> None:
    """Facts 6 and 10: tokens, positions and every entry of the mask."""
    lm = pasta_lm(policy)
    check_visibility(lm, random_text(random.Random(seed)))


def check_visibility(lm: LM, text: str) -> Example:
    """An example of a text is the trace of a run that draws that text; the example."""
    example = maker_of(lm).from_annotated(prompt_ids(lm), text)
    trace = run_forced(lm, text).trace
    assert torch.equal(example.ids, flat_tokens(trace))
    assert torch.equal(example.positions, flat_positions(trace))
    assert torch.equal(Batch.of([example]).visible(), dense_mask(trace))
    assert example.num_illegal == 0
    return example


@pytest.mark.parametrize("grace", [False, True])
@pytest.mark.parametrize("dialect", ["tip", "pasta+tip"])
def test_with_registers_too_an_example_is_the_runtimes_own_trace(dialect: str, grace: bool) -> None:
    lm, num_hidden = registers_lm(dialect, grace=grace), 0
    for seed in range(6):
        example = check_visibility(lm, random_text(random.Random(seed), dialect))
        hidden = (
            ~Batch.of([example]).visible() & torch.ones(len(example), len(example)).tril().bool()
        )
        num_hidden += int(hidden.sum())
    assert num_hidden > 500


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_trained_log_probs_are_those_the_sampler_records(policy: str, seed: int) -> None:
    """Fact 13, the master equivalence, and an example of an answer is that of its text."""
    lm = pasta_lm(policy)
    check_logprobs(lm, random_text(random.Random(100 + seed)))


@pytest.mark.parametrize("dialect", ["tip", "pasta+tip"])
def test_with_registers_too_trained_log_probs_are_those_of_the_sampler(dialect: str) -> None:
    """The importance ratio of a policy's first step is 1; under a dense mask it is not."""
    lm, num_checked = registers_lm(dialect, grace=dialect == "tip"), 0
    for seed in range(3):
        completion, example = check_logprobs(lm, random_text(random.Random(seed + 40), dialect))
        every = torch.ones_like(example.sees).tril(-1)
        if dialect == "tip" and not torch.equal(every, example.sees):
            dense, theirs = (
                learnt(lm, replace(example, sees=every), completion),
                recorded(completion),
            )
            assert max(abs(dense[k] - theirs[k]) for k in dense) > 1e-2
            num_checked += 1
    assert num_checked > 0 or dialect != "tip"


def check_logprobs(lm: LM, text: str) -> tuple[Completion, Example]:
    """The log-probs of training are those of a run that draws the text; both of them."""
    completion = run_forced(lm, text)
    example = maker_of(lm).from_answer(prompt_ids(lm), answer_of(completion))
    of_text = maker_of(lm).from_annotated(prompt_ids(lm), text)
    assert torch.equal(example.targets, of_text.targets)
    assert torch.equal(example.classes, of_text.classes)
    assert torch.equal(example.sees, of_text.sees)
    mine, theirs = learnt(lm, example, completion), recorded(completion)
    assert mine.keys() == theirs.keys()
    assert mine
    assert max(abs(mine[k] - theirs[k]) for k in mine) < 1e-3
    return completion, example


def test_sampled_answers_are_learnt_as_they_were_drawn() -> None:
    """At temperature 1, with ends that were forced and answers that were cut short."""
    lm, num_forks, num_forced = pasta_lm(), 0, 0
    made, control = maker_of(lm), lm.card.control
    begin = [control["promise"], control["tokens"], *lm.vocabulary.encode("1")]
    begin.append(control["promise_end"])
    for seed in range(12):
        params = SamplingParams(max_tokens=300, temperature=1.0, seed=seed)
        stream = lm.submit(
            "hi you", params, script=lambda t, i: begin[i] if t == "main" and i < 4 else None
        )
        completion = stream.finish()
        answer = answer_of(completion)
        try:
            example = made.from_answer(prompt_ids(lm, "hi you"), answer)
        except Unusable as error:
            assert completion.finish_reason == "length"
            assert "cannot be learnt from" in str(error)  # noqa: PT017
            continue
        num_forks += len(completion.trace.threads) - 1
        num_forced += answer.origins.count("f")
        assert torch.equal(example.ids, flat_tokens(completion.trace))
        assert torch.equal(Batch.of([example]).visible(), dense_mask(completion.trace))
        mine, theirs = learnt(lm, example, completion), recorded(completion)
        assert mine.keys() <= theirs.keys()
        assert len(theirs) - len(mine) == answer.origins.count("f")
        assert max(abs(mine[k] - theirs[k]) for k in mine) < 1e-3
    assert num_forks >= num_forced > 0


def test_a_text_without_annotations_is_plain_fine_tuning() -> None:
    """Fact 14: causal mask, positions 0..n-1, transformers' own loss."""
    lm = tiny_lm("plain")
    example = maker_of(lm).from_annotated(prompt_ids(lm), "Paris is the capital")
    n = len(example)
    assert example.positions.tolist() == list(range(n))
    assert torch.equal(Batch.of([example]).visible(), torch.ones(n, n).tril().bool())
    ids = torch.cat([example.ids, torch.tensor([min(lm.vocabulary.end_ids)])])
    labels = ids.clone()
    labels[: len(prompt_ids(lm))] = IGNORE
    with torch.no_grad():
        reference = lm.model(input_ids=ids[None], labels=labels[None]).loss
        mine = -token_logprobs(lm.model, Batch.of([example])).mean()
    assert float(reference) == pytest.approx(float(mine), abs=1e-5)


# -- labels ----------------------------------------------------------------------------------------


def test_labels_step_over_blocks() -> None:
    """Fact 12, and design 2.1: what each token predicts, and of which class that is."""
    lm = pasta_lm()
    control, encode = lm.card.control, lm.vocabulary.encode
    prompt = prompt_ids(lm)
    text = '<promise topic="a" tokens="20"/><async>b</async>c<sync/>'
    example = maker_of(lm).from_annotated(prompt, text)
    (a,), (b,), (c,), (two,) = encode("a"), encode("b"), encode("c"), encode("2")
    end = min(lm.vocabulary.end_ids)
    assert example.ids[len(prompt) :].tolist() == [
        control["promise"], a, control["tokens"], two, control["promise_end"],
        control["async"], b, control["async_end"], c, control["sync"],
    ]  # fmt: skip
    assert example.targets[len(prompt) - 1 :].tolist() == [
        control["promise"], a, control["tokens"], two, control["promise_end"],
        c, b, control["async_end"], IGNORE, control["sync"], end,
    ]  # fmt: skip
    assert (example.targets[: len(prompt) - 1] == IGNORE).all()
    names = [CLASSES[k] for k in example.classes.tolist() if k >= 0]
    assert names == [
        "promise", "promise", "promise", "length", "promise",
        "content", "content", "close", "sync", "end",
    ]  # fmt: skip


def test_a_register_is_a_target_of_its_own_class() -> None:
    lm = registers_lm("tip", grace=False)
    control, encode = lm.card.control, lm.vocabulary.encode
    prompt = prompt_ids(lm)
    example = maker_of(lm).from_annotated(prompt, "a<reg_1>b<reg_1><reg_0>")
    (a,), (b,), end = encode("a"), encode("b"), min(lm.vocabulary.end_ids)
    one, zero = control["reg_1"], control["reg_0"]
    assert example.targets[len(prompt) - 1 :].tolist() == [a, one, b, one, zero, end]
    names = [CLASSES[k] for k in example.classes.tolist() if k >= 0]
    assert names == ["content", "register", "content", "register", "register", "end"]
    assert (example.targets[: len(prompt) - 1] == IGNORE).all()


def test_targets_that_the_sampler_could_not_draw_are_none_and_counted() -> None:
    lm = pasta_lm()
    made = maker_of(lm)
    long_topic = " ".join(["word"] * 30)
    example = made.from_annotated(prompt_ids(lm), f'<promise topic="{long_topic}" tokens="10"/>')
    topic = len(lm.vocabulary.encode(long_topic))
    assert example.num_illegal == topic - 16 > 0
    over_cap = "x " * 80
    block = f'<promise topic="a" tokens="10"/><async>{over_cap}</async>'
    example = made.from_annotated(prompt_ids(lm), block)
    drawn = len(lm.vocabulary.encode(over_cap)) + 1
    assert example.num_illegal == drawn - (4 * 10 + 32 - 1) > 0


def test_forced_and_injected_tokens_are_no_targets() -> None:
    lm = pasta_lm()
    completion = run_forced(lm, TEXT)
    answer = answer_of(completion)
    place = answer.ids.index(lm.card.control["async_end"])
    origins = answer.origins[:place] + "f" + answer.origins[place + 1 :]
    free = maker_of(lm).from_answer(prompt_ids(lm), answer)
    forced = maker_of(lm).from_answer(
        prompt_ids(lm), answer.model_copy(update={"origins": origins})
    )
    assert forced.num_targets == free.num_targets - 1
    cut = answer.model_copy(update={"finish_reason": "length"})
    assert maker_of(lm).from_answer(prompt_ids(lm), cut).num_targets == free.num_targets - 1


@pytest.mark.parametrize(
    ("origins", "message"),
    [
        ("s", "has"),
        ("x", "has"),
        ("swap", "begin with what the runtime writes"),
        ("cut", "cut off"),
    ],
)
def test_answers_that_no_runtime_wrote_are_named(origins: str, message: str) -> None:
    lm = pasta_lm()
    answer = answer_of(run_forced(lm, TEXT))
    if origins == "swap":
        answer = answer.model_copy(update={"origins": answer.origins.replace("i", "s")})
    elif origins == "cut":
        place = answer.ids.index(lm.card.control["async_end"])
        answer = answer.model_copy(
            update={"ids": answer.ids[:place], "origins": answer.origins[:place]}
        )
    else:
        answer = answer.model_copy(update={"origins": origins * (1 if origins == "s" else 999)})
    with pytest.raises(Unusable, match=message):
        maker_of(lm).from_answer(prompt_ids(lm), answer)


def test_what_does_not_fit_the_positions_is_too_long() -> None:
    lm = pasta_lm()
    made = ExampleMaker(lm.vocabulary, lm.card, 40)
    with pytest.raises(TooLong, match="40 positions"):
        made.from_annotated(prompt_ids(lm), "word " * 60)


def test_plain_models_learn_under_the_mask_of_plain_decoding() -> None:
    plain = tiny_lm("plain")
    size = len(plain.tokenizer)
    plain.model.resize_token_embeddings(size + 8, mean_resizing=False)  # rows of no token
    for lm, num_banned in ((tiny_lm("plain"), 0), (LM.wrap(plain.model, plain.tokenizer), 8)):
        example = maker_of(lm).from_annotated(prompt_ids(lm), "Paris")
        (number,) = set(example.legal.tolist()) - {UNMASKED}
        mask = example.table[number].mask
        assert (~mask).nonzero()[0].tolist() == list(range(size, size + num_banned))
        assert num_banned == 0 or (mask == ~lm.banned).all()


# -- batches ---------------------------------------------------------------------------------------

KINDS = ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_gives_the_models_own_logits_and_gradients(kind: str) -> None:
    """The specification is the model's own pass under the dense mask, its logits masked."""
    lm = pasta_lm(kind=kind)
    made = maker_of(lm)
    long = TEXT + " word" * 130  # more than one run of rows
    batch = Batch.of([made.from_annotated(prompt_ids(lm), t) for t in (TEXT, long, "plain")])
    masks = model_masks(batch, lm.model.config, torch.float32)
    weights = torch.linspace(-1, 1, batch.num_targets)
    results = []
    for way in ("own", "plain", "fast"):
        lm.model.zero_grad()
        if way == "own":
            logits = lm.model(
                input_ids=batch.ids[None], position_ids=batch.positions[None], attention_mask=masks
            ).logits[0][batch.rows]
            legal = batch.table.dense(batch.legal.tolist(), logits.shape[1])
            rows = logits.float().masked_fill(~legal, -torch.inf).log_softmax(-1)
            found = rows.gather(1, batch.targets[:, None])[:, 0]
        else:
            found = token_logprobs(lm.model, batch, plain=way == "plain")
        (found * weights).sum().backward()
        grads = {n: p.grad.clone() for n, p in lm.model.named_parameters()}
        results.append((found.detach(), grads))
    for found, grads in results[1:]:
        assert float((found - results[0][0]).abs().max()) < 1e-4
        for name, grad in grads.items():
            own = results[0][1][name]
            assert float((grad - own).abs().max()) < 1e-4 * (1 + float(own.abs().max())), name


@pytest.mark.parametrize("plain", [True, False])
def test_a_neighbour_in_the_pack_changes_nothing(plain: bool) -> None:
    lm = pasta_lm()
    made = maker_of(lm)
    first, last = (made.from_annotated(prompt_ids(lm), t) for t in (TEXT, TEXT + " more"))
    others = [made.from_annotated(prompt_ids(lm, p), "France") for p in ("abcd", "wxyz")]
    assert len(others[0]) == len(others[1])
    assert not torch.equal(others[0].ids, others[1].ids)
    with torch.no_grad():
        found = [
            token_logprobs(lm.model, batch, plain=plain)[batch.owner != 1]
            for other in others
            if (batch := Batch.of([first, other, last]))
        ]
        alone = [token_logprobs(lm.model, Batch.of([e]), plain=plain) for e in (first, last)]
    assert torch.equal(found[0], found[1])
    assert float((found[0] - torch.cat(alone)).abs().max()) < 1e-5


def test_sums_over_targets_go_to_their_examples() -> None:
    lm = pasta_lm()
    made = maker_of(lm)
    examples = [made.from_annotated(prompt_ids(lm), t, key=t) for t in (TEXT, "Paris")]
    batch = Batch.of(examples)
    with torch.no_grad():
        whole = sequence_logprobs(lm.model, batch)
        each = [float(token_logprobs(lm.model, Batch.of([e])).sum()) for e in examples]
    assert whole.tolist() == pytest.approx(each, abs=1e-3)
    assert batch.keys == (TEXT, "Paris")
    assert [end - start for start, end in batch.bounds] == [len(e) for e in examples]


def test_long_examples_take_sdpa_and_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = pasta_lm()
    batch = Batch.of([maker_of(lm).from_annotated(prompt_ids(lm), TEXT)])
    with torch.no_grad():
        products = token_logprobs(lm.model, batch)
        monkeypatch.setattr("stretto.train.attention.LONGEST_PRODUCT", 8)
        assert float((token_logprobs(lm.model, batch) - products).abs().max()) < 1e-5


def test_the_attention_of_the_model_is_put_back() -> None:
    lm = pasta_lm()
    batch = Batch.of([maker_of(lm).from_annotated(prompt_ids(lm), TEXT)])
    token_logprobs(lm.model, batch)
    assert lm.model.config._attn_implementation == "sdpa"


def test_cards_without_an_end_are_refused() -> None:
    lm = tiny_lm("plain")
    lm.vocabulary.end_ids = frozenset()
    with pytest.raises(Exception, match="no end of sequence"):
        ExampleMaker(lm.vocabulary, ModelCard(), tiny_model("llama").config.max_position_embeddings)
