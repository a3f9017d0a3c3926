"""The annotator `likelihood`: measures with a language model which parts rest on which.

A part may be promised if seeing its elder siblings hardly raises its likelihood over seeing the
prompt, main's text and the siblings' topics alone. See docs/likelihood.md for the method.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stretto.data.annotators import Annotation, Refusal
from stretto.data.likelihood_plan import Costs, Plan, Rules, plan, sequential
from stretto.data.likelihood_views import (
    ELLIPSIS,
    Prepared,
    Sheet,
    first_views,
    pair_views,
    plan_views,
    prepare,
)
from stretto.data.likelihood_write import Writer
from stretto.data.markup import UNIT, holds_tags, promised
from stretto.dialects.pasta_masks import MAX_TOPIC_TOKENS
from stretto.errors import InvalidInput
from stretto.params import check_int

if TYPE_CHECKING:
    from stretto.data.likelihood_loss import Loss
    from stretto.data.likelihood_scorer import Scorer

DEFAULT_MAX_LOSS = 0.075
"""Chosen by benchmarks/pasta/choose_thresholds.py on its validation split."""
PROMISE_TAGS = 3
"""Control tokens of a promise beside its topic and its number."""
MAX_REVISIONS = 3
"""Plans that are read before none is made."""
NO_PLAN = Plan((), 0, ())
MANY = 64
"""Responses that are laid out and scored together."""


@dataclass
class _Work:
    """One response under way. `blind` and `pair`: losses by unit as in `Costs`, raised by what was
    read of plans that were given up. `is_settled`: the plan itself was read, `planned` is what it
    loses."""

    response: str
    prepared: Prepared
    full: list[Any] = field(default_factory=list)
    topics: list[str] = field(default_factory=list)
    blind: list[Loss] = field(default_factory=list)
    pair: list[Loss] = field(default_factory=list)
    planned: dict[int, Loss] = field(default_factory=dict)
    plan: Plan = NO_PLAN
    is_measured: bool = False
    is_settled: bool = False
    num_revisions: int = 0

    @property
    def size(self) -> int:
        return len(self.prepared.parts)

    def loss(self, index: int, blind: Any) -> Loss:
        from stretto.data.likelihood_loss import NOTHING, loss_of

        parts, full = self.prepared.parts, self.full[index]
        if full is None or blind is None:
            return NOTHING
        return loss_of(parts[index], parts[:index], full, blind)

    def is_doubtful(self) -> bool:
        """Whether the plan hides more than was measured: all of a unit that stood in the outline,
        or the topics of units that share a chunk with the one before."""
        moves = zip(self.prepared.parts, self.plan.moves, strict=True)
        return not self.is_settled and any(
            move.place == "continue" or (move.place == "start" and not part.is_hidden)
            for part, move in moves
        )

    def losses(self) -> list[float]:
        """What each unit loses under the plan: as read, else as the plan was made with."""
        return [
            self.planned[i].rate if i in self.planned else loss
            for i, loss in enumerate(self.plan.losses)
        ]

    def revise(self, read: dict[int, Loss], max_loss: float) -> None:
        """Takes what the plan's own view says of the units in it."""
        self.is_settled = all(loss.rate <= max_loss for loss in read.values())
        self.num_revisions += not self.is_settled
        self.planned = read if self.is_settled else {}
        for index, loss in read.items():
            if loss.rate > max_loss:
                self.blind[index] = self.pair[index] = loss


