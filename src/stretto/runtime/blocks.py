"""The blocks of one request while they are written: a pass of each, and who goes on after it."""

from __future__ import annotations

from collections.abc import Mapping

from stretto.dialects.base import Session
from stretto.recorder import Recorder
from stretto.runtime import events
from stretto.runtime.denoiser import Denoiser
from stretto.runtime.lane import Lane


class Blocks:
    """`lanes` are the request's own, by thread name; those with a `block` are meant."""

    def __init__(self, recorder: Recorder, lanes: Mapping[str, Lane], log: events.EventLog) -> None:
        self._recorder = recorder
        self._lanes = lanes
        self._log = log

    @property
    def open_lanes(self) -> list[Lane]:
        return [
            lane for lane in self._lanes.values() if lane.block is not None and lane.thread.is_open
        ]

    def write(self, session: Session, *, step: int) -> bool:
        """Writes what a pass draws of the blocks whose rows it has fed; whether there are any. All
        draws are from what the pass was fed: none depends on which block comes first."""
        drawn = []
        for lane in self._lanes.values():
            if lane.block is not None and lane.logits is not None:
                legal = session.legal(self._recorder, lane.thread)
                given = lane.block.draw(self._recorder, lane.thread, lane.logits, legal)
                drawn.append((lane, lane.block, given))
                lane.logits = None
        for lane, block, tokens in drawn:
            places = block.write(self._recorder, lane.thread, tokens, step=step)
            self.announce(lane, block, places, step)
        return bool(drawn)

    def announce(self, lane: Lane, block: Denoiser, places: list[int], step: int) -> None:
        """Emits what a pass has written; nothing of a block that begins."""
        own, first = lane.thread.own, len(block.effect.before)
        self._log.emit(
            events.Denoised(
                thread=lane.thread.name,
                segment=own.handle,
                pass_number=own.num_passes,
                length=block.effect.length,
                indices=tuple(places),
                tokens=tuple(own.tokens[first + place] for place in places),
                num_left=len(block.masked),
                step=step,
            )
        )

    def go_on(self) -> list[Lane]:
        """After a step: has the blocks that go on fed again, and returns those that are over.
        Blocks that see one another go on until all of them are written."""
        groups: dict[int | None, list[Lane]] = {}
        for lane in self.open_lanes:
            if not lane.thread.unfed:  # it is not one that the step has opened
                groups.setdefault(lane.thread.own.group, []).append(lane)
        over: list[Lane] = []
        for lanes in groups.values():
            if all(lane.block is None or lane.block.is_done for lane in lanes):
                over += lanes
                continue
            for lane in lanes:
                self._recorder.refeed(lane.thread)
        return over
