"""Elastic training while whole hosts are found, leave, are killed and are cut off: a short campaign, and a long one."""

from __future__ import annotations

import pytest

import hosts
from chaos.elastic_hosts import CHANGES, DEAD_AFTER, OF_RELAYS, ElasticHosts
from chaos.figures import rows, table
from patience import HOUR

pytestmark = pytest.mark.root

BRIEF = ("join", "kill", "leave", "kill_while_joining")
"""Plays of the normal run: those that need no heartbeat, which a busy machine may miss."""


BEHIND_RELAYS = ("join", "kill", "kill_relay", "stop_relay")


def play(
    seed: int, names: tuple[str, ...], count: int, dead_after: float = DEAD_AFTER, *, relays: bool = False
) -> None:
    """Play a campaign; fails with the whole story of whatever is not as it should be."""
    if hosts.missing():
        pytest.skip(hosts.missing())
    changes = [change for change in (*CHANGES, *OF_RELAYS) if change.play in names]
    with ElasticHosts(seed, changes=changes, dead_after=dead_after, relays=relays) as campaign:
        outcomes = list(campaign.play(count))
    print(table(rows(outcomes)))
    stories = [str(outcome) for outcome in outcomes if not outcome.ok]
    assert not stories, "\n\n".join(stories)
    assert {outcome.fault for outcome in outcomes} == {change.name for change in changes}


@pytest.mark.timeout(300)
def test_training_goes_on_whichever_hosts_come_and_go() -> None:
    play(31, BRIEF, len(BRIEF), HOUR)


@pytest.mark.timeout(300)
def test_training_goes_on_whichever_relays_are_lost() -> None:
    play(32, BEHIND_RELAYS, len(BEHIND_RELAYS), HOUR, relays=True)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_changes_of_hosts() -> None:
    play(301, tuple(change.play for change in CHANGES), 100)
