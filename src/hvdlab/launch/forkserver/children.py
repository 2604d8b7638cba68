"""Children of a fork server: forking them, their pipes, the set-up in the child, and the table of those that live.

The table also has processes that an earlier fork server has forked and this one adopted. Of these it reads the pipes through
``/proc`` and their ends from a pidfd, as they are no children of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import faulthandler
import functools
import gc
import os
import re
import resource
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from hvdlab.collectives.system import die_with_parent, name_process
from hvdlab.launch.forkserver.death_pipe import depend_on
from hvdlab.launch.forkserver.messages import CONTROLLER, Fork, Forked
from hvdlab.launch.forkserver.program import PIPE_SIZE, ForkedProgram, Preloads, StdPipes
from hvdlab.launch.forkserver.server_state import ChildEnded, ChildWrote, ControllerListens, Event
from hvdlab.launch.processes import (
    OutOfMemoryCounter,
    exit_status,
    kill_session,
    open_process,
    peak_memory,
    readable,
    start_time,
)

READ_SIZE = 64 * 1024
"""Bytes that are read from a pipe at once."""


@dataclass(slots=True)
class SupervisedChild:
    """A child that the fork server supervises, with the descriptors by which it does so.

    Attributes:
        number, pid: The child's number and process.
        log: Reading end of its log, or -1.
        err, out: Reading ends of its captured output, or -1. Read here only when it has ended: while it lives it reads them.
        unsent: Memory with output that it has not sent, or -1. Read only when it has ended, too.
        channel: The controller's connection.
        pidfd: Becomes readable when it ends; only for an adopted process, otherwise -1.
        peak: The most memory that an adopted process was seen to have had, in bytes.
        unread: Its standard error that was read after its end, and is not part of output that it left.
        outgoing: Bytes for the controller that its connection has not taken yet.
    """

    number: int
    pid: int
    log: int
    err: int
    out: int = -1
    unsent: int = -1
    channel: socket.socket | None = None
    pidfd: int = -1
    peak: int = 0
    unread: bytes = b""
    outgoing: bytearray = field(default_factory=bytearray)

    @classmethod
    def adopt(cls, child: Forked) -> SupervisedChild | None:
        """Return a process that another fork server has forked; ``None`` if it has ended."""
        pidfd = open_process(child.pid, child.started)
        if pidfd < 0:
            return None
        # After the process was identified by its start time: its number alone may have passed to another
        # process, whose descriptors would be opened here.
        theirs = (child.log, child.err, child.out, child.unsent)
        log, err, out, unsent = (_reopen(child.pid, descriptor) for descriptor in theirs)
        return cls(child.number, child.pid, log, err, out, unsent, pidfd=pidfd, peak=peak_memory(child.pid))

    def left(self, program: ForkedProgram) -> bytes | None:
        """Return its output that it may not have sent, as the program reads it; ``None`` if there is none."""
        if self.unsent < 0:
            return None
        out, err = (b"".join(_contents(pipe)) for pipe in (self.out, self.err))
        left = program.read_area(self.unsent, out, err)
        if left is None:
            self.unread = err
        return left

    def remaining_output(self) -> Iterator[bytes]:
        """Return the rest of its log and, unless :meth:`left` has read that, of its standard error."""
        yield from _contents(self.log)
        if self.unread:
            yield self.unread
        yield from _contents(self.err)

    # -- adopted processes ----------------------------------------------------------------------------------------

    def send_signal(self, number: int, group: bool) -> None:
        """Send a signal. Raises ``ProcessLookupError`` if it has ended, even if its number belongs to another process by now."""
        # A group has no descriptor. The check for life comes last: it shows that the group was read from
        # this process, and not from another one that has got its number.
        if group and os.getpgid(self.pid) == self.pid and not readable(self.pidfd, 0):
            os.killpg(self.pid, number)
        else:
            signal.pidfd_send_signal(self.pidfd, number)

    def sample_memory(self) -> None:
        """Record how much memory it has had: once it has ended, only its parent can find that out."""
        self.peak = max(self.peak, peak_memory(self.pid))

    def end_session(self) -> int | None:
        """Kill the processes that an ended child has left in its session. Returns its status as ``waitpid`` does; ``None`` if unknown."""
        # First: before Linux 6.15 the status can be read only until the parent of the process reaps it.
        status = exit_status(self.pidfd, self.pid)
        kill_session(self.pid)
        return status

    # -- end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the descriptors, in the fork server or in a child, without shutting the connection down for the other side."""
        for descriptor in (self.log, self.err, self.out, self.unsent, self.pidfd):
            if descriptor >= 0:
                os.close(descriptor)
        if self.channel is not None:
            os.close(self.channel.detach())


