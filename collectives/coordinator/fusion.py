"""From rounds that are ready to what each rank is told to execute."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlab.collectives.coordinator.events import Outbox
from hvdlab.collectives.coordinator.rounds import Round
from hvdlab.collectives.coordinator.signatures import FuseKey
from hvdlab.collectives.protocol.messages import Batch, Execute

FUSION_THRESHOLD = 64 * 1024 * 1024
"""Bytes of tensors that are executed as one operation at most (unless one tensor alone is larger)."""

Table = tuple[tuple[int, ...], ...]


def fuse(ready: Sequence[Round], threshold: int, *, separate_groups: bool = False) -> list[list[Round]]:
    """Gather allreduces of one kind into batches of up to ``threshold`` bytes.

    Batches are in the order in which their first rounds became ready; within a batch that order holds too. A
    threshold of 0 fuses nothing. With ``separate_groups`` tensors of a group are fused with each other only.
    """
    batches: list[list[Round]] = []
    open_batches: dict[tuple[FuseKey, str], tuple[list[Round], int]] = {}
    for current in ready:
        if current.info.fuse_key is None:
            batches.append([current])
            continue
        key = (current.info.fuse_key, current.info.group if separate_groups else "")
        nbytes = current.info.nbytes
        batch, filled = open_batches.get(key, (None, 0))
        if batch is not None and filled + nbytes <= threshold:
            batch.append(current)
        else:
            batch, filled = [current], 0
            batches.append(batch)
        open_batches[key] = (batch, filled + nbytes)
    return batches


def execute(
    process_set: int,
    epoch: int,
    sequence: int,
    batches: Sequence[Sequence[Round]],
    ranks: tuple[int, ...],
    peers: tuple[int, ...],
    outbox: Outbox,
) -> None:
    """Tell all members to execute ``batches``; one message for all if their local ids agree."""
    if len(batches) == 1 and len(batches[0]) == 1:
        (only,) = batches[0]
        if only.agree and not only.extras:  # a short way for the common case
            one = Batch((only.local,), (), _payloads(batches[0], ranks))
            outbox.send(peers, Execute(process_set, epoch, sequence, (one,)))
            return
    tables = [_tables(batch, ranks) for batch in batches]
    payloads = [_payloads(batch, ranks) for batch in batches]
    if all(current.agree for batch in batches for current in batch):
        same = tuple(
            [
                Batch(tuple([current.local for current in batch]), table, payload)
                for batch, table, payload in zip(batches, tables, payloads, strict=True)
            ]
        )
        outbox.send(peers, Execute(process_set, epoch, sequence, same))
        return
    for rank, peer in zip(ranks, peers, strict=True):
        own = tuple(
            [
                Batch(tuple([current.heads[rank].local for current in batch]), table, payload)
                for batch, table, payload in zip(batches, tables, payloads, strict=True)
            ]
        )
        outbox.send((peer,), Execute(process_set, epoch, sequence, own))


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
    """Every member's tensor, if all came along and nothing was fused with them."""
    payloads = batch[0].payloads
    if payloads is None or len(batch) != 1 or len(payloads) != len(ranks):
        return ()
    return tuple([payloads[rank] for rank in ranks])
