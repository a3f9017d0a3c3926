"""The model's own dialect: it annotates its answer and the runtime acts on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.dialects import get_dialect

if TYPE_CHECKING:
    from stretto.dialects.base import Session
    from stretto.lm import LM
    from stretto.params import SamplingParams


@dataclass(frozen=True)
class Native:
    """Decodes a self-orchestrating model in the dialect it was trained in."""

    name: str

    @property
    def reads(self) -> tuple[str, ...]:
        return get_dialect(self.name).reads

    def start(
        self, lm: LM, prompt: Sequence[dict[str, str]] | str, params: SamplingParams
    ) -> tuple[list[int], Session]:
        return lm.encode(prompt), lm.session(params)
