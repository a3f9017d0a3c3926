"""Plain decoding, one token after the other, with any control tokens of the model masked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.dialects.plain import PlainSession

if TYPE_CHECKING:
    from stretto.lm import LM
    from stretto.params import SamplingParams


@dataclass(frozen=True)
class Sequential:
    """The baseline that every other method is measured against."""

    name: str = "sequential"

    def start(
        self, lm: LM, prompt: Sequence[dict[str, str]] | str, params: SamplingParams
    ) -> tuple[list[int], PlainSession]:
        return lm.encode(prompt), PlainSession(lm.banned)
