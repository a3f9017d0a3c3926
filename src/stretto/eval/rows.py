"""What a run keeps of every prompt: both answers, their threads and timings, scores, failures."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from stretto.data.rows import Row

SIDES = ("ours", "baseline")
Side = Literal["ours", "baseline"]


class ThreadRow(BaseModel):
    """One thread, as in `ThreadOutput`, without its text: that is in the annotated form."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    id: str
    parent: str | None = None
    topic: str | None = None
    num_tokens: int
    start_step: int | None = None
    end_step: int | None = None
    finish_reason: str


class LiveRow(BaseModel):
    """Tokens visible to a token of an answer, itself included, over its tokens.

    `generated`: without those of the prompt. `dense_generated_mean`: what `generated_mean` would be
    with nothing hidden. `slots`: those of the pages of `page_size` that hold them, each segment on
    pages of its own. `reserved_mean`, `reserved_peak`: slots of the pages the answer held, full or
    not: over its passes, those of its prompt included, and at most; the mean is None in runs from
    before it was kept.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    mean: float
    peak: int
    generated_mean: float
    generated_peak: int
    dense_generated_mean: float
    page_size: int
    slots_mean: float
    slots_peak: int
    generated_slots_mean: float
    reserved_mean: float | None = None
    reserved_peak: int


class Answered(BaseModel):
    """An answer and what it cost.

    `annotated`: the text form with annotations, where the method writes any. `decode_s`, `total_s`:
    seconds of each measured decode in order, a warm-up left out; empty where nothing was timed.
    `most_at_once`: the most threads that drew a token in one step. `redundant`: forked threads that
    say nearly what an earlier one says. `unjoined`: forked threads that main never read.
    `well_formed` is None for a method without annotations. `repeats`: whether all decodes of the
    prompt gave this text; None if there was one. `vote`: as of a `Score`. `live` is None in runs
    from before it was kept.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    text: str
    annotated: str | None = None
    finish_reason: str
    threads: list[ThreadRow]
    issues: list[str] = Field(default_factory=list)
    prompt_tokens: int
    completion_tokens: int
    control_tokens: int
    drawn_tokens: int
    sequential_steps: int
    most_at_once: int
    redundant: int
    unjoined: int
    well_formed: bool | None = None
    repeats: bool | None = None
    decode_s: list[float] = Field(default_factory=list)
    total_s: list[float] = Field(default_factory=list)
    score: float | None = None
    shares: dict[str, float] = Field(default_factory=dict)
    details: dict[str, Any] = Field(default_factory=dict)
    vote: str | None = None
    live: LiveRow | None = None


def row_key(prompt_id: str, sample: int) -> str:
    """What a row is kept under: sample 0 under the prompt's id alone."""
    return f"{prompt_id}/{sample}" if sample else prompt_id


class EvalRow(Row):
    """Sample number `sample` of a prompt of a run, which is number `number` from 1 on.

    `prompt` is None in a run that keeps no prompts. `errors`: of a side that failed, why; that
    side is None then. `baseline` is also None in a run without one. `process`: which entry of
    `environment.json` measured this.
    """

    kind: ClassVar[str] = "evaluation"
    prompt_id: str
    number: int
    sample: int = 0
    prompt: str | None = None
    ours: Answered | None = None
    baseline: Answered | None = None
    errors: dict[Side, str] = Field(default_factory=dict)
    process: int = 0

    @property
    def key(self) -> str:
        return row_key(self.prompt_id, self.sample)


class VerdictRow(Row):
    """What a judge says of a prompt: `preference` for our answer over the baseline's, from 0 (the
    baseline is better, for sure) over 0.5 to 1; None where the judge gave none.

    `judge`: its identity. `details`: what it measured or was told, any JSON.
    """

    kind: ClassVar[str] = "verdict"
    prompt_id: str
    preference: float | None = Field(default=None, strict=True, ge=0, le=1, allow_inf_nan=False)
    judge: str
    details: dict[str, Any] = Field(default_factory=dict)

    @property
    def key(self) -> str:
        return self.prompt_id
