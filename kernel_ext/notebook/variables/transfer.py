"""Variables between the pool and its ranks: small ones in one message, large ones in pieces.

A large value is in this process only once: its arrays are received at their final place.
"""

from __future__ import annotations

import contextlib
import pickle
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # no stubs

from hvdlab.collectives.errors import HvdlabError
from hvdlab.collectives.text import format_ranks
from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.notebook.cells.results import ImportDisplay, ValueUnpickler
from hvdlab.kernel_ext.notebook.requests import RankRequests
from hvdlab.kernel_ext.wire.pickling import INLINE, dump_parts
from hvdlab.kernel_ext.wire.values import (
    NOT_SHARED,
    Acked,
    LoadSnapshot,
    PullValue,
    PushValue,
    ReadChunk,
    ReleaseTransfer,
    SharedBuffer,
    SharedBufferReader,
    Snapshot,
    SnapshotLoaded,
    TakeSnapshot,
    TransferChunk,
    Value,
    WriteChunk,
    rough_size,
)
from hvdlab.launch.local import available_memory

IN_FLIGHT = 32 << 20
"""Bytes that are on their way from all ranks together at most."""

PIECE = 8 << 20
LEAST_PIECE = 256 << 10
LOST = "it is lost"


def pull(
    questions: RankRequests,
    name: str,
    ranks: Sequence[int],
    *,
    near: Collection[int] = (),
    imports: ImportDisplay | None = None,
) -> dict[int, Any]:
    """Return the value of an expression on these ranks, by rank.

    Args:
        questions: Asks the ranks.
        name: The expression.
        ranks: The ranks.
        near: Ranks whose memory this process can look into.
        imports: Shows which modules the values import here; None shows nothing.

    Raises:
        LookupError: The value does not exist on a rank, can't be sent, or there is no room for it here.
    """
    transfers: list[int] = []
    lent = True  # unless the answers show that all values came at once: after an interrupt, ranks must release theirs

    def make(ticket: int) -> PullValue:
        transfers.append(ticket)
        return PullValue(ticket, (name,))

    try:
        answers = questions.ask(make, ranks, Deadline(None))
        found = {rank: a for rank, a in sorted(answers.items()) if isinstance(a, Value)}
        sizes = {rank: answer.sizes for rank, answer in found.items() if answer.sizes}
        lent = bool(sizes)
        for rank in ranks:
            if rank not in found:
                raise LookupError(f"rank {rank}: {name}: {_refused(answers).get(rank, LOST)}")
            if error := found[rank].errors[0]:
                raise LookupError(f"rank {rank}: {name}: {error}")
        parts = _fetch_all(questions, name, transfers[0], sizes, near, None) if sizes else {}
    finally:
        # An interrupt can come before `make`: then there is no transfer to release.
        for transfer_id in transfers if lent else ():
            questions.send(ReleaseTransfer(transfer_id), ranks)
    values: dict[int, Any] = {}
    for rank, answer in found.items():
        # The bytes come from a rank that this pool started: code that the user runs with the same rights.
        if rank in parts:
            # Popped: otherwise the pickles of all ranks would stay in memory beside their values.
            stream, *buffers = parts.pop(rank)
            values[rank] = _unpickled(stream, buffers, imports)
        elif answer.pickles[0] is not None:
            values[rank] = _unpickled(answer.pickles[0], (), imports)
    return values


def _unpickled(stream: bytes | bytearray, buffers: Iterable[bytearray], imports: ImportDisplay | None) -> Any:
    if imports is None:
        return pickle.loads(stream, buffers=buffers)  # noqa: S301
    return ValueUnpickler(stream, imports, buffers).load()


def _fetch_all(
    questions: RankRequests,
    name: str,
    transfer_id: int,
    sizes: Mapping[int, tuple[int, ...]],
    near: Collection[int],
    patience: float | None,
) -> dict[int, list[bytearray]]:
    # Unpickling makes one more copy of the data in the pickle itself.
    needs = [sum(found) + found[0] for found in sizes.values()]
    total, room = sum(needs), available_memory()
    if total + IN_FLIGHT > room:
        each = max(needs)
        raise LookupError(
            f"{name} takes {rough_size(each)}, and {rough_size(total)} for {format_ranks(list(sizes))} together, "
            f"but only {rough_size(room)} of memory are free here; pull it from fewer ranks at a time, or a part of it"
        )
    parts = {rank: [bytearray(size) for size in found] for rank, found in sizes.items()}
    far = {rank: found for rank, found in parts.items() if rank not in near}
    if shared := {rank: found for rank, found in parts.items() if rank in near}:
        try:
            with SharedBufferReader() as windows:
                _fetch(questions, name, transfer_id, shared, windows, patience)
        except OSError:  # their memory can't be looked into after all
            far = parts
    if far:
        _fetch(questions, name, transfer_id, far, None, patience)
    return parts


