"""An elastic job whose whole hosts come and go: found, announced to leave, killed, and cut off. Needs the right to make hosts.

``hvdlab run`` has its coordinator on the first host, which stays. The list of the others, which a discovery script prints, is
changed; their cables are pulled and their processes killed, none of which anything is told of. The job trains all the time, and
what it has computed in the end is calculated again from the ranks of each step.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from chaos.campaign import HANG, Hang, Mailbox
from chaos.elastic import Change
from chaos.figures import Outcome
from chaos.journal import replayed
from hosts import Network
from remote_shell import RemoteShell

HOSTS, SLOTS = 4, 2
"""Hosts, the first of which stays, and how many ranks the others have; the first has one."""

WITHIN = 15.0
"""Seconds from a change until all ranks that there are then have completed steps together: hosts are asked for once a second, and
one that is cut off is missed by the heartbeat."""

DEAD_AFTER = 3.0
"""Seconds of silence after which a host is lost. On a busy machine ranks that are not cut off may be silent for as long."""

COOLDOWN = ("1", "2")
"""Seconds for which a host that failed is not used."""

CHANGES = (
    Change("a host is found", "join", announced=True, weight=4),
    Change("a host is not listed any more", "leave", announced=True, weight=3),
    Change("a host is not listed any more, and another is found", "swap", announced=True),
    Change("all processes of a host are killed", "kill", weight=4),
    Change("all processes of a host are killed while another one is found", "kill_while_joining", weight=3),
    Change("a host is cut off", "cut", weight=4),
    Change("a host is cut off while another one is found", "cut_while_joining", weight=3),
)

VICTIM = Path(__file__).with_name("hosts_victim.py")


class ElasticHosts:
    """Plays changes on one job, which is replaced only if it is not as it should be. A context manager.

    Args:
        seed: What everything is drawn from.
        changes: What is drawn.
        hang_after: Seconds after which what has not ended counts as hanging.
        dead_after: Seconds of silence after which a host is lost; hosts that are cut off are lost by nothing else.

    Attributes:
        jobs: How many jobs there were.
    """

    def __init__(
        self,
        seed: int,
        *,
        changes: Sequence[Change] = CHANGES,
        hang_after: float = HANG,
        dead_after: float = DEAD_AFTER,
    ) -> None:
        self.seed, self.changes, self.hang_after = seed, tuple(changes), hang_after
        self.dead_after = dead_after
        self.jobs = 0
        #: What a job needs, taken down with it.
        self._stack = contextlib.ExitStack()
        self._job: subprocess.Popen[bytes] | None = None
        #: What the job writes.
        self._said = Path(os.devnull)
        #: Numbers of the hosts that are listed, the first left out.
        self._listed: set[int] = set()
        #: What is being played: its dice, its outcome, and the instant of the change.
        self._rng = random.Random(0)
        self._outcome = Outcome(seed, 0, "tls", "", "", -1, WITHIN)
        self._began = self._at = 0.0
        #: The hash of the memory of each process, by host and number, and how often it went back.
        self._known: dict[tuple[str, int], str] = {}
        self._back: Counter[tuple[str, int]] = Counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    # -- the job ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Make hosts, and a job on the first two of them. Returns when it trains."""
        self.jobs += 1
        # Unix sockets need a short path.
        self._directory = Path(
            self._stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp"))
        )
        self._network = self._stack.enter_context(Network(HOSTS))
        self._shell = self._stack.enter_context(RemoteShell(self._network, self._directory))
        self._mailbox = Mailbox(self._directory / "mail")
        self._stack.callback(self._mailbox.close)
        self._known.clear()
        self._back.clear()
        self._list({1})
        command = [sys.executable, "-m", "hvdlab", "run", "-np", "1", "--min-np", "1"]
        command += ["--max-np", str(1 + SLOTS * HOSTS), "--reset-limit", "1000000"]
        command += [
            "--host-discovery-script",
            f"cat {self._directory / 'hosts'}",
            "--ssh",
            self._shell.client,
        ]
        command += ["--blacklist-cooldown-range", *COOLDOWN, "--start-timeout", f"{self.hang_after:.0f}"]
        command += [sys.executable, str(VICTIM), str(self.seed), str(self._directory)]
        self._said = self._directory / "said"
        path = os.pathsep.join([str(VICTIM.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        with self._said.open("wb") as said:
            self._job = self._network.hosts[0].popen(
                command,
                {
                    "HVDLAB_PING_AFTER": str(self.dead_after / 6),
                    "HVDLAB_DEAD_AFTER": str(self.dead_after),
                    "HVDLAB_REATTACH": "2",
                    "PYTHONPATH": path,
                    "OMP_NUM_THREADS": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )
        self._await_steps(self._wanted())

    def finish(self) -> list[str]:
        """End the job. Returns what is not as it should be of its results, and what is left of it."""
        job, self._job = self._job, None
        if job is None:
            return []
        wrong: list[str] = []
        (self._directory / "stop").touch()
        try:
            if code := job.wait(self.hang_after):
                wrong.append(f"the job ended with exit code {code}: {self._last_lines()}")
            wrong += self._wrong_results()
            self._shell.wait()
            for host in self._network.hosts:
                lines = host.run("ps", "-eo", "args").splitlines()
                wrong += [f"left on {host.name}: {line}" for line in lines if "hvdlab" in line]
        except subprocess.TimeoutExpired:
            wrong.append(f"the job has not ended after {self.hang_after:g} s: {self._last_lines()}")
            self._job = job
        self.discard()
        return wrong

    def discard(self) -> None:
        """End the job, if there is one, and all its hosts."""
        job, self._job = self._job, None
        if job is not None:
            job.kill()
            job.wait()
            for host in self._network.hosts:
                host.fail()
        self._stack.close()

    def _wrong_results(self) -> list[str]:
        found = [json.loads(path.read_text()) for path in sorted(self._directory.glob("result-*.json"))]
        if len(found) != sum(self._wanted().values()):
            return [f"{len(found)} ranks have come to the end: {self._last_lines()}"]
        wrong = [f"the ranks differ: {found}"] if any(one != found[0] for one in found) else []
        weight, momentum = replayed([(tuple(ranks), count) for ranks, count in found[0]["groups"]])
        if (found[0]["weights"], found[0]["momenta"]) != ([weight], [momentum]):
            wrong.append(f"{found[0]} is not what its groups give: {weight}, {momentum}")
        if sum(count for _, count in found[0]["groups"]) != found[0]["step"]:
            wrong.append(f"steps were lost or done twice: {found[0]}")
        return wrong

    def _last_lines(self) -> str:
        if not self._said.is_file():
            return ""
        return " | ".join(self._said.read_text(errors="replace").splitlines()[-8:])

    # -- trials -----------------------------------------------------------------------------------------------------

    def play(self, count: int, first: int = 0) -> Iterator[Outcome]:
        """Make ``count`` changes, beginning with the one that has this number; each kind once before any twice."""
        for number in range(first, first + count):
            rng = self._rng = random.Random(f"{self.seed}/{number}/hosts")
            drawn = rng.choices(self.changes, [change.weight for change in self.changes])[0]
            change = self.changes[number] if number < len(self.changes) else drawn
            yield self._play_one(change, number, last=number == first + count - 1)

    def _play_one(self, change: Change, number: int, *, last: bool) -> Outcome:
        outcome = self._outcome = Outcome(self.seed, number, "tls", change.name, "any", -1, WITHIN)
        try:
            if self._job is None:
                self.start()
            self._began = self._at = time.monotonic()
            self._mailbox.clear()
            back = self._back.copy()
            getattr(self, change.play)()
            if change.announced and (again := self._back - back):
                outcome.lost.append(f"ranks went back though nothing failed: {dict(again)}")
            if last:
                outcome.wrong += self.finish()
        except Hang as hang:
            outcome.hang = str(hang)
        except Exception as error:  # noqa: BLE001  (whatever it is, it is what came of this change)
            outcome.wrong.append(f"{type(error).__name__}: {error}")
        if not outcome.ok:
            outcome.said = self._last_lines()
            self.discard()
        return outcome

    def _event(self, text: str) -> None:
        self._outcome.events.append(f"{time.monotonic() - self._began:8.3f} {text}")

    def _changes(self, text: str) -> None:
        """The change is made now."""
        self._at = time.monotonic()
        self._event(text)

    def _wait_a_little(self, most: float = 1.5) -> None:
        time.sleep(self._rng.uniform(0, most))

    # -- what must be so after each change ----------------------------------------------------------------------------

    def _wanted(self, without: int = -1) -> dict[str, int]:
        """How many ranks each host must have, once all is as it is listed, ``without`` one that can't be reached."""
        names = {self._network.hosts[number].name: SLOTS for number in self._listed if number != without}
        return {self._network.hosts[0].name: 1, **names}

    def _await_steps(self, wanted: Mapping[str, int]) -> float:
        """Wait until just so many ranks of each host have completed two commits together. Returns seconds since the change.

        Raises :class:`Hang`.
        """
        at = time.monotonic()
        while time.monotonic() - at < self.hang_after:
            if self._mailbox.wait_until(lambda letters: _together(letters, wanted, at), 0.2):
                self._hear()
                self._event(f"{dict(wanted)} have gone on together")
                return time.monotonic() - self._at
            if self._job is not None and (code := self._job.poll()) is not None:
                raise RuntimeError(f"the job has ended with exit code {code}")
        raise Hang(f"{dict(wanted)} do not train together; last letters {self._mailbox.letters[-4:]}")

    def _hear(self) -> None:
        """Look at what ranks have told: each remembers what it knew, and went back no further than to its commit."""
        for letter in self._mailbox.letters:
            if letter["what"] != "step":
                continue
            process = letter["host"], letter["pid"]
            if letter["kept"] != self._known.setdefault(process, letter["kept"]):
                self._outcome.lost.append(f"{process} remembers something else than before")
            for done, to, committed in letter["back"][self._back[process] :]:
                self._event(f"{process} went back from step {done} to {to}")
                if to < committed:
                    self._outcome.lost.append(f"{process} went back to {to}, before its commit {committed}")
            self._back[process] = len(letter["back"])

    # -- pieces of changes ----------------------------------------------------------------------------------------------

    def _list(self, numbers: set[int]) -> None:
        """Have the discovery script print the first host and these."""
        lines = [f"{self._network.hosts[0].name}:1", *(f"host{number}:{SLOTS}" for number in sorted(numbers))]
        new = self._directory / "hosts.new"
        new.write_text("\n".join(lines) + "\n")
        new.rename(self._directory / "hosts")
        self._listed = set(numbers)

    def _other(self, but: int = -1) -> int:
        """A host that is not listed; if all are, one of them, not ``but``, is given up first."""
        if len(self._listed) == HOSTS - 1:
            self._list(self._listed - {self._rng.choice(sorted(self._listed - {but}))})
            self._await_steps(self._wanted())
        return self._rng.choice(sorted(set(range(1, HOSTS)) - self._listed))

    def _some(self) -> int:
        """A host that is listed and trains; if none is, one is found first."""
        if not self._listed:
            self._list({self._rng.randrange(1, HOSTS)})
            self._await_steps(self._wanted())
        return self._rng.choice(sorted(self._listed))

    def _survive(self, number: int) -> None:
        """The others train on without this host, which can't be used for now."""
        self._outcome.victim = number
        self._outcome.report = self._await_steps(self._wanted(without=number))

    def _comes_back(self) -> None:
        """All that is listed trains again."""
        seconds = self._outcome.repair = self._await_steps(self._wanted())
        if self._outcome.report is None:
            self._outcome.report = seconds

    # -- changes --------------------------------------------------------------------------------------------------------

    def join(self) -> None:
        number = self._other()
        self._changes(f"host{number} is listed")
        self._list(self._listed | {number})
        self._outcome.report = self._await_steps(self._wanted())

    def leave(self) -> None:
        number = self._some()
        self._changes(f"host{number} is not listed any more")
        self._list(self._listed - {number})
        self._outcome.report = self._await_steps(self._wanted())

    def swap(self) -> None:
        old = self._some()
        new = self._other(but=old)
        self._changes(f"host{old} is not listed any more, host{new} is")
        self._list((self._listed - {old}) | {new})
        self._outcome.report = self._await_steps(self._wanted())

    def kill(self) -> None:
        number = self._some()
        self._wait_a_little()
        self._changes(f"SIGKILL to all processes of host{number}")
        self._network.hosts[number].fail()
        self._outcome.victim = number
        self._comes_back()

    def kill_while_joining(self) -> None:
        number = self._some()
        new = self._other(but=number)
        self._changes(f"host{new} is listed")
        self._list(self._listed | {new})
        self._wait_a_little(3.0)
        victim = self._rng.choice([number, new])  # the newcomer as well
        self._changes(f"SIGKILL to all processes of host{victim}")
        self._network.hosts[victim].fail()
        self._outcome.victim = victim
        self._comes_back()

    def cut(self) -> None:
        number = self._some()
        self._wait_a_little()
        self._cut(number)

    def cut_while_joining(self) -> None:
        number = self._some()
        new = self._other(but=number)
        self._changes(f"host{new} is listed")
        self._list(self._listed | {new})
        self._wait_a_little(3.0)
        self._cut(self._rng.choice([number, new]))

    def _cut(self, number: int) -> None:
        """Pull this host's cable until the others have gone on without it, and a little longer."""
        host = self._network.hosts[number]
        self._changes(f"{host.name} is cut off")
        host.cut()
        try:
            self._survive(number)
            self._wait_a_little(self.dead_after)
        finally:
            self._changes(f"{host.name} is back")
            host.mend()
        self._comes_back()


def _together(letters: Sequence[dict[str, Any]], wanted: Mapping[str, int], since: float) -> bool:
    """Whether so many ranks of each host, and no others, have told twice since then of commits that they made together."""
    steps = [letter for letter in letters if letter["what"] == "step" and letter["at"] > since]
    if not steps or len(steps[-1]["group"]) != sum(wanted.values()):
        return False
    told = Counter(
        (letter["host"], letter["pid"]) for letter in steps if letter["group"] == steps[-1]["group"]
    )
    return Counter(host for (host, _), count in told.items() if count >= 2) == Counter(wanted)
