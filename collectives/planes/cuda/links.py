"""What lies between GPUs that reach each other's memory, as NVIDIA's management library knows it."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Sequence
from typing import Any

from hvdlab.collectives import system
from hvdlab.collectives.planes.links import NVLINK, PCIE, PEER, SAME_GPU, Links

_KINDS = ("GPU", "MIG")


def links_between(mine: str, identities: Sequence[str], ranks: Sequence[int]) -> Links:
    """The links to the GPUs of other ranks, whose memory this rank's GPU reaches. Takes some milliseconds if they are other GPUs.

    Args:
        mine: The UUID of this rank's GPU, as 32 hexadecimal digits.
        identities: Those of the other ranks' GPUs.
        ranks: These ranks.
    """
    others = sorted({identity for identity in identities if identity != mine})
    by_gpu = {mine: SAME_GPU} | (_asked(mine, others) if others else {})
    found: dict[str, list[int]] = {}
    for identity, rank in zip(identities, ranks, strict=True):
        found.setdefault(by_gpu[identity], []).append(rank)
    order = (SAME_GPU, NVLINK, PCIE, PEER)
    return {link: tuple(found[link]) for link in order if link in found}


def _asked(mine: str, others: Sequence[str]) -> dict[str, str]:
    library = system.open_nvml("What lies between GPUs is not known")
    if library is None:
        return dict.fromkeys(others, PEER)
    try:
        return {other: _link(library, mine, other) for other in others}
    finally:
        with contextlib.suppress(library.NVMLError):
            library.nvmlShutdown()


def _link(library: Any, mine: str, other: str) -> str:
    """The link between two GPUs; :data:`PEER` unless the library knows it.

    A status that is neither yes nor a reason for no says nothing: then PCIe is not what is left.
    """
    try:
        here, there = _handle(library, mine), _handle(library, other)
        by_nvlink = library.nvmlDeviceGetP2PStatus(here, there, library.NVML_P2P_CAPS_INDEX_NVLINK)
        if by_nvlink == library.NVML_P2P_STATUS_OK:
            return NVLINK
        reads = library.nvmlDeviceGetP2PStatus(here, there, library.NVML_P2P_CAPS_INDEX_READ)
    except library.NVMLError:
        return PEER
    known = by_nvlink != library.NVML_P2P_STATUS_UNKNOWN
    return PCIE if known and reads == library.NVML_P2P_STATUS_OK else PEER


def _handle(library: Any, identity: str) -> Any:
    """The library's handle of a GPU or of an instance of a partitioned one. Raises ``NVMLError``."""
    text = str(uuid.UUID(hex=identity))
    try:
        return library.nvmlDeviceGetHandleByUUID(f"{_KINDS[0]}-{text}")
    except library.NVMLError:
        return library.nvmlDeviceGetHandleByUUID(f"{_KINDS[1]}-{text}")
