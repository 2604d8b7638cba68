"""Costs of printing on a rank.

    python benchmarks/output.py                # cost per print, in microseconds
    python benchmarks/output.py --lines 200000 --rounds 7

Compared are a rank's stream (bare, with the capture of descriptors 1 and 2, and with a copy for the case of its death
besides, as ranks of a pool on this host have it), the stream that ipykernel gives
its kernels, and a plain file on /dev/null, taking turns within one run. Figures are medians over the rounds, of wall
clock and of CPU time of the whole process, sending included.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import zmq
from ipykernel.iostream import IOPubThread, OutStream
from jupyter_client.session import Session

from hvdlab.kernel_ext.rank.output import OutputQueue, RankStream
from hvdlab.kernel_ext.rank.pipes import FdCapture
from hvdlab.kernel_ext.wire import codec
from hvdlab.kernel_ext.wire.cells import Output
from hvdlab.kernel_ext.wire.crash_ring import CrashRing, make_area

LINES: dict[str, Callable[[int, io.TextIOBase], None]] = {
    "print(f'line {i}')": lambda i, file: print(f"line {i}", file=file),
    "print('line', i)": lambda i, file: print("line", i, file=file),
}


@contextlib.contextmanager
def rank_stream(fds: FdCapture | None, unsent: CrashRing | None = None) -> Iterator[io.TextIOBase]:
    """Yield a rank's stdout, whose pool takes everything at once."""

    class AcknowledgingEngine:
        size = 1

        def post(self, topic: str, body: bytes) -> None:
            output = codec.decode_to_pool(body)
            assert isinstance(output, Output)
            capture.acknowledge(output.cell, output.total)

    capture = OutputQueue(AcknowledgingEngine(), fds=fds, unsent=unsent)
    capture.start()
    capture.begin_cell("")
    stream = RankStream(capture, "stdout", None)
    stream.flush = capture.flush  # type: ignore[method-assign]  # the end of a cell
    try:
        yield stream
    finally:
        capture.close()


@contextlib.contextmanager
def kernel_stream() -> Iterator[io.TextIOBase]:
    """Yield ipykernel's stdout, with a subscriber that takes everything."""
    context = zmq.Context()
    session = Session(key=b"benchmark")
    publisher, subscriber = context.socket(zmq.PUB), context.socket(zmq.SUB)
    publisher.bind("inproc://iopub")
    subscriber.connect("inproc://iopub")
    thread = IOPubThread(publisher, session=session)
    thread.start()
    stream = OutStream(session, thread, "stdout", watchfd=False)
    try:
        yield stream
    finally:
        stream.close()
        thread.stop()
        thread.close()
        subscriber.close(0)
        context.term()


def measure(
    lines: int, write: Callable[[int, io.TextIOBase], None], stream: io.TextIOBase
) -> tuple[float, float]:
    """Return microseconds per line: wall clock of the loop, CPU until all is sent."""
    cpu, wall = time.process_time(), time.perf_counter()
    for i in range(lines):
        write(i, stream)
    wall = time.perf_counter() - wall
    stream.flush()
    return wall / lines * 1e6, (time.process_time() - cpu) / lines * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with contextlib.ExitStack() as stack:
        report = os.fdopen(os.dup(1), "w")
        streams = {
            "rank": stack.enter_context(rank_stream(None)),
            "ipykernel": stack.enter_context(kernel_stream()),
            "/dev/null": stack.enter_context(open(os.devnull, "w")),
        }
        fds = FdCapture()
        stack.callback(fds.close)
        streams["rank, with descriptors"] = stack.enter_context(rank_stream(fds))
        streams["rank, with a copy too"] = stack.enter_context(rank_stream(fds, CrashRing(make_area())))
        for _ in range(options.rounds):
            for text, write in LINES.items():
                for name, stream in streams.items():
                    found.setdefault((text, name), []).append(measure(options.lines, write, stream))
    for (text, name), figures in found.items():
        wall, cpu = (statistics.median(column) for column in zip(*figures, strict=True))
        print(f"{text:20} {name:24} {wall:6.2f} µs a line ({cpu:5.2f} µs of CPU)", file=report)
    report.close()


if __name__ == "__main__":
    sys.exit(main())
