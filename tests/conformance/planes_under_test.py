"""The planes that the conformance suite runs over; ``harness.py`` says how to add one."""

from __future__ import annotations

from conformance.harness import PlaneUnderTest

CHUNK = 4096
"""Bytes per chunk where a plane has chunks; the sizes of the tests lie around its multiples."""

PLANES: tuple[PlaneUnderTest, ...] = (
    PlaneUnderTest("local", "hvdlab.collectives.planes.local:LocalPlane", sizes=(1,)),
)
