"""Elastic training while whole hosts are found, leave, are killed and are cut off: a short campaign, and a long one."""

from __future__ import annotations

import pytest

from chaos.elastic_hosts import CHANGES, DEAD_AFTER, ElasticHosts, RanksOfHosts
from chaos.figures import rows, table
from support.network import namespaces as hosts
from support.patience import HOUR

BRIEF = ("join", "kill", "leave", "kill_while_joining")
"""Plays of the normal run: those that need no heartbeat, which a busy machine may miss."""


def play(seed: int, names: tuple[str, ...], count: int, dead_after: float = DEAD_AFTER) -> None:
    """Play a campaign; fail with the whole story of any error."""
    if hosts.missing():
        pytest.skip(hosts.missing())
    changes = [change for change in CHANGES if change.play in names]
    with ElasticHosts(seed, changes=changes, dead_after=dead_after) as campaign:
        outcomes = list(campaign.play(count))
    print(table(rows(outcomes)))
    stories = [str(outcome) for outcome in outcomes if not outcome.ok]
    assert not stories, "\n\n".join(stories)
    assert {outcome.fault for outcome in outcomes} == {change.name for change in changes}


def test_newcomers_with_the_numbers_of_those_that_have_left_train_together() -> None:
    def told(*processes: tuple[int, str, int]) -> list[dict[str, object]]:
        group = [rank for rank, _, _ in processes]
        letters = [
            {"what": "step", "at": 2.0, "group": group, "rank": rank, "host": host, "pid": pid}
            for rank, host, pid in processes
        ]
        return letters * 2

    stays, leaves, comes = (
        (0, "host0", 10),
        (1, "host1", 11),
        (1, "host2", 11),
    )  # each host counts its own processes
    there, wanted = told(stays, leaves) + told(stays), RanksOfHosts({"host0": 1, "host2": 1})
    assert RanksOfHosts({"host0": 1, "host1": 1}).together(told(stays, leaves), 1.0)
    assert not wanted.together(there, 1.0)
    assert not wanted.together([*there, *told(stays, comes)[:2]], 1.0)
    assert wanted.together([*there, *told(stays, comes)], 1.0)


@pytest.mark.root
@pytest.mark.timeout(300)
def test_training_goes_on_whichever_hosts_come_and_go() -> None:
    play(31, BRIEF, len(BRIEF), HOUR)


@pytest.mark.root
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_changes_of_hosts() -> None:
    play(301, tuple(change.play for change in CHANGES), 100)
