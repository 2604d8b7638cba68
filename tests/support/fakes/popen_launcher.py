"""A launcher such as a package may offer: programs on this host, started once.

It does not report how a notebook's ranks end; of a program of the user's it passes the output on and reports the exit
code.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from hvdlab.collectives.client import Membership
from hvdlab.collectives.settings import own_environment
from hvdlab.collectives.system import HostPosition
from hvdlab.launch.options import Option, OptionKind
from hvdlab.launch.starter import (
    Capabilities,
    Capability,
    Ended,
    LaunchRequest,
    Program,
    RankObserver,
    Started,
)


def offer(directory: Path) -> None:
    """Put a package into a directory that offers this launcher, and one that can't be imported."""
    package = directory / "offering-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: offering\nVersion: 1.0\n")
    entries = "[hvdlab.launchers]\npopen = support.fakes.popen_launcher:PopenLauncher\nbroken = no_such_module:Launcher\n"
    (package / "entry_points.txt").write_text(entries)


class PopenLauncher:
    """Found by an entry point of ``hvdlab.launchers``."""

    name = "popen"
    capabilities = Capabilities(
        frozenset({Capability.SIGNALS, Capability.PROGRAMS}),
        {
            Capability.SINGLE_RANKS: "its queue gives out whole jobs",
            Capability.RESIZE: "its queue gives out whole jobs",
            Capability.KEEP: "its queue ends a job with its owner",
            Capability.REASONS: "its queue does not tell",
            Capability.PRELOADS: "its queue executes each",
        },
    )
    forks = False

    def options(self) -> Sequence[Option]:
        return (Option("nice", "how nice ranks are", OptionKind.COUNT),)

    def check(self, size: int, hosts: str, already: int = 0) -> None:
        pass

    def is_far(self, hosts: str) -> bool:
        return False

    def starter(self, request: LaunchRequest, ranks: RankObserver) -> PopenStarter:
        return PopenStarter(request, ranks)


class PopenStarter:
    def __init__(self, request: LaunchRequest, ranks: RankObserver) -> None:
        self._request, self._ranks = request, ranks
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: set[int] = set()
        self._readers: list[threading.Thread] = []
        if request.program is None:
            request.client.on_membership(self._on_membership)

    def start(self, ranks: Sequence[int], size: int) -> None:
        if self._processes:
            PopenLauncher.capabilities.require(Capability.SINGLE_RANKS, "popen", "start another job.")
        nice = ["nice", "-n", str(self._request.options.get("nice", 0))]
        for rank in ranks:
            environment = {**os.environ, **own_environment(self._request.world, rank, size)}
            if self._request.program is not None:
                self._run_program(self._request.program, rank, nice, environment)
                continue
            command = [*nice, sys.executable, "-m", self._request.module]
            self._processes[rank] = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, process_group=0
            )
            self._ranks.handle(Started(rank, self._processes[rank].pid))

    def _run_program(self, program: Program, rank: int, nice: list[str], environment: dict[str, str]) -> None:
        process = subprocess.Popen(
            [*nice, *program.command],
            env={**environment, **program.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        self._processes[rank] = process
        self._ranks.handle(Started(rank, process.pid, "popen-host"))
        reader = threading.Thread(target=self._pass_on, args=(program, rank, process))
        self._readers.append(reader)
        reader.start()

    def _pass_on(self, program: Program, rank: int, process: subprocess.Popen[bytes]) -> None:
        assert isinstance(process.stdout, io.BufferedReader)
        with process.stdout:
            while data := process.stdout.read1():
                program.output.write(rank, 1, data)
        code = process.wait()
        ended = f"code {code}"
        for _ in range(2):  # a launcher may say it twice
            self._ranks.handle(
                Ended(rank, process.pid, ended, code=None if code < 0 else code, signal=max(0, -code))
            )

    def signal(self, rank: int, number: int) -> None:
        self._processes[rank].send_signal(number)

    def place(self, rank: int, size: int) -> HostPosition | None:
        return None

    def close(self, timeout: float) -> None:
        for process in self._processes.values():
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            with contextlib.suppress(ProcessLookupError):  # its children may hold its output open
                os.killpg(process.pid, signal.SIGKILL)
        for reader in self._readers:
            reader.join()

    def _on_membership(self, membership: Membership) -> None:
        for death in membership.deaths:
            if death.rank not in self._ended:
                self._ended.add(death.rank)
                self._ranks.handle(Ended(death.rank, death.pid, death.reason))
