"""Task `multipart`: its problems, their splits, and what an answer scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_lms import tiny_tokenizer

from stretto.cli import main
from stretto.data.rows import Annotated, prompt_id, read_rows
from stretto.dialects import get_dialect
from stretto.dialects.pasta import PastaSettings
from stretto.dialects.words import WordsVocabulary
from stretto.errors import InvalidInput, UnknownName
from stretto.eval import multipart
from stretto.eval.task_multipart import MULTIPART, score
from stretto.eval.tasks import Item, Source, load_prompts

PROBLEMS = multipart.problems(0, 60, "test")


def item(problem: multipart.Problem) -> Item:
    return Item(problem.prompt, problem)


def test_problems_are_a_function_of_seed_and_split() -> None:
    assert multipart.problems(0, 60, "test") == PROBLEMS
    assert multipart.problems(0, 20, "test") == PROBLEMS[:20]
    assert multipart.problems(1, 20, "test") != PROBLEMS[:20]


def test_splits_share_no_problem_whatever_the_seeds() -> None:
    found = {
        split: {p.prompt for seed in range(3) for p in multipart.problems(seed, 200, split)}
        for split in multipart.SPLITS
    }
    assert not found["train"] & found["test"]
    assert not found["train"] & found["valid"]
    assert not found["valid"] & found["test"]
    held = [split for split, range_ in multipart.SPLITS.items() if range_.holds("0" * 16)]
    assert held == ["train"]


def test_what_the_parts_ask_has_the_result_they_say() -> None:
    """The work of each kind, done in another way."""
    checks = {
        "letters": lambda q: len(q.rstrip("?.").split()[-1]),
        "rows": lambda q: _product([int(w) for w in q.split() if w.isdigit()]),
        "animals": lambda q: sum(
            word.strip("?.") in multipart.ANIMALS for word in q.partition(": ")[2].split(", ")
        ),
        "occurrences": lambda q: (
            q.rstrip("?.").split()[-1].count(q.partition("letter ")[2].split()[0])
        ),
        "chain": _chain,
    }
    seen = set()
    for problem in PROBLEMS:
        for part in problem.parts:
            assert checks[part.kind](part.question) == part.result, part
            seen.add(part.kind)
    assert seen == set(checks)


def _product(numbers: list[int]) -> int:
    a, b = numbers
    return a * b


def _chain(question: str) -> int:
    value = 0
    for step in question.rstrip(".").replace(" and ", ", ").split(", "):
        number = int(step.split()[-1])
        value += -number if step.startswith("take") else number
    return value


def test_every_part_is_long_enough_to_pay_for_its_promise() -> None:
    lengths = [
        multipart.num_words(f"{part.work} So the result is {part.result}.")
        for problem in PROBLEMS
        for part in problem.parts
    ]
    assert min(lengths) >= 25


def test_the_annotated_answer_is_well_formed_and_half_as_long_in_steps() -> None:
    settings = PastaSettings()
    dialect = get_dialect("pasta")
    shares = []
    for problem in PROBLEMS:
        vocabulary = WordsVocabulary(dialect.control_forms)
        parsed = dialect.parse_text(problem.annotated(), vocabulary, settings, problem.prompt)
        assert parsed.issues == ()
        assert parsed.text == problem.response
        assert len(parsed.trace.threads) == 1 + len(problem.parts)
        plain = dialect.parse_text(problem.response, vocabulary, settings, problem.prompt)
        shares.append(plain.trace.num_tokens / parsed.trace.critical_path_steps)
        last = parsed.trace.segments[-1]
        assert {parsed.trace.segments[k].thread for k in last.sees} == {
            t.name for t in parsed.trace.threads
        }
    assert sum(shares) / len(shares) > 1.9


def test_promised_lengths_are_those_counted() -> None:
    annotated = PROBLEMS[0].annotated(lambda text: 41)
    assert annotated.count('tokens="50"') == len(PROBLEMS[0].parts)


@pytest.mark.parametrize("problem", PROBLEMS[:10], ids=lambda p: prompt_id(p.prompt))
def test_the_right_answer_scores(problem: multipart.Problem) -> None:
    found = score(item(problem), problem.response)
    assert (found.value, found.shares) == (1.0, {"parts_right": 1.0, "sums_own_results": 1.0})


def test_a_sum_made_without_reading_the_parts_is_told_from_wrong_parts() -> None:
    problem = PROBLEMS[0]
    body, _, _ = problem.response.partition(multipart.SUM_MARK)
    blind = score(item(problem), f"{body}Add up: 1 + 1 = 2. The total is {problem.total + 1}.")
    assert blind.value == 0
    assert blind.shares == {"parts_right": 1.0, "sums_own_results": 0.0}
    first = problem.parts[0].result
    slip = problem.response.replace(f"result is {first}.", f"result is {first + 3}.", 1)
    slip = slip.replace(f"total is {problem.total}.", f"total is {problem.total + 3}.")
    wrong = score(item(problem), slip)
    assert wrong.value == 0
    assert wrong.shares["sums_own_results"] == 1.0
    assert wrong.shares["parts_right"] == 1 - 1 / len(problem.parts)


@pytest.mark.parametrize(
    ("text", "results", "total"),
    [
        ("", {}, None),
        ("no number at all", {}, None),
        ("(1) So the result is 4.\n(2) the result is 7\nAdd up: 11. The total is 11.",
         {1: 4, 2: 7}, 11),
        ("(1) result is 3. No: the result is 4.\n(1) result is 9.", {1: 4}, 9),
        ("The total is: **12**", {}, 12),
        ("the total is 5. Wait, the TOTAL is 6!", {}, 6),
        ("I get 30 in the end", {}, 30),
        ("(3) result is -2. The total is -2.", {3: -2}, -2),
    ],
)  # fmt: skip
def test_answers_are_read(text: str, results: dict[int, int], total: int | None) -> None:
    assert multipart.read_answer(text) == multipart.Reading(results, total)


def test_the_task_is_limited_and_takes_no_files() -> None:
    prompts = load_prompts(MULTIPART, Source(limit=5, seed=3))
    assert [i.gold for i in prompts.items] == multipart.problems(3, 5, "test")
    with pytest.raises(InvalidInput, match="--prompts"):
        load_prompts(MULTIPART, Source(paths=(Path("x.jsonl"),)))
    with pytest.raises(UnknownName, match="valid"):
        load_prompts(MULTIPART, Source(split="valod"))
    with pytest.raises(InvalidInput, match="at least 1"):
        multipart.problems(0, 0, "test")


def test_examples_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, tokenizer = tmp_path / "train.jsonl", tiny_tokenizer()
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    arguments = ["eval", "examples", "--num", "7", "--seed", "2", "--out", str(out)]
    arguments += ["--tokenizer", str(tmp_path)]
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {
        "file": str(out), "examples": 7, "split": "train"
    }  # fmt: skip
    rows = read_rows(out, Annotated)
    examples = multipart.multipart_examples(
        2, 7, count_tokens=lambda text: len(tokenizer.encode(text, add_special_tokens=False))
    )
    assert [(r.prompt, r.response, r.annotated) for r in rows] == [
        (e.prompt, e.response, e.annotated) for e in examples
    ]
    assert main([*arguments, "--as", "questions", "--split", "test"]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    problems = multipart.problems(2, 7, "test")
    assert [line["answer"].rpartition("#### ")[2] for line in lines] == [
        str(p.total) for p in problems
    ]
    for wrong in (["--num", "0"], ["--split", "tst"], ["--as", "anotated"]):
        capfd.readouterr()
        assert main([*arguments, *wrong]) == 2
        assert len(capfd.readouterr().err.splitlines()) == 1
