"""Names to plane classes, imported when they are first needed."""

from __future__ import annotations

import importlib
import importlib.util
import os

from hvdlab.collectives.errors import UnsupportedError
from hvdlab.collectives.planes.base import Plane, PlaneContext
from hvdlab.collectives.planes.gpu import gpu_plane
from hvdlab.collectives.planes.host import HostPlane
from hvdlab.collectives.rendezvous import backends

_CLASSES: dict[str, tuple[str, str, str]] = {
    # name: module, class, package that must be installed; a plane for a device class is called "device/plane"
    "local": ("hvdlab.collectives.planes.host", "LocalPlane", ""),
    "shm": ("hvdlab.collectives.planes.shm", "ShmPlane", ""),
    "gloo": ("hvdlab.collectives.planes.gloo", "GlooPlane", "torch"),
    "mpi": ("hvdlab.collectives.planes.mpi", "MpiPlane", "mpi4py"),
    "hierarchical": ("hvdlab.collectives.planes.hierarchical", "HierarchicalPlane", ""),
    "cuda/ipc": ("hvdlab.collectives.planes.gpu.ipc_plane", "CudaPlane", ""),
    "cuda/nccl": ("hvdlab.collectives.planes.gpu.nccl_plane", "NcclPlane", ""),
}
_REMEDY = {"torch": "pip install 'hvdlab[torch]'", "mpi4py": "pip install 'hvdlab[mpi]'"}

MPI_LAUNCHER_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_ID", "MPI_LOCALRANKID")


def names() -> tuple[str, ...]:
    """Return all planes for tensors of the host, whether usable here or not."""
    return tuple(name for name in _CLASSES if "/" not in name)


def under_mpi() -> bool:
    """Return whether an MPI launcher started this process."""
    return any(name in os.environ for name in MPI_LAUNCHER_VARIABLES)


def missing(name: str) -> str | None:
    """Return why this process can't offer a plane, found out without importing anything heavy; ``None`` if it may be usable."""
    if name not in _CLASSES:
        return f"there is no data plane `{name}`; choose one of {', '.join(names())}"
    module, _, package = _CLASSES[name]
    if package and importlib.util.find_spec(package) is None:
        return f"the plane `{name}` needs {package}: {_REMEDY[package]}"
    if name == "mpi" and not under_mpi():
        return "the plane `mpi` needs ranks that an MPI launcher (mpiexec, srun --mpi) started"
    if name.startswith("cuda/"):
        reason = gpu_plane.why_off()
        return f"the plane `{name}` can't be used: {reason}" if reason else None
    if importlib.util.find_spec(module) is None:
        return f"the plane `{name}` is not part of this installation"
    return None


def plane_class(name: str) -> type[Plane]:
    """Import the class of a plane.

    Raises:
        UnsupportedError: The plane is unknown or can't be used in this process; the text gives the reason and the remedy.
    """
    reason = missing(name)
    if reason is not None:
        raise UnsupportedError(reason[0].upper() + reason[1:] + ".")
    module, attribute, _ = _CLASSES[name]
    cls: type[Plane] = getattr(importlib.import_module(module), attribute)
    # Asked as well: ``missing`` imports nothing, and so can't know whether a library loads.
    reason = cls.unavailable()
    if reason is not None:
        raise UnsupportedError(reason)
    return cls


def build(name: str, context: PlaneContext) -> Plane:
    """Return a plane of a process set; of CUDA tensors it is one that is checked before it is used. Raises like :func:`plane_class`."""
    if name.startswith(f"{gpu_plane.CUDA}/"):
        module = importlib.import_module("hvdlab.collectives.planes.gpu.checked_plane")
        checked: Plane = module.CheckedPlane(context, name)
        return checked
    return plane_class(name)(context)


def host_plane_class(name: str) -> type[HostPlane]:
    """Import the class of a plane of the host's memory. Raises like :func:`plane_class`, and ``TypeError``."""
    cls = plane_class(name)
    if not issubclass(cls, HostPlane):
        raise TypeError(f"the plane `{name}` is for tensors on {cls.device}")
    return cls


def why_unavailable(name: str) -> str | None:
    """Return why a plane can't be used in this process, in one sentence; ``None`` if it can. Imports the plane."""
    try:
        plane_class(name)
    except UnsupportedError as error:
        return str(error)
    return None


def offered(wish: str = "auto") -> tuple[str, ...]:
    """Return the planes that this process offers to the coordinator. For that only ``shm`` and planes of devices are imported.

    Not ``local``, which every rank has, nor ``hierarchical``, which is available wherever its parts are. For CUDA tensors
    only the plane that ``HVDLAB_CUDA_PLANE`` names, if it is set.
    Not ``mpi`` if mpi4py has another MPI than the launcher. Under a launcher that is not MPI's own, such as Slurm's, that can't
    be known, and ``mpi`` is offered only if it is the ``wish``.
    """
    found = []
    for name in _CLASSES:
        if name in ("local", "hierarchical") or missing(name) is not None:
            continue
        if (name == "mpi" and not _suits(wish)) or not gpu_plane.is_wanted(name):
            continue
        if (name == "shm" or "/" in name) and why_unavailable(name) is not None:
            continue
        found.append(name)
    return tuple(found)


def _suits(wish: str) -> bool:
    """Return whether MPI can be expected to work."""
    return backends.mpi_works(os.environ) if backends.started_by_mpi(os.environ) else wish == "mpi"
