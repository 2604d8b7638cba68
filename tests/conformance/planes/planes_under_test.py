"""The planes that the conformance suite runs over; ``harness.py`` describes how to add one."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance.planes.engine_actor import Coordination
from conformance.planes.harness import LIGHT, WORKER, PlaneUnderTest
from hvdlab.collectives.planes.shm.layout import layout_from

CHUNK = 4096
"""Bytes per chunk where a plane has chunks; the sizes of the tests lie around its multiples."""


def shm_memory(size: int, options: Mapping[str, str]) -> int:
    return layout_from(options, size).size


def mpiexec(size: int, path: str, environment: Mapping[str, str]) -> list[subprocess.Popen[bytes]]:
    """Start the workers with the environment's MPI (the ``mpich`` wheel, or the system's)."""
    command = [mpiexec_path() or "mpiexec", "-n", str(size), sys.executable, str(WORKER)]
    return [subprocess.Popen([*command, "--socket", path, "--size", str(size)], env=dict(environment))]


def mpiexec_path() -> str | None:
    beside_python = Path(sys.executable).with_name("mpiexec")
    return str(beside_python) if beside_python.exists() else shutil.which("mpiexec")


def mpi_missing() -> str | None:
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    return None if mpiexec_path() else "there is no mpiexec"


def negotiated(name: str, target: str, *, lacks: frozenset[str] = frozenset(), **how: Any) -> PlaneUnderTest:
    """The engine, made to use a plane. Each case is run on each plane, at one of the sizes."""
    return PlaneUnderTest(
        f"engine-{name}",
        target,
        actor="conformance.planes.engine_actor:engine_actor",
        service=Coordination,
        lacks=lacks | {"ragged", "abort"},
        **{"every": 4, **how},
    )


HIERARCHICAL = "hvdlab.collectives.planes.hierarchical:HierarchicalPlane"


def hierarchical(hosts: str, outer: str = "gloo", every: int = 12, block_bytes: int = 0) -> PlaneUnderTest:
    """Return the hierarchical plane on simulated hosts, a letter for each member."""
    how: dict[str, Any] = {}
    if outer == "mpi":
        how = {"launcher": mpiexec, "missing": mpi_missing, "lacks": frozenset({"survive"})}
    return PlaneUnderTest(
        f"hierarchical-{hosts}"
        + ("" if outer == "gloo" else f"-{outer}")
        + ("-blocks" if block_bytes else ""),
        HIERARCHICAL,
        sizes=(len(hosts),),
        hosts=hosts,
        options={"chunk_bytes": str(CHUNK), "outer": outer, "block_bytes": str(block_bytes)},
        library=True,
        every=every,
        **how,
    )


PLANES: tuple[PlaneUnderTest, ...] = (
    PlaneUnderTest("local", "hvdlab.collectives.planes.host:LocalPlane", sizes=(1,), launcher=LIGHT),
    PlaneUnderTest(
        "shm",
        "hvdlab.collectives.planes.shm:ShmPlane",
        memory=shm_memory,
        options={"chunk_bytes": str(CHUNK)},
        launcher=LIGHT,
        environment={"PYTHONWARNINGS": "error"},
    ),
    # A simulated GPU; tests/gpu has real ones.
    PlaneUnderTest(
        "cuda",
        "hvdlab.collectives.planes.shm:ShmPlane",  # whose demands on the system are the same
        actor="conformance.planes.cuda_actor:fake_actor",
        lacks=frozenset({"messages"}),
        launcher=LIGHT,
        every=3,
    ),
    PlaneUnderTest(
        "cuda-each",
        "hvdlab.collectives.planes.shm:ShmPlane",  # whose demands on the system are the same
        actor="conformance.planes.cuda_actor:fake_actor",
        lacks=frozenset({"messages"}),
        options={"workers": "all"},
        launcher=LIGHT,
        every=12,
    ),
    PlaneUnderTest(
        "cuda-nccl",
        "hvdlab.collectives.planes.shm:ShmPlane",  # whose demands on the system are the same
        sizes=(1, 3),
        actor="conformance.planes.cuda_actor:fake_nccl_actor",
        lacks=frozenset({"messages"}),
        launcher=LIGHT,
        every=12,
    ),
    PlaneUnderTest(
        "cuda-staged",
        "hvdlab.collectives.planes.shm:ShmPlane",  # by which its data goes
        actor="conformance.planes.cuda_actor:fake_staged_actor",
        lacks=frozenset({"messages"}),
        options={"chunk_bytes": str(CHUNK)},
        launcher=LIGHT,
        every=12,
    ),
    PlaneUnderTest("gloo", "hvdlab.collectives.planes.gloo:GlooPlane", library=True, normally=2),
    PlaneUnderTest(
        "mpi",
        "hvdlab.collectives.planes.mpi:MpiPlane",
        launcher=mpiexec,
        lacks=frozenset({"survive"}),  # mpiexec ends every process when one dies
        library=True,
        missing=mpi_missing,
        normally=4,
    ),
    hierarchical("aabb", every=4),
    hierarchical("aaab"),
    hierarchical("abbb"),
    hierarchical("abcc"),
    hierarchical("aabba", every=6),  # a host whose members do not follow each other
    hierarchical("aaaa"),
    hierarchical("aabb", every=6, block_bytes=2 * CHUNK),
    hierarchical("aab", block_bytes=2 * CHUNK),
    hierarchical("abb"),
    hierarchical("abab", outer="mpi"),
    hierarchical("aabab", outer="mpi"),
    # Once more with everything in front of the plane; operations that can't run on it are listed in engine_actor.py.
    negotiated("shm", "hvdlab.collectives.planes.shm:ShmPlane", launcher=LIGHT),
    # Tensors on a device, whose plane ends operations later.
    PlaneUnderTest(
        "engine-device",
        "hvdlab.collectives.planes.shm:ShmPlane",
        actor="conformance.planes.device_actor:device_actor",
        service=Coordination,
        lacks=frozenset({"ragged", "abort"}),
        launcher=LIGHT,
        every=4,
    ),
    negotiated("gloo", "hvdlab.collectives.planes.gloo:GlooPlane", library=True, normally=12),
    negotiated("hierarchical-aabb", HIERARCHICAL, library=True, hosts="aabb", sizes=(4,), every=12),
    negotiated("hierarchical-abb", HIERARCHICAL, library=True, hosts="abb", sizes=(3,), every=12),
    negotiated(
        "mpi",
        "hvdlab.collectives.planes.mpi:MpiPlane",
        lacks=frozenset({"survive"}),
        launcher=mpiexec,
        library=True,
        missing=mpi_missing,
        normally=12,
    ),
)
