"""Record the effects of the coordinator's state in random schedules, to compare them byte for byte before and after a change.

::

    PYTHONHASHSEED=0 python tests/support/simulation/effects_recording.py --rounds 20000 --to before.txt
    PYTHONHASHSEED=0 python tests/support/simulation/effects_recording.py --rounds 20000 --to after.txt && cmp before.txt after.txt

A line has the schedule, the batch of events in it, and the digest of all effects so far; the first line that differs
gives the place.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))  # where the other modules of tests are, for this program


from hvdlab.collectives.coordinator.events import Effect, Event
from hvdlab.collectives.coordinator.state import CoordinatorState
from support.fuzz import protocol as protocol_fuzz
from support.simulation import joint_schedules


class EffectsRecording:
    """Recording of the effects of all states in this process, one line for each batch of events.

    Attributes:
        lines: The lines so far.
        schedule: Name of the schedule that runs.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.schedule = ""
        self._digest = hashlib.blake2b(digest_size=8)
        self._handle_all = CoordinatorState.handle_all

    def record(self, rounds: int) -> None:
        """Run schedules of a whole job, and conversations of peers that send anything, until there are ``rounds`` batches of each."""
        recording = self

        def handle_all(state: CoordinatorState, events: Iterable[Event], now: float) -> list[Effect]:
            effects = recording._handle_all(state, events, now)
            recording.add(effects)
            return effects

        with mock.patch.object(CoordinatorState, "handle_all", handle_all):
            for seed in range(rounds):
                if len(self.lines) >= rounds:
                    break
                self.schedule = f"job {seed}"
                joint_schedules.run_seed(seed)
            for seed in range(rounds):
                if len(self.lines) >= 2 * rounds:
                    break
                self.schedule = f"conversation {seed}"
                protocol_fuzz.one_conversation(random.Random(seed))

    def add(self, effects: list[Effect]) -> None:
        """Add the effects of one batch of events."""
        self._digest.update(repr(effects).encode())
        self.lines.append(f"{self.schedule}, batch {len(self.lines)}: {self._digest.hexdigest()}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--to", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args()
    recording = EffectsRecording()
    recording.record(arguments.rounds)
    arguments.to.write_text("\n".join(recording.lines) + "\n")
    print(f"{len(recording.lines)} batches, {recording.lines[-1]}")


if __name__ == "__main__":
    main()
