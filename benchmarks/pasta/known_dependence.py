# ruff: noqa: E501
"""Responses whose dependence is known by construction, to choose and to test thresholds with.

`synthetic(split)` makes them from templates: lists of facts and tips (no part needs another),
chains of arithmetic, stories and procedures (each part carries on from the one before), and sums
of two independent costs (only the last parts depend). Every content is shown in every format, so
that format says nothing about dependence. The two splits share no template and no content.

`from_data(folder, split)` makes harder ones from real text: answers to unrelated questions, put
into one list (independent), and the steps of solved word problems (dependent).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SPLITS = ("validation", "test")


@dataclass(frozen=True)
class Known:
    """`depends[i]`: whether part i needs earlier parts; None where it is not known part by part,
    but then the response as a whole is dependent."""

    group: str
    prompt: str
    intro: str
    parts: tuple[tuple[str, str], ...]
    depends: tuple[bool | None, ...]
    outro: str = ""
    outro_depends: bool = False

    @property
    def is_dependent(self) -> bool:
        return any(d is not False for d in self.depends)


Format = Callable[[int, str, str], str]
FORMATS: dict[str, Format] = {
    "numbered-bold": lambda i, name, text: f"\n\n{i}. **{name}**: {text}",
    "numbered": lambda i, name, text: f"\n{i}. {text}",
    "bullets": lambda i, name, text: f"\n- {name}: {text}",
    "headed": lambda i, name, text: f"\n\n## {name}\n\n{text}",
    "paragraphs": lambda i, name, text: f"\n\n{text}",
}


def response_of(known: Known, form: str) -> tuple[str, list[tuple[int, bool | None]]]:
    """The response in a format, and for each part where its last character stands and whether it
    depends on earlier parts."""
    text = known.intro
    ends: list[tuple[int, bool | None]] = []
    for i, ((name, part), depends) in enumerate(zip(known.parts, known.depends, strict=True), 1):
        piece = FORMATS[form](i, name, part)
        text += piece if text else piece.lstrip("\n")
        ends.append((len(text) - 1, depends))
    if known.outro:
        text += f"\n\n{known.outro}"
        ends.append((len(text) - 1, known.outro_depends))
    return text, ends


# -- independent by construction -------------------------------------------------------------------

Facts = tuple[str, str, list[tuple[str, str]]]
FACTS: dict[str, list[Facts]] = {
    "validation": [
        ("Give me tips for saving water at home.", "Here are some tips for saving water:", [
            ("Fix leaks", "A dripping tap can waste thousands of litres a year, so repair it as soon as you notice it."),
            ("Take shorter showers", "Two minutes less under the shower save up to twenty litres each time you wash."),
            ("Water the garden early", "In the morning less of it evaporates, and plants drink before the heat of the day."),
            ("Run full loads", "The washing machine and the dishwasher should only be started when they are full."),
            ("Collect rain", "A barrel below the roof gutter gives you free water for flowers and for cleaning tools."),
            ("Reuse cooking water", "Once it is cold, the water that boiled vegetables is good food for house plants."),
        ]),
        ("Tell me something about each planet.", "Some facts about the planets:", [
            ("Mercury", "It is the smallest planet and the closest to the Sun, and its year lasts only 88 days."),
            ("Venus", "A thick atmosphere of carbon dioxide makes it the hottest of all, at about 465 degrees."),
            ("Mars", "Iron oxide gives its surface a red colour, and two small moons circle around it."),
            ("Jupiter", "The largest planet has a storm, the Great Red Spot, that has raged for centuries."),
            ("Saturn", "Its bright rings consist of countless pieces of ice and rock."),
            ("Neptune", "The strongest winds ever measured on a planet blow in its blue clouds."),
        ]),
        ("What are good breeds of dogs for a family?", "These breeds suit families well:", [
            ("Labrador", "Friendly and patient, it loves to fetch and gets along with children of any age."),
            ("Beagle", "This cheerful hound is small enough for a flat but needs a long walk every day."),
            ("Poodle", "Its coat hardly sheds, which helps people with allergies, and it learns tricks quickly."),
            ("Collie", "Known for its loyalty, it watches over everyone in the house and is easy to train."),
            ("Boxer", "A playful clown with a lot of energy, it needs a garden and firm rules."),
        ]),
        ("Describe a few programming languages.", "A few languages and what they are for:", [
            ("Python", "Its clear syntax makes it popular with beginners, in data science and for scripts."),
            ("C", "Operating systems and drivers are written in it since it is close to the hardware."),
            ("JavaScript", "Every web browser runs it, so nearly all interactive pages depend on it."),
            ("SQL", "Queries in this declarative language fetch rows from the tables of a database."),
            ("Haskell", "A purely functional design and lazy evaluation make it a favourite of researchers."),
        ]),
    ],
    "test": [
        ("How can I sleep better?", "Here is what helps many people to sleep:", [
            ("Keep regular hours", "Going to bed and getting up at the same time trains your inner clock."),
            ("Avoid coffee late", "Caffeine stays in the blood for many hours, so have your last cup after lunch."),
            ("Darken the room", "Heavy curtains or a mask block the street lamps that would keep you awake."),
            ("Put the phone away", "Blue light from screens tells the brain that it is still day."),
            ("Exercise", "Half an hour of jogging or swimming in the afternoon makes muscles pleasantly tired."),
            ("Cool the bedroom", "Most bodies rest best when the air is at about 18 degrees."),
        ]),
        ("Tell me about cities in Europe.", "Some cities that are worth a visit:", [
            ("Lisbon", "Yellow trams climb its steep hills, and the custard tarts of Belem are famous."),
            ("Vienna", "Coffee houses, the opera and the palace of Schönbrunn draw millions of visitors."),
            ("Prague", "A bridge with thirty statues leads over the Vltava to the castle on the hill."),
            ("Oslo", "From the white roof of its opera house people look out over the fjord."),
            ("Athens", "The marble columns of the Parthenon have stood on the Acropolis for 2,400 years."),
            ("Dublin", "Pubs with live music and the library of Trinity College are its main sights."),
        ]),
        ("Which musical instruments could I learn?", "Here are instruments for beginners:", [
            ("Piano", "All notes lie in a row before you, so it is easy to understand harmony on it."),
            ("Guitar", "With three chords you can already play hundreds of songs at a campfire."),
            ("Violin", "It takes patience, since there are no frets that show where the fingers go."),
            ("Drums", "They train rhythm and coordination, but your neighbours may complain."),
            ("Flute", "Light and small, it fits in any bag, and the first tones come with the right lips."),
        ]),
        ("List some ideas for a rainy weekend.", "You could try one of these:", [
            ("Visit a museum", "Many have free entry on the first Sunday of the month and special tours for kids."),
            ("Bake bread", "Kneading dough is fun, and the smell from the oven fills the whole house."),
            ("Play board games", "Chess, Scrabble or a card game bring everyone to the same table."),
            ("Sort old photos", "You will find forgotten holidays, and an album makes a fine present for relatives."),
            ("Learn calligraphy", "All you need is ink, a broad nib and some sheets of thick paper."),
        ]),
    ],
}  # fmt: skip


def _facts(split: str, rng: random.Random) -> Known:
    prompt, intro, items = rng.choice(FACTS[split])
    parts = tuple(rng.sample(items, rng.randint(4, len(items))))
    return Known("facts", prompt, intro, parts, (False,) * len(parts))


REPETITIVE = {
    "validation": (
        "Why should I keep a diary?",
        "There are several reasons for it:",
        "It is important to {0} because it can help you to {1} and to feel better about your life.",
        [("Reflection", "look back at the day", "understand what went wrong"),
         ("Writing", "practise with a pen", "find words more easily"),
         ("Memory", "note small moments", "remember holidays and birthdays"),
         ("Stress", "put worries on paper", "fall asleep sooner"),
         ("Goals", "write down your plans", "see what you have reached")],
    ),
    "test": (
        "What do companies gain from training their staff?",
        "Training has many benefits:",
        "Companies that invest in {0} are able to {1}, which can lead to better results over time.",
        [("Skills", "technical courses", "use new machines without mistakes"),
         ("Safety", "first aid lessons", "prevent accidents on the shop floor"),
         ("Languages", "Spanish classes", "serve customers in South America"),
         ("Leadership", "coaching for managers", "lose fewer talents to competitors"),
         ("Sales", "negotiation seminars", "close contracts in half the time")],
    ),
}  # fmt: skip
"""Parts of one wording that need nothing of one another: repetition is no dependence."""


def _repetitive(split: str, rng: random.Random) -> Known:
    prompt, intro, pattern, items = REPETITIVE[split]
    chosen = rng.sample(items, rng.randint(4, 5))
    parts = tuple((name, pattern.format(*words)) for name, *words in chosen)
    return Known("repetitive", prompt, intro, parts, (False,) * len(parts))


# -- dependent by construction ---------------------------------------------------------------------

NAMES = {
    "validation": ["Tom", "Mira", "Ahmed", "Lucy", "Pavel"],
    "test": ["Ines", "Oscar", "Yuki", "Bruno", "Carla"],
}


def _shop(split: str, rng: random.Random) -> Known:
    name, friends = rng.choice(NAMES[split]), rng.randint(2, 4)
    price, count = rng.randint(3, 9), rng.randint(4, 9)
    cost = price * count
    paid = (cost // 50 + 1) * 50
    thing = rng.choice(["pens", "mugs", "books"] if split == "validation" else ["caps", "plants"])
    prompt = (
        f"A shop sells {thing} at {price} dollars each. {name} buys {count}, pays with {paid} "
        f"dollars and splits the change among {friends} friends. How much does each get?"
    )
    change = paid - cost
    share = f"{change / friends:.2f}"
    parts = (
        ("Cost", f"{count} {thing} at {price} dollars each cost {count} * {price} = {cost} dollars."),
        ("Change", f"{name} pays {paid} dollars and gets {paid} - {cost} = {change} dollars back."),
        ("Share", f"The {change} dollars are split in {friends}, so each gets {share} dollars."),
    )  # fmt: skip
    outro = f"So each of the friends gets {share} dollars."
    return Known("arithmetic", prompt, "Step by step:", parts, (False, True, True), outro, True)


def _growth(split: str, rng: random.Random) -> Known:
    start, factor, loss = rng.randint(11, 49), rng.randint(2, 5), rng.randint(3, 9)
    name = rng.choice(NAMES[split])
    who = "rabbits" if split == "validation" else "bees"
    prompt = (
        f"{name} has {start} {who}. Their number grows {factor}-fold, then {loss} leave, and half "
        f"of the rest are sold at 4 dollars each. What does {name} earn?"
    )
    grown = start * factor
    rest = grown - loss
    half = rest // 2
    parts = (
        ("Growth", f"At first there are {start}, and {factor} times as many are {grown} {who}."),
        (
            "Loss",
            f"When {loss} of the {grown} leave, {grown} - {loss} = {rest} remain with {name}.",
        ),
        ("Sale", f"Half of {rest} is {half}, so {half} of the {who} are sold."),
        ("Earnings", f"At 4 dollars each the {half} {who} bring {half} * 4 = {half * 4} dollars."),
    )
    depends = (False, True, True, True)
    outro = f"{name} earns {half * 4} dollars."
    return Known("arithmetic", prompt, "We can solve this in order:", parts, depends, outro, True)


def _two_costs(split: str, rng: random.Random) -> Known:
    a, b = rng.randint(12, 49), rng.randint(12, 49)
    x, y = rng.randint(3, 9), rng.randint(3, 9)
    goods = [("chairs", "lamps"), ("bricks", "planks")]
    if split == "test":
        goods = [("shirts", "hats"), ("apples", "melons")]
    one, two = rng.choice(goods)
    prompt = f"What do {a} {one} at {x} dollars and {b} {two} at {y} dollars cost together?"
    parts = (
        (one.title(), f"There are {a} {one} at {x} dollars each, which makes {a} * {x} = {a * x} dollars."),
        (two.title(), f"There are {b} {two} at {y} dollars each, which makes {b} * {y} = {b * y} dollars."),
        ("Total", f"Together that is {a * x} + {b * y} = {a * x + b * y} dollars for all of them."),
    )  # fmt: skip
    return Known("two costs", prompt, "Let us see:", parts, (False, False, True))


_STORIES = {
    "validation": [
        (["{n} found {o} under the floor of the old mill and wondered who had hidden it.",
          "{g}, the miller, turned pale at the sight of {o} and begged {n} to put it back.",
          "But {n} carried {o} to the castle, where {k} had been waiting for it for years.",
          "{k} gave {n} a bag of silver for {o}, and {g} was never seen in the valley again."],
         ["a green lantern", "a cracked bell", "a silver flute"]),
        (["On the market {n} traded a goose for {o}, although everybody laughed.",
          "At night {o} began to hum, and {n} could not sleep until {g} knocked at the door.",
          "{g} offered a ship for {o}; {n} agreed and sailed with {k} the next morning.",
          "Far out at sea {k} confessed that {g} had taken {o} only to save the village."],
         ["a stone egg", "a copper mirror", "a box of sand"]),
    ],
    "test": [
        (["In the attic {n} opened a trunk and took out {o}, wrapped in a letter from {g}.",
          "The letter said that {o} belonged to {k}, who lived at the end of the island.",
          "{n} rowed for a day, and {k} wept when {o} lay on the table at last.",
          "Years later {k} left the house to {n}, and {o} still hangs above its door."],
         ["a torn map", "a wooden fish", "an iron ring"]),
        (["Detective {n} noticed that {o} was missing from the hall of the museum.",
          "The guard, {g}, swore that nobody had touched {o} since noon.",
          "But mud on the shoes of {g} led {n} to a boat that belonged to {k}.",
          "{k} handed over {o} and named {g} as the one who had planned it all."],
         ["the blue vase", "the golden mask", "the glass crown"]),
    ],
}  # fmt: skip
_PEOPLE = {
    "validation": ["Aldous", "Perrin", "Queen Isolde", "Marwick", "Old Teresa"],
    "test": ["Fenwick", "Dorothea", "Captain Brandt", "Lysander", "Madame Kirov"],
}


def _story(split: str, rng: random.Random) -> Known:
    beats, objects = rng.choice(_STORIES[split])
    keeper, other = rng.sample(_PEOPLE[split], 2)
    words = {"n": rng.choice(NAMES[split]), "o": rng.choice(objects), "g": keeper, "k": other}
    titles = ["The beginning", "The turn", "The journey", "The end"]
    parts = tuple((t, b.format(**words)) for t, b in zip(titles, beats, strict=True))
    return Known("story", "Tell me a short story in four parts.", "", parts, (False, *[True] * 3))


_PROCEDURES = {
    "validation": [
        ("How do I parse a log file and plot it?", [
            ("Read", "Open the file with `{a} = open('server.log')` and skip its first line."),
            ("Split", "Loop over `{a}` and append the second column of each line to `{b}`."),
            ("Count", "Call `Counter({b})` and keep its ten largest entries as `{c}`."),
            ("Plot", "Pass the keys and values of `{c}` to `plt.bar` and save the picture."),
        ]),
    ],
    "test": [
        ("How do I join two tables and export the result?", [
            ("Load", "Read both files with `{a} = pd.read_csv(path)` and check their columns."),
            ("Join", "Merge the frames in `{a}` on their key and call the outcome `{b}`."),
            ("Filter", "Drop the rows of `{b}` without a price and store what is left in `{c}`."),
            ("Export", "Write `{c}` to disk with `to_csv` and leave the index out."),
        ]),
    ],
}  # fmt: skip
_VARIABLES = ["rows", "blob", "parts", "handle", "series", "stock", "table", "entries", "chunk"]


def _procedure(split: str, rng: random.Random) -> Known:
    prompt, steps = rng.choice(_PROCEDURES[split])
    words = dict(zip("abc", rng.sample(_VARIABLES, 3), strict=True))
    parts = tuple((name, text.format(**words)) for name, text in steps)
    return Known("procedure", prompt, "Proceed like this:", parts, (False, True, True, True))


def synthetic(split: str, num_each: int = 10, seed: int = 0) -> Iterator[tuple[Known, str]]:
    """(response, format): `num_each` of each of the kinds, facts three times as many, formats
    in turn."""
    rng = random.Random(f"{seed}/{split}")
    makers = [_facts, _facts, _facts, _repetitive, _shop, _growth, _two_costs, _story, _procedure]
    forms = list(FORMATS)
    for i in range(num_each):
        for maker in makers:
            yield maker(split, rng), forms[i % len(forms)]


# -- real text -------------------------------------------------------------------------------------


def from_data(folder: Path, split: str, num_each: int = 50) -> Iterator[tuple[Known, str]]:
    """Needs `instruct/*.jsonl` (instruction, response, eval_overlap) and `math/gsm8k_train.jsonl`
    (question, answer) in `folder`."""
    rng = random.Random(f"data/{split}")
    forms = list(FORMATS)
    for i, known in enumerate([*_unrelated(folder, split, num_each, rng), *_problems(folder, split, num_each, rng)]):  # fmt: skip
        yield known, forms[i % len(forms)]


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def _mine(text: str, split: str) -> bool:
    return SPLITS[sum(text.encode()) % 2] == split


def _unrelated(folder: Path, split: str, count: int, rng: random.Random) -> Iterator[Known]:
    """Answers to unrelated questions, one paragraph each, in one list."""
    pool = []
    for path in sorted(folder.glob("instruct/*.jsonl")):
        for row in _lines(path):
            question, answer = str(row["instruction"]).strip(), str(row["response"]).strip()
            short = 15 <= len(answer.split()) <= 60 and len(question.split()) <= 25
            if short and not row["eval_overlap"] and "\n" not in question + answer and ":" not in answer:  # fmt: skip
                pool.append((question, answer))
    pool = [pair for pair in pool if _mine(pair[0], split)]
    for _ in range(count):
        chosen = rng.sample(pool, 4)
        listed = "\n".join(f"{i}. {q}" for i, (q, _) in enumerate(chosen, 1))
        parts = tuple((f"Answer {i}", a) for i, (_, a) in enumerate(chosen, 1))
        yield Known("unrelated", f"Answer these questions.\n{listed}", "Here you are:", parts, (False,) * 4)  # fmt: skip


def _problems(folder: Path, split: str, count: int, rng: random.Random) -> Iterator[Known]:
    """Solved word problems, each line a step."""
    pool = []
    for row in _lines(folder / "math" / "gsm8k_train.jsonl"):
        steps = re.sub(r"<<[^>]*>>", "", str(row["answer"])).split("\n####")[0].split("\n")
        if 3 <= len(steps) <= 6 and _mine(str(row["question"]), split):
            pool.append((str(row["question"]), steps))
    for question, steps in rng.sample(pool, count):
        parts = tuple((f"Step {i}", s) for i, s in enumerate(steps, 1))
        yield Known("problems", question, "Step by step:", parts, (False, *[None] * (len(parts) - 1)))  # fmt: skip
