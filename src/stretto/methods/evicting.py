"""What all methods have in common that hide whole pages of a sequence to keep to a budget.

The sequence is cut into pages: first the sinks, if a method has any, then pages of `page_tokens`,
beginning anew where the answer begins. The prompt is fed as a whole and sees itself densely; then,
before the first token of each page of the answer is placed, pages are hidden until those left and
the new page, full, come to the budget at most. So every row of the answer keeps to the budget, and
within a page nothing changes. Positions go on counting: a token's is that of the one before it + 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, ClassVar

from stretto.dialects.plain import PlainSession
from stretto.effects import Cut, Evict
from stretto.errors import InvalidInput
from stretto.idset import IdSet
from stretto.methods.budget import Budget
from stretto.methods.spelling import spell
from stretto.params import check_int

if TYPE_CHECKING:
    from stretto.lm import LM
    from stretto.params import SamplingParams
    from stretto.recorder import OpenThread, Recorder


@dataclass(frozen=True, slots=True)
class Page:
    """A page that may be hidden: a segment, and how many tokens it has."""

    handle: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Moment:
    """When pages must go: before token `index` of a thread, of a request's `seed` and `sample`.

    `room`: the budget less what is pinned. `attention`: by page, the mass it has been given so far;
    empty unless it was wanted.
    """

    room: int
    attention: Mapping[int, float]
    seed: int
    sample: int
    thread: str
    index: int

    def number(self, k: int) -> float:
        """The `k`-th random number in [0, 1) of this moment, apart from those that draw tokens."""
        from stretto.runtime.sampler import uniform

        return uniform(self.seed, self.sample, f"{self.thread}/evict.{k}", self.index)


@dataclass(frozen=True, kw_only=True)
class EvictingMethod:
    """Decodes sequentially, with control tokens masked, and hides pages by the method's rule.

    `budget`: tokens a row may see, itself included (int), or a share of what it would see with
    nothing hidden (float in (0, 1]); see `Budget`. `pin_prompt`: the prompt is never hidden, and
    counts. `page_tokens`: tokens a page; None: the pool's page, and `least_page_tokens` at least.

    A subclass names its `rule`, says what is hidden first (`victims`), and may pin sinks.
    """

    rule: ClassVar[str]

    budget: int | float
    pin_prompt: bool = False
    page_tokens: int | None = None

    def __post_init__(self) -> None:
        Budget(self.budget)
        if self.page_tokens is not None:
            check_int("page_tokens", self.page_tokens, 1)

    # -- what a method says of itself ----------------------------------------------------------

    @property
    def name(self) -> str:
        """The rule and all settings that differ from the usual, as `get_method` takes them."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        usual = {f.name: f.default for f in fields(self)}
        return spell(self.rule, {k: v for k, v in given.items() if v != usual[k]})

    @property
    def wants_attention(self) -> bool:
        return False

    @property
    def is_reindexed(self) -> bool:
        return False

    @property
    def num_sinks(self) -> int:
        """First tokens of the sequence that are never hidden."""
        return 0

    @property
    def least_page_tokens(self) -> int:
        return 1

    def least_room(self, page_tokens: int) -> int:
        """Tokens that the budget must hold besides what is pinned: one page, or more."""
        return page_tokens

    def victims(self, pages: Sequence[Page], moment: Moment) -> Iterator[Page]:
        """The pages that may be hidden, first the one to go first. `pages`: oldest first, none of
        them pinned."""
        raise NotImplementedError

    # -- what the runtime asks for -------------------------------------------------------------

    def start(
        self, lm: LM, prompt: Sequence[dict[str, str]] | str, params: SamplingParams
    ) -> tuple[list[int], PlainSession]:
        return lm.encode(prompt), PlainSession(lm.banned)

    def policy(
        self, num_prompt_tokens: int, params: SamplingParams, *, pool_page: int, sample: int
    ) -> Eviction:
        """One request's policy. Raises `InvalidInput` for a budget that cannot hold what is pinned
        and one page."""
        page = self.page_tokens
        page = max(pool_page, self.least_page_tokens) if page is None else page
        pinned = max(self.num_sinks, num_prompt_tokens if self.pin_prompt else 0)
        least = pinned + self.least_room(page)
        longest = num_prompt_tokens + params.max_tokens
        most = Budget(self.budget).tokens(longest)
        if most < least:
            share = f" of at most {longest} tokens comes to {most}, which"
            raise InvalidInput(
                f"a budget of {self.budget}{share if isinstance(self.budget, float) else ''} "
                f"cannot hold the {least} tokens that method {self.name!r} needs: {pinned} pinned "
                f"and {least - pinned} for pages of {page}; raise it to {least}"
            )
        return Eviction(self, page, least, params.seed, sample)


