"""What mpiexec is told, by pools and by ``hvdlab run --mpi``, and what is known when it fails."""

from __future__ import annotations

import importlib.util

import pytest

from hvdlab.launch import mpi
from hvdlab.launch.hosts import Host
from started_ranks import StartedRanks

HOSTS = [Host("a", 4), Host("b", 1)]


def test_open_mpi_is_told_that_root_and_many_ranks_are_meant_and_what_to_pass_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mpi, "version", lambda program: "mpiexec (Open MPI) 5.0.8")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    passed = ["-x", "HVDLAB_TOKEN", "-x", "LD_LIBRARY_PATH", "-x", "PATH", "-x", "PYTHONPATH"]
    found = mpi.arguments("mpiexec", [], ["HVDLAB_TOKEN", "PATH"])
    assert found == ["--allow-run-as-root", "--oversubscribe", *passed]
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    found = mpi.arguments("mpiexec", HOSTS, ["HVDLAB_TOKEN"])
    assert found == ["--host", "a:4,b:1", "--oversubscribe", *passed]


def test_hydra_is_told_of_hosts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "version", lambda program: "HYDRA build details: Version: 4.3.2")
    assert mpi.arguments("mpiexec", [], ["HVDLAB_TOKEN"]) == []
    assert mpi.arguments("mpiexec", HOSTS, ["HVDLAB_TOKEN"]) == ["-hosts", "a:4,b:1"]


@pytest.mark.skipif(
    mpi.program() is None or importlib.util.find_spec("mpi4py") is None, reason="there is no mpiexec"
)
def test_ranks_that_mpiexec_can_not_start_are_ended_with_its_last_words() -> None:
    ranks = StartedRanks("mpi", options={"python": "/no/such/python"})
    try:
        ranks.starter.start([0, 1], 2)
        for rank in range(2):
            end = ranks.end_of(rank)
            assert end.pid == 0
            assert end.reason.startswith("`mpiexec` ended: exit code ")
            assert "/no/such/python" in end.tail
    finally:
        ranks.close()


def test_only_other_hosts_are_far() -> None:
    launcher = mpi.MpiLauncher()
    assert not launcher.is_far("")
    assert not launcher.is_far("localhost:4")
    assert launcher.is_far("localhost:1,elsewhere:1")
