"""Random schedules of whole jobs on a simulated clock: simulated hours, schedules, distinct states and faults, beside the processor's time.

::

    python benchmarks/simulated_hours.py --minutes 60 --page docs/reference/faults.md     # another hour, from the next seed on
    python benchmarks/simulated_hours.py --kind collectives --count 100000
    python benchmarks/simulated_hours.py --seed 5000000 --count 1000 --json out/hours.json # these seeds
    python benchmarks/simulated_hours.py --count 0 --page docs/reference/faults.md         # only writes the table again

Pieces add up: each appends a line to the result file, and begins with the seed after the last one of its kind. A piece that is
ended by Ctrl-C or SIGTERM keeps its finished schedules. A seed is played once; a piece whose seeds were played before is refused.

A *schedule* is one job from its start to its end. The state machines are those of every job: the coordinator, the ranks, and for
``elastic`` also the launcher, its table of hosts, and the loop around elastic training. A seed chooses the order in which messages
arrive, and which processes, hosts, connections and coordinators fail when. Each schedule ends with all faults mended, and must then
work and end in order; invariants are checked all along (``tests/support/simulation/joint_elastic.py``, ``tests/support/simulation/joint_schedules.py``).

* **Simulated hours** are the hours that the clocks of the jobs have passed. A clock moves on only while a part waits for its time.
* A **step** is one event of the simulated network or of a rank: a message is sent or read, a connection ends, an operation runs.
* A **state** is taken after each step of each tenth schedule, as taking it costs a third of a schedule's time. It consists of

  - the coordinator's: ranks that live, are expected, are awaited, wait, leave, died, were cut off, train or have regrouped; whether
    it restores its predecessor's world; and for each process set its phase, its members, those of the next generation, those that have
    said Bye, whether a plane has failed, and the ranks that have submitted each collective that is pending;
  - each connected rank's: how its process and its connection stand; its error, if its world has ended; its cells; the collective
    that its user waits for; the operations that it has to execute; and for each process set whether it has a generation, how many
    generations it is behind the coordinator (0, 1, or more), its members, and its pending collectives with their phases;
  - the kinds of the messages on their way between the two, in order.

  Numbers that only count (process ids, generations, tickets, orders, seconds) are left out: otherwise each state would be distinct.
  Distinct states are counted by 64-bit hashes in a HyperLogLog sketch of 16,384 registers, whose standard error is 0.8 %. Sketches
  of several pieces unite without a loss, so a state that two pieces reach counts once.
* A **fault** is a schedule that ended with an error. Its seed plays it again, step by step: ``python tests/support/simulation/joint_elastic.py --seed N``.
"""

from __future__ import annotations

import argparse
import base64
import gc
import json
import marshal
import math
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
import zlib
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from pages import write

from hvdlab.collectives.coordinator.process_sets import ProcessSetState
from hvdlab.collectives.engine.process_set_view import SetState
from support.simulation.joint_elastic import ElasticSchedule
from support.simulation.joint_ranks import SimRank
from support.simulation.joint_schedules import Schedule
from support.simulation.joint_simulation import Simulation

PLACE = "simulated-hours"
"""Name of the table on the page, and of the benchmark."""
RESULTS = ROOT / "benchmarks" / "results" / "simulated_hours.json"
COUNTED = 10
"""States are counted in the schedules whose seeds are multiples of this."""
BATCH = 50
"""Schedules that a process plays before it reports: some seconds."""
INDEX_BITS = 14
"""A sketch has as many registers as there are numbers of so many bits."""
SEEDS_SHOWN = 20
"""Seeds of faults that the table names."""


# -- states -----------------------------------------------------------------------------------------------------------


class StateSketch:
    """HyperLogLog sketch of a set of states.

    Args:
        registers: Those of another sketch; none are set by default.
    """

    def __init__(self, registers: bytes | None = None) -> None:
        self._registers = bytearray(registers or 1 << INDEX_BITS)

    def add(self, state: bytes) -> None:
        """Add an encoded state."""
        number = int.from_bytes(blake2b(state, digest_size=8).digest())
        index, rest = number >> (64 - INDEX_BITS), number & ((1 << (64 - INDEX_BITS)) - 1)
        zeros = 64 - INDEX_BITS + 1 - rest.bit_length()
        self._registers[index] = max(self._registers[index], zeros)

    def unite(self, other: StateSketch) -> None:
        """Add all states of another sketch."""
        self._registers = bytearray(map(max, self._registers, other._registers))

    def count(self) -> int:
        """Return the estimated number of distinct states."""
        size = len(self._registers)
        estimate = 0.7213 / (1 + 1.079 / size) * size * size / sum(2.0**-value for value in self._registers)
        empty = self._registers.count(0)
        if empty and estimate <= 2.5 * size:  # few states: the empty registers say more
            estimate = size * math.log(size / empty)
        return round(estimate)

    def to_text(self) -> str:
        """Return its registers as text for a result file."""
        return base64.b64encode(zlib.compress(bytes(self._registers), 9)).decode()

    @classmethod
    def from_text(cls, text: str) -> StateSketch:
        """Return the sketch of a result file."""
        return cls(zlib.decompress(base64.b64decode(text)))


