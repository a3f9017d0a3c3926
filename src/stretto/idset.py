"""Sets of small numbers as bits: what a segment sees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set


class IdSet(Set[int]):
    """An immutable set of small numbers as the bits of one integer; iterates in rising order.

    A long answer has many segments that each see nearly all before them: a bit for each pair is
    affordable where an element is not.
    """

    __slots__ = ("bits",)
    bits: int

    def __init__(self, ids: Iterable[int] = (), bits: int = 0) -> None:
        self.bits = ids.bits if isinstance(ids, IdSet) else bits | _bits_of(ids)

    def __contains__(self, item: object) -> bool:
        return isinstance(item, int) and item >= 0 and bool(self.bits >> item & 1)

    def __iter__(self) -> Iterator[int]:
        digits = bin(self.bits)[:1:-1]
        at = digits.find("1")
        while at >= 0:
            yield at
            at = digits.find("1", at + 1)

    def __len__(self) -> int:
        return self.bits.bit_count()

    def __hash__(self) -> int:
        return self._hash()

    def __sub__(self, other: Set[int]) -> IdSet:
        return IdSet(bits=self.bits & ~_bits_of(other))

    def __repr__(self) -> str:
        return f"IdSet({list(self)})"


def _bits_of(ids: Iterable[int]) -> int:
    if isinstance(ids, IdSet):
        return ids.bits
    bits = 0
    for item in ids:
        bits |= 1 << item
    return bits
