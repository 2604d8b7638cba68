"""Ranks of every launcher without a pool: reports of their starts and ends, signals, and ranks that follow."""

from __future__ import annotations

import os
import signal

import pytest

from conformance.launchers.sites import Site
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.launch.options import parse
from hvdlab.launch.starter import Capability
from support.ranks.started import StartedRanks

# Ray leaves files and sockets to the collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


def test_started_ranks_are_reported_with_the_processes_that_the_coordinator_knows(
    ranks: StartedRanks,
) -> None:
    members = {member.rank: member.pid for member in ranks.client.membership().members}
    assert sorted(ranks.ready) == [0, 1]
    assert {event.rank: event.pid for event in ranks.started()} == members


def test_end_is_reported_with_its_reason(site: Site, ranks: StartedRanks) -> None:
    ranks.tell(1, "import ctypes; ctypes.string_at(0)")
    end = ranks.end_of(1)
    assert end.reason
    if Capability.REASONS in ranks.launcher.capabilities:
        assert (end.pid, end.reason) == (ranks.pid(1), "segmentation fault")
        assert site.logs or "Fatal Python error: Segmentation fault" in end.tail


def test_signal_reaches_its_rank_and_no_other(ranks: StartedRanks) -> None:
    capabilities = ranks.launcher.capabilities
    ranks.starter.signal(1, signal.SIGKILL)
    end = ranks.end_of(1)
    if {Capability.REASONS, Capability.SIGNALS} <= capabilities.has:
        assert end.reason == "killed by SIGKILL"
    if Capability.SINGLE_RANKS in capabilities:
        os.kill(ranks.pid(0), 0)


def test_single_rank_is_replaced_or_the_refusal_has_the_reason(ranks: StartedRanks) -> None:
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


def test_rank_is_added_while_others_run(ranks: StartedRanks) -> None:
    if Capability.RESIZE not in ranks.launcher.capabilities:
        with pytest.raises(InvalidRequestError, match="can't be added or taken away, because "):
            ranks.launcher.capabilities.require(Capability.RESIZE, ranks.launcher.name, "stop it.")
        return
    before = ranks.pid(0)
    ranks.start([2], 3)
    assert sorted(ranks.ready) == [0, 1, 2]
    assert ranks.pid(0) == before
    os.kill(before, 0)


def test_closed_starter_ends_ranks_and_refuses_more(ranks: StartedRanks) -> None:
    if ranks.launcher.forks:
        pytest.skip("its ranks end with their fork server")
    if Capability.SINGLE_RANKS not in ranks.launcher.capabilities:
        pytest.skip("its ranks are started once, all together")
    ranks.starter.close(0.0)
    assert {ranks.end_of(rank).pid for rank in (0, 1)} == {ranks.pid(0), ranks.pid(1)}
    with pytest.raises(InvalidRequestError, match=r"no rank can be started any more: the job has ended\."):
        ranks.starter.start([1], 2)


def test_unknown_option_is_refused_with_those_that_there_are(site: Site) -> None:
    options = site.launcher().options()
    known = ", ".join(f"`{option.name}`" for option in options)
    with pytest.raises(InvalidRequestError) as refused:
        parse(site.name, options, {"colour": "red"})
    assert f"the launcher `{site.name}` has no option `colour`; " in str(refused.value)
    assert (f"it takes {known}." if known else "it takes none.") in str(refused.value)


def test_each_lacking_capability_is_refused_with_its_reason(site: Site) -> None:
    capabilities = site.launcher().capabilities
    for capability, why in capabilities.lacks.items():
        with pytest.raises(InvalidRequestError) as refused:
            capabilities.require(capability, site.name, "do without.")
        text = f"ranks of the launcher `{site.name}` can't be {capability.value}, because {why}; do without."
        assert str(refused.value) == text