class StateCounter:
    """Counter of the steps and distinct states of simulations.

    Attributes:
        steps: Events that were played.
        sketch: The states after them, where they are counted.
        counts_states: Whether they are.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.sketch = StateSketch()
        self.counts_states = True

    def stepped(self, simulation: Simulation) -> None:
        """Count a step, and the state after it."""
        self.steps += 1
        if not self.counts_states:
            return
        # The second version of the format has no references between equal objects: equal states have equal bytes.
        self.sketch.add(marshal.dumps(abstract_state(simulation), 2))


def abstract_state(simulation: Simulation) -> tuple[Any, ...]:
    """Return a simulation's state without numbers that only count, as a tuple of tuples, texts and numbers."""
    coordinator = simulation.coordinator
    membership, elastic = coordinator.membership, coordinator.elastic
    ranks = [_rank(me, coordinator.sets.by_id) for me in simulation.connected()]
    ranks.sort()  # not by age: the order of processes is no part of the state
    return (
        coordinator.restoring.active,
        membership.expected,
        *map(_sorted, (membership.awaited, membership.ranks, membership.leaving, membership.deaths)),
        *map(_sorted, (membership.returning, elastic.training, elastic.ready, elastic.finished)),
        membership.waiting,
        _sorted([rank for rank, peer in membership.ranks.items() if peer.outdated]),
        tuple([_process_set(each) for each in coordinator.sets]),
        _kinds(simulation.client),
        tuple(ranks),
    )


# Counting takes half as long as all the rest of a step: lists in place of generators, and nothing is built for empty collections.


def _sorted(numbers: Collection[int]) -> tuple[int, ...]:
    return tuple(sorted(numbers)) if numbers else ()


def _kinds(messages: Collection[object]) -> tuple[str, ...]:
    return tuple([type(message).__name__ for message in messages]) if messages else ()


def _process_set(each: ProcessSetState) -> tuple[Any, ...]:
    """Return the coordinator's state of a process set."""
    submitted = [(name, _sorted(found.submissions)) for name, found in each.negotiation.rounds.items()]
    return (
        each.id,
        each.phase,
        each.members,
        each.next_members,
        _sorted(each.gone),
        each.failure is not None,
        each.past_failure is not None,
        tuple(sorted(submitted)),
    )


def _rank(me: SimRank, sets: Mapping[int, ProcessSetState]) -> tuple[Any, ...]:
    """Return the state of a connected rank."""
    state = me.state
    return (
        me.rank,
        (me.alive, me.open, me.ending, me.lost, me.early, me.cut, me.away, me.told_to_leave),
        (state.elastic, state.outdated, state.failover.paused != ()),
        "" if state.failure is None else state.failure.kind.name,
        len(me.cells),
        len(me.jobs),
        "" if me.blocked is None or me.blocked.outcome is not None else me.blocked.name,
        me.at_board is not None,
        tuple([_own_set(each, sets.get(number)) for number, each in state.sets.items()]),
        _kinds(me.to_coordinator),
        _kinds(me.from_coordinator),
    )


def _own_set(each: SetState, known: ProcessSetState | None) -> tuple[Any, ...]:
    """Return a rank's state of a process set, which the coordinator knows or has removed."""
    behind = -1 if known is None else min(2, known.generation - each.generation)
    pending = tuple([(entry.name, entry.phase) for entry in each.pending]) if each.pending else ()
    return each.id, each.configured, behind, each.ranks, pending


# -- schedules --------------------------------------------------------------------------------------------------------


class JobSchedule(Protocol):
    """Schedule that can be played."""

    sim: Simulation

    def run(self) -> None: ...


KINDS: dict[str, type[JobSchedule]] = {"elastic": ElasticSchedule, "collectives": Schedule}
NAMES = {
    "elastic": "elastic jobs, whose hosts, ranks and coordinators come and go",
    "collectives": "jobs and pools, whose users submit, interrupt, resize and end cells",
}
"""Schedules of each kind, as the table calls them."""


@dataclass
class PlayedSeeds:
    """Schedules of consecutive seeds that were played.

    Attributes:
        schedules, steps: How many.
        counted: In how many schedules states were counted.
        simulated_s: Seconds that the clocks of their jobs have passed.
        processor_s: Seconds of a core.
        failed: Errors, by seed.
        registers: The sketch of their states, as text.
    """

    schedules: int
    counted: int
    steps: int
    simulated_s: float
    processor_s: float
    failed: dict[str, str]
    registers: str