def _contents(pipe: int) -> Iterator[bytes]:
    """Return the content of a pipe, and no more than fits into it, as another process may go on writing."""
    rest = PIPE_SIZE
    with contextlib.suppress(BlockingIOError):
        while pipe >= 0 and rest > 0 and (data := os.read(pipe, min(rest, READ_SIZE))):
            rest -= len(data)
            yield data


def _reopen(pid: int, descriptor: int) -> int:
    """Return another process's reading end of a pipe; -1 if it can't be had."""
    try:
        # The child keeps the reading ends open, so that they are still there when the fork server that made them is not.
        return os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return -1


MEMORY_SAMPLE_EVERY = 1.0
"""Seconds between two samples of the memory of adopted processes."""


class ChildTable:
    """Children that were forked here, and processes that were adopted.

    Args:
        selector: Gets their descriptors, each with a callable that returns its events.
        program: Reads the output that ended ranks have left behind.
    """

    def __init__(self, selector: selectors.BaseSelector, program: ForkedProgram) -> None:
        self._selector, self._program = selector, program
        #: Shows whether the kernel has killed a process for lack of memory since it was asked last.
        self._memory = OutOfMemoryCounter()
        #: The supervised children by number.
        self._children: dict[int, SupervisedChild] = {}
        #: When the memory of adopted processes was read last.
        self._sampled = time.monotonic()

    def add(self, child: SupervisedChild) -> None:
        """Supervise one more child."""
        self._children[child.number] = child
        if child.log >= 0:
            self._watch(child.log, functools.partial(self._read_log, child))
        if child.channel is not None:
            child.channel.setblocking(False)
            self._watch(child.channel, self._serve_controller)
        if child.pidfd >= 0:
            self._watch(child.pidfd, functools.partial(self._adopted_ended, child))

    def adopt(self, child: Forked) -> list[Event]:
        """Supervise a process that another fork server has forked."""
        adopted = SupervisedChild.adopt(child)
        if adopted is None:
            return [ChildEnded(child.pid, out_of_memory=self._memory.increased())]
        self.add(adopted)
        return []

    def next_memory_sample(self) -> float | None:
        """Return the seconds until :meth:`sample_memory` is due; ``None`` for never."""
        if all(child.pidfd < 0 for child in self._children.values()):
            return None
        return max(0.0, self._sampled + MEMORY_SAMPLE_EVERY - time.monotonic())

    def sample_memory(self) -> None:
        """Record the memory of adopted processes, which can't be asked for once they have ended."""
        self._sampled = time.monotonic()
        for child in self._children.values():
            if child.pidfd >= 0:
                child.sample_memory()

    def kill(self, pid: int, number: int, group: bool) -> None:
        """Send a signal to one of them, or to its process group."""
        adopted = next((p for p in self._children.values() if p.pid == pid and p.pidfd >= 0), None)
        try:
            if adopted is not None:
                adopted.send_signal(number, group)
            else:
                # The number of a child stays its own until this process reaps it; an adopted process is
                # reaped by another parent.
                (os.killpg if group else os.kill)(pid, number)
        except ProcessLookupError:
            return
        except (OSError, OverflowError, ValueError) as error:  # the others that are to get one must get it
            print(f"hvdlab: process {pid} can't be sent signal {number}: {error}", file=sys.stderr)

    def notify_controller(self, line: bytes) -> None:
        """Write to the controller, if there is one; never blocks, even if the controller is stopped."""
        child = self._children.get(CONTROLLER)
        if child is not None and child.channel is not None:
            child.outgoing += line
            self._send_to_controller(child, child.channel)

    def _send_to_controller(self, child: SupervisedChild, channel: socket.socket) -> None:
        """Write as much to the controller as its connection takes; watch for room if bytes are left."""
        try:
            while child.outgoing:
                del child.outgoing[: channel.send(child.outgoing)]
        except BlockingIOError:
            pass
        except OSError:  # it has ended
            child.outgoing.clear()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if child.outgoing else 0)
        # It is watched no longer once its connection has ended.
        if channel in self._selector.get_map() and self._selector.get_key(channel).events != wanted:
            self._selector.modify(channel, wanted, self._serve_controller)

    def close_in_child(self) -> None:
        """Close the pipes of the other children, in a forked child."""
        for child in self._children.values():
            child.close()

    # -- output of children ---------------------------------------------------------------------------------------

    def _watch(self, source: object, happened: object) -> None:
        self._selector.register(source, selectors.EVENT_READ, happened)  # type: ignore[arg-type]  # has a descriptor

    def _read_log(self, child: SupervisedChild) -> list[Event]:
        if self._children.get(child.number) is not child:
            return []  # the child was reaped a moment ago, and its log was read then
        try:
            data = os.read(child.log, READ_SIZE)
        except BlockingIOError:
            return []
        if not data:
            self._selector.unregister(child.log)
            return []
        return [ChildWrote(child.number, data)]

    def _serve_controller(self) -> list[Event]:
        child = self._children.get(CONTROLLER)
        if child is None or child.channel is None:
            return []
        self._send_to_controller(child, child.channel)
        try:
            said = child.channel.recv(READ_SIZE)
        except BlockingIOError:  # there was room to write
            return []
        except ConnectionResetError:  # it ended without having read everything
            said = b""
        if not said:
            self._selector.unregister(child.channel)
            return []
        return [ControllerListens()]

    # -- ends -----------------------------------------------------------------------------------------------------

    def reap(self) -> list[Event]:
        """Reap children that have ended, adopted orphans of ranks included.

        A thread of an imported package may start processes as well, and wait for them itself.
        """
        events: list[Event] = []
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return events
            if found is None:
                return events
            events += self._reap_one(found.si_pid)

    def _reap_one(self, pid: int) -> list[Event]:
        events: list[Event] = []
        left: bytes | None = None
        child = next((child for child in self._children.values() if child.pid == pid), None)
        if child is not None:
            # What it left behind in its process group (a data loader's workers) ends with it; before it is reaped, no
            # other process can get its number.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            events, left = self._drain(child)
        try:
            _, status, usage = os.wait4(pid, 0)
        except ChildProcessError:
            # Another thread of this process has reaped it between waitid() and this call.
            return [*events, self._ended(pid, None, 0, left)] if child is not None else events
        return [*events, self._ended(pid, status, usage.ru_maxrss * 1024, left)]

    def _adopted_ended(self, child: SupervisedChild) -> list[Event]:
        status = child.end_session()
        events, left = self._drain(child)
        return [*events, self._ended(child.pid, status, child.peak, left, seen=True)]

    def _ended(
        self, pid: int, status: int | None, max_rss: int, left: bytes | None, seen: bool = False
    ) -> ChildEnded:
        if status is None:
            oom = self._memory.increased()
            return ChildEnded(pid, max_rss=max_rss, out_of_memory=oom, seen=seen, left=left)
        code = os.waitstatus_to_exitcode(status)
        killed = code == -signal.SIGKILL and self._memory.increased()
        return ChildEnded(pid, max(code, -1), max(-code, 0), max_rss, killed, seen, left)

    def _drain(self, child: SupervisedChild) -> tuple[list[Event], bytes | None]:
        """Read a child's last words, and close its pipes."""
        for source in (child.log, child.channel, child.pidfd):
            if source is not None and source != -1:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(source)
        del self._children[child.number]
        left = child.left(self._program)
        events: list[Event] = [ChildWrote(child.number, data) for data in child.remaining_output()]
        child.close()
        return events, left


