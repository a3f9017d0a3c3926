"""How many tokens a method may keep visible: a number of them, or a share of a dense answer's."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from stretto.errors import InvalidInput

_WAYS = "give a whole number of tokens, as 256, or a share, as 0.5 or 50%"


@dataclass(frozen=True)
class Budget:
    """A row sees at most this many tokens, itself included.

    `amount`: an int is a number of tokens; a float in (0, 1] is a share of the tokens that the row
    would see with nothing hidden. Raises `InvalidInput` for anything else.
    """

    amount: int | float

    def __post_init__(self) -> None:
        amount = self.amount
        if isinstance(amount, bool) or not isinstance(amount, int | float):
            raise InvalidInput(f"a budget of {amount!r} is no number; {_WAYS}")
        is_share = isinstance(amount, float)
        if not (0 < amount <= 1 if is_share else amount >= 1):  # NaN is in no range
            raise InvalidInput(f"a budget of {amount} is outside its range; {_WAYS}")

    @property
    def is_share(self) -> bool:
        return isinstance(self.amount, float)

    def tokens(self, dense: int) -> int:
        """The budget where `dense` tokens would be visible with nothing hidden."""
        return math.floor(self.amount * dense) if self.is_share else int(self.amount)


def parse_budget(text: str) -> int | float:
    """A budget as users write it: `256`, `0.5` or `50%`. Raises `InvalidInput`."""
    match = re.fullmatch(r"(\d{1,18})|(\d*\.\d+|\d+\.)|(\d+(?:\.\d*)?)%", text.strip(), re.ASCII)
    if match is None:
        raise InvalidInput(f"a budget of {text!r} is no number; {_WAYS}")
    whole, share, percent = match.groups()
    amount = int(whole) if whole else float(share) if share else float(percent) / 100
    return Budget(amount).amount
