"""A model that may not do all it has learnt: what is a control token, or a join, good for?

`blind(lm)` is the ablation without joins: main writes its syncs but neither waits for its threads
nor reads them, so what it writes afterwards is written blind. `without(lm, ["sync"])` takes a token
away: what a model does that would have drawn it is then for the model to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from stretto.dialects.base import Legal
from stretto.effects import Join, Wait
from stretto.errors import InvalidInput, UnknownName
from stretto.lm import LM

if TYPE_CHECKING:
    from stretto.dialects.base import Issue, Session
    from stretto.effects import Move
    from stretto.params import SamplingParams
    from stretto.recorder import OpenThread, Recorder


class WrappedSession:
    """A session as it is; see `base.Session`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def main_role(self) -> str:
        return self._session.main_role

    @property
    def budget(self) -> Callable[[], int]:
        return self._session.budget

    @budget.setter
    def budget(self, budget: Callable[[], int]) -> None:
        self._session.budget = budget

    def feed(self, recorder: Recorder, thread: OpenThread, token: int) -> list[Move]:
        return self._session.feed(recorder, thread, token)

    def stopped(self, recorder: Recorder, thread: OpenThread, reason: str) -> list[Move]:
        return self._session.stopped(recorder, thread, reason)

    def cut_off(self, recorder: Recorder, thread: OpenThread) -> list[Move]:
        return self._session.cut_off(recorder, thread)

    def annotated(self, recorder: Recorder) -> tuple[str, tuple[Issue, ...]] | None:
        return self._session.annotated(recorder)

    def legal(self, recorder: Recorder, thread: OpenThread) -> Legal | None:
        return self._session.legal(recorder, thread)


class BlindSession(WrappedSession):
    """A session whose threads go on at a join at once, and read nothing there. Only at its end does
    a thread still wait for those it has forked."""

    def feed(self, recorder: Recorder, thread: OpenThread, token: int) -> list[Move]:
        moves = super().feed(recorder, thread, token)
        return [move for move in moves if not isinstance(move, Join | Wait)]


class RestrictedSession(WrappedSession):
    """A session in which `banned` ids are legal nowhere."""

    def __init__(self, session: Session, banned: frozenset[int], size: int) -> None:
        super().__init__(session)
        self._banned = sorted(banned)
        self._size = size
        self._known: dict[Legal | None, Legal] = {}

    def legal(self, recorder: Recorder, thread: OpenThread) -> Legal:
        """What the session allows, less the banned ids. Raises `InvalidInput` if nothing is left:
        the token banned is one that must come."""
        allowed = super().legal(recorder, thread)
        known = self._known.get(allowed)
        if known is None:
            known = self._known[allowed] = self._less(allowed)
        return known

    def _less(self, allowed: Legal | None) -> Legal:
        mask = np.ones(self._size, dtype=np.bool_) if allowed is None else allowed.mask.copy()
        mask[[i for i in self._banned if i < len(mask)]] = False
        if not mask.any():
            raise InvalidInput(
                "a control token was banned that the answer cannot go on without; ban another one"
            )
        return Legal(mask, forced=allowed is not None and allowed.forced)


class RestrictedLM(LM):
    """Another `LM`'s model, engine, pool and scheduler; only its sessions differ."""

    def __init__(self, lm: LM, wrap: Callable[[Session], WrappedSession]) -> None:
        self.__dict__.update(lm.__dict__)
        self._whole = lm
        self._wrap = wrap

    def session(self, params: SamplingParams) -> Session:
        """A fresh session of the model's dialect, restricted."""
        return cast("Session", self._wrap(self._whole.session(params)))


def without(lm: LM, names: Sequence[str]) -> LM:
    """The model without these control tokens, by their names in its card; the same one for none.

    Weights and pool are shared: `lm` is as it was. Raises `UnknownName` for a name that the model
    has not.
    """
    control = lm.vocabulary.control
    for name in names:
        if not control:
            raise InvalidInput(f"model {lm.name} has no control tokens to ban; leave {name!r} out")
        if name not in control:
            raise UnknownName("control token", name, list(control))
    if not names:
        return lm
    banned, size = frozenset(control[name] for name in names), lm.vocabulary.size
    return RestrictedLM(lm, lambda session: RestrictedSession(session, banned, size))


def blind(lm: LM) -> LM:
    """The model with joins skipped, on the same weights and pool. Raises `InvalidInput` for one
    whose dialect forks no threads."""
    if lm.card.dialect == "plain":
        raise InvalidInput(f"model {lm.name} forks no threads, so it joins none; leave joins alone")
    return RestrictedLM(lm, BlindSession)