REMEDIES = {
    errno.EAGAIN: "no more processes are allowed here (`ulimit -u`, or the container's limit)",
    errno.EMFILE: "too many files are open (`ulimit -n`)",
    errno.ENFILE: "too many files are open on this host",
    errno.ENOMEM: "there is no memory left for another process",
}


@dataclass(frozen=True, slots=True)
class ChildRole:
    """Role of a forked child.

    Attributes:
        order: The pool's order.
        log: Pipe for descriptors 1 and 2 at the start, whose last lines are reported when the child ends.
        pipes: The pipes that a rank captures its output with; the fork server reads to their end when it ends.
        unsent: Memory for output that the rank has not sent, which the fork server reads likewise; -1 for none.
        channel: The controller's connection to the fork server, otherwise -1.
        parent: Process id of the fork server.
        death_pipe: The writing end of the pipe that children depend on.
        leave_to_live: A pipe that gives one byte when the pool knows of the child, or ends if the fork server died before
            that.
    """

    order: Fork
    log: int
    pipes: StdPipes
    unsent: int
    channel: int
    parent: int
    death_pipe: int
    leave_to_live: int


@dataclass(frozen=True, slots=True)
class ForkedChild:
    """New child, as the fork server sees it.

    Attributes:
        record: The message to the pool about it.
        child: Its entry in the table of children.
        announced: Where to write a byte once the pool was sent ``record``, and then to close.
    """

    record: Forked
    child: SupervisedChild
    announced: int


