"""Running ``hvdlab run`` as a user does, and checking its leftovers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.network.two_hosts import network, shell  # noqa: F401  (fixtures)
from support.patience import HOUR, PROGRAM_PATIENCE

WITHIN = PROGRAM_PATIENCE
"""Seconds that nothing here should take."""
PATIENT = f"""
import dataclasses, sys
from hvdlab.runner.cli import main
from hvdlab.runner.job_spec import JobSpec
policy = JobSpec.policy
limits = dict.fromkeys(("settle", "grace", "interrupt_grace"), {HOUR})
JobSpec.policy = lambda job: dataclasses.replace(policy(job), **limits)
sys.exit(main(sys.argv[1:]))
"""
"""``hvdlab`` that waits for the ends of ranks as long as they take."""


WaitFor = Callable[[Callable[[], object]], None]


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def launcher(self) -> list[str]:
        """Return the launcher's own output."""
        return [
            line.removeprefix("hvdlab: ") for line in self.err.splitlines() if line.startswith("hvdlab: ")
        ]

    def of(self, rank: int, stream: str = "stdout") -> list[str]:
        """Return the lines of a rank."""
        head = f"[{rank}]<{stream}>:"
        source = self.out if stream == "stdout" else self.err
        return [line.removeprefix(head) for line in source.splitlines() if line.startswith(head)]


class Launcher:
    """Starter of launchers; leftovers of a test are killed, and must leave nothing behind.

    Every process it starts, however far down, inherits a variable, by which it is found.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.mark = f"HVDLAB_TEST_MARK={os.getpid()}-{time.monotonic_ns()}"
        self._started: list[subprocess.Popen[str]] = []

    def script(self, text: str, name: str = "script.py") -> str:
        """Write a script and return its path."""
        path = self.directory / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    def start(self, *arguments: str, patient: bool = False, **options: Any) -> subprocess.Popen[str]:
        """Start ``hvdlab run`` with these arguments; a ``patient`` one waits for the ends of ranks as long as they take."""
        program = ("-c", PATIENT) if patient else ("-m", "hvdlab")
        environ = {
            **os.environ,
            "PYTHONFAULTHANDLER": "",
            "OMP_NUM_THREADS": "1",
            **dict([self.mark.split("=")]),
        }
        environ.update(options.pop("env", None) or {})
        process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, *program, "run", *arguments],
            stdin=options.pop("stdin", subprocess.DEVNULL),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="backslashreplace",
            env=environ,
            cwd=self.directory,
            start_new_session=True,
            **options,
        )
        self._started.append(process)
        return process

    def run(self, *arguments: str, input: str | None = None, **options: Any) -> Ran:
        """Run it to its end."""
        if input is not None:
            options["stdin"] = subprocess.PIPE
        process = self.start(*arguments, **options)
        out, err = process.communicate(input, timeout=WITHIN)
        return Ran(process.returncode, out, err)

    def python(
        self, np: int, script: str, *arguments: str, flags: tuple[str, ...] = (), **options: Any
    ) -> Ran:
        """Run a Python script, given as text, on ``np`` ranks."""
        return self.run("-np", str(np), *flags, sys.executable, self.script(script), *arguments, **options)

    def finish(self, process: subprocess.Popen[str]) -> Ran:
        """Wait for one that was started."""
        out, err = process.communicate(timeout=WITHIN)
        return Ran(process.returncode, out, err)

    def descendants(self) -> list[int]:
        """Return processes that these launchers started, however they were orphaned."""
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (place / "environ").read_bytes().split(b"\0"):
                    found.append(int(place.name))
            except OSError:  # it has ended since the listing, or belongs to another user
                continue
        return found

    def running(self, text: str) -> list[int]:
        """Return those among them that have this in their command line."""
        found = []
        for pid in self.descendants():
            # A process can end between the listing and the reading.
            with contextlib.suppress(OSError):
                if text.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def wait_for_none(self) -> None:
        """Fail unless all of them end."""
        until = time.monotonic() + WITHIN
        while self.descendants():
            assert time.monotonic() < until, [
                Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ") for pid in self.descendants()
            ]
            time.sleep(0.02)

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        try:
            self.wait_for_none()
        finally:
            for pid in self.descendants():
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()


@pytest.fixture
def wait_for() -> WaitFor:
    """Wait until a condition holds."""

    def wait(condition: Callable[[], object]) -> None:
        until = time.monotonic() + WITHIN
        while not condition():
            assert time.monotonic() < until
            time.sleep(0.01)

    return wait
