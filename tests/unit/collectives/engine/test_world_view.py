"""The living ranks, as a rank reports them to a successor of the coordinator."""

from __future__ import annotations

from hvdlab.collectives.engine.world_view import WorldView
from hvdlab.collectives.protocol import messages as m


def world(generation: int, *ranks: int) -> m.World:
    members = tuple(m.Member(rank, "host", 100 + rank) for rank in ranks)
    return m.World((0, 1, 2), members, (), generation)


def test_members_that_came_after_the_last_news_live() -> None:
    """The news of a change come once in a while, the group's configuration at once."""
    view = WorldView()
    view.update(world(0, 0))
    view.configured([0, 1, 2], 1)
    assert view.alive == (0, 1, 2)


def test_who_left_after_the_group_was_made_does_not() -> None:
    view = WorldView()
    view.configured([0, 1, 2], 1)
    assert view.alive == (0, 1, 2)
    view.update(world(1, 0, 2))
    assert view.alive == (0, 2)
