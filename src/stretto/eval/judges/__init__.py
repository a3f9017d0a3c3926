"""Judges of answers behind one interface; see `stretto.eval.judges.base`. Imports no torch."""

from stretto.eval.judges.base import (
    Comparison,
    Identity,
    Judge,
    Measure,
    Question,
    Verdict,
    check_different,
    judges_of,
)
from stretto.eval.judges.choose import JUDGES, JudgeSettings, open_judge

__all__ = [
    "JUDGES",
    "Comparison",
    "Identity",
    "Judge",
    "JudgeSettings",
    "Measure",
    "Question",
    "Verdict",
    "check_different",
    "judges_of",
    "open_judge",
]
