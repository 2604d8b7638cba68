"""Which operations are complete: all ranks that take part have recorded them, and gone on."""

from __future__ import annotations

from hvdlab.collectives.tracing.chrome_trace import OperationMatcher, Placed, tensor_arrivals
from hvdlab.collectives.tracing.record_format import Members, Span
from hvdlab.collectives.types import DType, OpKind


def placed(kind: OpKind, sequence: int, submitted: int) -> Placed:
    span = Span(
        name="x",
        kind=kind,
        dtype=DType.F32,
        process_set=0,
        sequence=sequence,
        batch=0,
        nbytes=4,
        submitted_ns=submitted,
        ready_ns=submitted,
        started_ns=submitted,
        finished_ns=submitted + 1,
    )
    return Placed(span, 0, 0)


def test_a_message_is_complete_with_the_two_that_exchange_it() -> None:
    operations = OperationMatcher(60.0)
    operations.members(Members(0, 1, 3, 0))
    for sequence, kind in ((1, OpKind.SENDRECV), (2, OpKind.ALLREDUCE), (3, OpKind.BARRIER)):
        for rank in (0, 2):
            operations.add(rank, placed(kind, sequence, 10 * sequence + rank), 0.0)
    (message,) = operations.completed()  # the sum still waits for rank 1
    assert (message.size, sorted(message.ranks)) == (2, [0, 2])
    (by_rank,) = message.tensors()
    came = tensor_arrivals(by_rank, message.size)
    assert came is not None
    assert (came.last, came.ranks_missing) == (2, False)