def fork(
    order: Fork, program: ForkedProgram, death_pipe: int, close_inherited: Callable[[], None]
) -> ChildRole | ForkedChild:
    """Fork. Returns a :class:`ChildRole` in the child, where ``close_inherited`` is called first.

    Raises:
        OSError: There is no room for a process or its pipes; nothing is left behind.
    """
    parent = os.getpid()
    opened: list[int] = []
    try:
        log, log_child = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        opened += [log, log_child]
        pipes = StdPipes.make()
        opened += [*pipes.out, *pipes.err]
        leave_to_live, announced = os.pipe2(os.O_CLOEXEC)
        opened += [leave_to_live, announced]
        ours = theirs = unsent = -1
        if order.number == CONTROLLER:
            ours, theirs = (end.detach() for end in socket.socketpair())
            opened += [ours, theirs]
        elif (unsent := program.make_area()) >= 0:
            opened.append(unsent)
        # A collection in the child would otherwise write to, and so copy, all objects that it shares.
        gc.freeze()
        pid = os.fork()
    except OSError:
        for descriptor in opened:
            os.close(descriptor)
        raise
    if pid == 0:
        close_inherited()
        # Both ends were made non-blocking: a rank that prints faster than the fork server reads would get
        # EAGAIN instead of waiting.
        os.set_blocking(log_child, True)
        # The log's reading end stays open in the child: writing must not fail when the fork server is gone.
        for descriptor in (announced, ours):
            if descriptor >= 0:
                os.close(descriptor)
        return ChildRole(order, log_child, pipes, unsent, theirs, parent, death_pipe, leave_to_live)
    for descriptor in (log_child, pipes.out[1], pipes.err[1], leave_to_live, theirs):
        if descriptor >= 0:
            os.close(descriptor)
    channel = socket.socket(fileno=ours) if ours >= 0 else None
    out, err = pipes.out[0], pipes.err[0]
    # The start time is there even if the child has ended by now: only this process can reap it, and does so
    # later.
    record = Forked(order.number, pid, start_time(pid), log, err, out, unsent)
    return ForkedChild(record, SupervisedChild(order.number, pid, log, err, out, unsent, channel), announced)


def why_not(error: OSError) -> str:
    """Return why no child could start, and the remedy."""
    text = error.strerror or str(error)
    return f"{text}: {REMEDIES[error.errno]}" if error.errno in REMEDIES else text


