"""Seven worked examples for a teacher, written for this project; a test holds them to the rules."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.data.markup import stripped


@dataclass(frozen=True)
class Demonstration:
    """A question and its annotated answer. `shows`: what a teacher learns from it."""

    shows: str
    prompt: str
    annotated: str

    @property
    def response(self) -> str:
        return stripped(self.annotated)


DEMONSTRATIONS = (
    Demonstration(
        "a list of independent items, and a conclusion that needs none of them in particular",
        "How can I make my small flat feel bigger?",
        """\
A few changes make a small flat feel much larger:\
<promise topic="light colours on walls" tokens="40"/><async>

1. **Paint the walls in light colours.** Pale tones reflect more daylight, so the corners of a \
room seem further away. Keep the ceiling white to make it look higher.</async>\
<promise topic="furniture with two uses" tokens="40"/><async>
2. **Choose furniture with two uses.** A bed with drawers or a bench with storage inside replaces \
a whole cupboard and leaves more of the floor free.</async>\
<promise topic="mirrors opposite windows" tokens="40"/><async>
3. **Hang a large mirror opposite a window.** It doubles the view and carries daylight to the \
darker side of the room, at a far lower price than a new window.</async>\
<promise topic="a clear floor" tokens="40"/><async>
4. **Keep the floor clear.** The more floor you can see, the larger the room feels, so use wall \
shelves instead of standing ones.</async>

Start with the one that costs least and see how far it takes you.""",
    ),
    Demonstration(
        "independent paragraphs under one opening sentence that stays on main",
        "Tell me about the climate, the food and the music of Portugal.",
        """\
Portugal is a small country with a character of its own.\
<promise topic="climate of Portugal" tokens="50"/><async>

The climate is mild. The north is green and rainy for much of the winter, while the Algarve in \
the south has over three hundred days of sun a year. The sea keeps summers on the coast from \
becoming too hot.</async>\
<promise topic="food of Portugal" tokens="60"/><async>

The food comes from the sea and from small farms. Salted cod is said to have a recipe for every \
day of the year, grilled sardines fill the streets in June, and custard tarts are eaten warm with \
cinnamon at any hour.</async>\
<promise topic="music of Portugal" tokens="50"/><async>

The best known music is fado, slow songs about longing that are sung to a round twelve-string \
guitar. It grew up in the old harbour quarters of Lisbon, and students in Coimbra sing a version \
of their own.</async>""",
    ),
    Demonstration(
        "two results that are worked out apart, then combined after a sync",
        "A hall is 12 m long and 8 m wide. Tiles cost 30 euros per square metre and skirting "
        "boards 5 euros per metre. What does it cost in all?",
        """\
We need the price of the tiles and the price of the skirting boards.\
<promise topic="price of the tiles" tokens="60"/><async>

**Tiles:** The floor has an area of 12 m × 8 m = 96 square metres. At 30 euros per square metre, \
the tiles cost 96 × 30 = 2880 euros.</async>\
<promise topic="price of the boards" tokens="60"/><async>

**Skirting boards:** The walls are 2 × (12 m + 8 m) = 40 metres long in all. At 5 euros per \
metre, the boards cost 40 × 5 = 200 euros.</async><sync/>

**Total:** Together this is 2880 + 200 = 3080 euros.""",
    ),
    Demonstration(
        "a list in form, but each step needs the one before: nothing is promised",
        "A jacket costs 80 euros. The shop raises the price by a quarter and then takes a quarter "
        "off. What does it cost in the end?",
        """\
1. **The rise.** A quarter of 80 euros is 20 euros, so the jacket first goes up to 80 + 20 = 100 \
euros.
2. **The discount.** A quarter of this new price is 100 / 4 = 25 euros, so 25 euros come off.
3. **The price in the end.** What is left is 100 − 25 = 75 euros. That is 5 euros less than \
before, since the discount was a quarter of more than the rise was.""",
    ),
    Demonstration(
        "a nested list: items under a heading are one part with it, as each alone is too short",
        "What should I pack for a weekend of hiking?",
        """\
For two days on the trail, pack light but do not forget the basics.\
<promise topic="clothing to pack" tokens="60"/><async>

**Clothing**
- Hiking boots that you have already worn in
- Two pairs of wool socks
- A rain jacket
- A warm layer for the evening:
  - a fleece, or
  - a thin down jacket</async>\
<promise topic="food and water" tokens="60"/><async>

**Food and water**
- Two litres of water a day for each person, or a filter if there are streams on the way
- Nuts, dried fruit and chocolate
- One warm meal for the evening, which only needs hot water</async>\
<promise topic="safety things" tokens="40"/><async>

**Safety**
- A paper map, since batteries run out
- A head torch
- Plasters and a bandage
- The number of the mountain rescue</async>

Weigh your pack before you leave: a fifth of your own weight is the most you should carry.""",
    ),
    Demonstration(
        "code: a block is kept whole, and what explains it needs it, so it comes after a sync; a "
        "part about something else can be written at the same time",
        "How do I count the words of a file in Python? And how in the shell?",
        """\
Both take a few lines.\
<promise topic="counting words in Python" tokens="70"/><async>

**Python**

```python
from collections import Counter

with open("book.txt", encoding="utf-8") as file:
    counts = Counter(file.read().split())

print(sum(counts.values()))
print(counts.most_common(10))
```</async>\
<promise topic="counting words in the shell" tokens="50"/><async>

**Shell**

```sh
wc -w book.txt
tr -s ' ' '\\n' < book.txt | sort | uniq -c | sort -nr | head
```</async><sync/>

In both, the first line of output is the number of all words, and the rest are the ten most \
frequent ones. The Python version also keeps the counts in `counts`, so that you can go on with \
them.""",
    ),
    Demonstration(
        "two rounds: options that can be described apart, a comparison that needs them, then "
        "advice for two cases that needs the comparison",
        "Should I travel from Vienna to Venice by train or by car? I might go alone or with my "
        "family.",
        """\
Let us look at both ways first.\
<promise topic="going by train" tokens="50"/><async>

**By train:** The direct train takes about eight hours and runs twice a day. A ticket bought early \
costs around 40 euros, and you arrive at the Grand Canal without having to park \
anywhere.</async>\
<promise topic="going by car" tokens="60"/><async>

**By car:** The drive takes about six hours over the motorway. Fuel and tolls come to around 110 \
euros, and a garage at the edge of Venice costs another 30 euros a day, whatever the number of \
people.</async><sync/>

So the train costs 40 euros a head and the car about 140 euros for the first day, and they are \
equal at between three and four people.\
<promise topic="advice for one person" tokens="40"/><async>

**If you go alone,** take the train. It is far cheaper for one, you can read or sleep on the way, \
and two hours more are a small price for that.</async>\
<promise topic="advice for a family" tokens="40"/><async>

**If you go with your family,** four or more of you travel cheaper by car, and you can stop where \
the children want to. Book the garage before you leave.</async>""",
    ),
)
