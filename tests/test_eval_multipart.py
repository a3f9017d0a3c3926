"""Task `multipart`: its problems, their splits, and what an answer scores."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from tiny_lms import tiny_tokenizer

from stretto.cli import main
from stretto.data.markup import stripped
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


def test_problems_of_four_or_five_parts_are_those_of_version_1() -> None:
    """The first one of a seed, drawn as it was before a number of parts could be asked for."""
    assert multipart.VERSION == 1
    for seed in range(4):
        rng = random.Random(f"multipart/1/{seed}/0")
        count = rng.choice((4, 5))
        parts = tuple(multipart._DRAWN[rng.choice(multipart.KINDS)](rng) for _ in range(count))
        lines = [rng.choice(multipart.OPENINGS).format(count=count)]
        lines += [f"({number}) {part.question}" for number, part in enumerate(parts, 1)]
        lines.append(rng.choice(multipart.CLOSINGS))
        firsts = [multipart.problems(seed, 1, split)[0] for split in multipart.SPLITS]
        assert multipart.Problem("\n".join(lines), parts) in firsts


@pytest.mark.parametrize("parts", [(1, 1), (1, 2), (2, 4), (9, 9)])
def test_a_number_of_parts_can_be_asked_for(parts: multipart.Parts) -> None:
    found = multipart.problems(0, 40, "train", parts)
    assert found[:7] == multipart.problems(0, 7, "train", parts)
    assert {len(p.parts) for p in found} == set(range(parts[0], parts[1] + 1))
    assert all(multipart.SPLITS["train"].holds(prompt_id(p.prompt)) for p in found)
    for problem in found:
        assert score(item(problem), problem.response).value == 1
        assert stripped(problem.annotated()) == problem.response
        assert stripped(problem.annotated(planned=True)) == problem.response
    rows = multipart.multipart_rows(0, 7, parts=parts)
    assert [row["prompt"] for row in rows] == [p.prompt for p in found[:7]]
    asked = multipart.multipart_questions(0, 7, parts=parts)
    assert [row["prompt"] for row in asked] == [p.prompt for p in found[:7]]


def test_a_problem_of_one_part_speaks_of_one_alone() -> None:
    for problem in multipart.problems(0, 40, "train", (1, 1)):
        opening, question, closing = problem.prompt.splitlines()
        assert question == f"(1) {problem.parts[0].question}"
        for plural in ("each", "every", "all", "sum", "results", "parts", "questions", "are"):
            assert plural not in re.findall(r"\w+", f"{opening} {closing}"), problem.prompt
        assert problem.response.endswith(f"Add up: {problem.total}. The total is {problem.total}.")


@pytest.mark.parametrize("parts", [(0, 2), (2, 1), (1, 10), (-1, 1)])
def test_numbers_of_parts_that_there_are_not(parts: multipart.Parts) -> None:
    with pytest.raises(InvalidInput, match="no range from 1 to 9"):
        multipart.problems(0, 1, "train", parts)


def test_kinds_of_parts_can_be_asked_for() -> None:
    found = multipart.problems(0, 40, "train", kinds=("rows", "chain"))
    assert {part.kind for p in found for part in p.parts} == {"chain", "rows"}
    assert found == multipart.problems(0, 40, "train", kinds=("chain", "rows"))
    assert multipart.problems(0, 60, "test", kinds=multipart.KINDS[::-1]) == PROBLEMS
    with pytest.raises(UnknownName, match="kind of part"):
        multipart.problems(0, 1, "train", kinds=("chain", "row"))
    with pytest.raises(InvalidInput, match="no kind of part"):
        multipart.problems(0, 1, "train", kinds=())


def test_more_problems_than_there_are() -> None:
    """And no endless search for them."""
    with pytest.raises(InvalidInput, match=r"hardly more than \d+ such problems in split valid"):
        multipart.problems(0, 100_000, "valid", (1, 1), ("rows",))


def test_parts_are_read() -> None:
    assert multipart.parse_parts("3") == (3, 3)
    assert multipart.parse_parts("1-2") == (1, 2)
    for text in ("", "-", "1-", "-2", "one", "1-2-3", "1.5", "²", "2-1", "0", "1-10", "12345"):
        with pytest.raises(InvalidInput, match=r"^parts "):
            multipart.parse_parts(text)


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
    assert main([*arguments, "--parts", "1-2"]) == 0
    assert [r.prompt for r in read_rows(out, Annotated)] == [
        p.prompt for p in multipart.problems(2, 7, "train", (1, 2))
    ]
    assert main([*arguments, "--kinds", "rows,chain"]) == 0
    assert [r.prompt for r in read_rows(out, Annotated)] == [
        p.prompt for p in multipart.problems(2, 7, "train", kinds=("chain", "rows"))
    ]
    for wrong in (
        ["--kinds", "row"], ["--kinds", "chain,"], ["--num", "0"], ["--split", "tst"],
        ["--as", "anotated"], ["--parts", "2-1"], ["--parts", "0-2"], ["--parts", "few"],
    ):  # fmt: skip
        capfd.readouterr()
        assert main([*arguments, *wrong]) == 2
        assert len(capfd.readouterr().err.splitlines()) == 1
