"""Arrays as bytes, wherever they are: numpy's, torch's on any device, and what turns into numpy's.

Nothing here imports a framework: what is not in ``sys.modules`` can't have made the value.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdlab.collectives import fingerprint

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ArraySource:
    """The elements of an array, in C order.

    Attributes:
        dtype: Its name, as users know it.
        shape, device, requires_grad: As the framework tells them.
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


def array_source(value: Any) -> ArraySource | None:
    """``value`` as an array; None if it is none, or holds Python objects. Raises what the framework raises."""
    kind = type(value)  # isinstance may ask the value
    if issubclass(kind, np.ndarray):
        return None if value.dtype.hasobject else _of_numpy(value)
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "Tensor") and issubclass(kind, torch.Tensor):
        return _of_torch(torch, value)
    if kind.__module__.partition(".")[0] in ("jaxlib", "jax", "tensorflow", "cupy"):
        return _of_other(value)
    return None


def _of_numpy(array: npt.NDArray[Any], **told: Any) -> ArraySource:
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)

    def read(offset: int, length: int) -> Bytes:
        return flat[offset : offset + length]

    return ArraySource(
        told.get("dtype", str(array.dtype)),
        tuple(told.get("shape", array.shape)),
        told.get("device", "cpu"),
        told.get("requires_grad"),
        flat.nbytes,
        max(1, array.dtype.itemsize),
        read,
    )


def _of_torch(torch: Any, tensor: Any) -> ArraySource | None:
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    plain = tensor.detach()
    if tensor.is_quantized:
        plain = plain.int_repr()
    plain = plain.resolve_conj().resolve_neg().contiguous().reshape(-1)
    raw = plain.view(torch.uint8) if plain.numel() else torch.empty(0, dtype=torch.uint8)

    def read(offset: int, length: int) -> Bytes:
        part: Bytes = raw[offset : offset + length].cpu().numpy()
        return part

    return ArraySource(
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        str(tensor.device),
        bool(tensor.requires_grad),
        int(raw.numel()),
        max(1, int(plain.element_size())),
        read,
    )


def _of_other(value: Any) -> ArraySource | None:
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        return None
    moved = value.get() if type(value).__module__.startswith("cupy") else np.asarray(value)
    device = str(getattr(value, "device", "cpu"))
    return _of_numpy(moved, dtype=str(value.dtype), shape=value.shape, device=device)


def family(device: str) -> str:
    """``cuda`` of ``cuda:3``: each rank has its own."""
    return device.partition(":")[0]
