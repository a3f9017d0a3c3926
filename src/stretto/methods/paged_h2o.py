"""Heavy hitters by the page: H2O (Zhang et al. 2023, arXiv 2306.14048) as the TIP experiments use
it, half the budget for recent tokens and half for those with the most attention.

H2O sums each token's attention weights over all rows so far, a sum for each head, and drops tokens.
Here a page has one score for all layers and heads, which share their slots: the mean, over its
tokens, of the mass that all rows so far, the prompt's included, have given them. Scores are of
one sequence alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from stretto.methods.evicting import EvictingMethod, Moment, Page


@dataclass(frozen=True, kw_only=True)
class PagedH2O(EvictingMethod):
    """Hides the page with the lowest score first, the older one of two alike; never a page with
    one of the last `room // 2` tokens, `room` being the budget less what is pinned, so that new
    pages have time to be attended to. The engine must give the attention mass.
    """

    rule: ClassVar[str] = "paged_h2o"

    @property
    def wants_attention(self) -> bool:
        return True

    @property
    def least_page_tokens(self) -> int:
        return 16

    def least_room(self, page_tokens: int) -> int:
        """The page under way, and the recent half with the pages that it cuts into."""
        return 4 * page_tokens

    def victims(self, pages: Sequence[Page], moment: Moment) -> Iterator[Page]:
        def score(page: Page) -> float:
            return moment.attention.get(page.handle, 0.0) / page.num_tokens

        num_old, num_recent = len(pages), 0
        while num_old and num_recent < moment.room // 2:
            num_old -= 1
            num_recent += pages[num_old].num_tokens
        return iter(sorted(pages[:num_old], key=score))
