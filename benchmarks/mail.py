"""How long mail takes to a client that does not keep up with the ranks' events.

    python benchmarks/mail.py                # some seconds
    python benchmarks/mail.py --json FILE

One rank records as fast as the coordinator takes it in (batches of 64 KiB). The client spends a given time on each
batch, as one does that draws, so that events wait for it. Another rank posts mail, as cells do with their output; its
delay is a user's wait for a line. Both ranks are in this process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import struct
import threading
import time
from pathlib import Path

from hvdlab.collectives.client import Client
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.codec import decode_to_peer
from hvdlab.collectives.protocol.endpoint import ConnectionLost, Endpoint
from hvdlab.collectives.protocol.handshake import connect
from hvdlab.collectives.time_limits import Deadline

BATCH = struct.Struct("<4sHHIIIQQQ").pack(b"HVDS", 2, 0, 0, 0, 1000, 0, 0, 0) + bytes(64_000)
PAUSE = 0.02
"""Seconds between letters."""


def join(coordinator: CoordinatorProcess, rank: int) -> Endpoint:
    hello = m.Hello(m.PROTOCOL_VERSION, coordinator.token, "rank", rank, "h", os.getpid(), planes=("gloo",))
    return connect(coordinator.address, hello, deadline=Deadline(10))[0]


def record(rank: Endpoint, stop: threading.Event) -> None:
    """Send batches, each once the one before was taken in."""
    rank._sock.setblocking(True)
    number = 0
    try:
        while not stop.is_set():
            number += 1
            rank.send(m.Events(BATCH))
            rank.send(m.Ping(number))
            while not any(
                isinstance(message, m.Pong) and message.number == number
                for message in map(decode_to_peer, rank.receive())
            ):
                pass
    except ConnectionLost:  # the end of the measurement
        pass


def measure(letters: int, work: float) -> dict[str, float]:
    """Return delays of mail in milliseconds, with a client that works so many seconds on a batch."""
    delays: list[float] = []
    batches = [0]
    stop, arrived = threading.Event(), threading.Event()

    def take(rank: int, body: bytes) -> None:
        delays.append(1e3 * (time.perf_counter() - struct.unpack("<d", body)[0]))
        if len(delays) == letters:
            arrived.set()

    def draw(rank: int, batch: bytes) -> None:
        batches[0] += 1
        time.sleep(work)

    with (
        CoordinatorProcess.start(size=2) as coordinator,
        Client.connect(coordinator.address, coordinator.client_token) as client,
    ):
        client.on_mail("line", take)
        if work:
            client.on_events(draw)
        ranks = [join(coordinator, rank) for rank in (0, 1)]
        client.wait_for(lambda world: world.complete, 10)
        recording = threading.Thread(target=record, args=(ranks[0], stop))
        recording.start()
        time.sleep(2.0)  # until as much waits as ever does
        for _ in range(letters):
            ranks[1].send(m.Post("line", struct.pack("<d", time.perf_counter())))
            time.sleep(PAUSE)
        arrived.wait(120)
        stop.set()
        ranks[0].close()
        recording.join()
        ranks[1].close()
    delays.sort()
    return {
        "letters": len(delays),
        "batches": batches[0],
        "median_ms": round(statistics.median(delays), 2),
        "p99_ms": round(delays[int(0.99 * (len(delays) - 1))], 2),
        "worst_ms": round(delays[-1], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--letters", type=int, default=200)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    figures = {}
    for name, work in (("no events", 0.0), ("1 ms a batch", 0.001), ("10 ms a batch", 0.01)):
        figures[name] = measure(given.letters, work)
        print(f"{name:>14}: {figures[name]}", flush=True)
    if given.json:
        host = {"python": platform.python_version(), "cores": os.cpu_count()}
        given.json.write_text(json.dumps({"host": host, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
