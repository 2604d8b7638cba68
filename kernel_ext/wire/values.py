"""Messages that bind values on ranks, or bring values from there."""

from __future__ import annotations

import msgspec

from hvdlab.kernel_ext.wire.channel import Payload
from hvdlab.kernel_ext.wire.compare import SharedRange


class PushValue(Payload, frozen=True):
    """Bind ``names[i]`` to the value pickled in ``pickles[i]``.

    With a ``lot`` the pool has brought one pickle of all values and its buffers before, as :class:`WriteChunk`.
    """

    ticket: int
    names: tuple[str, ...]
    pickles: tuple[bytes, ...]
    lot: int = 0


class WriteChunk(Payload, frozen=True):
    """A piece of what a :class:`PushValue` or a :class:`LoadSnapshot` with this ``lot`` will take: ``data`` of one part at an offset.

    ``sizes`` are the bytes of all parts. The rank answers with a :class:`Acked`; from then on ``shared`` memory may change.
    """

    ticket: int
    lot: int
    sizes: tuple[int, ...]
    part: int
    offset: int
    data: bytes
    shared: SharedRange | None = None


class PullValue(Payload, frozen=True):
    """Evaluate each expression and send the values back."""

    ticket: int
    names: tuple[str, ...]


class ReadChunk(Payload, frozen=True):
    """Ask for a :class:`TransferChunk` of what the :class:`Value` with ticket ``lot`` did not carry.

    ``share`` says that the pool is on the rank's host and can look into its memory.
    """

    ticket: int
    lot: int
    part: int
    offset: int
    length: int
    share: bool = False


class ReleaseTransfer(Payload, frozen=True):
    """The pool no longer needs anything of this lot."""

    lot: int


class TakeSnapshot(Payload, frozen=True):
    """Ask for all variables and modules of a rank, also while it runs a cell: :class:`Snapshot`."""

    ticket: int


class Snapshot(Payload, frozen=True):
    """Answer to TakeSnapshot: ``sizes`` are the bytes of its parts, which the pool fetches (:class:`ReadChunk`) and then releases.

    ``names`` and ``modules`` are in it; ``failed`` has name to reason for what is not. With an ``error`` there is nothing.
    """

    ticket: int
    sizes: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    failed: dict[str, str] = msgspec.field(default_factory=dict)
    error: str = ""


class LoadSnapshot(Payload, frozen=True):
    """Take what another rank knows, which the pool has brought as :class:`WriteChunk` of this lot: :class:`SnapshotLoaded`.

    The rank binds it when it enters a cell that it joins.
    """

    ticket: int
    lot: int


class SnapshotLoaded(Payload, frozen=True):
    """Answer to LoadSnapshot: modules that could not be imported, with the reasons; ``error`` says why nothing was taken, if so.

    ``missing``: parts of the lot did not arrive, as where the coordinator died that was to pass them on.
    """

    ticket: int
    failed: dict[str, str] = msgspec.field(default_factory=dict)
    error: str = ""
    missing: bool = False


class Acked(Payload, frozen=True):
    """Answer to PushValue and WriteChunk, and to a question about an examination that can't be answered.

    ``error`` is empty if all is well.
    """

    ticket: int
    error: str = ""


class Value(Payload, frozen=True):
    """Answer to PullValue: pickles by name, or an error line for the names that could not be sent.

    A value that is too large for a message has neither, but ``sizes``: the bytes of a pickle and of its buffers, which the
    pool fetches (:class:`ReadChunk`) and then releases (:class:`ReleaseTransfer`). Only in the answer about a single name.
    """

    ticket: int
    pickles: tuple[bytes | None, ...]
    errors: tuple[str, ...]
    sizes: tuple[int, ...] = ()


class TransferChunk(Payload, frozen=True):
    """Answer to ReadChunk; with neither if the rank no longer keeps the value. ``shared`` memory is valid until the next one."""

    ticket: int
    data: bytes | None
    shared: SharedRange | None = None
