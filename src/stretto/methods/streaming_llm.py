"""StreamingLLM (Xiao et al. 2023, arXiv 2309.17453): attention sinks and a window.

A row sees the first 4 tokens of the sequence, whatever they are, and the most recent ones. In the
paper, positions are places in the cache (section 3.2); here they are kept as they are unless
`reindexed`. Differs from the paper in that a request still ends at the model's last position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from stretto.methods.evicting import EvictingMethod, Moment, Page
from stretto.params import check_int


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(EvictingMethod):
    """Keeps `sinks` first tokens, hides the oldest page after them first.

    `reindexed`: a row and what it sees stand at their places among what is visible, on a copy of
    the keys that is made for each pass; for default RoPE, on engines that can. Such rows are not
    those of one masked pass, since where a key stands depends on when it is read.
    """

    rule: ClassVar[str] = "streaming_llm"

    sinks: int = 4
    reindexed: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("sinks", self.sinks, 0)

    @property
    def is_reindexed(self) -> bool:
        return self.reindexed

    @property
    def num_sinks(self) -> int:
        return self.sinks

    def victims(self, pages: Sequence[Page], moment: Moment) -> Iterator[Page]:
        return iter(pages)
