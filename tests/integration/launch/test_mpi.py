"""Command lines of mpiexec, from pools and from ``hvdlab run --mpi``, and the reports of its failures."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvdlab.collectives.errors import StartError
from hvdlab.collectives.settings import Settings, WorldEnvironment
from hvdlab.launch import mpi
from hvdlab.launch.hosts import Host
from hvdlab.launch.starter import LaunchRequest, Program
from support.ranks.started import StartedRanks

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


@pytest.fixture
def shell(tmp_path: Path) -> tuple[str, ...]:
    """Return a script that acts as ssh on this host, and writes down its command line."""
    script = tmp_path / "shell"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/said\n[ "$1" = broken ] && {{ echo no route >&2; exit 255; }}\nshift\nexec sh -c "$*"\n'
    )
    script.chmod(0o755)
    return (str(script),)


def test_the_secret_is_on_each_host_for_the_user_alone_until_the_end(
    tmp_path: Path, shell: tuple[str, ...]
) -> None:
    placed = mpi.SecretOnHosts([Host("elsewhere", 2)], shell, "the secret")
    try:
        assert Path(placed.path).read_text() == "the secret\n"
        assert Path(placed.path).stat().st_mode & 0o777 == 0o600
        assert Path(placed.path).parent.stat().st_mode & 0o777 == 0o700
        assert "the secret" not in (tmp_path / "said").read_text()
    finally:
        placed.close()
        placed.close()
    assert not Path(placed.path).parent.exists()


def test_a_host_that_the_secret_can_not_be_brought_to_is_named(shell: tuple[str, ...]) -> None:
    with pytest.raises(StartError, match="can't be brought to broken: no route"):
        mpi.SecretOnHosts([Host("elsewhere", 2), Host("broken", 1)], shell, "the secret")
    with pytest.raises(StartError, match="can't run `/no/such/shell`"):
        mpi.SecretOnHosts([Host("elsewhere", 2)], ("/no/such/shell",), "the secret")


def test_mpiexec_is_not_told_the_secret_of_ranks_on_other_hosts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shell: tuple[str, ...]
) -> None:
    """Hydra sends variables to its proxies in the clear."""
    told: list[Program] = []

    class NoMpiexec:
        def __init__(self, request: LaunchRequest, *args: object, **options: object) -> None:
            assert request.program is not None
            told.append(request.program)

        def start(self, ranks: object, size: int) -> None: ...

        def close(self, timeout: float) -> None: ...

    monkeypatch.setattr(mpi, "ExecStarter", NoMpiexec)
    monkeypatch.setenv("DB_PASSWORD", "x")
    monkeypatch.setenv("HVDLAB_ENV_EXCLUDE", "DB_*")
    monkeypatch.setattr(mpi, "version", lambda program: "mpiexec (Open MPI) 5.0.8")
    client: Any = SimpleNamespace(on_membership=lambda call: None)
    for hosts, far in (("elsewhere:2", True), ("localhost:2", False)):
        request = LaunchRequest(
            WorldEnvironment("unix:/x", "the secret"),
            client,
            program=None,
            size=2,
            hosts=hosts,
            options={"shell": shell},
            module="m",
        )
        starter = mpi.MpiStarter(request, SimpleNamespace(handle=lambda event: None), "mpiexec")
        try:
            starter.start((0, 1), 2)
            variables = told[-1].environment
            assert ("HVDLAB_TOKEN" in variables) is not far
            assert ("the secret" in str(told[-1])) is not far
            assert (told[-1].command[:4] == ("env", "-u", "DB_PASSWORD", "mpiexec")) is far
            if far:
                file = variables["HVDLAB_TOKEN_FILE"]
                assert Settings.from_env({"HVDLAB_TOKEN_FILE": file}).token == "the secret"
                assert "HVDLAB_TOKEN_FILE" in told[-1].command
        finally:
            starter._stopped.set()
            starter.close(0)


def test_only_other_hosts_are_far() -> None:
    launcher = mpi.MpiLauncher()
    assert not launcher.is_far("")
    assert not launcher.is_far("localhost:4")
    assert launcher.is_far("localhost:1,elsewhere:1")
