"""Arrays of any framework as bytes that can be read block by block, wherever they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvdlab.collectives import fingerprint

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ArraySource:
    """The elements of an array, in C order.

    Attributes:
        dtype: Its name, as users know it.
        shape, device, requires_grad: As the framework gives them; ``requires_grad`` is None where there is no such thing.
        nbytes: Of all elements.
        itemsize: Bytes of one.
        read: ``read(offset, length)``: these bytes, without a copy if they are in this process's memory.
    """

    dtype: str
    shape: tuple[int, ...]
    device: str
    requires_grad: bool | None
    nbytes: int
    itemsize: int
    read: Callable[[int, int], Bytes]

    @property
    def block(self) -> int:
        """Bytes of a block with a fingerprint of its own; whole elements."""
        return max(1, fingerprint.BLOCK // self.itemsize) * self.itemsize


def numpy_source(
    array: npt.NDArray[Any],
    *,
    dtype: str | None = None,
    shape: tuple[int, ...] | None = None,
    device: str = "cpu",
) -> ArraySource:
    """A numpy array (without Python objects) as a source; another framework may give its own ``dtype``, ``shape``, ``device``."""
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
