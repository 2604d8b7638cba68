"""Data planes in words: their names, the size of chunks that was measured, and the links that CUDA tensors travel over
between this rank's GPU and those of others. Only the driver's answers are reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hvdlab.collectives.errors import compact_ranks

Links = Mapping[str, tuple[int, ...]]
"""The ranks that are reached by each kind of link, one of the words below. Empty as long as no rank was reached."""

SAME_GPU = "same GPU"
NVLINK = "NVLink"
PCIE = "PCIe"
PEER = "peer access, link unknown"
"""The GPUs read each other's memory; the link between them can't be found out."""
UNKNOWN = "link unknown"
THROUGH_HOST = "CUDA tensors through the host"
"""There is no plane for CUDA tensors: they are copied to the host and back."""


def links_text(links: Links) -> str:
    """Return ``NVLink`` if all ranks are reached by it; otherwise the ranks by their links: ``same GPU: 1; NVLink: 2-3``."""
    if len(links) == 1:
        return next(iter(links))
    return "; ".join(f"{link}: {compact_ranks(ranks)}" for link, ranks in links.items())


def plane_text(plane: str, chunk_bytes: int) -> str:
    """Return a plane of the host, with the size of its chunks where it was measured (otherwise 0): ``shm in chunks of 512 KiB``."""
    return f"{plane} in chunks of {chunk_bytes // 1024} KiB" if chunk_bytes else plane


def planes_text(planes: Iterable[str], links: Links) -> str:
    """Return the planes of a process set, those for devices last, with the links of the last one: ``shm, cuda/ipc (NVLink)``."""
    text = ", ".join(filter(None, planes))
    return f"{text} ({links_text(links)})" if links else text
