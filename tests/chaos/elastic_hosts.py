"""An elastic job whose whole hosts come and go: found, announced to leave, killed, and cut off. Needs the right to make hosts.

``hvdlab run`` has its coordinator on the first host, which stays. The list of the others, which a discovery script prints, is
changed; their cables are pulled and their processes killed, without any notification. The job trains all the time, and
its final results are calculated again from the ranks of each step.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from chaos.campaign import HANG, Mailbox
from chaos.figures import Outcome
from chaos.membership import Change, MembershipCampaign, Teller, wrong_results
from support.network.namespaces import Network
from support.network.remote_shell import RemoteShell

HOSTS, SLOTS = 4, 2
"""Hosts, the first of which stays, and how many ranks the others have; the first has one."""

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


@dataclass(frozen=True, slots=True)
class RanksOfHosts:
    """How many ranks of each host, and no others, are to train together."""

    counts: Mapping[str, int]

    def __str__(self) -> str:
        return str(dict(self.counts))

    def together(self, letters: Sequence[dict[str, Any]], since: float) -> bool:
        steps = [letter for letter in letters if letter["what"] == "step" and letter["at"] > since]
        if not steps or len(steps[-1]["group"]) != sum(self.counts.values()):
            return False
        # Newcomers may have the numbers of those that have left, and so be a group of the same name.
        latest = {letter["rank"]: (letter["host"], letter["pid"]) for letter in steps}
        told = Counter(
            process
            for letter in steps
            if letter["group"] == steps[-1]["group"]
            and (process := (letter["host"], letter["pid"])) == latest[letter["rank"]]
        )
        return Counter(host for (host, _), count in told.items() if count >= 2) == Counter(self.counts)


class ElasticHosts(MembershipCampaign):
    """Campaign of changes on one job, which is replaced only after an error. Context manager.

    Args:
        seed: Seed of all draws.
        changes: The changes to draw from.
        hang_after: Seconds after which an unfinished step counts as hanging.
        dead_after: Seconds of silence after which a host is lost; hosts that are cut off are lost only by it.

    Attributes:
        started: How many jobs there were.
    """

    plane = "tls"
    # Hosts are asked for once a second, and one that is cut off is missed by the heartbeat.
    within = 15.0
    longest_wait = 1.5

    def __init__(
        self,
        seed: int,
        *,
        changes: Sequence[Change] = CHANGES,
        hang_after: float = HANG,
        dead_after: float = DEAD_AFTER,
    ) -> None:
        super().__init__(changes)
        self.seed, self.hang_after, self.dead_after = seed, hang_after, dead_after
        self.started = 0
        #: Resources of a job, closed with it.
        self._stack = contextlib.ExitStack()
        self._job: subprocess.Popen[bytes] | None = None
        #: The job's output.
        self._said = Path(os.devnull)
        #: Numbers of the hosts that are listed, the first left out.
        self._listed: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    # -- the job ----------------------------------------------------------------------------------------------------

    @property
    def trains(self) -> bool:
        return self._job is not None

    def start_training(self) -> None:
        """Make hosts, and a job on the first two of them. Returns when it trains."""
        self.started += 1
        # Unix sockets need a short path.
        self._directory = Path(
            self._stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp"))
        )
        self._network = self._stack.enter_context(Network(HOSTS))
        self._shell = self._stack.enter_context(RemoteShell(self._network, self._directory))
        self.mailbox = Mailbox(self._directory / "mail")
        self._stack.callback(self.mailbox.close)
        self._forget_tellers()
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

    def end_training(self) -> list[str]:
        """End the job. Returns the errors of its results, and its leftovers."""
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
        return wrong_results(found)

    def _last_lines(self) -> str:
        if not self._said.is_file():
            return ""
        return " | ".join(self._said.read_text(errors="replace").splitlines()[-8:])

    def _dice(self, number: int) -> random.Random:
        return random.Random(f"{self.seed}/{number}/hosts")

    def _complete(self, outcome: Outcome) -> None:
        if not outcome.ok:
            outcome.said = self._last_lines()

    def _usable(self, outcome: Outcome) -> bool:
        return outcome.ok

    # -- checks after each change -------------------------------------------------------------------------------------

    def _wanted(self, without: int = -1) -> dict[str, int]:
        """Return how many ranks each host must have, once all is as it is listed, ``without`` one that can't be
        reached."""
        names = {self._network.hosts[number].name: SLOTS for number in self._listed if number != without}
        return {self._network.hosts[0].name: 1, **names}

    def _await_steps(self, wanted: Mapping[str, int]) -> float:
        """Wait until just so many ranks of each host have completed two commits together. Returns seconds since the change.

        Raises :class:`Hang`.
        """
        members = RanksOfHosts(wanted)
        return self._await_together(lambda: members)

    def _raise_if_ended(self) -> None:
        if self._job is not None and (code := self._job.poll()) is not None:
            raise RuntimeError(f"the job has ended with exit code {code}")

    def _where(self) -> str:
        return f"last letters {self.mailbox.letters[-4:]}"

    def _tellers(self, letters: Sequence[dict[str, Any]]) -> Iterator[tuple[Teller, dict[str, Any]]]:
        for letter in letters:
            yield Teller(f"process {letter['pid']} of {letter['host']}", letter["pid"]), letter

    # -- pieces of changes ----------------------------------------------------------------------------------------------

    def _list(self, numbers: set[int]) -> None:
        """Have the discovery script print the first host and these."""
        lines = [f"{self._network.hosts[0].name}:1", *(f"host{number}:{SLOTS}" for number in sorted(numbers))]
        new = self._directory / "hosts.new"
        new.write_text("\n".join(lines) + "\n")
        new.rename(self._directory / "hosts")
        self._listed = set(numbers)

    def _other(self, but: int = -1) -> int:
        """Return a host that is not listed; if all are, one of them, not ``but``, is given up first."""
        if len(self._listed) == HOSTS - 1:
            self._list(self._listed - {self._rng.choice(sorted(self._listed - {but}))})
            self._await_steps(self._wanted())
        return self._rng.choice(sorted(set(range(1, HOSTS)) - self._listed))

    def _some(self) -> int:
        """Return a host that is listed and trains; if none is, one is found first."""
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
