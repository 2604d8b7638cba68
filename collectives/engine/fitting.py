"""Whether a request fits the process set that it is for, as far as this rank can tell."""

from __future__ import annotations

from hvdlab.collectives.dtypes import OpKind, ReduceOp
from hvdlab.collectives.engine.entry import Entry, SetState
from hvdlab.collectives.engine.request import Request
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.planes.buffers import HOST
from hvdlab.collectives.reduce.integers import needs_width


def fit(group: SetState, entry: Entry) -> None:
    """Check a request against the members as they are now, and set the numbers that go along with its announcement.

    Raises:
        InvalidRequestError: It does not fit.
    """
    request = entry.request
    kind = request.kind
    if request.device != HOST:
        _fit_device(group, request)
    if kind is OpKind.BROADCAST and group.configured and request.root not in group.ranks:
        raise InvalidRequestError(
            f"root {request.root} is not in process set {group.id}; its ranks are {list(group.ranks)}."
        )
    if kind is OpKind.SENDRECV:
        _fit_message(group, request)
    if kind is OpKind.ALLGATHER or kind is OpKind.ALLTOALL:
        assert request.input is not None
        rows = request.input.shape[0] if request.input.shape else 1
        if kind is OpKind.ALLGATHER:
            entry.extra = (rows,)
        else:
            entry.extra = _splits(request.splits, rows, group)


def _fit_message(group: SetState, request: Request) -> None:
    if request.group is not None:
        raise InvalidRequestError("a message can't be one of a group of tensors.")
    if len(request.ranks) == 1:
        _fit_receive_from_any(group, request)
        return
    source, target = request.ranks
    for rank in request.ranks:
        if group.configured and rank not in group.ranks:
            raise InvalidRequestError(
                f"rank {rank} is not in process set {group.id}; its ranks are {list(group.ranks)}."
            )
    if source == target:
        raise InvalidRequestError(f"rank {source} can't send to itself.")
    if group.configured and group.ranks[group.index] not in request.ranks:
        raise InvalidRequestError(
            f"rank {group.ranks[group.index]} is neither rank {source}, which sends, nor rank {target}, which receives."
        )


def _fit_receive_from_any(group: SetState, request: Request) -> None:
    if not request.channel:
        raise InvalidRequestError("a receive from any rank needs a channel.")
    if group.configured and group.ranks == request.ranks:
        raise InvalidRequestError(f"process set {group.id} has no other rank that could send.")
    if group.configured and group.ranks[group.index] != request.ranks[0]:
        raise InvalidRequestError(
            f"rank {group.ranks[group.index]} can't receive in place of rank {request.ranks[0]}."
        )


def _fit_device(group: SetState, request: Request) -> None:
    """Refuse what no plane of the device could execute."""
    if group.configured and request.device not in group.device_planes:
        raise InvalidRequestError(
            f"process set {group.id} has no data plane for tensors on {request.device}: some of its ranks offer none. "
            "Copy the tensor to the CPU."
        )
    if request.kind is OpKind.SENDRECV:
        raise InvalidRequestError(f"messages of tensors on {request.device}: copy them to the CPU.")
    if request.op is ReduceOp.ADASUM:
        raise InvalidRequestError(f"Adasum of tensors on {request.device}: copy them to the CPU.")
    if needs_width(request.dtype, request.op, request.prescale, request.postscale):
        raise InvalidRequestError(
            f"an average or scaled sum of integers on {request.device}: copy them to the CPU."
        )


def _splits(splits: tuple[int, ...] | None, rows: int, group: SetState) -> tuple[int, ...]:
    members = len(group.ranks)
    if splits is None:
        if members and rows % members:
            raise InvalidRequestError(
                f"alltoall without splits needs a first dimension that {members} members divide, not {rows}; give splits."
            )
        return (rows // members,) * members if members else ()
    if members and len(splits) != members:
        # The ranks are named: if one of them has died since the caller counted them, its number is missing here.
        raise InvalidRequestError(
            f"alltoall needs one split per member, not {len(splits)}: process set {group.id} has the ranks {list(group.ranks)}."
        )
    if any(rows_to < 0 for rows_to in splits) or sum(splits) != rows:
        raise InvalidRequestError(
            f"alltoall's splits {list(splits)} must not be negative, and add up to {rows} rows."
        )
    return splits
