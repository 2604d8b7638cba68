"""One rank's process, as its host's agent sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from hvdlab.collectives.system import die_with_parent
from hvdlab.launch.host_agent import wire

STDOUT, STDERR = 1, 2


class SpawnError(Exception):
    """The command can't be run; ``code`` is a shell's exit code for it."""

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        super().__init__(text)


class Child:
    """A rank in a process group of its own.

    Args:
        out, err: Reading ends of its pipes; owned by this object, and made non-blocking.
        memory: A descriptor of the memory that its function's outcome is in; owned by this object. -1 for none.

    Attributes:
        rank: The rank's number.
        pid: Its process, a child of this one, and the number of its process group.
        pipes: Descriptor to read from, to the stream that it carries (1 or 2).
    """

    def __init__(self, rank: int, pid: int, out: int, err: int, memory: int) -> None:
        self.rank = rank
        self.pid = pid
        self.pipes = {out: STDOUT, err: STDERR}
        for descriptor in self.pipes:
            os.set_blocking(descriptor, False)
        self._memory = memory

    def signal(self, number: int) -> None:
        """Signal the whole group, unless it is gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
        if number in (signal.SIGTERM, signal.SIGINT):  # a stopped process could not take it
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGCONT)

    def reap(self) -> tuple[int, int]:
        """Exit code and signal of the process, which has ended.

        If it was reaped before this process knew of it, as happens to one that was killed while a zygote reported it, that
        counts as SIGKILL.
        """
        try:
            _, status = os.waitpid(self.pid, 0)
        except ChildProcessError:
            return 0, signal.SIGKILL
        code = os.waitstatus_to_exitcode(status)
        return (code, 0) if code >= 0 else (0, -code)

    def result(self) -> Iterator[bytes]:
        """Yield the pickled outcome of this rank's function, in pieces. Call it once."""
        if self._memory < 0:
            return
        with open(self._memory, "rb", buffering=0) as file:
            file.seek(0)
            while piece := file.read(wire.PIECE):
                yield piece
        self._memory = -1


@dataclass(slots=True)
class RankDescriptors:
    """The descriptors of a rank that has no process yet.

    Attributes:
        stdin: Its standard input.
        out, err: ``(reading end, writing end)``.
        call, memory: Anonymous memory with the pickled call, and for its outcome; -1 if it is no function that is run.
    """

    stdin: int
    out: tuple[int, int]
    err: tuple[int, int]
    call: int = -1
    memory: int = -1

    @classmethod
    def make(cls, function: bytes, stdin: int) -> Self:
        """Make new pipes.

        Args:
            function: The pickled call, or empty.
            stdin: The rank's standard input, which is duplicated; -1 for none.

        Raises:
            SpawnError: This process may open no more files.
        """
        with contextlib.ExitStack() as undo:

            def opened(*descriptors: int) -> tuple[int, ...]:
                for descriptor in descriptors:
                    undo.callback(os.close, descriptor)
                return descriptors

            call = memory = -1
            try:
                (given,) = opened(os.dup(stdin) if stdin >= 0 else os.open(os.devnull, os.O_RDONLY))
                out, err = opened(*os.pipe2(os.O_CLOEXEC)), opened(*os.pipe2(os.O_CLOEXEC))
                if function:
                    call, memory = opened(os.memfd_create("hvdlab-call"), os.memfd_create("hvdlab-result"))
                    with open(call, "wb", closefd=False) as file:
                        file.write(function)
            except OSError as error:
                raise SpawnError(126, f"a rank can't be given pipes: {error.strerror or error}") from error
            undo.pop_all()
        return cls(given, (out[0], out[1]), (err[0], err[1]), call, memory)

    @property
    def for_rank(self) -> list[int]:
        """Return the rank's descriptors: standard input, output and error, then the call and the memory for its outcome."""
        return [self.stdin, self.out[1], self.err[1], *((self.call, self.memory) if self.call >= 0 else ())]

    def child(self, rank: int, pid: int) -> Child:
        """Return the process that has them now; descriptors that only the rank needs are closed here."""
        child = Child(rank, pid, self.out[0], self.err[0], self.memory)
        for descriptor in (self.stdin, self.out[1], self.err[1], self.call):
            if descriptor >= 0:
                os.close(descriptor)
        return child

    def close(self) -> None:
        """Close the pipes, since no process will be started."""
        for descriptor in (self.stdin, *self.out, *self.err, self.call, self.memory):
            if descriptor >= 0:
                os.close(descriptor)


def spawn(start: wire.Start, spec: wire.RankSpec, stdin: int) -> Child:
    """Start a rank. Its stdin is ``stdin``, or nothing if that is negative.

    Raises:
        SpawnError: The program does not exist, or may not be run, or this process may open no more files; or the
            command or a variable can't be given to any process.
    """
    command = list(map(os.fsdecode, start.command))
    shown = start.command[0].decode("utf-8", "backslashreplace")  # reports are UTF-8, and a path need not be
    descriptors = RankDescriptors.make(start.function, stdin)
    _, out, err, *kept = descriptors.for_rank
    agent = os.getpid()
    try:
        process = subprocess.Popen(
            [*command, *map(str, kept)],
            env={**os.environ, **spec.environment},
            stdin=descriptors.stdin,
            stdout=out,
            stderr=err,
            pass_fds=kept,
            process_group=0,
            # The kernel sends this signal when the thread that forked ends, so a rank must never be started
            # on another thread than the main one.
            preexec_fn=lambda: die_with_parent(agent),  # noqa: PLW1509  # the agent has one thread
        )
    except OSError as error:
        descriptors.close()
        code = 127 if isinstance(error, FileNotFoundError) else 126
        hint = f"; `python {shown}`?" if command[0].endswith(".py") else ""
        raise SpawnError(code, f"`{shown}` can't be run: {error.strerror or error}{hint}") from error
    except (ValueError, subprocess.SubprocessError) as error:  # such as a null character in a variable
        descriptors.close()
        raise SpawnError(126, f"`{shown}` can't be run: {error}") from error
    process.returncode = 0  # it is reaped by its number; Popen would wait for it, too
    return descriptors.child(spec.rank, process.pid)
