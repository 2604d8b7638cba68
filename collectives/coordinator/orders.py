"""From batches that are ready to the order that each rank gets."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlab.collectives.coordinator.events import Outbox
from hvdlab.collectives.coordinator.rounds import Round
from hvdlab.collectives.protocol.messages import Batch, Execute, Signature

Table = tuple[tuple[int, ...], ...]


def execute(
    process_set: int,
    epoch: int,
    sequence: int,
    batches: Sequence[Sequence[Round]],
    ranks: tuple[int, ...],
    peers: tuple[int, ...],
    outbox: Outbox,
    *,
    reported: bool = False,
) -> None:
    """Order all members to execute ``batches``; members whose local ids agree share a message.

    The end of each batch is ``reported`` by the member at position 0, if wanted.
    """
    if len(batches) == 1 and len(batches[0]) == 1:
        (only,) = batches[0]
        if only.agree and not only.extras:  # a short way for the common case
            one = Batch((only.local,), (), _payloads(batches[0], ranks), (), reported)
            outbox.send(peers, Execute(process_set, epoch, sequence, (one,)))
            return
    tables = [_tables(batch, ranks) for batch in batches]
    payloads = [_payloads(batch, ranks) for batch in batches]
    if all(current.agree for batch in batches for current in batch):
        same = tuple(
            [
                Batch(tuple([current.local for current in batch]), table, payload, (), reported)
                for batch, table, payload in zip(batches, tables, payloads, strict=True)
            ]
        )
        outbox.send(peers, Execute(process_set, epoch, sequence, same))
        return
    by_locals: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for rank, peer in zip(ranks, peers, strict=True):
        by_locals.setdefault(tuple([_locals(batch, rank) for batch in batches]), []).append(peer)
    for locals, alike in by_locals.items():
        own = tuple(
            [
                Batch(numbers, table, payload, _zeros(batch, numbers), reported)
                for batch, numbers, table, payload in zip(batches, locals, tables, payloads, strict=True)
            ]
        )
        outbox.send(tuple(alike), Execute(process_set, epoch, sequence, own))


def _locals(batch: Sequence[Round], rank: int) -> tuple[int, ...]:
    """The rank's local ids, by round of the batch; rounds for which it has none, since it has joined, count as -1, -2, …"""
    numbers = []
    lacking = 0
    for current in batch:
        head = current.heads.get(rank)
        if head is None:
            lacking -= 1
            numbers.append(lacking)
        else:
            numbers.append(head.local)
    return tuple(numbers)


def _zeros(batch: Sequence[Round], numbers: tuple[int, ...]) -> tuple[Signature, ...]:
    """The signatures for which the numbers below zero stand."""
    return tuple(
        [current.info.signature for current, number in zip(batch, numbers, strict=True) if number < 0]
    )


def _tables(batch: Sequence[Round], ranks: tuple[int, ...]) -> tuple[Table, ...]:
    for current in batch:
        if current.extras:
            break
    else:
        return ()
    return tuple(
        tuple((current.extras or {}).get(rank, ()) for rank in ranks) if current.extras else ()
        for current in batch
    )


def _payloads(batch: Sequence[Round], ranks: tuple[int, ...]) -> tuple[bytes, ...]:
    """Every member's tensor, if all came along and nothing is fused with them; zeros for members that have joined."""
    only = batch[0]
    payloads = only.payloads
    if only.info.between:  # a message: only the sender has a tensor
        sent = (payloads or {}).get(only.info.signature.root)
        return () if sent is None else (sent,)
    if payloads is None or len(batch) != 1 or len(payloads) + len(only.absent) != len(ranks):
        return ()
    if not only.absent:
        return tuple([payloads[rank] for rank in ranks])
    zeros = bytes(only.info.nbytes)
    return tuple([payloads.get(rank, zeros) for rank in ranks])
