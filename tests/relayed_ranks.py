"""Ranks behind relays: resident ones, and what cells and scripts of tests, which run on the ranks, look at and do to relays."""

from __future__ import annotations

from collections.abc import Mapping

from hvdlab.collectives.environment import relay_variable
from hvdlab.collectives.relay.process import RelayProcess
from patience import PATIENCE
from ranks import Ranks

ON_RANKS = '''
import contextlib, os, signal
import numpy as np, psutil
from hvdlab.collectives import api, context
from hvdlab.collectives.errors import AbortedError

def total(name, value=1.0):
    # Of the kind that needs the coordinator.
    return float(np.asarray(api.synchronize(api.allreduce_async(np.full(3, value), name, op=api.Sum)))[0])

def relay():
    """The process of the relay that this rank's agent has started."""
    for above in psutil.Process().parents():
        for process in above.children():
            with contextlib.suppress(psutil.Error):
                if "hvdlab.collectives.relay" in process.cmdline():
                    return process.pid

def relayed():
    return not context.engine()._endpoint.secure

def reduce_until_lost(victim, kill):
    """Reduce until the coordinator has a successor; after 20 steps the rank ``victim`` calls ``kill``. Returns epochs of coordinators since."""
    engine, steps = context.engine(), 0
    before = engine.generation
    while True:
        if steps == 20 and engine.rank == victim:
            kill()
        steps += 1
        try:
            # What is lost for some ranks may have been completed for others, which then wait in the next one: all have one name.
            if total("x", float(engine.generation != before)) == engine.size:
                return engine.generation - before
        except AbortedError as error:
            assert error.cause.kind == "coordinator_lost", error

def kill_relay():
    os.kill(relay(), signal.SIGKILL)
'''
"""What ranks execute first: ``total``, ``relay``, ``relayed``, ``reduce_until_lost`` and ``kill_relay``."""

BEGIN = f"{ON_RANKS}\nengine = context.init()\nkept = [engine.rank]"
"""The first cell of a pool."""

STATE = "[kept, relayed(), total('x')]"
"""A cell that shows what a rank has kept, whether it is behind a relay, and a sum of ones."""

LOSE_RELAY = "reduce_until_lost(engine.size - 1, kill_relay)"
"""A cell in which the last rank kills its relay."""


class RelayedRanks(Ranks):
    """Ranks of which all but rank 0 are behind a relay; rank 0 has a connection of its own, as on another host."""

    def __init__(
        self,
        size: int,
        *,
        tls: bool = True,
        keep: bool = True,
        token: str = "",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._relay_token = token
        super().__init__(size, tls=tls, keep=keep, env=env, imports=["torch"])

    def _begin_coordinator(self) -> None:
        super()._begin_coordinator()
        coordinator = self.coordinator
        token = self._relay_token or coordinator.relay_token
        self.relay = RelayProcess(
            self._env["HVDLAB_COORDINATOR"], token, coordinator.certificate or "", "here"
        )
        self._without = self._env
        self._with = {
            **self._env,
            **relay_variable(self.relay.address, self._env["HVDLAB_COORDINATOR"]),
        }

    def _spawn(self, rank: int) -> None:
        self._env = self._with if rank else self._without
        super()._spawn(rank)

    def _end_coordinator(self) -> None:
        self.relay.close(PATIENCE)
        super()._end_coordinator()
