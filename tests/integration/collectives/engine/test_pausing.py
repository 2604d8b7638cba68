"""A rank in which the user looks around reports it, also to a coordinator's successor."""

from __future__ import annotations

from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.engine.rank_state import RankState
from hvdlab.collectives.errors import Cause, CauseKind
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.settings import Settings
from support.patience import PATIENCE


def test_a_successor_is_told_once() -> None:
    state = RankState(0)
    state.paused(("at a prompt",))
    assert state.take_messages() == [m.Paused("at a prompt")]
    state.disconnect(Cause(CauseKind.COORDINATOR_LOST, (), "gone"))
    state.paused(("at a prompt", "stopped by the debugger"))
    state.reconnect(())
    assert state.take_messages() == [m.Paused("stopped by the debugger")]
    state.paused(())
    state.disconnect(Cause(CauseKind.COORDINATOR_LOST, (), "gone"))
    state.reconnect(())
    assert state.take_messages() == []


def test_reasons_may_overlap() -> None:
    with CoordinatorProcess.start(size=1, timeout=PATIENCE) as coordinator:
        settings = Settings(coordinator=coordinator.address, token=coordinator.token, rank=0, size=1)
        engine = Engine.connect(settings)
        try:
            engine.pause("at a prompt")
            engine.pause("stopped by the debugger")
            engine.resume("at a prompt")
            assert engine.paused == "stopped by the debugger"
            engine.resume("at a prompt")  # it was not
            assert engine.paused == "stopped by the debugger"
            engine.resume("stopped by the debugger")
            assert engine.paused == ""
        finally:
            engine.close()
