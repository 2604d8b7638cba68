"""Messages that bind values on ranks, or bring values from there."""

from __future__ import annotations

import msgspec

from hvdlab.kernel_ext.wire.channel import Payload, RankReply, RankRequest
from hvdlab.kernel_ext.wire.compare import SharedRange


class PushValue(RankRequest, frozen=True):
    """Bind ``names[i]`` to the value pickled in ``pickles[i]``.

    With a ``transfer_id`` the pool has brought one pickle of all values and its buffers before, as :class:`WriteChunk`.
    """

    names: tuple[str, ...]
    pickles: tuple[bytes, ...]
    transfer_id: int = 0


class WriteChunk(RankRequest, frozen=True):
    """A piece of the value that a :class:`PushValue` or a :class:`LoadSnapshot` with this ``transfer_id`` will take: ``data`` of one part at an offset.

    ``sizes`` are the bytes of all parts. The rank answers with a :class:`Acked`; from then on ``shared`` memory may change.
    """

    transfer_id: int
    sizes: tuple[int, ...]
    part: int
    offset: int
    data: bytes
    shared: SharedRange | None = None


class PullValue(RankRequest, frozen=True):
    """Evaluate each expression and send the values back."""

    names: tuple[str, ...]


class ReadChunk(RankRequest, frozen=True):
    """Ask for a :class:`TransferChunk` of the parts that the :class:`Value` with ticket ``transfer_id`` did not carry.

    ``share`` says that the pool is on the rank's host and can look into its memory.
    """

    transfer_id: int
    part: int
    offset: int
    length: int
    share: bool = False


class ReleaseTransfer(Payload, frozen=True):
    """The pool no longer needs anything of this transfer."""

    transfer_id: int


class TakeSnapshot(RankRequest, frozen=True):
    """Ask for all variables and modules of a rank, also while it runs a cell: :class:`Snapshot`."""


class Snapshot(RankReply, frozen=True):
    """Answer to TakeSnapshot: ``sizes`` are the bytes of its parts, which the pool fetches (:class:`ReadChunk`) and then releases.

    ``names`` and ``modules`` are in it; ``failed`` has name to reason for the variables that are not. With an ``error`` there is nothing.
    """

    sizes: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    failed: dict[str, str] = msgspec.field(default_factory=dict)
    error: str = ""


class LoadSnapshot(RankRequest, frozen=True):
    """Bind the variables of another rank, which the pool has brought as :class:`WriteChunk` of this transfer: :class:`SnapshotLoaded`.

    The rank binds it when it enters a cell that it joins.
    """

    transfer_id: int


class SnapshotLoaded(RankReply, frozen=True):
    """Answer to LoadSnapshot: modules that could not be imported, with the reasons; ``error`` says why nothing was taken, if so.

    ``missing``: parts of the transfer did not arrive, as where the coordinator died that was to pass them on.
    """

    failed: dict[str, str] = msgspec.field(default_factory=dict)
    error: str = ""
    missing: bool = False


class Acked(RankReply, frozen=True):
    """Answer to PushValue and WriteChunk, and to a question about an examination that can't be answered.

    ``error`` is empty if all is well.
    """

    error: str = ""


class Value(RankReply, frozen=True):
    """Answer to PullValue: pickles by name, or an error line for the names that could not be sent.

    A value that is too large for a message has neither, but ``sizes``: the bytes of a pickle and of its buffers, which the
    pool fetches (:class:`ReadChunk`) and then releases (:class:`ReleaseTransfer`). Only in the answer about a single name.
    """

    pickles: tuple[bytes | None, ...]
    errors: tuple[str, ...]
    sizes: tuple[int, ...] = ()


class TransferChunk(RankReply, frozen=True):
    """Answer to ReadChunk; with neither if the rank no longer keeps the value. ``shared`` memory is valid until the next one."""

    data: bytes | None
    shared: SharedRange | None = None
