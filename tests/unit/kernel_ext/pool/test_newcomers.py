"""Which ranks count as newcomers: from their start until they have the others' variables."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hvdlab.kernel_ext.notebook.elastic import BEFORE, MembershipHistory, UnsyncedRank, UnsyncedRanks


def test_a_rank_is_a_newcomer_until_it_has_entered_the_cell() -> None:
    changes: list[None] = []
    history = MembershipHistory()
    history.listen(lambda: changes.append(None))
    newcomers = UnsyncedRanks(history)
    newcomers.add("resize", [2, 3], range(4))
    assert {rank: one.how for rank, one in newcomers.all().items()} == {2: "resize", 3: "resize"}
    newcomers.join("a", [2])
    assert set(newcomers.all()) == {3}
    newcomers.mark_joined("a", 2)
    newcomers.cell_ended("a")
    assert set(newcomers.all()) == {3}
    assert len(changes) == 4


def test_what_was_brought_is_lost_with_the_cell() -> None:
    newcomers = UnsyncedRanks()
    newcomers.add("repair", [1], range(2))
    newcomers.join("a", [1])
    newcomers.cell_ended("a")
    assert set(newcomers.all()) == {1}
    # It entered just before that, and its mail comes only now.
    newcomers.mark_joined("a", 1)
    assert newcomers.all() == {}


def test_ranks_that_another_process_has_started_after_others() -> None:
    newcomers = UnsyncedRanks()
    newcomers.restore({1: 1000.0, 2: 2000.0})
    newcomers.join("a", [1])
    assert newcomers.all() == {2: UnsyncedRank(BEFORE, 2000.0)}
    newcomers.mark_joined("a", 1)  # which it sends again, since it is asked for the cell's messages
    newcomers.cell_ended("a")
    assert set(newcomers.all()) == {2}


def test_mail_of_a_process_before_this_one_says_nothing() -> None:
    newcomers = UnsyncedRanks()
    newcomers.add("resize", [1], range(2))
    newcomers.join("a", [1])
    newcomers.add("restart", [1], range(2))
    newcomers.mark_joined("a", 1)
    assert newcomers.all()[1].how == "restart"


def test_if_no_other_rank_is_left_none_came_later() -> None:
    newcomers = UnsyncedRanks()
    newcomers.add("restart", [0], range(2))
    newcomers.add("restart", [1], range(2))
    assert newcomers.all() == {}


RANKS = st.sets(st.integers(0, 3), min_size=1)
STEPS = st.one_of(
    st.tuples(st.just("came"), RANKS),
    st.tuples(st.just("join"), st.sampled_from("ab"), RANKS),
    st.tuples(st.just("mark_joined"), st.sampled_from("ab"), st.integers(0, 3)),
    st.tuples(st.just("cell_ended"), st.sampled_from("ab")),
    st.tuples(st.just("mark_synced"), RANKS),
)


@given(st.lists(STEPS, max_size=30))
def test_whatever_happens_a_rank_that_was_brought_nothing_is_one(steps: list[tuple[Any, ...]]) -> None:
    """Rank 4 has never come later; the others are newcomers just if they have nothing and no cell brings it."""
    newcomers = UnsyncedRanks()
    nothing: set[int] = set()
    sent: dict[int, str] = {}
    running: set[str] = set()
    for what, *details in steps:
        if what == "came":
            newcomers.add("resize", details[0], range(5))
            nothing |= details[0]
            for rank in details[0]:
                sent.pop(rank, None)
        else:
            getattr(newcomers, what)(*details)
        if what == "join":
            running.add(details[0])
            sent.update(dict.fromkeys(details[1], details[0]))
        elif what == "mark_joined" and sent.get(details[1]) == details[0]:
            nothing.discard(details[1])
            del sent[details[1]]
        elif what == "cell_ended":
            running.discard(details[0])
        elif what == "mark_synced":
            nothing -= details[0]
            for rank in details[0]:
                sent.pop(rank, None)
        assert set(newcomers.all()) == {rank for rank in nothing if sent.get(rank) not in running}
