"""A model that may not draw some of its control tokens: what are they good for?

The ablation without syncs is `without(lm, ["sync"])`: main never joins its threads, so it writes
what comes after them blind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from stretto.dialects.base import Legal
from stretto.errors import InvalidInput, UnknownName
from stretto.lm import LM

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.dialects.base import Issue, Session
    from stretto.effects import Move
    from stretto.params import SamplingParams
    from stretto.recorder import OpenThread, Recorder


class RestrictedSession:
    """A session as it is, but that `banned` ids are legal nowhere. See `base.Session`."""

    def __init__(self, session: Session, banned: frozenset[int], size: int) -> None:
        self._session = session
        self._banned = sorted(banned)
        self._size = size
        self._known: dict[Legal | None, Legal] = {}

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

    def legal(self, recorder: Recorder, thread: OpenThread) -> Legal:
        """What the session allows, less the banned ids. Raises `InvalidInput` if nothing is left:
        the token banned is one that must come."""
        allowed = self._session.legal(recorder, thread)
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

    def __init__(self, lm: LM, banned: frozenset[int]) -> None:
        self.__dict__.update(lm.__dict__)
        self._barred = banned

    def session(self, params: SamplingParams) -> Session:
        """A fresh session of the model's dialect that never draws what is banned."""
        session = super().session(params)
        return cast("Session", RestrictedSession(session, self._barred, self.vocabulary.size))


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
    return RestrictedLM(lm, frozenset(control[name] for name in names)) if names else lm
