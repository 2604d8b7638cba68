"""Messages that bind values on ranks, or bring values from there."""

from __future__ import annotations

import msgspec

from hvdlab.kernel_ext.wire.channel import Payload
from hvdlab.kernel_ext.wire.compare import SharedRange


class PushValue(Payload, frozen=True):
    """Bind ``names[i]`` to the value pickled in ``pickles[i]``.

    With a ``lot`` the pool has brought one pickle of all values and its buffers before, as :class:`PushPart`.
    """

    ticket: int
    names: tuple[str, ...]
    pickles: tuple[bytes, ...]
    lot: int = 0


class PushPart(Payload, frozen=True):
    """A piece of what a :class:`PushValue` or a :class:`Learn` with this ``lot`` will take: ``data`` of one part at an offset.

    ``sizes`` are the bytes of all parts. The rank answers with a :class:`Done`; from then on ``shared`` memory may change.
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


class Fetch(Payload, frozen=True):
    """Ask for a :class:`Piece` of what the :class:`Value` with ticket ``lot`` did not carry.

    ``share`` says that the pool is on the rank's host and can look into its memory.
    """

    ticket: int
    lot: int
    part: int
    offset: int
    length: int
    share: bool = False


class Release(Payload, frozen=True):
    """The pool no longer needs anything of this lot."""

    lot: int


class AskKnown(Payload, frozen=True):
    """Ask for all variables and modules of a rank, also while it runs a cell: :class:`Known`."""

    ticket: int


class Known(Payload, frozen=True):
    """Answer to AskKnown: ``sizes`` are the bytes of its parts, which the pool fetches (:class:`Fetch`) and then releases.

    ``names`` and ``modules`` are in it; ``failed`` has name to reason for what is not. With an ``error`` there is nothing.
    """

    ticket: int
    sizes: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    failed: dict[str, str] = msgspec.field(default_factory=dict)
    error: str = ""


class Learn(Payload, frozen=True):
    """Take what another rank knows, which the pool has brought as :class:`PushPart` of this lot: :class:`Learnt`.

    The rank binds it when it enters a cell that it joins.
    """

    ticket: int
    lot: int


class Learnt(Payload, frozen=True):
    """Answer to Learn: modules that could not be imported, with the reasons; ``error`` says why nothing was taken, if so.

    ``missing``: parts of the lot did not arrive, as where the coordinator died that was to pass them on.
    """

    ticket: int
    failed: dict[str, str] = msgspec.field(default_factory=dict)
    error: str = ""
    missing: bool = False


class Done(Payload, frozen=True):
    """Answer to PushValue and PushPart, and to a question about an examination that can't be answered.

    ``error`` is empty if all is well.
    """

    ticket: int
    error: str = ""


class Value(Payload, frozen=True):
    """Answer to PullValue: pickles by name, or an error line for the names that could not be sent.

    A value that is too large for a message has neither, but ``sizes``: the bytes of a pickle and of its buffers, which the
    pool fetches (:class:`Fetch`) and then releases (:class:`Release`). Only in the answer about a single name.
    """

    ticket: int
    pickles: tuple[bytes | None, ...]
    errors: tuple[str, ...]
    sizes: tuple[int, ...] = ()


class Piece(Payload, frozen=True):
    """Answer to Fetch; with neither if the rank no longer keeps the value. ``shared`` memory is valid until the next one."""

    ticket: int
    data: bytes | None
    shared: SharedRange | None = None
