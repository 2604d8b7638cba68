"""``python -m hvdlab.launch.host_agent.zygote_process SOCKET AGENT MODULES -- COMMAND``: imports, then forks itself to be ranks.

``SOCKET`` is the number of an inherited socket to the agent, ``AGENT`` the agent's process id. ``MODULES`` are the imported modules, with
commas between the names, and ``COMMAND`` the command line that ranks run: its interpreter, with its options, is this one.

A rank is a grandchild whose parent ends at once, so that it becomes a child of the agent, which adopts orphans. It
waits until that has happened and the agent was sent its process id; then it runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import socket
import sys
from collections.abc import Sequence

from hvdlab.bindings.framework_hooks import FrameworkPreloads
from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.system import die_with_parent, name_process
from hvdlab.launch.command import PythonCommand
from hvdlab.launch.forkserver.children import refresh_libraries, why_not
from hvdlab.launch.forkserver.program import load, load_later
from hvdlab.launch.host_agent import wire
from hvdlab.launch.host_agent.zygote import LARGEST
from hvdlab.launch.processes import describe_exit

DESCRIPTORS = 5
"""Descriptors that come with a rank, at most."""


def main() -> None:
    number, agent = int(sys.argv[1]), int(sys.argv[2])
    modules, words = tuple(filter(None, sys.argv[3].split(","))), sys.argv[5:]
    die_with_parent(agent)
    name_process("hvd-zygote", "hvdlab: imports for ranks")
    os.set_inheritable(number, False)
    sock = socket.socket(fileno=number)
    command = PythonCommand.parse(words)
    assert command is not None  # the agent has taken it apart, too
    # A copy from before the imports: a rank must not inherit the single OpenBLAS thread.
    environment = dict(os.environ)
    # A thread that runs at a fork is lost in the child, with the locks that it held.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    gc.disable()  # imported objects stay, so collecting during imports only costs time
    preloads = FrameworkPreloads()
    failed = load(preloads, modules).failed
    for name in preloads.for_training():
        load_later(name)
    if len(os.listdir("/proc/self/task")) > 1:
        print("hvdlab: a preloaded module has started threads, which forks would lack", file=sys.stderr)
        sys.exit(1)
    gc.freeze()
    sock.send(wire.encode_payload(wire.Preloaded(failed)))
    spec, kept = _serve(sock)
    # In the rank again: a fork does not inherit the request, and the agent is its parent only from now on.
    die_with_parent(agent)
    os.environ.clear()
    os.environ.update(environment | spec.environment)
    command = dataclasses.replace(command, arguments=(*command.arguments, *map(str, kept)))
    name_process(os.path.basename(command.interpreter), " ".join(command.words))
    gc.enable()
    refresh_libraries(preloads)
    command.run()


def _serve(sock: socket.socket) -> tuple[wire.RankSpec, Sequence[int]]:
    """Fork ranks, and end the process once the agent is gone. Returns in a rank: its order, and its further descriptors."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(sock, LARGEST, DESCRIPTORS)
        if not data:
            os._exit(0)  # taking down a framework's modules one by one would take a while
        try:
            (spec,) = wire.decode_to_zygote(data).ranks
        except (ProtocolError, ValueError) as error:
            # The rank of this order is unknown. At the end of this process, the agent starts all that wait.
            print(
                f"hvdlab: the zygote ends: it was sent no order for one rank: {error}",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)
        if _fork(sock, spec.rank):
            sock.close()
            for descriptor, number in zip(descriptors, (0, 1, 2), strict=False):
                os.dup2(descriptor, number, inheritable=True)
                os.close(descriptor)
            # The stream was made for the agent's output; a rank's is a pipe.
            sys.stdout.reconfigure(line_buffering=False)  # type: ignore[union-attr]  # no test runner has replaced it
            return spec, descriptors[3:]
        for descriptor in descriptors:
            os.close(descriptor)


def _fork(sock: socket.socket, rank: int) -> bool:
    """Fork a rank and report it, or why there is none, to the agent. Returns whether this is the rank."""
    pipes: list[int] = []
    try:
        pipes += os.pipe2(os.O_CLOEXEC)
        pipes += os.pipe2(os.O_CLOEXEC)
        middle = os.fork()
    except OSError as error:  # the next rank may find room again
        for descriptor in pipes:
            os.close(descriptor)
        text = f"it could not be forked: {why_not(error)}"
        sock.send(wire.encode_payload(wire.RankNotStarted(rank, 1, text)))
        return False
    told, tell, leave_to_live, announced = pipes
    if middle == 0:
        try:
            child = os.fork()
        except OSError as error:
            os.write(tell, f"0 {why_not(error)}".encode())
            os._exit(1)
        if child:
            # Before the number is reported: the agent may signal the rank's group as soon as it knows that.
            os.setpgid(child, child)
            os.write(tell, str(child).encode())
            os._exit(0)
        for descriptor in (told, tell, announced):
            os.close(descriptor)
        # A rank that ran earlier could end before the agent is its parent, and its end be reaped as an
        # unknown orphan's.
        if not os.read(leave_to_live, 1):
            os._exit(1)  # the zygote has died; the agent starts this rank itself
        os.close(leave_to_live)
        return True
    # Before the read, which would otherwise wait for ever if the process in the middle is killed before it writes.
    os.close(tell)
    pid, _, text = os.read(told, 1024).decode().partition(" ")
    _, status = os.waitpid(middle, 0)  # from now on the rank is the agent's child
    if not pid:
        code = os.waitstatus_to_exitcode(status)
        text = f"its parent ended, {describe_exit(code, max(-code, 0))}"
    started = wire.RankStarted(rank, int(pid)) if int(pid or 0) else None
    sock.send(wire.encode_payload(started or wire.RankNotStarted(rank, 1, f"it could not be forked: {text}")))
    # Only a rank that the agent knows may live: without leave, one whose parent was killed before it wrote the number ends.
    if started is not None:
        with contextlib.suppress(BrokenPipeError):  # something has killed the rank
            os.write(announced, b"\0")
    for descriptor in (told, leave_to_live, announced):
        os.close(descriptor)
    return False


if __name__ == "__main__":
    main()
