"""A slow cable between two network namespaces; see ``support/network/namespaces.py``. Kernels do not always have the means (netem).

``support/network/slow_link.py NAMESPACE DEVICE NAMESPACE DEVICE DELAY RATE`` makes a TAP device in each and carries frames between
them, until its standard input ends. SIGUSR1 cuts the direction towards the second namespace, SIGUSR2 the other one; each
puts it together again when it comes again.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import os
import select
import signal
import struct
import sys
import time

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_CLONE_NEWNET = 0x40000000
_QUEUE_SECONDS = 0.5
"""Frames that would wait longer for the ones before them are lost, as in a router."""


class Direction:
    """One way through the cable."""

    def __init__(self, source: int, target: int, delay: float, rate: float) -> None:
        self.source, self.target = source, target
        self._delay, self._rate = delay, rate
        self._free = 0.0  # when the last frame is on its way
        self.cut = False

    def toggle(self, number: int, frame: object) -> None:
        self.cut = not self.cut

    def due(self, length: int, now: float) -> float | None:
        """Return when a frame arrives; ``None`` if it is lost."""
        begin = max(now, self._free)
        if self.cut:
            return None
        if begin - now > _QUEUE_SECONDS:
            return None
        self._free = begin + length * 8 / self._rate
        return self._free + self._delay


def device(namespace: str, name: str) -> int:
    """Return a new TAP device in a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace) as entered:
        if libc.setns(entered.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return descriptor


def carry(directions: list[Direction]) -> None:
    by_source = {direction.source: direction for direction in directions}
    poll = select.poll()
    poll.register(0, 0)  # its end is reported anyway
    for source in by_source:
        poll.register(source, select.POLLIN)
    order = itertools.count()
    flying: list[tuple[float, int, int, bytes]] = []
    while True:
        wait = None if not flying else max(0.0, flying[0][0] - time.monotonic()) * 1000
        for descriptor, _ in poll.poll(wait):
            if descriptor == 0:
                return
            try:
                frame = os.read(descriptor, 65536)
            except OSError:  # the device is down
                continue
            due = by_source[descriptor].due(len(frame), time.monotonic())
            if due is not None:
                heapq.heappush(flying, (due, next(order), by_source[descriptor].target, frame))
        while flying and flying[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(flying)
            try:
                os.write(target, frame)
            except OSError:  # the device is down: the frame is lost
                continue


def main() -> None:
    one_namespace, one, other_namespace, other, delay, rate = sys.argv[1:]
    ends = device(one_namespace, one), device(other_namespace, other)
    directions = [Direction(a, b, float(delay), float(rate)) for a, b in (ends, ends[::-1])]
    for number, direction in zip((signal.SIGUSR1, signal.SIGUSR2), directions, strict=True):
        signal.signal(number, direction.toggle)
    print("up", flush=True)
    carry(directions)


if __name__ == "__main__":
    main()