@dataclass(frozen=True)
class LikelihoodAnnotator:
    """Implements `Annotator`. `rules.max_loss` is the one knob between fast and careful: what a
    unit may lose, in nats of excess a token (see `likelihood_loss.loss_of`).

    Deterministic: a response gets the same annotation each time, up to the rounding that a batch
    of other composition brings.
    """

    scorer: Scorer
    rules: Rules
    unit: int = UNIT
    name: str = "likelihood"

    def annotate(self, prompt: str, response: str) -> Annotation | Refusal:
        """The annotated response, unchanged where nothing may be promised or gains by it."""
        return self.annotate_many([(prompt, response)])[0]

    def annotate_many(self, pairs: Sequence[tuple[str, str]]) -> list[Annotation | Refusal]:
        """The same for many (prompt, response), whose passes are shared."""
        return [found for some in _slices(pairs, MANY) for found in self._annotate(some)]

    # -- internals -----------------------------------------------------------------------------

    def _annotate(self, pairs: Sequence[tuple[str, str]]) -> list[Annotation | Refusal]:
        begun = [self._begin(prompt, response) for prompt, response in pairs]
        works = [work for work in begun if isinstance(work, _Work) and self._may_gain(work)]
        self._measure(works)
        self._decide(works)
        return [self._finish(work) if isinstance(work, _Work) else work for work in begun]

    def _begin(self, prompt: str, response: str) -> _Work | Refusal:
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
        return _Work(response, prepared)

    def _may_gain(self, work: _Work) -> bool:
        """Whether any plan would promise anything if no unit lost anything; else there is nothing
        to be measured, and the response stays as it is."""
        from stretto.data.likelihood_loss import NOTHING, is_code

        work.topics = [
            "" if is_code(work.response[p.unit.start : p.unit.end]) else p.topic.text
            for p in work.prepared.parts
        ]
        work.blind = work.pair = [NOTHING] * work.size
        work.plan = self._plan(work)
        return work.plan.num_promises > 0

    def _measure(self, works: Sequence[_Work]) -> None:
        """Two passes: all views of which each unit's loss is made; then, for units that lose too
        much, how much of it the unit right before makes good."""
        views = [first_views(work.prepared) for work in works]
        read = self._score([view.sheet for view in views])
        pairs: list[tuple[Sheet, dict[int, int]]] = []
        for work, view, found in zip(works, views, read, strict=True):
            work.full = [None if number is None else found[number] for number in view.full]
            alone = [None if number is None else found[number] for number in view.blind]
            work.topics = [self._topic(work, index, read) for index, read in enumerate(alone)]
            work.blind = [work.loss(index, read) for index, read in enumerate(alone)]
            work.is_measured = True
            wanted = [i for i, loss in enumerate(work.blind) if loss.rate > self.rules.max_loss]
            pairs.append(pair_views(work.prepared, wanted))
        again = self._score([sheet for sheet, _ in pairs])
        for work, (_, readings), near in zip(works, pairs, again, strict=True):
            work.pair = list(work.blind)
            for index, number in readings.items():
                work.pair[index] = work.loss(index, near[number])

    def _decide(self, works: Sequence[_Work]) -> None:
        """Plans, then reads again what was planned with more hidden than was measured, and plans
        anew where that loses too much."""
        for work in works:
            work.plan = self._plan(work)
        for _ in range(MAX_REVISIONS):
            doubtful = [work for work in works if work.is_doubtful()]
            sheets = [
                plan_views(work.prepared, work.plan.moves, self._heads(work)) for work in doubtful
            ]
            found = self._score([sheet for sheet, _ in sheets])
            for work, (_, readings), read in zip(doubtful, sheets, found, strict=True):
                work.revise(
                    {index: work.loss(index, read[n]) for index, n in readings.items()},
                    self.rules.max_loss,
                )
                if not work.is_settled:
                    work.plan = self._plan(work)
        for work in works:
            if work.is_doubtful():
                work.plan = sequential([self._costs(work, i) for i in range(work.size)])

    def _plan(self, work: _Work) -> Plan:
        return plan([self._costs(work, index) for index in range(work.size)], self.rules)

    def _heads(self, work: _Work) -> list[list[int]]:
        """The outline of a chunk that begins with a unit: the unit's own, or all of it."""
        ellipsis = self.scorer.vocabulary.encode(ELLIPSIS)
        return [p.outline if p.is_hidden else [*p.ids, *ellipsis] for p in work.prepared.parts]

    def _score(self, sheets: Sequence[Sheet]) -> list[list[Any]]:
        """What the scorer reads; a sheet of which nothing is wanted is not laid before it."""
        asked = [sheet for sheet in sheets if sheet.readings]
        answers = iter(self.scorer.score(asked) if asked else [])
        return [next(answers) if sheet.readings else [] for sheet in sheets]

    def _topic(self, work: _Work, index: int, alone: Any) -> str:
        from stretto.data.likelihood_loss import best_topic, is_code, is_name, sound_topic

        part = work.prepared.parts[index]
        text = part.topic.text
        if part.unit.is_lead or (part.topic.is_name and is_name(text)):
            return text
        if is_code(work.response[part.unit.start : part.unit.end]):
            return ""
        if alone is None:
            return sound_topic(text)
        return best_topic(work.response, part, alone, self._count)

    def _count(self, text: str) -> int:
        return len(self.scorer.vocabulary.encode(text))

    # -- deciding and writing ------------------------------------------------------------------

    def _finish(self, work: _Work) -> Annotation | Refusal:
        writer = Writer(self._count, self.unit)
        text = writer.text(work.response, work.prepared.parts, work.topics, work.plan.moves)
        return Annotation(text, self._details(work, work.plan))

    def _costs(self, work: _Work, index: int) -> Costs:
        part = work.prepared.parts[index]
        topic = self._count(work.topics[index]) if work.is_measured else 1
        # An opening stays on main: all others were measured with it in view.
        pinned = index == 0 and part.is_main and part.unit.kind != "heading"
        can = bool(work.topics[index]) and not pinned
        before = work.prepared.parts[index - 1].unit.kind if index else None
        number = self._count(str(promised(len(part.ids), self.unit) // self.unit))
        return Costs(
            num_tokens=len(part.ids),
            promise_steps=PROMISE_TAGS + min(topic, MAX_TOPIC_TOKENS) + number if can else None,
            blind=work.blind[index].rate,
            pair=work.pair[index].rate,
            scope_end=part.unit.scope_end,
            is_sibling=part.unit.kind == before == "item",
        )

    def _details(self, work: _Work, chosen: Plan) -> dict[str, Any]:
        """What was measured and decided, unit by unit; nats rounded to a thousandth."""
        units = []
        lost = work.losses()
        for index, (part, move) in enumerate(zip(work.prepared.parts, chosen.moves, strict=True)):
            blind, pair = work.blind[index], work.pair[index]
            units.append(
                {
                    "kind": part.unit.kind,
                    "tokens": len(part.ids),
                    "topic": work.topics[index],
                    "gain": round(blind.gain, 3),
                    "counted": blind.num_counted,
                    "loss": round(blind.rate, 4),
                    "pair_loss": round(pair.rate, 4),
                    "plan_loss": round(lost[index], 4),
                    "place": move.place,
                    "sync": move.sync,
                }
            )
        return {
            "model": self.scorer.name,
            "measured": work.is_measured,
            "max_loss": self.rules.max_loss,
            "min_tokens": self.rules.min_tokens,
            "steps": chosen.steps,
            "sequential_steps": work.prepared.num_tokens,
            "loss": round(sum(lost), 4),
            "revisions": work.num_revisions,
            "promises": chosen.num_promises,
            "units": units,
        }


def _slices(pairs: Sequence[tuple[str, str]], size: int) -> Iterator[Sequence[tuple[str, str]]]:
    for start in range(0, len(pairs), size):
        yield pairs[start : start + size]


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
    from stretto.data.likelihood_scorer import ModelScorer

    scorer = ModelScorer.load(model_name, dtype=dtype, device=device, offline=offline)
    return LikelihoodAnnotator(scorer, rules, unit)
