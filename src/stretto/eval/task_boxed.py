r"""Tasks `boxed` and `math`: any file of problems whose answers stand in `\boxed{...}`.

Both compare what the last `\boxed{...}` of an answer holds with the file's answer; `math` also asks
for the box, `boxed` leaves prompts as they are, for models that were trained to box.
"""

from __future__ import annotations

import re
from functools import partial

from stretto.eval.tasks import Item, Loaded, Score, Source, Task, from_files, lacks_reference

REQUEST = "\nPlease reason step by step, and put your final answer within \\boxed{}."
"""What task `math` appends to every problem."""

_BRACES = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")
_NUMBER = re.compile(r"([+-]?)([0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.0*)?")
_DROPPED = re.compile(r"\s|\\?\$|\\[,;:! ]|\\(?:left|right)(?![a-zA-Z])|\^\\circ|\^\{\\circ\}|\\?%")
_UNIT = re.compile(r"(?<=.)\\(?:text|mathrm|mbox)\{[^{}]*\}$")


def boxed_task(name: str, request: str = "") -> Task:
    """The task of this name, whose prompts end with `request`."""

    def load(source: Source) -> Loaded:
        return from_files(name, source, partial(_item, source, request))

    return Task(name, 2, load, boxed, has_votes=True)


def _item(source: Source, request: str, prompt: str, reference: str | None, place: str) -> Item:
    wanted = "" if reference is None else wanted_of(reference)
    if not normal(wanted):
        raise lacks_reference(source, place)
    return Item(prompt + request, wanted)


def wanted_of(reference: str) -> str:
    r"""The answer in a file's field: what its last `\boxed{...}` holds, else what stands after its
    last `####`, else the whole."""
    held = last_boxed(reference)
    return reference.rpartition("####")[2].strip() if held is None else held


def boxed(item: Item, text: str) -> Score:
    r"""1 if what the answer's last whole `\boxed{...}` holds and the reference have the same
    `normal` form, else 0; an answer without a box is wrong, and has no vote."""
    found = last_boxed(text)
    vote = None if found is None else normal(found)
    right = vote is not None and vote == normal(wanted_of(item.gold))
    return Score(float(right), details={"found": found}, vote=vote)


def last_boxed(text: str) -> str | None:
    r"""What the last whole `\boxed{...}` of a text holds: the one that begins last. Braces in it
    are balanced, escaped ones left out of account; a box that never ends is none."""
    opened: list[tuple[bool, int]] = []
    last: tuple[int, int] | None = None
    for found in _BRACES.finditer(text):
        mark = found.group()
        if mark.endswith("{") and mark != "\\{":
            opened.append((mark != "{", found.end()))
        elif mark == "}" and opened:
            is_box, start = opened.pop()
            if is_box and (last is None or start > last[0]):
                last = start, found.start()
    return None if last is None else text[last[0] : last[1]]


def normal(text: str) -> str:
    r"""What is compared: white space, `$`, thin spaces, `\left`, `\right`, degrees, percents, a
    unit in `\text{}` at the end and a full stop are dropped, `\dfrac` and `\tfrac` are `\frac`. Of
    a whole number also thousands separators, a plus, leading zeros and `.0`: `033` is `33`."""
    bare = _UNIT.sub("", text.strip().rstrip("."))
    bare = _DROPPED.sub("", bare).replace("{,}", ",").rstrip(".")
    bare = bare.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    number = _NUMBER.fullmatch(bare)
    if number is None:
        return bare
    digits = number[2].replace(",", "").lstrip("0") or "0"
    return "-" + digits if number[1] == "-" and digits != "0" else digits


BOXED = boxed_task("boxed")
MATH = boxed_task("math", REQUEST)
