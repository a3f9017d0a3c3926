"""The problems of task `multipart`: K small questions to be answered, then one sum of all results.

Every part can be worked out alone, so all can be written at once; the sum cannot be had without
reading them. A model that does not wait for its threads cannot get it right but by luck. Problems
are drawn from a seed, and nothing but numbers and the words below is in them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.data.markup import promised, write_chunk
from stretto.data.rows import Annotated, prompt_id
from stretto.data.select import Split
from stretto.errors import InvalidInput, UnknownName

VERSION = 1
"""Raised when the problems of a seed change."""

SPLITS = {"train": Split(0, 70), "valid": Split(70, 80), "test": Split(80, 100)}
"""Percents of the prompts' hashes."""
Parts = tuple[int, int]
"""The fewest and the most parts that a problem may have."""
NUM_PARTS: Parts = (4, 5)
"""Of the task, and wherever nothing else is asked for."""
MAX_PARTS = 9
"""Of a problem: parts have numbers of one digit."""
PATIENCE = 10_000
"""Draws in a row without a new problem, after which there are none."""
KINDS = ("letters", "occurrences", "chain", "rows", "animals")
"""Of parts, each as likely as the others."""
SUMS = ("chain", "rows")
"""Kinds that ask for copied numbers and small sums, and for no spelling or knowledge of words: for
models of a million weights that are to write from masks."""

WORDS = (
    "planet", "garden", "bridge", "window", "letter", "summer", "winter", "butter", "pencil",
    "market", "silver", "forest", "island", "castle", "basket", "bottle", "kitten", "rabbit",
    "street", "pepper", "carpet", "helmet", "lemon", "apple", "river", "table", "chair", "bread",
    "stone", "cloud", "house", "green", "sweet", "cheese", "coffee", "dinner", "village", "blanket",
    "chicken", "balloon", "kitchen", "weather", "teacher", "morning",
)  # fmt: skip
ANIMALS = ("cat", "dog", "horse", "cow", "sheep", "pig", "goat", "duck", "bear", "lion", "mouse")
THINGS = ("cup", "drum", "chair", "spoon", "hat", "box", "key", "book", "lamp", "shoe", "coin")
ROW_THINGS = ("chairs", "trees", "cars", "plates", "lamps", "books", "boxes", "stones")

OPENINGS = (
    "Answer every part, then add up the results.",
    "Work out each of these small questions and then add all the results together.",
    "There are {count} small questions. Solve each one, then give the sum of all the results.",
    "Solve the parts one after the other. After that, add their results.",
)
CLOSINGS = (
    "Show the work of every part after its number, and end with: The total is N.",
    "Write each part after its number. The last sentence must be: The total is N.",
    "Begin each part with its number and finish with the sentence: The total is N.",
)
OPENINGS_OF_ONE = (
    "Answer the part, then give its result as the total.",
    "Work out this small question and then give its result as the total.",
    "There is one small question. Solve it, then give its result as the total.",
    "Solve the only part. After that, give its result as the total.",
)
"""Of problems with one part: its result is the total."""
CLOSINGS_OF_ONE = (
    "Show the work of the part after its number, and end with: The total is N.",
    "Write the part after its number. The last sentence must be: The total is N.",
    "Begin the part with its number and finish with the sentence: The total is N.",
)
SUM_MARK = "Add up:"

_TOKENS = re.compile(r"\s(?=\d)|\d|[^\W\d]+|[^\w\s]|\n")
_PART = re.compile(r"^\((\d+)\)", re.MULTILINE)
_RESULT = re.compile(r"result is (-?\d+)", re.IGNORECASE)
_TOTAL = re.compile(r"total(?: of all (?:the )?results)? is:?\s*\**(-?\d+)", re.IGNORECASE)
_INTEGER = re.compile(r"-?\d+")


@dataclass(frozen=True, slots=True)
class Part:
    """A question, its work as a model should write it, and its result."""

    kind: str
    question: str
    work: str
    result: int


@dataclass(frozen=True)
class Problem:
    """A prompt with its parts and the sum of their results."""

    prompt: str
    parts: tuple[Part, ...]

    @property
    def total(self) -> int:
        return sum(part.result for part in self.parts)

    @property
    def response(self) -> str:
        """The right answer, without annotations."""
        return "".join(self._sections()) + self._sum()

    def annotated(
        self, count_tokens: Callable[[str], int] | None = None, *, planned: bool = False
    ) -> str:
        """The right answer with a promise for every part, and a sync before the sum; `planned`: the
        sum is promised too, in a round of its own.

        `count_tokens` gives the length of a part in the model's tokens; without it they are guessed
        (`num_words`). A promise's number is that length, rounded up to a multiple of 10.
        """
        count = count_tokens if count_tokens is not None else num_words
        chunks = [
            write_chunk(f"part {number}", promised(count(section)), section)
            for number, section in enumerate(self._sections(), 1)
        ]
        total = self._sum()
        last = write_chunk("the sum", promised(count(total)), total) if planned else total
        return "".join(chunks) + "<sync/>" + last

    def _sections(self) -> Iterator[str]:
        for number, part in enumerate(self.parts, 1):
            yield f"({number}) {part.work} So the result is {part.result}.\n"

    def _sum(self) -> str:
        total, steps = self.parts[0].result, []
        for part in self.parts[1:]:
            steps.append(f"{total} + {part.result} = {total + part.result}")
            total += part.result
        return f"{SUM_MARK} {', '.join(steps) or total}. The total is {total}."


