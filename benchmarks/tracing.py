"""Costs of recording: nanoseconds per span where it happens, and the later work on other threads.

Run it as ``python benchmarks/tracing.py [--json FILE]``; it prints one JSON object. Every figure is the median of several rounds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from hvdlab.collectives.planes.base import PhaseTimes
from hvdlab.collectives.tracing.chrome_trace import ChromeTrace
from hvdlab.collectives.tracing.record_format import decode
from hvdlab.collectives.tracing.recorder import Recorder
from hvdlab.collectives.tracing.timeline_file import TimelineFile
from hvdlab.collectives.types import DType, OpKind

TENSORS = 161
"""Gradients of a ResNet-50, the usual number of names in flight."""


def per_item(action: Callable[[], object], items: int, rounds: int) -> float:
    """Return median nanoseconds per item of ``action``, which does ``items`` of them."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter_ns()
        action()
        times.append((time.perf_counter_ns() - begin) / items)
    return round(statistics.median(times), 1)


def measure(spans: int, rounds: int) -> dict[str, float | int | str]:
    recorder = Recorder(rank=0, capacity=spans)
    texts = [f"gradients.layer{number}.weight" for number in range(TENSORS)]
    names = [recorder.name_id(text, "train.py:33") for text in texts]
    phases = PhaseTimes(pack=1000, transfer=5000, unpack=1000, wait=300)
    base = time.monotonic_ns()

    def single() -> None:
        record_with(recorder.span)

    def empty() -> None:
        record_with(nothing)

    def nothing(*arguments: object) -> None:
        """Do nothing: the cost of the loop and of a call with as many arguments."""

    def record_with(record: Callable[..., None]) -> None:
        name = names[0]
        for number in range(spans):
            begin = base + number * 100
            record(
                name, OpKind.ALLREDUCE, DType.F32, 0, number, 0, 4096,
                begin, begin + 50_000, begin + 60_000, begin + 90_000, phases, True,
            )  # fmt: skip

    def fused() -> None:
        for number in range(spans // TENSORS):
            begin = base + number * 100
            recorder.spans(
                OpKind.ALLREDUCE, DType.F32, 0, number, 0,
                begin + 50_000, begin + 60_000, begin + 90_000, phases, True,
                [(name, 4096, begin) for name in names],
            )  # fmt: skip

    def off() -> None:
        recorder.enabled = False
        single()
        recorder.enabled = True

    def look_up() -> None:
        for _ in range(spans // TENSORS):
            for text in texts:
                recorder.name_id(text, "train.py:33")

    result: dict[str, float | int | str] = {
        "python": platform.python_version(),
        "spans": spans,
        "span_ns": per_item(single, spans, rounds),
        "span_of_fused_batch_ns": per_item(fused, spans // TENSORS * TENSORS, rounds),
        "name_and_site_ns": per_item(look_up, spans // TENSORS * TENSORS, rounds),
        "span_when_off_ns": per_item(off, spans, rounds),
        "empty_call_ns": per_item(empty, spans, rounds),
    }
    recorder.drain()
    fused()
    pending = recorder.pending()
    begin = time.perf_counter_ns()
    batches = recorder.drain()
    result["drain_per_span_ns"] = round((time.perf_counter_ns() - begin) / pending, 1)
    result["bytes_per_span"] = round(sum(map(len, batches)) / pending, 1)
    result["decode_per_span_ns"] = per_item(lambda: [decode(data) for data in batches], pending, rounds)

    def convert() -> None:
        trace = ChromeTrace()
        for data in batches:
            msgspec.json.encode(trace.feed(decode(data), 0.0))
        msgspec.json.encode(trace.close())

    result["to_chrome_per_span_ns"] = per_item(convert, pending, rounds)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        trace = TimelineFile.start(path)
        for data in batches:
            trace.feed(0, data)
        trace.close()
        result["file_bytes_per_span"] = round(path.stat().st_size / pending, 1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--spans", type=int, default=1 << 16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    text = json.dumps(measure(arguments.spans, arguments.rounds), indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
