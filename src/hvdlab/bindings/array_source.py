"""Arrays of any framework as bytes that can be read block by block, wherever they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hvdlab.collectives import fingerprint

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]


class OnDevice(Protocol):
    """Facts about an array's elements, found on the device that they are on, without moving them."""

    def fingerprints(self) -> bytes:
        """Return a fingerprint of :data:`~hvdlab.collectives.fingerprint.SIZE` bytes for each block, one behind the other; equal ones mean equal bytes.

        They are made by another method than on the host, so one may only be compared with one that a device has made.
        """
        ...

    def not_finite(self) -> tuple[int, int] | None:
        """Return how many of the elements are NaN, and how many infinite; ``None`` if only the host can count them."""
        ...


@dataclass(frozen=True, slots=True)
class ArraySource:
    """The elements of an array, in C order.

    Attributes:
        dtype: Its name, as users know it.
        shape, device, requires_grad: As the framework gives them; ``requires_grad`` is None where there is no such thing.
        nbytes: Of all elements.
        itemsize: Bytes of one.
        read: ``read(offset, length)``: these bytes, without a copy if they are in this process's memory.
        on_device: Works on the elements where they are; ``None`` if it is as well to read them. Whether there is one depends on the kind of
            device and ``nbytes`` only, so it is the same on all ranks for arrays that are alike in these.
    """

    dtype: str
    shape: tuple[int, ...]
    device: str
    requires_grad: bool | None
    nbytes: int
    itemsize: int
    read: Callable[[int, int], Bytes]
    on_device: OnDevice | None = None

    @property
    def block(self) -> int:
        """Return the bytes of a block with a fingerprint of its own; whole elements."""
        return max(1, fingerprint.BLOCK // self.itemsize) * self.itemsize

    def fingerprints(self, pool: ThreadPoolExecutor | None = None) -> bytes:
        """Return the fingerprints of the blocks, one behind the other: those of the device if it makes any, otherwise those of the bytes.

        Args:
            pool: Threads among which blocks that are read are divided.
        """
        if self.on_device is not None:
            return self.on_device.fingerprints()
        return fingerprint.of_blocks(self.nbytes, self.read, block=self.block, pool=pool)


def numpy_source(
    array: npt.NDArray[Any],
    *,
    dtype: str | None = None,
    shape: tuple[int, ...] | None = None,
    device: str = "cpu",
) -> ArraySource:
    """Return a numpy array (without Python objects) as a source; another framework may give its own ``dtype``, ``shape``, ``device``."""
    import numpy as np

    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)

    def read(offset: int, length: int) -> Bytes:
        return flat[offset : offset + length]

    return ArraySource(
        str(array.dtype) if dtype is None else dtype,
        tuple(array.shape if shape is None else shape),
        device,
        None,
        flat.nbytes,
        max(1, array.dtype.itemsize),
        read,
    )
