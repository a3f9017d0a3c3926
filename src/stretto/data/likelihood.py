"""The annotator `likelihood`: measures with a language model which parts rest on which.

A part may be promised if seeing its elder siblings hardly raises its likelihood over seeing the
prompt, main's text and the siblings' topics alone. See docs/likelihood.md for the method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stretto.data.annotators import Annotation, Refusal
from stretto.data.likelihood_loss import best_topic, is_code, is_name, sound_topic
from stretto.data.likelihood_plan import Costs, Plan, Rules, plan, sequential
from stretto.data.likelihood_scorer import LogProbs, ModelScorer, Scorer
from stretto.data.likelihood_views import (
    ELLIPSIS,
    Sheet,
    first_views,
    pair_views,
    plan_views,
    prepare,
)
from stretto.data.likelihood_work import Work
from stretto.data.likelihood_write import Writer
from stretto.data.markup import UNIT, holds_tags, promised
from stretto.data.topics import numbered
from stretto.dialects.pasta_masks import MAX_TOPIC_TOKENS
from stretto.errors import InvalidInput
from stretto.params import check_int

DEFAULT_MAX_LOSS = 0.075
"""Chosen by benchmarks/pasta/choose_thresholds.py on its validation split."""
PROMISE_TAGS = 3
"""Control tokens of a promise beside its topic and its number."""
MAX_REVISIONS = 3
"""Plans that are read before none is made."""


@dataclass(frozen=True)
class LikelihoodAnnotator:
    """Implements `Annotator`. `rules.max_loss` is the one knob between fast and careful: what a
    unit may lose, in nats of excess a token (see `likelihood_loss.loss_of`).

    Deterministic: a response gets the same annotation each time.
    """

    scorer: Scorer
    rules: Rules
    unit: int = UNIT
    name: str = "likelihood"

    def annotate(self, prompt: str, response: str) -> Annotation | Refusal:
        """The annotated response, unchanged where nothing may be promised or gains by it."""
        work = self._begin(prompt, response)
        if isinstance(work, Refusal):
            return work
        work.plan = self._plan(work)
        if work.plan.num_promises:  # else no loss, however small, would leave anything to promise
            self._measure(work)
            self._decide(work)
        return self._finish(work)

    # -- reading -------------------------------------------------------------------------------

    def _begin(self, prompt: str, response: str) -> Work | Refusal:
        if not response.strip():
            return Refusal(["empty-response: there is nothing to annotate"])
        if holds_tags(response):
            return Refusal(
                ["tags-in-response: it has a tag in its own text, which would be read as one"]
            )
        try:
            ids = self.scorer.prompt_ids(prompt)
            prepared = prepare(ids, response, self.scorer.vocabulary)
        except InvalidInput as error:
            return Refusal([f"not-encodable: {error}"])
        if (wanted := len(ids) + prepared.num_tokens) > self.scorer.max_positions:
            return Refusal(
                [f"too-long: {wanted} tokens, and {self.scorer.name} reads "
                 f"{self.scorer.max_positions}"]
            )  # fmt: skip
        work = Work(response, prepared)
        work.topics = [
            "" if is_code(work.text(index)) else part.topic.text
            for index, part in enumerate(work.parts)
        ]
        return work

    def _measure(self, work: Work) -> None:
        """Two passes: all views of which each unit's loss is made; then, for units that lose too
        much, how much of it the unit right before makes good."""
        views = first_views(work.prepared)
        found = self._read(views.sheet)
        work.full = [None if number is None else found[number] for number in views.full]
        alone = [None if number is None else found[number] for number in views.blind]
        work.topics = [self._topic(work, index, read) for index, read in enumerate(alone)]
        work.blind = [work.loss(index, read) for index, read in enumerate(alone)]
        work.pair = list(work.blind)
        wanted = [i for i, loss in enumerate(work.blind) if loss.rate > self.rules.max_loss]
        sheet, readings = pair_views(work.prepared, wanted)
        near = self._read(sheet)
        for index, number in readings.items():
            work.pair[index] = work.loss(index, near[number])
        work.is_measured = True

    def _read(self, sheet: Sheet) -> list[LogProbs]:
        """What the scorer reads; a sheet of which nothing is wanted is not laid before it."""
        return self.scorer.score([sheet])[0] if sheet.readings else []

    def _topic(self, work: Work, index: int, alone: LogProbs | None) -> str:
        name = self._name(work, index, alone)
        return numbered(name, work.response, work.parts[index].unit)

    def _name(self, work: Work, index: int, alone: LogProbs | None) -> str:
        part = work.parts[index]
        text = part.topic.text
        if part.unit.is_lead or (part.topic.is_name and is_name(text)):
            return text
        if is_code(work.text(index)):
            return ""
        if alone is None:
            return sound_topic(text)
        return best_topic(work.response, part, alone, self._count)

    # -- deciding and writing ------------------------------------------------------------------

    def _decide(self, work: Work) -> None:
        """Plans, then reads again what was planned with more hidden than was measured, and plans
        anew where that loses too much."""
        work.plan = self._plan(work)
        for _ in range(MAX_REVISIONS):
            if not work.is_doubtful():
                return
            sheet, readings = plan_views(work.prepared, work.plan.moves, self._heads(work))
            found = self._read(sheet)
            read = {index: work.loss(index, found[n]) for index, n in readings.items()}
            work.revise(read, self.rules.max_loss)
            if not work.is_settled:
                work.plan = self._plan(work)
        if work.is_doubtful():
            work.plan = sequential(self._costs(work))

    def _plan(self, work: Work) -> Plan:
        return plan(self._costs(work), self.rules)

    def _heads(self, work: Work) -> list[list[int]]:
        """The outline of a chunk that begins with a unit: the unit's own, or all of it."""
        ellipsis = self.scorer.vocabulary.encode(ELLIPSIS)
        return [p.outline if p.is_hidden else [*p.ids, *ellipsis] for p in work.parts]

    def _costs(self, work: Work) -> list[Costs]:
        return [self._cost(work, index) for index in range(work.size)]

    def _cost(self, work: Work, index: int) -> Costs:
        part = work.parts[index]
        topic = self._count(work.topics[index]) if work.is_measured else 1
        # An opening stays on main: all others were measured with it in view.
        pinned = index == 0 and part.is_main and part.unit.kind != "heading"
        can = bool(work.topics[index]) and not pinned
        before = work.parts[index - 1].unit.kind if index else None
        number = self._count(str(promised(len(part.ids), self.unit) // self.unit))
        return Costs(
            num_tokens=len(part.ids),
            promise_steps=PROMISE_TAGS + min(topic, MAX_TOPIC_TOKENS) + number if can else None,
            blind=work.blind[index].rate,
            pair=work.pair[index].rate,
            scope_end=part.unit.scope_end,
            is_sibling=part.unit.kind == before == "item",
        )

    def _finish(self, work: Work) -> Annotation:
        writer = Writer(self._count, self.unit)
        text = writer.text(work.response, work.parts, work.topics, work.plan.moves)
        return Annotation(text, self._details(work))

    def _details(self, work: Work) -> dict[str, Any]:
        return {
            "model": self.scorer.name,
            "measured": work.is_measured,
            "max_loss": self.rules.max_loss,
            "min_tokens": self.rules.min_tokens,
            "steps": work.plan.steps,
            "sequential_steps": work.prepared.num_tokens,
            "loss": round(sum(work.losses()), 4),
            "revisions": work.num_revisions,
            "promises": work.plan.num_promises,
            "units": work.units(),
        }

    def _count(self, text: str) -> int:
        return len(self.scorer.vocabulary.encode(text))


def likelihood_annotator(
    model_name: str | None = None,
    *,
    max_loss: float = DEFAULT_MAX_LOSS,
    min_tokens: int = 20,
    unit: int = UNIT,
    dtype: str = "bfloat16",
    device: str = "cpu",
    offline: bool | None = None,
) -> LikelihoodAnnotator:
    """The annotator on a reference model: the embedded one, a folder, a GGUF file or a hub name.

    `max_loss` in nats of excess a token: 0 promises only what loses nothing at all, a large number
    whatever is quick. A chunk has at least `min_tokens`; promised lengths are multiples of `unit`.
    Raises `InvalidInput` and its kinds for settings or models that cannot work.
    """
    rules = Rules(max_loss, min_tokens)
    check_int("unit", unit, 1)
    scorer = ModelScorer.load(model_name, dtype=dtype, device=device, offline=offline)
    return LikelihoodAnnotator(scorer, rules, unit)
