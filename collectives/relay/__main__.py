"""``python -m hvdlab.collectives.relay``: the process of a host's relay.

It reads one line of JSON (:class:`RelayLaunch`) from standard input, connects to the coordinator, and serves ranks at the socket that its
starter has opened. Further bytes on standard input are questions for a sign of life, which it answers on standard output. It ends with the
coordinator's connection, or when standard input has ended and the last rank has gone.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys

import msgspec

from hvdlab.collectives.coordinator.server import LONGEST_LINE
from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.errors import StartError
from hvdlab.collectives.protocol.connect import connect
from hvdlab.collectives.protocol.messages import PROTOCOL_VERSION, Hello
from hvdlab.collectives.relay.launch import RelayLaunch
from hvdlab.collectives.relay.server import RelayServer
from hvdlab.collectives.visible import visible

CONNECT_WITHIN = 20.0
"""Seconds for connecting to the coordinator; then ranks that wait at the relay's socket have still time to do that by themselves."""


def main() -> int:
    """Run the relay; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    launch = msgspec.json.decode(_read_line(0), type=RelayLaunch)
    listener = socket.socket(fileno=launch.listener)
    try:
        hello = Hello(PROTOCOL_VERSION, launch.token, "relay", host=launch.host, pid=os.getpid())
        try:
            up, _ = connect(
                launch.coordinator,
                hello,
                certificate=launch.certificate or None,
                deadline=Deadline(CONNECT_WITHIN),
                dead_after=launch.dead_after,
            )
        except StartError as error:
            log(f"{error} The ranks of {launch.host} connect by themselves")
            return 1
        server = RelayServer(up, log)
        server.listen(listener)
        server.answer(0, 1)
        server.serve()
    finally:
        listener.close()
        shutil.rmtree(launch.directory, ignore_errors=True)
    return 0


def log(text: str) -> None:
    """Write one line for the operator, with anything unusual in it escaped."""
    print(f"hvdlab relay: {visible(text, LONGEST_LINE)}", file=sys.stderr, flush=True)


def _read_line(descriptor: int) -> bytes:
    """A line, and not a byte behind it."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(descriptor, 1)
        if not piece:
            sys.exit("hvdlab relay: no settings on standard input; it is started by RelayProcess")
        line += piece
    return line


if __name__ == "__main__":
    sys.exit(main())
