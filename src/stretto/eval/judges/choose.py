"""Which judge, by name. Imports no torch and no client: what a judge needs is loaded with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stretto.errors import InvalidInput, UnknownName
from stretto.eval.judges.base import Judge

JUDGES = ("likelihood", "llm", "exact", "reference")
OPTIONS = {
    "url": "--judge-url", "expected": "--expected", "price_in": "--price-in",
    "price_out": "--price-out", "max_cost": "--max-cost", "references": "--references",
    "reference_field": "--reference-field",
}  # fmt: skip
OF_REFERENCE = ("references", "reference_field")
UNUSED = {
    "likelihood": tuple(OPTIONS),
    "llm": ("expected", *OF_REFERENCE),
    "exact": ("model", "url", "price_in", "price_out", "max_cost", *OF_REFERENCE),
    "reference": ("model", "url", "expected", "price_in", "price_out", "max_cost"),
}
"""Of each judge, the settings that are other judges' own."""


@dataclass(frozen=True)
class JudgeSettings:
    """What a judge is made of; None where its kind does not need it.

    `model`: the reference model of `likelihood` (a name or folder; the embedded one if None), or
    the name of an endpoint's model for `llm`. `url`: that endpoint, up to its /v1. `api_key_env`:
    the environment variable with its key. `expected`: JSONL with the right answers, for `exact`.
    `references`: JSONL with reference answers, for `reference`, in `reference_field`. `replies`:
    where `llm` keeps what it was told. Prices are of a million tokens, in dollars; the judge stops
    before it has spent `max_cost`.
    """

    kind: str = "likelihood"
    model: str | None = None
    url: str | None = None
    api_key_env: str = "OPENAI_API_KEY"
    expected: Path | None = None
    references: tuple[Path, ...] | None = None
    reference_field: str | None = None
    replies: Path | None = None
    concurrency: int = 8
    price_in: float | None = None
    price_out: float | None = None
    max_cost: float | None = None
    dtype: str = "auto"
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Raises `InvalidInput` for a setting that only another judge has: it would be passed over
        in silence."""
        for name in UNUSED.get(self.kind, ()):
            if getattr(self, name) is not None:
                option = "a model" if name == "model" else OPTIONS[name]
                raise InvalidInput(f"judge {self.kind} has no use for {option}; leave it out")


def open_judge(settings: JudgeSettings) -> Judge:
    """The judge that `settings` describe. Raises `UnknownName`, `InvalidInput` for a setting that
    its kind needs and lacks, and what loading a model raises."""
    if settings.kind == "likelihood":
        return _likelihood(settings)
    if settings.kind == "llm":
        from stretto.eval.judges.llm import LLMJudge

        return LLMJudge.open(settings)
    if settings.kind == "exact":
        from stretto.eval.judges.exact import ExactJudge, ExpectedAnswers

        if settings.expected is None:
            raise InvalidInput("judge exact needs the right answers; name a file (--expected)")
        return ExactJudge(ExpectedAnswers.read(settings.expected), settings.expected.name)
    if settings.kind == "reference":
        from stretto.eval.judges.reference import ReferenceJudge

        if not settings.references:
            raise InvalidInput("judge reference needs answers; name a file (--references)")
        return ReferenceJudge.read(settings.references, settings.reference_field)
    raise UnknownName("judge", settings.kind, list(JUDGES))


def _likelihood(settings: JudgeSettings) -> Judge:
    from stretto.eval.judges.likelihood import LikelihoodJudge
    from stretto.lm import LM
    from stretto.models.embedded import EMBEDDED_MODEL

    lm = LM.load(
        EMBEDDED_MODEL if settings.model is None else settings.model,
        dtype=settings.dtype, device=settings.device, engine="hf", pool_slots=2,
    )  # fmt: skip
    return LikelihoodJudge(lm)
