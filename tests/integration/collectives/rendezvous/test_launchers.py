"""Meaning of launchers' variables."""

from __future__ import annotations

import pytest

from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.collectives.rendezvous import backends
from hvdlab.collectives.rendezvous.discovery import discover
from hvdlab.collectives.rendezvous.launchers import LAUNCHERS, detect
from hvdlab.collectives.settings import Settings

SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "3", "SLURM_STEP_NUM_TASKS": "3"}
TORCH = {"MASTER_ADDR": "a", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (
            {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            ("MPICH", 1, 4, 1, 2, False),
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"},
            ("MPICH", 1, 4, 1, 4, True),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "PMIX_RANK": "3",
            },
            ("Open MPI", 3, 4, 1, 2, False),
        ),
        (
            {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_SIZE": "2"},
            ("MVAPICH", 0, 2, None, 2, True),
        ),
        (
            {"JSM_NAMESPACE_RANK": "5", "JSM_NAMESPACE_SIZE": "6", "OMPI_COMM_WORLD_RANK": "5"},
            ("jsrun", 5, 6, None, None, False),
        ),
        (
            SRUN | {"SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2",
                    "SLURM_STEP_TASKS_PER_NODE": "2,1"},
            ("srun", 2, 3, 0, 1, False),
        ),
        (
            SRUN | {"SLURM_PROCID": "2", "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1",
                    "SLURM_STEP_TASKS_PER_NODE": "3"},
            ("srun", 2, 3, None, 3, True),
        ),
        (TORCH, ("MASTER_ADDR and RANK", 1, 4, None, None, False)),
        (TORCH | {"MASTER_ADDR": "localhost"}, ("MASTER_ADDR and RANK", 1, 4, None, None, True)),
        (TORCH | {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2"}, ("MASTER_ADDR and RANK", 1, 4, None, 2, False)),
        (
            TORCH | {"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"},
            ("torchrun", 1, 4, 1, 2, False),
        ),
        # The launcher that is nearest counts.
        (
            SRUN | TORCH | {"SLURM_PROCID": "0", "TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "4"},
            ("torchrun", 1, 4, None, 4, True),
        ),
        (
            SRUN | {"SLURM_PROCID": "0", "PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "5",
                    "MPI_LOCALNRANKS": "8"},
            ("MPICH", 5, 8, 5, 8, True),
        ),
        (
            SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_NODES": "1", "PMI_RANK": "1", "PMI_SIZE": "3"},
            ("srun", 1, 3, None, None, True),
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "0"},
            ("MPI by PMI", 1, 2, 0, None, False),
        ),
    ],
)  # fmt: skip
def test_variables_are_understood(environ: dict[str, str], expected: tuple[object, ...]) -> None:
    found = detect(environ)
    assert found is not None
    read = (found.launcher.name, found.rank, found.size, found.local_rank, found.local_size, found.one_host)
    assert read == expected


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"HOME": "/", "RANK": "1", "WORLD_SIZE": "2"},
        # A batch script, and its children without srun.
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
    ],
)  # fmt: skip
def test_without_a_launcher_there_is_none(environ: dict[str, str]) -> None:
    assert detect(environ) is None
    assert discover(environ, Settings()) is None


def test_one_rank_needs_nobody() -> None:
    interactive = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "4294967290",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "8",
    }
    assert discover(interactive | {"SLURM_STEP_NUM_TASKS": "1"}, Settings()) is None
    assert discover({"PMI_RANK": "0", "PMI_SIZE": "1"}, Settings()) is None


@pytest.mark.parametrize(
    ("environ", "yes"),
    [
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}, True),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"}, True),
        ({"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0"}, False),
        # A notebook in an interactive job of a cluster, and the processes of srun: no sign that mpi4py can talk to it.
        (SRUN | {"SLURM_PROCID": "0", "PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "1"}, False),
        (SRUN | {"SLURM_PROCID": "0", "PMIX_RANK": "0"}, False),
        # torchrun's ranks under mpiexec are all the same one to MPI.
        (TORCH | {"TORCHELASTIC_RUN_ID": "x", "PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}, False),
    ],
)  # fmt: skip
def test_ranks_of_mpis_launchers_are_known(environ: dict[str, str], yes: bool) -> None:
    assert backends.started_by_mpi(environ) is yes


OMPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}
OPEN_MPI = "Open MPI v5.0.11, package: …"
MPICH = "MPICH Version:      5.0.2\nMPICH Release date: …"


@pytest.mark.parametrize(
    ("environ", "version", "works"),
    [
        (OMPI, OPEN_MPI, True),
        (OMPI, MPICH, False),
        (HYDRA, MPICH, True),
        (HYDRA, "Intel(R) MPI Library 2021.13", True),
        (HYDRA, OPEN_MPI, False),
        (HYDRA, None, False),
        ({}, MPICH, False),
    ],
)
def test_mpi_is_used_only_if_it_is_the_launchers(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], version: str | None, works: bool
) -> None:
    monkeypatch.setattr(backends, "mpi_version", lambda: version)
    assert backends.mpi_works(environ) is works


def test_the_other_mpi_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "mpi_version", lambda: MPICH)
    assert (
        backends.mpi_mismatch(OMPI) == "Open MPI started the ranks, but mpi4py uses MPICH Version:      5.0.2"
    )


def test_mpi4pys_library_is_known_without_starting_mpi() -> None:
    pytest.importorskip("mpi4py")
    version = backends.mpi_version()
    assert version is None or "MPI" in version


def test_ranks_of_a_launcher_take_part_in_a_world_of_ours() -> None:
    ours = {"HVDLAB_COORDINATOR": "unix:/x", "HVDLAB_TOKEN": "t"}
    mpi = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0"}
    settings = Settings.from_env(ours | mpi)
    assert (settings.rank, settings.local_rank) == (2, 0)
    assert Settings.from_env(ours | mpi | {"HVDLAB_RANK": "1"}).rank == 1
    assert (
        Settings.from_env(ours | {"PMI_RANK": "0", "PMI_SIZE": "1"}).rank == -1
    )  # e.g. an allocation of one task


def test_local_ranks_follow_the_ranks() -> None:
    open_mpi = detect(OMPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "1"})
    mpich = detect(HYDRA)
    assert open_mpi is not None
    assert mpich is not None
    assert (open_mpi.local_rank, open_mpi.ordered_local_rank) == (1, None)
    assert (mpich.local_rank, mpich.ordered_local_rank) == (0, 0)


def test_nonsense_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="WORLD_SIZE='four' is no whole number"):
        detect(TORCH | {"WORLD_SIZE": "four"})
    with pytest.raises(InvalidRequestError, match="RANK=4 does not go with WORLD_SIZE=4"):
        detect(TORCH | {"RANK": "4"})


def test_horovodruns_ranks_are_sent_to_ours() -> None:
    environ = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1"}
    with pytest.raises(StartError, match="hvdlab run -np"):
        discover(environ, Settings())


def test_a_name_of_a_launcher_is_there_once() -> None:
    names = [launcher.name for launcher in LAUNCHERS]
    assert len(set(names)) == len(names)