def play(kind: str, start: int, stop: int) -> PlayedSeeds:
    """Play the schedules of these seeds."""
    begin, seconds, counted, failed, counter = time.process_time(), 0.0, 0, {}, StateCounter()
    gc.set_threshold(100_000, 20, 100)  # with the usual 700, the search for cycles takes a sixth of the time
    for seed in range(start, stop):
        try:
            schedule = KINDS[kind](seed)  # type: ignore[call-arg]  # both take a seed
            schedule.sim.watcher = counter
            counter.counts_states = seed % COUNTED == 0
            counted += counter.counts_states
            try:
                schedule.run()
            finally:
                seconds += schedule.sim.now
        except Exception:  # noqa: BLE001  # any error is a fault, and reported with its seed
            failed[str(seed)] = traceback.format_exc(limit=-4).replace(f"{ROOT}/", "")
    return PlayedSeeds(
        stop - start,
        counted,
        counter.steps,
        seconds,
        time.process_time() - begin,
        failed,
        counter.sketch.to_text(),
    )


# -- results ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class PlayedPiece:
    """One run of this program.

    Attributes:
        kind: Of the schedules.
        seed, schedules: The first seed, and how many were played from it on.
        counted, steps, simulated_s, processor_s, failed: As for :class:`PlayedSeeds`.
        wall_s: Seconds by the clock on the wall.
        jobs: Processes that played side by side.
        revision: The commit of the code.
        python: The interpreter's version.
    """

    kind: str
    seed: int
    jobs: int
    revision: str
    python: str
    schedules: int = 0
    counted: int = 0
    steps: int = 0
    simulated_s: float = 0.0
    processor_s: float = 0.0
    wall_s: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, batch: PlayedSeeds) -> None:
        """Add a batch that follows what there is."""
        self.schedules += batch.schedules
        self.counted += batch.counted
        self.steps += batch.steps
        self.simulated_s += batch.simulated_s
        self.processor_s += batch.processor_s
        self.failed |= batch.failed


class HourResults:
    """HourResults of all pieces, in a file.

    Args:
        path: The file; it need not exist.

    Attributes:
        pieces: In the order in which they were played.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        known = json.loads(path.read_text()) if path.exists() else {"pieces": [], "states": {}}
        self.pieces = [PlayedPiece(**piece) for piece in known["pieces"]]
        self.sketches = {kind: StateSketch.from_text(text) for kind, text in known["states"].items()}

    def next_seed(self, kind: str) -> int:
        """Return the seed after all that were played of this kind."""
        return max((piece.seed + piece.schedules for piece in self.pieces if piece.kind == kind), default=0)

    def overlap(self, kind: str, seed: int, count: float) -> PlayedPiece | None:
        """Return a piece that has played some of these seeds."""
        for piece in self.pieces:
            if piece.kind == kind and piece.seed < seed + count and seed < piece.seed + piece.schedules:
                return piece
        return None

    def add(self, piece: PlayedPiece, batch: PlayedSeeds) -> None:
        """Add a batch to a piece, which is listed from its first batch on."""
        if piece not in self.pieces:
            self.pieces.append(piece)
        piece.add(batch)
        self.sketches.setdefault(piece.kind, StateSketch()).unite(StateSketch.from_text(batch.registers))

    def report(self) -> dict[str, Any]:
        """Return the contents of the file."""
        return {
            "benchmark": PLACE,
            "cores": os.cpu_count(),
            "pieces": [vars(piece) for piece in self.pieces],
            "states": {kind: sketch.to_text() for kind, sketch in self.sketches.items()},
        }

    def save(self) -> None:
        """Replace the file by one with all that is known now."""
        unfinished = self._path.with_suffix(".new")
        unfinished.write_text(json.dumps(self.report(), indent=1) + "\n")
        unfinished.replace(self._path)


def markdown(report: dict[str, Any]) -> str:
    """Return the table of a result file, for a page."""
    heads = ("random schedules of", "schedules", "simulated hours", "steps", "distinct states, in schedules", "faults", "core hours", "simulated hours a core hour")  # fmt: skip
    lines = [heads, ("---", *["---:"] * (len(heads) - 1))]
    for kind, name in NAMES.items():
        pieces = [piece for piece in report["pieces"] if piece["kind"] == kind]
        if not pieces:
            continue
        total = {
            key: sum(piece[key] for piece in pieces)
            for key in ("schedules", "counted", "steps", "simulated_s", "processor_s")
        }
        states = _rounded(StateSketch.from_text(report["states"][kind]).count())
        counts = f"{total['schedules']:,}", f"{total['simulated_s'] / 3600:,.0f}", f"{total['steps']:,}"
        hours = f"{total['processor_s'] / 3600:,.2f}", f"{total['simulated_s'] / total['processor_s']:,.0f}"
        lines.append((name, *counts, f"{states}, in {total['counted']:,}", _faults(pieces), *hours))
    table = ["| " + " | ".join(line) + " |" for line in lines]
    seeds = "; ".join(
        f"{kind}: {', '.join(f'{first:,} to {last:,}' for first, last in _seeds(report['pieces'], kind))}"
        for kind in NAMES
        if any(piece["kind"] == kind for piece in report["pieces"])
    )
    versions = " and ".join(sorted({piece["python"] for piece in report["pieces"]}))
    return "\n".join([f"Seeds of {seeds}. {report['cores']} cores, Python {versions}.", "", *table])


def _rounded(number: int) -> str:
    """Return a number to three digits, as exactly as a sketch knows it."""
    scale = 10 ** max(0, len(str(number)) - 3)
    return f"{round(number / scale) * scale:,}"


def _faults(pieces: list[dict[str, Any]]) -> str:
    seeds = [seed for piece in pieces for seed in piece["failed"]]
    more = ", …" if len(seeds) > SEEDS_SHOWN else ""
    return f"{len(seeds)} (seeds {', '.join(seeds[:SEEDS_SHOWN])}{more})" if seeds else "0"


def _seeds(pieces: list[dict[str, Any]], kind: str) -> list[tuple[int, int]]:
    """Return the ranges of seeds that were played, each with its last one."""
    found: list[tuple[int, int]] = []
    for first, count in sorted(
        (piece["seed"], piece["schedules"]) for piece in pieces if piece["kind"] == kind
    ):
        if found and found[-1][1] + 1 == first:
            found[-1] = found[-1][0], first + count - 1
        elif count:
            found.append((first, first + count - 1))
    return found


# -- the program ------------------------------------------------------------------------------------------------------


def revision() -> str:
    """Return the commit of the code, or an empty text outside a repository."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return described.stdout.strip()


