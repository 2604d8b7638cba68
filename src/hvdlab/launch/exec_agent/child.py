"""One rank's process, as its host's agent sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator

from hvdlab.collectives.linux import die_with_parent
from hvdlab.launch.exec_agent import wire

STDOUT, STDERR = 1, 2


class SpawnError(Exception):
    """The command can't be run; ``code`` is what a shell would exit with."""

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        super().__init__(text)


class Child:
    """A rank in a process group of its own.

    Attributes:
        rank: The rank's number.
        pid: Its process, and the number of its process group.
        pipes: Descriptor to read from, to the stream that it carries (1 or 2).
    """

    def __init__(self, rank: int, process: subprocess.Popen[bytes], memory: int) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.rank = rank
        self.pid = process.pid
        self.pipes = {_detach(process.stdout): STDOUT, _detach(process.stderr): STDERR}
        self._process = process
        self._memory = memory

    def signal(self, number: int) -> None:
        """Signal the whole group, unless it is gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
        if number in (signal.SIGTERM, signal.SIGINT):  # a stopped process could not take it
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGCONT)

    def reap(self) -> tuple[int, int]:
        """Exit code and signal of the process, which has ended."""
        code = self._process.wait()
        return (code, 0) if code >= 0 else (0, -code)

    def result(self) -> Iterator[bytes]:
        """The pickled outcome of this rank's function, in pieces. Call it once."""
        if self._memory < 0:
            return
        with open(self._memory, "rb", buffering=0) as file:
            file.seek(0)
            while piece := file.read(wire.PIECE):
                yield piece
        self._memory = -1


def spawn(start: wire.Start, spec: wire.RankSpec, stdin: int) -> Child:
    """Start a rank. Its stdin is ``stdin``, or nothing if that is negative.

    Raises:
        SpawnError: The program does not exist, or may not be run.
    """
    command, memory, kept = list(map(os.fsdecode, start.command)), -1, []
    if start.function:
        call = os.memfd_create("hvdlab-call")
        with open(call, "wb", closefd=False) as file:
            file.write(start.function)
        memory = os.memfd_create("hvdlab-result")
        kept = [call, memory]
        command += [str(call), str(memory)]
    agent = os.getpid()
    try:
        process = subprocess.Popen(
            command,
            env={**os.environ, **spec.environment},
            stdin=stdin if stdin >= 0 else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=kept,
            process_group=0,
            preexec_fn=lambda: die_with_parent(agent),  # noqa: PLW1509  # the agent has one thread
        )
    except OSError as error:
        if memory >= 0:
            os.close(memory)
        code = 127 if isinstance(error, FileNotFoundError) else 126
        hint = f"; `python {command[0]}`?" if command[0].endswith(".py") else ""
        raise SpawnError(code, f"`{command[0]}` can't be run: {error.strerror or error}{hint}") from error
    finally:
        if kept:
            os.close(kept[0])
    return Child(spec.rank, process, memory)


def _detach(pipe: object) -> int:
    """A non-blocking descriptor that is ours to close."""
    fd = os.dup(pipe.fileno())  # type: ignore[attr-defined]  # the reading end that Popen made
    pipe.close()  # type: ignore[attr-defined]  # as above
    os.set_blocking(fd, False)
    return fd