@dataclass(frozen=True)
class Example:
    """A problem as training data: `strip(annotated) == response`."""

    prompt: str
    response: str
    annotated: str


def multipart_examples(
    seed: int, n: int, *, split: str = "train", parts: Parts = NUM_PARTS,
    kinds: Sequence[str] = KINDS, count_tokens: Callable[[str], int] | None = None,
    planned: bool = False,
) -> list[Example]:  # fmt: skip
    """The first `n` problems of a seed in a split, with their answers, plain and annotated."""
    return [
        Example(problem.prompt, problem.response, problem.annotated(count_tokens, planned=planned))
        for problem in problems(seed, n, split, parts, kinds)
    ]


def multipart_rows(
    seed: int, n: int, *, split: str = "train", parts: Parts = NUM_PARTS,
    kinds: Sequence[str] = KINDS, count_tokens: Callable[[str], int] | None = None,
    planned: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """`multipart_examples` as lines of a file: `Annotated` rows to train on."""
    return [
        Annotated(
            prompt_id=prompt_id(example.prompt),
            prompt=example.prompt,
            response=example.response,
            annotated=example.annotated,
            annotator=f"multipart-{VERSION}",
        ).model_dump(exclude_none=True)
        for example in multipart_examples(
            seed,
            n,
            split=split,
            parts=parts,
            kinds=kinds,
            count_tokens=count_tokens,
            planned=planned,
        )
    ]


def multipart_questions(
    seed: int, n: int, *, split: str = "train", parts: Parts = NUM_PARTS,
    kinds: Sequence[str] = KINDS,
) -> list[dict[str, Any]]:  # fmt: skip
    """The same problems as `prompt` and `answer`, the expected number after `####`."""
    return [
        {"prompt": problem.prompt, "answer": f"{problem.response}\n#### {problem.total}"}
        for problem in problems(seed, n, split, parts, kinds)
    ]


def problems(
    seed: int, n: int, split: str, parts: Parts = NUM_PARTS, kinds: Sequence[str] = KINDS
) -> list[Problem]:
    """The first `n` different problems of a seed in a split, with so many parts each, of these
    kinds: a function of these five alone.

    Which split a problem is in is a function of its prompt, so no problem of one split is in
    another, whatever the seeds. Raises `UnknownName`, and `InvalidInput` for `n` below 1 and for
    numbers or kinds of parts that there are not, and for more problems than there are.
    """
    if split not in SPLITS:
        raise UnknownName("split", split, list(SPLITS))
    chosen = SPLITS[split]
    if n < 1:
        raise InvalidInput(f"the number of problems must be at least 1, got {n}")
    name = "" if _checked(parts) == NUM_PARTS else f"{parts[0]}-{parts[1]}/"
    chosen_kinds = _checked_kinds(kinds)
    name += "" if chosen_kinds == KINDS else f"{'+'.join(chosen_kinds)}/"
    found: dict[str, Problem] = {}
    index = last = 0
    while len(found) < n:
        if index - last > PATIENCE:
            raise InvalidInput(
                f"there are hardly more than {len(found)} such problems in split {split}, and {n} "
                "are asked for; ask for fewer, for more parts or for more kinds"
            )
        rng = random.Random(f"multipart/{VERSION}/{name}{seed}/{index}")
        problem = _draw(rng, parts, chosen_kinds)
        index += 1
        if problem.prompt not in found and chosen.holds(prompt_id(problem.prompt)):
            found[problem.prompt], last = problem, index
    return list(found.values())


def parse_parts(text: str) -> Parts:
    """From N or LOW-HIGH, such as 1-2. Raises `InvalidInput`."""
    low, dash, high = text.partition("-")
    ends = (low, high) if dash else (low, low)
    if not all(end.isascii() and end.isdigit() and len(end) < 5 for end in ends):
        raise InvalidInput(f"parts {text!r} is no number of parts; give one, or LOW-HIGH")
    return _checked((int(ends[0]), int(ends[1])))


def _checked(parts: Parts) -> Parts:
    if not 1 <= parts[0] <= parts[1] <= MAX_PARTS:
        raise InvalidInput(
            f"parts {parts[0]}-{parts[1]} is no range from 1 to {MAX_PARTS}; give one, such as 1-2"
        )
    return parts


def _checked_kinds(kinds: Sequence[str]) -> tuple[str, ...]:
    """In the order of `KINDS`."""
    for kind in kinds:
        if kind not in KINDS:
            raise UnknownName("kind of part", kind, list(KINDS))
    if not kinds:
        raise InvalidInput(f"no kind of part is asked for; give some of {', '.join(KINDS)}")
    return tuple(kind for kind in KINDS if kind in kinds)


def num_words(text: str) -> int:
    """Words, digits, spaces before digits, and marks: what many tokenizers count in such a text."""
    return len(_TOKENS.findall(text))


@dataclass(frozen=True, slots=True)
class Reading:
    """What an answer says: the result of each part by its number, and the total, if it has them."""

    results: dict[int, int]
    total: int | None


def read_answer(text: str) -> Reading:
    """Reads an answer. A part reaches from its number in brackets at the start of a line to the
    next one, or to the sum; its result is the last "result is N" in it. The total is the last
    "total is N" of the text; without one, the last whole number in it."""
    body, _, _ = text.partition(SUM_MARK)
    results: dict[int, int] = {}
    _, *pieces = _PART.split(body)  # number, its text, number, its text …
    for number, part in zip(pieces[::2], pieces[1::2], strict=True):
        said = _RESULT.findall(part)
        if said:
            results.setdefault(int(number), int(said[-1]))
    totals = _TOTAL.findall(text) or _INTEGER.findall(text)
    return Reading(results, int(totals[-1]) if totals else None)


# -- drawing -----------------------------------------------------------------------------------


def _draw(rng: random.Random, num_parts: Parts, kinds: Sequence[str]) -> Problem:
    """What is drawn, and in which order, makes the problems: see `VERSION`."""
    count = rng.choice(range(num_parts[0], num_parts[1] + 1))
    parts = tuple(_DRAWN[rng.choice(kinds)](rng) for _ in range(count))
    openings, closings = (OPENINGS, CLOSINGS) if count > 1 else (OPENINGS_OF_ONE, CLOSINGS_OF_ONE)
    lines = [rng.choice(openings).format(count=count)]
    lines += [f"({number}) {part.question}" for number, part in enumerate(parts, 1)]
    lines.append(rng.choice(closings))
    return Problem("\n".join(lines), parts)


def _letters(rng: random.Random) -> Part:
    word = rng.choice(WORDS)
    question = rng.choice(
        ("How many letters are in the word {}?", "Count the letters of the word {}.")
    )
    counts = ", ".join(f"{letter} is {place}" for place, letter in enumerate(word, 1))
    work = f"Go through the letters of {word}: {counts}. There are no more letters."
    return Part("letters", question.format(word), work, len(word))


def _occurrences(rng: random.Random) -> Part:
    word = rng.choice(WORDS)
    letter = rng.choice(word)
    question = rng.choice(
        ("How often is the letter {} in the word {}?", "Count the letter {} in the word {}.")
    )
    seen, steps = 0, []
    for each in word:
        seen += each == letter
        steps.append(f"{each} {'yes' if each == letter else 'no'} {seen}")
    work = f"Look for {letter} in {word}: {', '.join(steps)}."
    return Part("occurrences", question.format(letter, word), work, seen)


def _chain(rng: random.Random) -> Part:
    value = rng.randint(2, 6)
    asked, steps = [f"Start with {value}"], [f"Start with {value}."]
    for _ in range(3):
        takes = value >= 4 and rng.random() < 0.4
        change = rng.randint(1, min(3, value - 1) if takes else 4)
        after = value - change if takes else value + change
        sign, verb = ("-", "take away") if takes else ("+", "add")
        asked.append(f"{verb} {change}")
        steps.append(f"Now {verb} {change}: {value} {sign} {change} = {after}.")
        value = after
    question = f"{asked[0]}, {asked[1]}, {asked[2]} and {asked[3]}."
    return Part("chain", question, " ".join(steps), value)


def _rows(rng: random.Random) -> Part:
    rows, each = rng.randint(2, 4), rng.randint(2, 4)
    thing = rng.choice(ROW_THINGS)
    question = rng.choice(
        ("How many {2} are in {0} rows of {1} {2}?", "There are {0} rows of {1} {2}. How many?")
    )
    steps = [
        f"Row {row} has {each} {thing}, which makes {row * each} so far."
        for row in range(1, rows + 1)
    ]
    return Part("rows", question.format(rows, each, thing), " ".join(steps), rows * each)


def _animals(rng: random.Random) -> Part:
    count = rng.randint(1, 4)
    names = rng.sample(ANIMALS, count) + rng.sample(THINGS, 5 - count)
    rng.shuffle(names)
    question = rng.choice(("How many of these are animals: {}?", "Count the animals: {}."))
    seen, steps = 0, []
    for name in names:
        is_animal = name in ANIMALS
        seen += is_animal
        steps.append(f"{name} is {'an animal' if is_animal else 'a thing'}, {seen} so far.")
    return Part("animals", question.format(", ".join(names)), " ".join(steps), seen)


_DRAWN: dict[str, Callable[[random.Random], Part]] = {
    "letters": _letters,
    "occurrences": _occurrences,
    "chain": _chain,
    "rows": _rows,
    "animals": _animals,
}
