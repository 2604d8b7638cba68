"""Messages that compare and show the variables of ranks.

A value is compared by its *leaves*: numbers, texts and arrays, each with a path such as ``.fc.weight`` or
``['lr']``. :class:`OpenComparison` opens an *examination*: while it lasts the rank's main thread does nothing else, so that
nothing changes, until the pool releases it (by :class:`~hvdlab.kernel_ext.wire.values.ReleaseTransfer`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from hvdlab.bindings.fingerprints import fingerprint
from hvdlab.kernel_ext.wire.channel import RankReply, RankRequest


class SharedRange(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The first ``length`` bytes of descriptor ``memory`` of process ``pid``, which must be called ``name``."""

    pid: int
    memory: int
    name: str
    length: int


class Leaf(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One part of a value that has no parts.

    Attributes:
        path: How to get there from the value.
        kind: ``array``, ``value``, ``opaque`` (of which only the type is known) or ``error``.
        type: Name of the Python type.
        digest: Fingerprint of the contents; empty if there are none to be compared.
        dtype, shape, device: Of arrays. Long texts have a dtype, too: ``text``, ``bytes`` or ``hex`` (of an int).
        nbytes: Size of the contents of arrays, and of texts that are too long to be shown.
        itemsize: Bytes of an element.
        block: Bytes of the blocks of an array that have fingerprints of their own.
        requires_grad: Of torch's tensors.
        text: The value, shortened, or the error.
        on_device: Whether ``digest`` was made on the array's device, by another method than on the host.
    """

    path: str
    kind: str
    type: str
    digest: bytes = b""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    device: str = ""
    nbytes: int = 0
    itemsize: int = 1
    block: int = 0
    requires_grad: bool | None = None
    text: str = ""
    on_device: bool = False


class OpenComparison(RankRequest, frozen=True):
    """Open an examination of the value of an expression, or of something ``special`` (``rng``, ``environment``)."""

    expression: str
    special: str = ""


class ComparisonOpened(RankReply, frozen=True):
    """Answer to OpenComparison.

    Attributes:
        digest: Fingerprint of the whole value; equal if and only if nothing differs.
        type_name: Name of the Python type.
        leaves: How many leaves there are.
        arrays: How many of them are arrays, of ``nbytes`` in all.
        error: Why there is no value; then there is no examination either.
        left_out: How many parts were not looked at, since there are too many.
        unknown: How many parts can't be compared, such as locks and open files.
        unknown_parts: The first of them: path and type, or path and error.
    """

    digest: bytes = b""
    type_name: str = ""
    leaves: int = 0
    arrays: int = 0
    nbytes: int = 0
    error: str = ""
    left_out: int = 0
    unknown: int = 0
    unknown_parts: tuple[str, ...] = ()


class AskLeaves(RankRequest, frozen=True):
    """Ask for the leaves of an examination, from leaf number ``first`` on."""

    transfer_id: int
    first: int


class LeafList(RankReply, frozen=True):
    """Answer to AskLeaves: a limited number of leaves; empty behind the last one."""

    leaves: tuple[Leaf, ...]


class AskBlocks(RankRequest, frozen=True):
    """Ask for the fingerprints of blocks: of ``leaves[rank]``, by their numbers; ``on_host`` if those of the bytes are needed, also of a device's arrays."""

    transfer_id: int
    leaves: dict[int, tuple[int, ...]]
    on_host: bool = False


class Blocks(RankReply, frozen=True):
    """Answer to AskBlocks: per leaf the blocks' fingerprints, and how many NaN and infinite elements there are."""

    digests: tuple[bytes, ...]
    nans: tuple[int, ...]
    infs: tuple[int, ...]


Range = tuple[int, int, int]
"""Number of a leaf, offset in it and length, in bytes."""


class Gather(RankRequest, frozen=True):
    """Ask for bytes of leaves, one behind the other, as :class:`~hvdlab.kernel_ext.wire.values.TransferChunk`."""

    transfer_id: int
    ranges: tuple[Range, ...]
    share: bool = False


class Compare(RankRequest, frozen=True):
    """Compare with another rank's bytes, which are in ``data`` or ``shared``.

    ``ranges[rank]`` has for each range of this rank's leaves the offset in these bytes.
    """

    transfer_id: int
    ranges: dict[int, tuple[tuple[Range, int], ...]]
    data: bytes = b""
    shared: SharedRange | None = None


class Difference(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How a range of an array differs from another rank's.

    Attributes:
        count: Elements whose bytes differ.
        first: The first of them, counted in elements from the beginning of the range.
        here, there: Its values, in words; ``there`` is the other rank's.
        largest: Largest absolute difference of numbers; None if the elements have none.
        relative: Largest difference relative to the larger of the two magnitudes.
    """

    count: int
    first: int = 0
    here: str = ""
    there: str = ""
    largest: float | None = None
    relative: float | None = None


class Compared(RankReply, frozen=True):
    """Answer to Compare, by range; ``error`` is set if the bytes could not be read."""

    differences: tuple[Difference, ...]
    error: str = ""


# -- looking, also while a cell runs ----------------------------------------------------------------------------------


class AskView(RankRequest, frozen=True):
    """Ask for a description of the value of an expression."""

    expression: str


class VariableView(RankReply, frozen=True):
    """Answer to AskView: some lines about the value, or in ``error`` why there are none.

    Attributes:
        lines: The kind of the value, then more about it.
        nbytes: Size of its arrays, or of itself.
        cell: Id of the cell that was running: the value may have been changing.
        names: Its attributes.
    """

    lines: tuple[str, ...] = ()
    nbytes: int = 0
    error: str = ""
    cell: str = ""
    names: tuple[str, ...] = ()


class AskVariables(RankRequest, frozen=True):
    """Ask for the user's variables; fingerprints for as long as they take no more than ``budget`` bytes of arrays."""

    budget: int


class Variable(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A variable: its type, its value in a few words, its size, and its fingerprint unless it is too large for that."""

    name: str
    type: str
    text: str
    nbytes: int
    digest: bytes = b""


class Variables(RankReply, frozen=True):
    """Answer to AskVariables, in the order in which they were made; ``cell`` as in VariableView."""

    variables: tuple[Variable, ...]
    cell: str = ""
    error: str = ""


class AskTensors(RankRequest, frozen=True):
    """Ask for the largest arrays and tensors."""

    most: int


class Tensor(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Memory of an array or tensor, or of ``count`` equal ones without a name together."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    device: str
    nbytes: int
    count: int = 1


class Tensors(RankReply, frozen=True):
    """Answer to AskTensors: the largest first; ``count`` and ``nbytes`` are those of all."""

    tensors: tuple[Tensor, ...]
    count: int = 0
    nbytes: int = 0
    cell: str = ""
    error: str = ""


InspectAnswer = ComparisonOpened | LeafList | Blocks | Compared | VariableView | Variables | Tensors


SPECIAL = ("rng", "environment")


def family(device: str) -> str:
    """``cuda`` of ``cuda:3``, to compare devices of ranks: each rank has a number of its own."""
    return device.partition(":")[0]


def same_key(leaf: Leaf) -> tuple[Any, ...]:
    """Return a key that is equal for leaves that do not differ. Of devices only the kind counts: each rank has its own."""
    return (
        leaf.path,
        leaf.kind,
        leaf.type,
        leaf.digest,
        leaf.dtype,
        leaf.shape,
        family(leaf.device),
        leaf.requires_grad,
        leaf.text if leaf.kind == "error" else "",
    )


def with_host_digest(leaf: Leaf, blocks: bytes) -> Leaf:
    """Return an array whose blocks' fingerprints were made of its bytes on the host."""
    return msgspec.structs.replace(leaf, digest=fingerprint(blocks), on_device=False)