def rounds(seed: int, count: float, jobs: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the first seeds and the ends of batches that are played side by side."""
    done = 0
    while done < count:
        batches = []
        for _ in range(4 * jobs):
            size = int(min(BATCH, count - done))
            if size:
                batches.append((seed + done, seed + done + size))
            done += size
        yield batches


def run(results: HourResults, piece: PlayedPiece, count: float, seconds: float) -> None:
    """Play schedules until there are enough or the time is over; save after each round."""
    begin = time.monotonic()
    # Workers ignore Ctrl-C: this process ends them, and drops the round that they have not finished.
    with ProcessPoolExecutor(
        piece.jobs, initializer=partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    ) as pool:
        for batches in rounds(piece.seed, count, piece.jobs):
            starts, stops = zip(*batches, strict=True)
            for batch in list(pool.map(partial(play, piece.kind), starts, stops)):
                results.add(piece, batch)
                for seed, text in batch.failed.items():
                    print(f"seed {seed}: {text}", flush=True)
            piece.wall_s = time.monotonic() - begin
            results.save()
            print(
                f"{piece.schedules} schedules, {len(piece.failed)} failed, {piece.simulated_s / 3600:.0f} simulated hours, "
                f"{piece.schedules / piece.processor_s:.0f} a second of a core, {piece.schedules / piece.wall_s:.0f} a second",
                flush=True,
            )
            if piece.wall_s > seconds:
                return


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=KINDS, default="elastic")
    parser.add_argument("--seed", type=int, help="the first one (default: after the last that was played)")
    parser.add_argument("--count", type=int, help="schedules (default: as many as the time allows)")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin no other schedules after these"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes side by side")
    parser.add_argument("--json", type=Path, default=RESULTS, help="the file to which the piece is appended")
    parser.add_argument("--page", type=Path, help="page whose table is written again")
    given = parser.parse_args()
    if given.count is None and given.minutes == math.inf:
        parser.error("give --count, --minutes or both")
    results = HourResults(given.json)
    seed = results.next_seed(given.kind) if given.seed is None else given.seed
    count = math.inf if given.count is None else given.count
    if count and (known := results.overlap(given.kind, seed, count)):
        parser.error(
            f"seeds {known.seed} to {known.seed + known.schedules - 1} were played before: give --count or another --seed"
        )
    piece = PlayedPiece(given.kind, seed, given.jobs, revision(), platform.python_version())
    try:
        if count:
            run(results, piece, count, 60 * given.minutes)
    except KeyboardInterrupt:
        print(f"ended after {piece.schedules} schedules")
    table = markdown(results.report())
    print(table)
    if given.page:
        write(given.page, PLACE, table)
    return min(len(piece.failed), 255)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a piece ends by it as by Ctrl-C
    sys.exit(main())
