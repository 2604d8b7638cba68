"""What a foreign launcher's environment says about a rank. (What we tell ours is in ``collectives.environment``.)"""

from __future__ import annotations

from collections.abc import Mapping

_RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
_SIZE = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS")
_LOCAL_RANK = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_LOCAL_SIZE = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")


def foreign_sizes(environ: Mapping[str, str]) -> dict[str, str]:
    """What a foreign launcher's variables mean for this rank; empty without such a launcher.

    What the launcher does not tell, such as the number of hosts, is left out.
    """
    found = {
        ("RANK", "HVDLAB_RANK", "HOROVOD_RANK"): _first(environ, _RANK),
        ("WORLD_SIZE", "HVDLAB_SIZE", "HOROVOD_SIZE"): _first(environ, _SIZE),
        ("LOCAL_RANK", "HOROVOD_LOCAL_RANK"): _first(environ, _LOCAL_RANK),
        ("LOCAL_WORLD_SIZE", "HOROVOD_LOCAL_SIZE"): _first(environ, _LOCAL_SIZE),
    }
    return {name: value for names, value in found.items() if value for name in names}


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")
