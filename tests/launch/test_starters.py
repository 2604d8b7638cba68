"""One suite over all launchers: what they can do they do, and what they can't they refuse with the reason."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import loopback_hosts
from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.kernel_ext.launchers import names
from hvdlab.launch import mpi, registry
from hvdlab.launch.starter import Capabilities, Capability
from popen_launcher import offer
from started_ranks import StartedRanks

StartRanks = Callable[..., StartedRanks]

HOSTS = {"ssh": "localhost:3"}
KINDS = ("local", "ssh", "mpi", "popen")
FAR = "ssh, over TLS"
"""Ranks that reach the coordinator as those of other hosts do."""


@pytest.fixture(autouse=True)
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that offers a launcher is installed; ipyparallel's files are the test's own."""
    offer(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))


@pytest.fixture(params=[*KINDS, FAR])
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StartedRanks]:
    """Two ranks of each launcher; afterwards no process of them is left."""
    if request.param == "mpi" and (mpi.program() is None or importlib.util.find_spec("mpi4py") is None):
        pytest.skip(mpi.why_unavailable())
    if request.param == FAR:
        options = loopback_hosts.options(tmp_path)
        found = StartedRanks("ssh", loopback_hosts.named(1, 3), options, far=True)
    else:
        found = StartedRanks(request.param, HOSTS.get(request.param, ""))
    try:
        found.start([0, 1], 2)
        yield found
    finally:
        found.close()


def test_ranks_are_started_and_reported_with_the_processes_that_the_coordinator_knows(
    ranks: StartedRanks,
) -> None:
    members = {member.rank: member.pid for member in ranks.client.membership().members}
    assert sorted(ranks.ready) == [0, 1]
    assert {event.rank: event.pid for event in ranks.started()} == members
    place = ranks.starter.place(1, 2)
    assert place is None or (place.local_rank, place.local_size) == (1, 2)


def test_an_end_is_reported_with_its_reason(ranks: StartedRanks) -> None:
    ranks.tell(1, "import ctypes; ctypes.string_at(0)")
    end = ranks.end_of(1)
    assert end.reason
    if Capability.REASONS in ranks.launcher.capabilities:
        assert (end.pid, end.reason) == (ranks.pid(1), "segmentation fault")
        assert "Fatal Python error: Segmentation fault" in end.tail


def test_a_signal_reaches_its_rank_and_no_other(ranks: StartedRanks) -> None:
    ranks.starter.signal(1, signal.SIGKILL)
    end = ranks.end_of(1)
    if Capability.REASONS in ranks.launcher.capabilities:
        assert end.reason == "killed by SIGKILL"
    if Capability.SINGLE_RANKS in ranks.launcher.capabilities:
        os.kill(ranks.pid(0), 0)


def test_a_single_rank_is_replaced_or_the_refusal_says_why(ranks: StartedRanks) -> None:
    capabilities = ranks.launcher.capabilities
    before = ranks.pid(1)
    ranks.starter.signal(1, signal.SIGKILL)
    ranks.lose(1, ranks.end_of(1).reason)
    if Capability.SINGLE_RANKS in capabilities:
        ranks.start([1], 2)
        assert ranks.pid(1) != before
        return
    why = capabilities.lacks[Capability.SINGLE_RANKS]
    with pytest.raises(InvalidRequestError, match=f"can't be started one by one, because {why}; "):
        ranks.starter.start([1], 2)


def test_a_rank_is_added_where_that_is_possible(ranks: StartedRanks) -> None:
    if Capability.RESIZE not in ranks.launcher.capabilities:
        with pytest.raises(InvalidRequestError, match="can't be added or taken away, because "):
            ranks.launcher.capabilities.require(Capability.RESIZE, ranks.launcher.name, "stop it.")
        return
    before = ranks.pid(0)
    ranks.start([2], 3)
    assert sorted(ranks.ready) == [0, 1, 2]
    assert ranks.pid(0) == before
    place = ranks.starter.place(2, 3)
    assert place is None or (place.local_rank, place.local_size) == (2, 3)


def test_options_that_a_launcher_does_not_know_are_refused_with_those_that_it_does() -> None:
    for name in KINDS:
        found = names.find(name)
        known = ", ".join(f"`{option.name}`" for option in found.options())
        with pytest.raises(InvalidRequestError) as refused:
            StartedRanks(name, HOSTS.get(name, ""), {"colour": "red"})
        assert f"the launcher `{name}` has no option `colour`; " in str(refused.value)
        assert (f"it takes {known}." if known else "it takes none.") in str(refused.value)


def test_values_that_an_option_can_not_have_are_refused() -> None:
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


def test_an_interpreter_that_is_not_there_is_named() -> None:
    ranks = StartedRanks("ssh", "localhost", {"python": "/no/such/python"})
    try:
        with pytest.raises(
            StartError, match="agent of localhost could not be started: `/no/such/python`: No such file"
        ):
            ranks.starter.start([0], 1)
    finally:
        ranks.close()


def test_launchers_are_found_by_entry_point() -> None:
    assert {"local", "ssh", "popen", "broken"} <= set(registry.names())
    assert {"local", "mpi", "slurm", "popen"} <= set(names.known())
    with pytest.raises(
        InvalidRequestError, match=r"no launcher 'sl'; choose one of local, mpi, ssh, .*popen"
    ):
        names.find("sl")
    with pytest.raises(
        StartError, match=r"`broken` \(no_such_module:Launcher\) can't be used: ModuleNotFoundError"
    ):
        names.find("broken")


def test_each_capability_is_there_or_lacking_with_a_reason() -> None:
    with pytest.raises(ValueError, match="either there or lacking"):
        Capabilities(frozenset({Capability.KEEP}))
    with pytest.raises(ValueError, match="either there or lacking"):
        Capabilities(frozenset(Capability), {Capability.KEEP: "it is not"})
    for name in KINDS:
        capabilities = names.find(name).capabilities
        for capability, why in capabilities.lacks.items():
            with pytest.raises(InvalidRequestError) as refused:
                capabilities.require(capability, name, "do without.")
            said = f"ranks of the launcher `{name}` can't be {capability.value}, because {why}; do without."
            assert str(refused.value) == said
