"""``python -m hvdlab.collectives.coordinator``: the coordinator's process.

It reads one line of JSON (:class:`CoordinatorLaunch`) from standard input, listens on the sockets that its starter has opened, and
answers with one line (:class:`CoordinatorReady`) on standard output. It serves until standard input ends, its starter ends, or
it gets SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import shutil
import signal
import socket
import sys
from pathlib import Path

import msgspec

from hvdlab.collectives.coordinator.process import (
    CoordinatorLaunch,
    CoordinatorReady,
    ServerOptions,
    state_options,
)
from hvdlab.collectives.coordinator.server import CoordinatorServer
from hvdlab.collectives.errors import StartError
from hvdlab.collectives.failover.supervisor import Handover
from hvdlab.collectives.text import operator_log


def main() -> int:
    """Run the coordinator. Return the exit status."""
    launch = msgspec.json.decode(_read_line(0), type=CoordinatorLaunch)
    _raise_descriptor_limit()
    wakeup = _catch_sigterm()
    directory = Path(launch.directory)
    server: CoordinatorServer | None = None
    try:
        options = ServerOptions(
            launch.token,
            launch.client_token,
            ping_after=launch.ping_after,
            dead_after=launch.dead_after,
            tuning_log=launch.autotune_log,
            state=state_options(launch),
        )
        journal = os.environ.get("HVDLAB_COORDINATOR_LOG", "")
        server = CoordinatorServer(
            options, log=operator_log("coordinator", level=launch.log_level, journal=journal)
        )
        try:
            ready = _listen(server, launch, directory)
        except (OSError, StartError) as error:
            _answer(CoordinatorReady(error=str(error)))
            return 1
        server.on_alone = _leave_stderr
        server.stop_at_end_of(0, linger=launch.linger)
        server.stop_when_readable(wakeup)
        if launch.incarnation > 0 and _has_ended(0):
            return 1  # the starter has ended; the process in its place has started another successor, which needs the sockets
        # Any other coordinator ends with its starter, or has ranks that wait for no successor.
        if launch.linger and launch.keeps:
            handover = Handover(launch)
            server.watch(handover.socket.fileno(), handover.serve)
        _watch(server, launch)
        try:
            _answer(ready)
        except BrokenPipeError:  # the starter has ended
            return 1
        server.serve()
    finally:
        # A successor that has lost its starter before any peer found it leaves the directory, too: the process that supervises
        # the ranks now starts another successor there. A coordinator with an unsound state leaves it to that successor as well.
        found = launch.incarnation == 0 or (server is not None and server.connections.met)
        if not launch.keeps or server is None or (server.alone and found and not server.state.unsound):
            shutil.rmtree(directory, ignore_errors=True)  # otherwise the successor uses the directory, too
    return 0


def _listen(server: CoordinatorServer, launch: CoordinatorLaunch, directory: Path) -> CoordinatorReady:
    server.listen(socket.socket(fileno=launch.listener))
    if launch.tls_listener < 0:
        return CoordinatorReady()
    from hvdlab.collectives.protocol.endpoint import new_certificate, server_context

    remote = socket.socket(fileno=launch.tls_listener)
    certificate, key = launch.certificate, launch.key
    if not certificate:
        certificate, key = new_certificate(launch.tcp_host)
    server.listen(remote, server_context(directory, certificate, key))
    return CoordinatorReady(certificate, key)


def _watch(server: CoordinatorServer, launch: CoordinatorLaunch) -> None:
    """Stop when the starter's process ends, even if a child of it still holds the other end of this process's lifeline."""
    if not hasattr(os, "pidfd_open"):
        return
    try:
        descriptor = os.pidfd_open(launch.starter)
    except OSError:
        # The starter has ended already, or is hidden from this process; end of file on the lifeline decides.
        return
    server.stop_at_end_of(descriptor, linger=launch.linger)


def _catch_sigterm() -> int:
    """Return a descriptor that becomes readable on SIGTERM."""
    # Python repeats a wait that a signal interrupts, so that only a readable descriptor ends the server's.
    reader, writer = os.pipe()
    # set_wakeup_fd() demands it: a signal's handler must not wait for room in the pipe.
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    # An interrupt is for the ranks: the coordinator has to outlive it, so that they can recover.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return reader


def _raise_descriptor_limit() -> None:
    """Allow this process as many descriptors as the system lets it have: each rank takes one, and the usual limit is 1024."""
    # The low limit protects programs that use select(); this process waits by epoll and poll, which take any descriptor.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Refused where the system's own bound (fs.nr_open) has been lowered since: the low limit serves small jobs.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _leave_stderr() -> None:
    """Redirect stderr to ``/dev/null``: its reader has perhaps ended with the starter, or waits until no process has it open."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


def _read_line(descriptor: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        # By the descriptor: the loop watches it later for the starter's end, which a buffered reader could
        # have consumed.
        piece = os.read(descriptor, 65536)
        if not piece:
            sys.exit("hvdlab coordinator: no settings on standard input; it is started by CoordinatorProcess")
        line += piece
    return line


def _has_ended(descriptor: int) -> bool:
    """Return whether no process holds the other end of this pipe any more."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(0))


def _answer(ready: CoordinatorReady) -> None:
    os.write(1, msgspec.json.encode(ready) + b"\n")
    # Only this line is written to stdout: a reader that waits for its end can continue.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


if __name__ == "__main__":
    sys.exit(main())
