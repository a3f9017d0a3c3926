"""Random eviction: the control that every rule must beat (as in arXiv 2609.03430, where the prompt
is kept and each head draws for itself; here all layers and heads share their slots)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from stretto.methods.evicting import EvictingMethod, Moment, Page


@dataclass(frozen=True, kw_only=True)
class RandomEvict(EvictingMethod):
    """Hides pages drawn uniformly from all that are not pinned, the newest one included; only the
    page about to be written is safe.

    The draws are a function of (seed, sample, thread, index of the token), as those of tokens are.
    """

    rule: ClassVar[str] = "random_evict"

    def victims(self, pages: Sequence[Page], moment: Moment) -> Iterator[Page]:
        left = list(pages)
        for k in range(len(pages)):
            yield left.pop(int(moment.number(k) * len(left)))