def become(role: ChildRole, program: ForkedProgram, *, open_files: int) -> NoReturn:
    """Run a role in a forked child, and end the process with it.

    Args:
        program: The children's program.
        open_files: Soft limit on open files.
    """
    code = 1
    try:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (open_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
        _set_up(role, program)
        code = _run(role, program)
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else int(request.code is not None)
    except BaseException:  # noqa: BLE001  (the end of the process; its last words say why)
        # Not to sys.stderr, which cells write to: perhaps it is the thread that sends that which could not be started.
        traceback.print_exc(file=sys.__stderr__)
    finally:
        leave(code)


def leave(code: int) -> NoReturn:
    """End a forked process: run exit handlers and flush, but don't tear down resources that it shares with the fork server.

    An orderly end of the interpreter would touch, and so copy, every object that the fork shares.
    """
    with contextlib.suppress(RuntimeError):  # no thread can be started
        threading.Thread(target=_end_after, args=(3.0, code), name="hvdlab-exit", daemon=True).start()
    # atexit has no public way to run the handlers that the user's code registered without ending the interpreter.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(code)


def _end_after(seconds: float, code: int) -> None:
    """Exit even if an exit handler hangs."""
    threading.Event().wait(seconds)
    os._exit(code)


def _set_up(role: ChildRole, program: ForkedProgram) -> None:
    order = role.order
    os.setsid()  # Ctrl-C in the notebook's terminal must reach the pool alone, which passes it on
    if order.number == CONTROLLER:
        # Only the controller: ranks outlive the fork server, whose successor adopts them.
        die_with_parent(role.parent)
    _connect_standard_descriptors(role)
    # After setsid(): the kernel's SIGKILL goes to the group that has this process's number. Before the byte
    # is awaited: the pool and the fork server may both die in the meantime.
    depend_on(role.death_pipe)
    if not os.read(role.leave_to_live, 1):
        # The pool may not know of this process; then a successor of the fork server forks another one.
        os.write(2, b"The process that forked this one died before it could tell so.\n")
        os._exit(1)
    os.close(role.leave_to_live)
    signal.signal(signal.SIGINT, _ignore_interrupt)
    # The order's variables replace all others: the fork server has those of the pool's start, and single
    # ones set for its imports.
    os.environ.clear()
    os.environb.update(order.environment)
    os.chdir(order.directory if os.path.isdir(order.directory) else os.path.expanduser("~"))
    sys.path[:] = map(os.fsdecode, order.path)
    sys.argv[:] = [""]
    faulthandler.enable()
    # Disabled in the fork server, whose objects stay to its end; a rank's cells make garbage in cycles.
    gc.enable()
    if order.number == CONTROLLER:
        name_process("hvd-controller", "hvdlab: ipyparallel controller")
    else:
        name_process(f"hvd-rank-{order.number}", f"hvdlab: rank {order.number}")
        refresh_libraries(program)


def _connect_standard_descriptors(role: ChildRole) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (role.log, 1), (role.log, 2)):
        os.dup2(source, target, inheritable=True)
    for source in (nothing, role.log):
        if source > 2:
            os.close(source)
    # The inherited objects may have been made for a terminal or a file.
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        stream = open(descriptor, mode, buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _ignore_interrupt(number: int, frame: object) -> None:
    """Ignore an interrupt, in place of SIG_IGN, which programs that the rank starts would inherit."""


def _run(role: ChildRole, program: ForkedProgram) -> int:
    if role.order.number == CONTROLLER:
        return program.run_controller(role.order.argv, role.channel)
    return program.run_rank(role.order.argv, role.pipes, role.unsent)


# -- libraries that were imported before the fork -----------------------------------------------------------------------


def refresh_libraries(program: Preloads) -> None:
    """Reset state that a fork must not share: random states, and thread pools sized for one process."""
    threads = int(os.environ.get("OMP_NUM_THREADS", "1") or 1)
    _size_openblas(threads)
    program.refresh(threads)


def _size_openblas(threads: int) -> None:
    """Give the rank its own number of OpenBLAS threads: the fork server loads it with one, so that none runs at the fork."""
    if threads <= 1:
        return
    pattern = re.compile(r"\S*openblas\S*\.so\S*")
    libraries = set(pattern.findall(Path("/proc/self/maps").read_text()))
    # A wheel of NumPy or SciPy brings an OpenBLAS of its own, with prefixed names, and 64-bit indices add a
    # suffix. A system's library has the plain name.
    names = (
        "scipy_openblas_set_num_threads64_",
        "scipy_openblas_set_num_threads",
        "openblas_set_num_threads",
    )
    for path in libraries:
        library = ctypes.CDLL(path)
        for name in names:
            if hasattr(library, name):
                getattr(library, name)(threads)
                break
