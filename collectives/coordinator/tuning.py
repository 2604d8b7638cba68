"""The tuner's place in the coordinator: it sees what is executed, and its settings are put into effect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvdlab.collectives.autotune import Parameters, Tuner, TuningSample
from hvdlab.collectives.coordinator.events import Tuned
from hvdlab.collectives.coordinator.options import CoordinatorOptions
from hvdlab.collectives.coordinator.process_sets import ProcessSet
from hvdlab.collectives.coordinator.rounds import Round
from hvdlab.collectives.protocol.messages import Tune

if TYPE_CHECKING:
    from hvdlab.collectives.coordinator.state import CoordinatorState


class Tuning:
    """Applies a tuner's settings: two to the coordinator itself, one to the ranks' planes.

    The coordinator sends members a new slice size right before the first order that they execute with it, so that all
    members change at the same place.
    """

    def __init__(self, options: CoordinatorOptions) -> None:
        self._tuner: Tuner | None = None
        self._slice = 0
        self._announced: dict[int, tuple[int, int]] = {}
        if options.tuning is not None:
            start = Parameters(options.fusion_threshold, options.flush_delay)
            self._tuner = Tuner(options.tuning, start)

    @property
    def active(self) -> bool:
        """Whether settings may still change."""
        return self._tuner is not None and not self._tuner.done

    def before(self, state: CoordinatorState, ps: ProcessSet) -> None:
        """An order for ``ps`` is about to be sent."""
        if self._tuner is None:
            return
        announced = (ps.epoch, self._slice)
        before = self._announced.get(ps.id)
        if before == announced:
            return
        if before is None:
            for id in [id for id in self._announced if id not in state.sets.by_id]:
                del self._announced[id]
        self._announced[ps.id] = announced
        state.outbox.send(ps.peers, Tune(ps.id, ps.epoch, self._slice))

    def executed(self, ps: ProcessSet, run: Sequence[Round]) -> None:
        """These rounds have been ordered."""
        if self.active:
            assert self._tuner is not None
            self._tuner.executed(
                [((ps.id, r.info.name), r.info.nbytes) for r in run if r.info.fuse_key is not None]
            )

    def advance(self, state: CoordinatorState, now: float) -> None:
        """A round of events is over."""
        tuner = self._tuner
        if tuner is None or tuner.done:
            return
        sample = tuner.advance(now)
        if sample is None:
            return
        if sample.number == 1:
            state.outbox.effects.append(Tuned(sample.header()))
        state.outbox.effects.append(Tuned(sample.line()))
        best = tuner.finish()
        if best is not None:
            state.outbox.effects.append(Tuned(best.line()))
            state.outbox.note(_summary(best))
        chosen = tuner.parameters
        state.fusion_threshold, state.flush_delay = chosen.fusion_threshold, chosen.flush_delay
        self._slice = chosen.slice_bytes


def _summary(best: TuningSample) -> str:
    p = best.parameters
    return (
        f"autotune: keeping fusion threshold {p.fusion_threshold} bytes, flush delay {p.flush_delay * 1000:g} ms, "
        f"slices of {p.slice_bytes or 'the usual'} bytes"
    )
