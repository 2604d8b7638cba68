"""Launchers by name, their options and their capabilities."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.kernel_ext.notebook.ipyparallel import launchers
from hvdlab.launch import registry
from hvdlab.launch.starter import Capabilities, Capability
from support.fakes.popen_launcher import offer
from support.ranks.started import StartedRanks


@pytest.fixture(autouse=True)
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that offers a launcher is installed; ipyparallel's files are the test's own."""
    offer(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))


def test_launchers_are_found_by_entry_point() -> None:
    assert {"local", "ssh", "popen", "broken"} <= set(registry.names())
    assert {"local", "mpi", "slurm", "popen"} <= set(launchers.launcher_names())
    with pytest.raises(
        InvalidRequestError, match=r"no launcher 'sl'; choose one of local, mpi, ssh, .*popen"
    ):
        launchers.find("sl")
    with pytest.raises(
        StartError, match=r"`broken` \(no_such_module:Launcher\) can't be used: ModuleNotFoundError"
    ):
        launchers.find("broken")


@pytest.mark.parametrize("name", ["local", "mpi", "ssh"])
def test_our_launchers_are_found_without_a_look_at_the_installed_packages(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (registry, launchers):
        monkeypatch.setattr(module, "entry_points", lambda group: pytest.fail(f"looks for {group}"))
    assert launchers.find(name).capabilities


def test_value_that_an_option_cannot_have_is_refused() -> None:
    with pytest.raises(
        InvalidRequestError, match="`nice` of the launcher `popen` is to be a whole number, not 'x'"
    ):
        StartedRanks("popen", options={"nice": "x"})


def test_options_reach_the_launcher() -> None:
    ranks = StartedRanks("popen", options={"nice": "3"})
    try:
        ranks.start([0], 1)
        assert os.getpriority(os.PRIO_PROCESS, ranks.pid(0)) == os.getpriority(os.PRIO_PROCESS, 0) + 3
    finally:
        ranks.close()


def test_missing_interpreter_is_named() -> None:
    ranks = StartedRanks("ssh", "localhost", {"python": "/no/such/python"})
    try:
        with pytest.raises(
            StartError, match="agent of localhost could not be started: `/no/such/python`: No such file"
        ):
            ranks.starter.start([0], 1)
    finally:
        ranks.close()


def test_each_capability_is_there_or_lacking_with_a_reason() -> None:
    with pytest.raises(ValueError, match="either there or lacking"):
        Capabilities(frozenset({Capability.KEEP}))
    with pytest.raises(ValueError, match="either there or lacking"):
        Capabilities(frozenset(Capability), {Capability.KEEP: "it is not"})
