"""Sees when the whole machine stands still: a process that does nothing but look at the clock, ten times a second.

No process can be notified in such a time, and a campaign's measurements of it are void.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

EVERY = 0.1  # seconds between two readings of the clock
LEAST = 0.5
"""Seconds that are no standstill yet."""


def start(mailbox: str, mark: str) -> subprocess.Popen[bytes]:
    """Start it; it ends with its standard input.

    Args:
        mailbox: Socket for its reports.
        mark: Variable that it is not to have, so that it does not count as one of the pool's processes.
    """
    environ = {name: value for name, value in os.environ.items() if name != mark}
    command = [sys.executable, "-S", __file__, mailbox]
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=environ)


def watch(mailbox: str) -> None:
    os.set_blocking(0, False)
    before = time.monotonic()
    while _lives():
        time.sleep(EVERY)
        now = time.monotonic()
        if now - before - EVERY >= LEAST:
            letter = {"rank": -1, "what": "standstill", "at": now, "seconds": now - before}
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.sendto(json.dumps(letter).encode(), mailbox)
        before = now


def _lives() -> bool:
    try:
        return bool(os.read(0, 1))
    except BlockingIOError:
        return True


if __name__ == "__main__":
    watch(sys.argv[1])
