"""Hosts that are cut off, again and again: the lost ranks, the times, and the others' progress."""

from __future__ import annotations

import pytest

from chaos.partitions import KINDS, Partitions
from support.network import namespaces as hosts

pytestmark = [pytest.mark.root, pytest.mark.soak, pytest.mark.timeout(900)]


def test_hosts_that_are_cut_off() -> None:
    if hosts.missing():
        pytest.skip(hosts.missing())
    with Partitions(21) as campaign:
        outcomes = list(campaign.play(6))
    stories = [str(outcome) for outcome in outcomes if not outcome.ok]
    assert not stories, "\n\n".join(stories)
    assert {outcome.fault for outcome in outcomes} == set(KINDS)