def _fetch(
    questions: RankRequests,
    name: str,
    transfer_id: int,
    parts: Mapping[int, list[bytearray]],
    windows: SharedBufferReader | None,
    patience: float | None,
) -> None:
    sizes = {rank: tuple(map(len, found)) for rank, found in parts.items()}
    length = max(LEAST_PIECE, min(PIECE if windows is None else IN_FLIGHT, IN_FLIGHT // len(sizes)))
    for part, offset in _positions(sizes.values(), length):
        asked = [rank for rank, found in sizes.items() if part < len(found) and offset < found[part]]
        answers = questions.ask(
            _fetching(transfer_id, part, offset, length, windows), asked, Deadline(patience)
        )
        for rank in asked:
            piece = answers.get(rank)
            if isinstance(piece, TransferChunk) and piece.shared is not None and windows is not None:
                windows.read(
                    piece.shared, memoryview(parts[rank][part])[offset : offset + piece.shared.length]
                )
            elif isinstance(piece, TransferChunk) and piece.data is not None:
                parts[rank][part][offset : offset + len(piece.data)] = piece.data
            else:
                gone = LOST if piece is None else "it does not keep the value any longer"
                why = _refused(answers).get(rank, gone)
                raise LookupError(f"rank {rank}: {name}: {why}")


def _fetching(
    transfer_id: int, part: int, offset: int, length: int, windows: SharedBufferReader | None
) -> Callable[[int], ReadChunk]:
    return lambda ticket: ReadChunk(ticket, transfer_id, part, offset, length, windows is not None)


def _positions(sizes: Any, length: int) -> Iterator[tuple[int, int]]:
    """Yield ``(part, offset)`` of every piece of the largest of these."""
    for part in range(max(map(len, sizes))):
        largest = max(found[part] for found in sizes if part < len(found))
        for offset in range(0, largest, length):
            yield part, offset


def push(
    questions: RankRequests, values: Mapping[str, Any], ranks: Sequence[int], *, near: Collection[int] = ()
) -> None:
    """Bind variables on these ranks; ``near`` are those that can look into this process's memory.

    Raises:
        HvdlabError: A value can't be pickled, or a rank could not take it.
    """
    names = tuple(values)
    try:
        parts = dump_parts(tuple(values.values()), move=False)
        small = sum(part.nbytes for part in parts) <= INLINE
        pickles = tuple(cloudpickle.dumps(value) for value in values.values()) if small else ()
    except Exception as error:
        raise HvdlabError(f"{', '.join(names)} can't be sent: {type(error).__name__}: {error}") from error
    if small:
        _check(names, questions.ask(lambda ticket: PushValue(ticket, names, pickles), ranks, Deadline(None)))
        return
    transfer_id = secrets.randbits(62)
    try:
        _raise_refused(names, _bring(questions, transfer_id, parts, ranks, near, None))
        _check(
            names,
            questions.ask(lambda ticket: PushValue(ticket, names, (), transfer_id), ranks, Deadline(None)),
        )
    finally:
        questions.send(ReleaseTransfer(transfer_id), ranks)


def _bring(
    questions: RankRequests,
    transfer_id: int,
    parts: Sequence[memoryview],
    ranks: Sequence[int],
    near: Collection[int],
    patience: float | None,
) -> dict[int, str]:
    """Send parts of a value to ranks, piece by piece; ranks have ``patience`` seconds to receive each.

    Returns:
        Rank to the reason, for ranks that could not receive a piece. They got no further pieces, nor did ranks that gave no
        answer.
    """
    if set(ranks) <= set(near):
        with contextlib.suppress(OSError):  # no descriptor or no memory is left: it goes as messages
            refused = _bring_pieces(questions, transfer_id, parts, ranks, SharedBuffer(IN_FLIGHT), patience)
            if NOT_SHARED not in refused.values():
                return refused
    return _bring_pieces(questions, transfer_id, parts, ranks, None, patience)


def _bring_pieces(
    questions: RankRequests,
    transfer_id: int,
    parts: Sequence[memoryview],
    ranks: Sequence[int],
    window: SharedBuffer | None,
    patience: float | None,
) -> dict[int, str]:
    sizes = tuple(part.nbytes for part in parts)
    length = PIECE if window is None else IN_FLIGHT
    refused: dict[int, str] = {}
    takers = list(ranks)
    for part, offset in _positions([sizes], length):
        ask = _bringing(transfer_id, sizes, part, offset, parts[part][offset : offset + length], window)
        answers = questions.ask(ask, takers, Deadline(patience))
        refused |= _refused(answers)
        takers = [rank for rank in takers if rank in answers and rank not in refused]
        if NOT_SHARED in refused.values():
            break
    return refused


def _bringing(
    transfer_id: int,
    sizes: tuple[int, ...],
    part: int,
    offset: int,
    data: memoryview,
    window: SharedBuffer | None,
) -> Callable[[int], WriteChunk]:
    if window is None:
        return lambda ticket: WriteChunk(ticket, transfer_id, sizes, part, offset, bytes(data))
    # Written before the question is sent: a rank reads it as soon as it has the range. All have answered before the next piece.
    shared = window.write(data)
    return lambda ticket: WriteChunk(ticket, transfer_id, sizes, part, offset, b"", shared)


def _refused(answers: Mapping[int, Any]) -> dict[int, str]:
    return {rank: a.error for rank, a in answers.items() if isinstance(a, Acked) and a.error}


def _check(names: Sequence[str], answers: Mapping[int, Any]) -> None:
    _raise_refused(names, _refused(answers))


def _raise_refused(names: Sequence[str], refused: Mapping[int, str]) -> None:
    if refused:
        text = next(iter(refused.values()))
        raise HvdlabError(f"{format_ranks(list(refused))} could not take {', '.join(names)}: {text}")


@dataclass(frozen=True, slots=True)
class Brought:
    """Outcome of sending one rank's variables to others.

    Attributes:
        failed: Name of each variable or module that was not sent, with the reason.
        refused: Ranks that have none of them, since they could not load them or died meanwhile, with the reason.
        missed: Those of these ranks that the snapshot did not reach, or whose answer did not come: another try can succeed.
    """

    failed: Mapping[str, str]
    refused: Mapping[int, str]
    missed: frozenset[int] = frozenset()


def bring_known(
    questions: RankRequests, source: int, ranks: Sequence[int], patience: float, *, near: Collection[int] = ()
) -> Brought:
    """Send a snapshot of ``source``'s variables, which can be running a cell, to ranks that run none, by way of this process.

    Args:
        patience: Seconds that a rank has for each answer, and to send or receive each piece.
        near: The ranks whose memory this process can read, and that can read its own.

    Raises:
        HvdlabError: There is no snapshot, so that no rank got one; the text has the reason.
    """
    known = questions.ask(TakeSnapshot, [source], Deadline(patience)).get(source)
    if isinstance(known, Acked):
        raise HvdlabError(f"what rank {source} knows can't be sent: {known.error}")
    if not isinstance(known, Snapshot):
        raise HvdlabError(f"rank {source} did not answer")
    if known.error:
        raise HvdlabError(f"what rank {source} knows can't be sent: {known.error}")
    try:
        found = _fetch_all(
            questions, f"what rank {source} knows", known.ticket, {source: known.sizes}, near, patience
        )
    except LookupError as error:
        raise HvdlabError(str(error)) from error
    finally:
        questions.send(ReleaseTransfer(known.ticket), [source])
    failed = dict(known.failed)
    transfer_id = secrets.randbits(62)
    try:
        refused = _bring(
            questions, transfer_id, [memoryview(part) for part in found[source]], ranks, near, patience
        )
        takers = [rank for rank in ranks if rank not in refused]
        answers = questions.ask(lambda ticket: LoadSnapshot(ticket, transfer_id), takers, Deadline(patience))
    finally:
        questions.send(ReleaseTransfer(transfer_id), ranks)
    missed = set()
    for rank in takers:
        answer = answers.get(rank)
        if not isinstance(answer, SnapshotLoaded):
            refused[rank] = "it did not answer"
            missed.add(rank)
        elif answer.error:
            refused[rank] = answer.error
            if answer.missing:
                missed.add(rank)
        else:
            failed |= answer.failed
    return Brought(failed, refused, frozenset(missed))
