"""Costs of the coordinator per announcement, without and with its sockets.

    python benchmarks/coordinator.py            # some seconds
    python benchmarks/coordinator.py --profile  # and where the time goes

``core`` decodes announcements, runs the state machine and encodes its messages. ``server`` adds the selector and the
sockets; the ranks are socket pairs in this process, whose own sends and receives are not counted. Each round, every
rank announces one 4-byte allreduce, and one ``Execute`` goes to all. A figure is the median over rounds.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import socket
import statistics
import time
from collections.abc import Callable

from hvdlab.collectives.coordinator.events import PeerConnected, Received, Send
from hvdlab.collectives.coordinator.process import CoordinatorOptions, ServerOptions
from hvdlab.collectives.coordinator.server import CoordinatorServer
from hvdlab.collectives.coordinator.state import CoordinatorState
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.codec import decode_from_rank, encode

DEFINITION = m.Definition(0, m.Signature(0, "loss", 8, 1, (1,)), "cell [1] line 1")
FIRST = encode(m.Announce(0, 1, (0,), (DEFINITION,)))
NEXT = encode(m.Announce(0, 1, (0,)))


def hello(rank: int) -> m.Hello:
    return m.Hello(m.PROTOCOL_VERSION, "token", "rank", rank, "host", planes=("gloo",))


def core(ranks: int) -> Callable[[], float]:
    """Return a function that runs one round and returns its seconds."""
    state = CoordinatorState(CoordinatorOptions(size=ranks))
    for rank in range(ranks):
        state.handle(PeerConnected(rank, hello(rank)), 0.0)

    def say(frame: bytes) -> None:
        for rank in range(ranks):
            for effect in state.handle_all([Received(rank, decode_from_rank(frame[4:]))], 1.0):
                if type(effect) is Send:
                    encode(effect.message)
            state.next_deadline()

    def one_round() -> float:
        begun = time.perf_counter()
        say(NEXT)
        return time.perf_counter() - begun

    say(FIRST)
    return one_round


def server(ranks: int) -> Callable[[], float]:
    """Return the same over sockets: every rank's message arrives by itself, as in the worst case."""
    serving = CoordinatorServer(ServerOptions("token", state=CoordinatorOptions(size=ranks)))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # an abstract address that the kernel chooses
    listener.listen(ranks)
    serving.listen(listener)
    peers = []
    for rank in range(ranks):
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(listener.getsockname())
        peer.send(encode(hello(rank)))
        peers.append(peer)
        serving.serve_once(1.0)
        serving.serve_once(1.0)

    def say(frame: bytes) -> float:
        spent = 0.0
        for peer in peers:
            peer.send(frame)
            begun = time.perf_counter()
            serving.serve_once(serving.timeout())
            spent += time.perf_counter() - begun
        for peer in peers:
            peer.recv(65536)
        return spent

    say(FIRST)
    return lambda: say(NEXT)


def measure(build: Callable[[int], Callable[[], float]], ranks: int, rounds: int) -> dict[str, float]:
    one_round = build(ranks)
    times = [one_round() for _ in range(rounds)][rounds // 10 :]
    announcement = statistics.median(times) / ranks
    return {
        "us_per_announcement": round(announcement * 1e6, 2),
        "messages_per_second": round(1 / announcement),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    figures: dict[str, object] = {"python": platform.python_version(), "machine": platform.machine()}
    for build in (core, server):
        for ranks in arguments.ranks:
            figures[f"{build.__name__}, {ranks} ranks"] = measure(build, ranks, arguments.rounds)
    print(json.dumps(figures, indent=1))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(figures, file, indent=1)
    if arguments.profile:
        one_round = server(2)
        with cProfile.Profile() as profile:
            for _ in range(arguments.rounds):
                one_round()
        pstats.Stats(profile).sort_stats("tottime").print_stats(18)


if __name__ == "__main__":
    main()
