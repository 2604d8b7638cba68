"""Fingerprints of tensors: equal fingerprints mean equal bits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from hvdlab.bindings.fingerprints import fingerprint, of_blocks


def of_tensor(tensor: torch.Tensor, pool: ThreadPoolExecutor | None = None) -> bytes:
    """Return the fingerprint of a tensor's elements, dtype and shape.

    Args:
        tensor: On any device. Of a sparse or empty tensor, and of one on the meta device, only dtype and shape count.
        pool: Threads among which a large tensor is divided; ``None`` computes on the calling thread.
    """
    head = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return fingerprint(head)
    raw = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)

    def read(offset: int, length: int) -> Any:
        return raw[offset : offset + length].cpu().numpy()

    return fingerprint(head, of_blocks(raw.numel(), read, pool=pool))
