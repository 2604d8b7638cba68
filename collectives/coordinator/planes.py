"""Which data plane a process set gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdlab.collectives.planes.shm.layout import CHUNK_BYTES, SLOTS, segment_size
from hvdlab.collectives.protocol.messages import Member

SHM_LIMIT = 1024
"""Ranks of one host that may share a segment: each chunk is divided among them."""


@dataclass(frozen=True, slots=True)
class PlaneChoice:
    """A plane with its options.

    Attributes:
        plane: Name of the plane.
        options: Settings that all members use.
        memory: Bytes of shared memory that come along, or 0.
        notes: Lines for the operator about wishes that could not be met.
    """

    plane: str
    options: dict[str, str]
    memory: int = 0
    notes: tuple[str, ...] = ()


def choose_plane(members: Sequence[Member]) -> PlaneChoice:
    """Choose for these members (in order of rank).

    The users' wish comes first; then MPI if all were started by it, nothing for one member, shared memory on one
    host, and Gloo between hosts.
    """
    notes: list[str] = []
    wish = _wish(members, notes)
    if wish:
        return _choice(wish, members, notes)
    if all("mpi" in member.planes for member in members):
        return _choice("mpi", members, notes)
    if len(members) == 1:
        return _choice("local", members, notes)
    one_host = len({member.host for member in members}) == 1
    if one_host and len(members) <= SHM_LIMIT and all("shm" in member.planes for member in members):
        return _choice("shm", members, notes)
    return _choice("gloo", members, notes)


def without_memory(choice: PlaneChoice) -> PlaneChoice:
    """What takes the place of a choice whose shared memory can't be had."""
    return PlaneChoice(
        "gloo", {"note": "shared memory can't be given to all members; using gloo instead of shm"}
    )


def _wish(members: Sequence[Member], notes: list[str]) -> str:
    wishes = {member.plane: member.rank for member in reversed(members) if member.plane not in ("", "auto")}
    if not wishes:
        return ""
    plane, rank = min(wishes.items(), key=lambda item: item[1])
    if len(wishes) > 1:
        said = ", ".join(f"rank {r} {p}" for p, r in sorted(wishes.items(), key=lambda item: item[1]))
        notes.append(f"the ranks ask for different planes ({said}); taking {plane} of rank {rank}")
    if plane == "local" and len(members) > 1:
        notes.append(f"plane local has room for one rank, not {len(members)}; choosing another")
        return ""
    if plane == "shm" and len(members) > SHM_LIMIT:
        notes.append(f"plane shm has room for {SHM_LIMIT} ranks, not {len(members)}; choosing another")
        return ""
    if plane == "shm" and len({member.host for member in members}) > 1:
        notes.append("plane shm was asked for, but the ranks are on several hosts; choosing another")
        return ""
    lacking = [member.rank for member in members if member.planes and plane not in member.planes]
    if lacking and plane != "local":
        notes.append(f"plane {plane} was asked for, but ranks {lacking} can't use it; choosing another")
        return ""
    return plane


def _choice(plane: str, members: Sequence[Member], notes: list[str]) -> PlaneChoice:
    options = {"note": "; ".join(notes)} if notes else {}
    if plane != "shm":
        return PlaneChoice(plane, options, 0, tuple(notes))
    options |= {"chunk_bytes": str(CHUNK_BYTES), "slots": str(SLOTS)}
    return PlaneChoice(plane, options, segment_size(len(members), CHUNK_BYTES, SLOTS), tuple(notes))
