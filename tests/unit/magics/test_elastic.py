"""Output of ``%hvd_elastic``."""

from __future__ import annotations

from hvdlab.kernel_ext.notebook.elastic import Bounds, MembershipChange, MembershipHistory
from hvdlab.kernel_ext.notebook.membership import ElasticState
from hvdlab.magics.view_magics import ElasticView


def state() -> ElasticState:
    history = MembershipHistory()
    history.add(MembershipChange(0, "joined", "start", "here#ab", 10, 1.0))
    history.add(MembershipChange(1, "joined", "start", "here#ab", 11, 1.0))
    history.add(MembershipChange(1, "died", "killed by <SIGKILL>\x1b[31m", "here#ab", 11, 2.0))
    arrivals = {rank: came for rank in (0, 1) if (came := history.arrival(rank)) is not None}
    members = {0: "ready", 1: "lost: killed by SIGKILL"}
    return ElasticState(4, [("[7]", Bounds(1, 3), (0,))], members, (1,), arrivals, history.all())


def test_text_has_the_world_its_ranks_and_the_history() -> None:
    lines = repr(ElasticView(state())).splitlines()
    assert lines[0] == (
        "1 of 2 ranks are there, rank 1 is awaited; cell [7] trains on rank 0, at least 1, at most 3"
    )
    assert [line.split()[:4] for line in lines[3:5]] == [
        ["0", "here", "10", "ready"],
        ["1", "here", "11", "lost:"],
    ]
    assert [line.split()[1:3] for line in lines[7:]] == [["0", "joined"], ["1", "joined"], ["1", "died"]]
    assert "\x1b" not in lines[-1]


def test_older_changes_are_counted() -> None:
    lines = repr(ElasticView(state(), last=1)).splitlines()
    assert lines[-1] == "(2 earlier changes: --last N shows more)"
    assert "died" in lines[-2]


def test_html_has_the_newest_change_first_as_the_widget_has() -> None:
    page = ElasticView(state())._repr_html_()
    assert page.index(">died<") < page.rindex(">joined<")
    assert page.count(">died<") == 1


def test_html_escapes_what_ranks_say() -> None:
    page = ElasticView(state())._repr_html_()
    assert "killed by &lt;SIGKILL&gt;" in page
    assert "<SIGKILL>" not in page
