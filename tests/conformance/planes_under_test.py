"""The planes that the conformance suite runs over; ``harness.py`` says how to add one."""

from __future__ import annotations

from collections.abc import Mapping

from conformance.harness import PlaneUnderTest
from hvdlab.collectives.planes.shm.layout import layout_from

CHUNK = 4096
"""Bytes per chunk where a plane has chunks; the sizes of the tests lie around its multiples."""


def shm_memory(size: int, options: Mapping[str, str]) -> int:
    return layout_from(options, size).size


PLANES: tuple[PlaneUnderTest, ...] = (
    PlaneUnderTest("local", "hvdlab.collectives.planes.local:LocalPlane", sizes=(1,)),
    PlaneUnderTest(
        "shm",
        "hvdlab.collectives.planes.shm:ShmPlane",
        memory=shm_memory,
        options={"chunk_bytes": str(CHUNK)},
        environment={"PYTHONWARNINGS": "error"},
    ),
)
