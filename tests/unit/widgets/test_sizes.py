"""A million spans: how many bytes each takes from the rank, in the kernel, and to the page."""

from __future__ import annotations

import struct
import tracemalloc

import pytest

from hvdlab.collectives.tracing.record_format import Span, encode
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.collectives.types import DType, OpKind
from hvdlab.widgets.recording_feed import ROWS_PER_MESSAGE, pack_rows

SPANS, RANKS, PER_BATCH = 1_000_000, 8, 1000
RANK_AT = 8  # position of a batch's rank
LAYERS = [f"DistributedOptimizer.model.layer{k}.weight" for k in range(160)]


def batch(first: int) -> bytearray:
    """Return rank 0's batch of ``PER_BATCH`` collectives, one each millisecond."""
    spans = []
    for k in range(first, first + PER_BATCH):
        at = 10**9 + k * 10**6
        layer = LAYERS[k % len(LAYERS)]
        spans.append(
            Span(
                layer,
                OpKind.ALLREDUCE,
                DType.F32,
                0,
                k + 1,
                k,
                4096,
                at,
                at + 9000,
                at + 12_000,
                at + 300_000,
            )
        )
    return bytearray(encode(0, spans))


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_million_spans_are_64_bytes_each_on_their_way_and_not_many_more_in_the_kernel() -> None:
    recording = Recording(limit=2 * SPANS)
    batches = [batch(first) for first in range(0, SPANS // RANKS, PER_BATCH)]
    tracemalloc.start()
    try:
        for data in batches:
            for rank in range(RANKS):
                struct.pack_into("<I", data, RANK_AT, rank)
                recording.feed(rank, bytes(data))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert recording.end == SPANS
    # Each is 64; a batch has a head, and gives the name and line of its spans once.
    each = sum(map(len, batches)) / (len(batches) * PER_BATCH)
    assert 64 <= each < 64 * 1.2, each
    assert held / SPANS < 128, held / SPANS
    row, to_page = 0, 0
    while row < recording.end:
        first, rows = recording.rows_since(row, ROWS_PER_MESSAGE)
        assert first == row
        to_page += len(pack_rows(rows, recording.origin_ns or 0))
        row += len(rows)
    assert to_page / SPANS <= 64