@dataclass(slots=True)
class Kept:
    """What a thread sees, as `bits`: pages that may be hidden, oldest first, and tokens that may
    not. `limit`: how many tokens the page under way may have."""

    bits: int = 0
    pages: list[Page] = field(default_factory=list)
    num_pinned: int = 0
    limit: int = 0


class Eviction:
    """The policy of one request. What is kept is read from the thread; it is remembered only so as
    not to be read again while nothing but this policy changes it."""

    def __init__(
        self, method: EvictingMethod, page_tokens: int, least: int, seed: int, sample: int
    ) -> None:
        self.name = method.name
        self.wants_attention = method.wants_attention
        self.is_reindexed = method.is_reindexed
        self._method = method
        self._budget = Budget(method.budget)
        self._page_tokens = page_tokens
        self._least = least
        self._seed, self._sample = seed, sample
        self._kept: dict[str, Kept] = {}

    def cuts(self, num_prompt_tokens: int) -> list[int]:
        """A pinned prompt is one segment."""
        if self._method.pin_prompt:
            return []
        sinks = self._method.num_sinks
        return [n for n in range(sinks, num_prompt_tokens, self._page_tokens) if n > 0]

    def act(
        self, recorder: Recorder, thread: OpenThread, attention: Mapping[int, float] | None
    ) -> list[Cut | Evict]:
        own, kept = thread.own, self._kept.setdefault(thread.name, Kept())
        if own.tokens and len(own.tokens) < kept.limit:
            return []
        self._read(kept, recorder, thread)
        length, sinks = thread.next_position, self._method.num_sinks
        kept.limit = sinks - length if length < sinks else self._page_tokens
        # A share grows more slowly than the page does, so that its end decides.
        budget = max(self._least, self._budget.tokens(length + kept.limit))
        room = budget - kept.num_pinned
        moment = Moment(
            room, attention or {}, self._seed, self._sample, thread.name, thread.num_drawn
        )
        hidden = self._choose(kept, room - kept.limit, moment)
        cut: list[Cut | Evict] = [Cut()] if own.tokens else []
        return cut + [Evict(page.handle) for page in hidden]

    def _read(self, kept: Kept, recorder: Recorder, thread: OpenThread) -> None:
        """Brings `kept` to what the thread sees, its own segment included if it has tokens."""
        own = thread.own
        bits = thread.bits | (bool(own.tokens) << own.handle)
        new = IdSet(bits=bits & ~kept.bits)
        if kept.bits & ~bits or (kept.pages and min(new, default=0) < kept.pages[-1].handle):
            kept.pages, kept.num_pinned, new = [], 0, IdSet(bits=bits)
        for handle in new:
            segment = recorder.segments[handle]
            is_sink = segment.positions[0] < self._method.num_sinks
            if is_sink or (self._method.pin_prompt and segment.origins[0] == "prompt"):
                kept.num_pinned += len(segment.tokens)
            else:
                kept.pages.append(Page(handle, len(segment.tokens)))
        kept.bits = bits

    def _choose(self, kept: Kept, room: int, moment: Moment) -> list[Page]:
        """Takes out pages until those left come to `room` tokens at most; returns them."""
        excess = sum(page.num_tokens for page in kept.pages) - room
        if excess <= 0:
            return []
        hidden: list[Page] = []
        for page in self._method.victims(kept.pages, moment):
            hidden.append(page)
            excess -= page.num_tokens
            if excess <= 0:
                break
        if excess > 0:
            raise AssertionError(f"method {self.name!r} cannot get down to {room} tokens")
        gone = {page.handle for page in hidden}
        kept.pages = [page for page in kept.pages if page.handle not in gone]
        kept.bits &= ~sum(1 << handle for handle in gone)
        return hidden
