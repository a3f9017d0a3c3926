"""The embedded model through the whole stack. Needs what `stretto model pull` fetches."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from test_kernels import kernels_for

from stretto import LM, SamplingParams

pytestmark = pytest.mark.embedded

PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Explain what a hash table is.",
    "List three uses of copper.",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "How do vaccines work?",
    "What is 17 times 3?",
    "Name five rivers in Europe.",
    "Write a short letter to a friend who moved away.",
    "What should I pack for a week in the mountains?",
    "Describe the water cycle.",
    "Who wrote Hamlet?",
    "Suggest a name for a bakery.",
    "How can I learn to juggle?",
    "What is the difference between a lake and a pond?",
    "Summarise the plot of Cinderella.",
    "Write a Python function that reverses a string.",
    "What do bees eat in winter?",
]
NUM_TOKENS = 64
SMALLEST_GAP = 1e-3
"""Below this difference of the two best logits, two engines may choose differently."""


@pytest.fixture(scope="module")
def lm() -> LM:
    return LM.load("smollm2-135m-instruct", dtype="float32", engine="hf", pool_slots=4096)


@pytest.fixture(scope="module")
def generated(lm: LM) -> tuple[list[list[int]], tuple[torch.Tensor, ...]]:
    prompts = [lm.encode([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    return generate(lm, prompts)


@pytest.mark.parametrize("engine", ["hf", "fused"])
def test_plain_answers_equal_transformers_generate(
    lm: LM, generated: tuple[list[list[int]], tuple[torch.Tensor, ...]], engine: str
) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS)
    if engine != "hf":
        kernels_for("float32", skip=True)
        lm = LM.load("smollm2-135m-instruct", dtype="float32", engine=engine, pool_slots=4096)
    assert lm.engine.name == engine
    streams = [lm.submit(p, params, method="sequential") for p in PROMPTS]
    answers = [stream.finish() for stream in streams]
    theirs, logits = generated
    for row, answer in enumerate(answers):
        ours = [t for s in answer.trace.response for t in s.tokens]
        pairs = enumerate(zip(ours, theirs[row], strict=False))
        differs = next((i for i, (a, b) in pairs if a != b), None)
        if differs is None:
            assert len(ours) == len(theirs[row]), PROMPTS[row]
            assert answer.text == lm.vocabulary.decode(theirs[row])
        else:
            best = logits[differs][row].float().topk(2).values
            assert float(best[0] - best[1]) < SMALLEST_GAP, (PROMPTS[row], differs)


def generate(lm: LM, prompts: list[list[int]]) -> tuple[list[list[int]], tuple[torch.Tensor, ...]]:
    """Greedy tokens of transformers' `generate` on a left-padded batch, and its logits by step."""
    end = min(lm.vocabulary.end_ids)
    longest = max(map(len, prompts))
    padded = torch.tensor([[end] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with torch.inference_mode():
        out = lm.engine.model.generate(
            padded,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            pad_token_id=end,
            return_dict_in_generate=True,
            output_logits=True,
        )
    rows = []
    for row in out.sequences[:, longest:].tolist():
        ends = [i for i, token in enumerate(row) if token in lm.vocabulary.end_ids]
        rows.append(row[: ends[0]] if ends else row)
    return rows, out.logits


def test_forced_promises_on_the_real_model(lm: LM) -> None:
    """Control tokens can be added to the real model; it is untrained in them but never breaks."""
    import copy

    from transformers import AutoTokenizer

    from stretto.models import resolve

    tokenizer = AutoTokenizer.from_pretrained(str(resolve().path))
    model = copy.deepcopy(lm.engine.model)
    pasta = LM.wrap(model, tokenizer, dialect="pasta", pool_slots=2048)
    control = pasta.vocabulary.control
    promise = [
        control["promise"], *pasta.vocabulary.encode("a fact"), control["tokens"],
        *pasta.vocabulary.encode("2"), control["promise_end"],
    ]  # fmt: skip
    main: list[int | None] = [*promise, *promise, control["sync"]]

    def script(thread: str, index: int) -> int | None:
        return main[index] if thread == "main" and index < len(main) else None

    params = SamplingParams(max_tokens=80, max_thread_tokens=12)
    done = pasta.submit("Tell me two facts.", params, script=script).finish()
    assert [t.id for t in done.threads[:3]] == ["main", "main.1", "main.2"]
    assert {t.topic for t in done.threads[1:3]} == {"a fact"}
    assert done.usage.capped_threads >= 0
    assert "<promise" not in done.text
    assert "<promise" in done.annotated
    pasta.scheduler.check_integrity()


def test_sequential_sampling_is_reproducible_and_samples_differ(lm: LM) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.9, seed=7)
    first = lm.generate("Tell me a story.", params, n=3)
    again = lm.generate("Tell me a story.", params, n=3)
    alone = lm.submit("Tell me a story.", params, sample=2).finish()
    assert [c.text for c in first] == [c.text for c in again]
    assert len({c.text for c in first}) == 3
    assert alone.text == first[2].text


TIMED = """
import time
wall, cpu = time.perf_counter(), time.process_time()
{}
print(min(time.perf_counter() - wall, time.process_time() - cpu))
"""
LOADING = """
from stretto import LM
LM.load("smollm2-135m-instruct")
"""
LIBRARIES = """
import transformers.models.llama.modeling_llama
from transformers import AutoModelForCausalLM, AutoTokenizer
"""


def least_seconds(source: str) -> float:
    """Of three fresh processes, of the time on the clock and on the CPU: the least, since other
    tests may run beside it."""
    command = [sys.executable, "-c", TIMED.format(source)]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(3)]
    return min(float(run.stdout) for run in runs)


def test_loading_from_the_cache_takes_under_five_seconds() -> None:
    """To import, resolve, check and load; on a slow machine, under twice what importing
    the libraries takes."""
    assert least_seconds(LOADING) < max(5, 2 * least_seconds(LIBRARIES))
