"""Matching of one process set's submissions, by hand-made schedules."""

from __future__ import annotations

import msgspec

from hvdlab.collectives.coordinator.negotiation import DuplicateName, Impossible, Mismatch, Negotiation
from hvdlab.collectives.coordinator.signatures import LocalDefinition, SignatureTable
from hvdlab.collectives.protocol.messages import Definition
from hvdlab.collectives.types import OpKind, ReduceOp
from support.simulation.coordinator import signature


class Bench:
    """Matcher with ranks 0, 1, 2 whose local ids are made up as needed."""

    def __init__(self, size: int = 3) -> None:
        self.negotiation = Negotiation(tuple(range(size)))
        self.table = SignatureTable()
        self.definitions: list[dict[int, LocalDefinition]] = [{} for _ in range(size)]

    def submit(
        self,
        rank: int,
        name: str,
        *,
        shape: tuple[int, ...] = (4,),
        group: str = "",
        size: int = 0,
        kind: OpKind = OpKind.ALLREDUCE,
        op: ReduceOp = ReduceOp.SUM,
        payload: bytes = b"",
    ) -> int:
        sig = signature(name, kind, shape=shape, op=op, group=group, group_size=size)
        known = self.definitions[rank]
        local = next((n for n, d in known.items() if d.info.signature == sig), len(known))
        if local not in known:
            self.table.define(known, Definition(local, sig, f"line {rank}"))
        self.negotiation.submit(rank, known[local], (), 0.0, payload)
        return local

    def ready(self) -> list[str]:
        ready, self.negotiation.ready = self.negotiation.ready, []
        return [current.info.name for current in ready]

    def rejected(self) -> list[tuple[int, str]]:
        """(rank, name of the rejected submission) since the last call."""
        told, self.negotiation.rejections = self.negotiation.rejections, []
        return sorted((rank, self.definitions[rank][local].info.name) for _, rank, local, _ in told)

    def reject_mismatches(self) -> None:
        """The time that ranks in dispute wait for the others is over."""
        self.negotiation.reject_mismatches(0.0, 0.0)

    def join(self, rank: int) -> None:
        self.submit(rank, "join.noname", kind=OpKind.JOIN, shape=())

    def verdicts(self) -> list[object]:
        return list({id(v): v for _, _, _, v in self.negotiation.rejections}.values())


def test_a_name_is_ready_when_all_have_submitted_it_in_any_order() -> None:
    bench = Bench()
    for rank, name in [(0, "a"), (0, "b"), (1, "b"), (2, "b"), (2, "a"), (1, "a")]:
        bench.submit(rank, name)
    assert bench.ready() == ["b", "a"]
    assert not bench.negotiation.pending


def test_submissions_of_one_name_match_in_order() -> None:
    bench = Bench(2)
    for shape in [(1,), (2,), (3,)]:
        bench.submit(0, "n", shape=shape)
    for shape in [(1,), (2,), (3,)]:
        bench.submit(1, "n", shape=shape)
    assert bench.ready() == ["n"] * 3
    assert bench.rejected() == []
    assert not bench.negotiation.pending


def test_a_mismatch_names_everything_that_was_asked_for() -> None:
    bench = Bench(4)
    for rank, extent in enumerate((4, 5, 6, 4)):
        assert bench.rejected() == []
        bench.submit(rank, "a", shape=(extent,))
    (verdict,) = bench.verdicts()
    assert isinstance(verdict, Mismatch)
    assert [(p.ranks, p.request, p.site) for p in verdict.parties] == [
        ((0, 3), "allreduce float32[4] sum", "line 0"),
        ((1,), "allreduce float32[5] sum", "line 1"),
        ((2,), "allreduce float32[6] sum", "line 2"),
    ]
    assert bench.rejected() == [(rank, "a") for rank in range(4)]
    assert not bench.negotiation.owed
    assert not bench.negotiation.pending


def test_a_mismatch_does_not_wait_long_for_the_last_rank_and_holds_for_it() -> None:
    bench = Bench()
    bench.submit(0, "a", shape=(4,))
    bench.submit(1, "a", shape=(5,))
    assert bench.rejected() == []
    assert bench.negotiation.oldest_mismatch == 0.0
    bench.reject_mismatches()
    (verdict,) = bench.verdicts()
    assert isinstance(verdict, Mismatch)
    assert [p.ranks for p in verdict.parties] == [(0,), (1,)]
    assert bench.rejected() == [(0, "a"), (1, "a")]
    bench.submit(2, "a", shape=(4,))
    assert bench.verdicts() == [verdict]
    assert bench.rejected() == [(2, "a")]
    assert not bench.negotiation.owed
    assert bench.negotiation.oldest_mismatch is None


def test_ranks_that_try_again_after_a_mismatch_meet_in_a_round_of_their_own() -> None:
    bench = Bench()
    bench.submit(0, "a", shape=(4,))
    bench.submit(1, "a", shape=(5,))
    bench.reject_mismatches()
    bench.rejected()
    bench.submit(0, "a")
    bench.submit(1, "a")
    bench.submit(2, "a", shape=(9,))  # its first try: the old verdict
    assert bench.rejected() == [(2, "a")]
    assert bench.ready() == []
    bench.submit(2, "a")
    assert bench.ready() == ["a"]


def test_a_mismatch_among_several_in_flight_concerns_one_round_only() -> None:
    bench = Bench(2)
    for shape in [(1,), (2,), (3,)]:
        bench.submit(0, "n", shape=shape)
    for shape in [(1,), (7,), (3,)]:
        bench.submit(1, "n", shape=shape)
    assert bench.ready() == ["n", "n"]
    assert bench.rejected() == [(0, "n"), (1, "n")]
    assert not bench.negotiation.pending


def test_other_names_are_not_concerned_by_a_mismatch() -> None:
    bench = Bench(2)
    bench.submit(0, "a", shape=(4,))
    bench.submit(0, "b")
    bench.submit(1, "a", shape=(5,))
    bench.submit(1, "b")
    assert bench.ready() == ["b"]


def test_a_group_is_released_as_a_whole() -> None:
    bench = Bench(2)
    for rank in (0, 1):
        bench.submit(rank, "x", group="g", size=2)
    assert bench.ready() == []
    assert bench.negotiation.pending
    for rank in (0, 1):
        bench.submit(rank, "y", group="g", size=2)
    assert bench.ready() == ["x", "y"]


def test_a_mismatch_ends_the_whole_group_on_every_rank() -> None:
    bench = Bench()
    for rank in range(3):
        bench.submit(rank, "x", group="g", size=3)  # complete, held back
    bench.submit(0, "y", group="g", size=3)
    bench.submit(0, "z", group="g", size=3)
    bench.submit(1, "z", group="g", size=3, shape=(9,))
    bench.reject_mismatches()
    assert bench.rejected() == [(0, "x"), (0, "y"), (0, "z"), (1, "x"), (1, "z"), (2, "x")]
    bench.submit(1, "y", group="g", size=3)
    bench.submit(2, "y", group="g", size=3)
    bench.submit(2, "z", group="g", size=3)
    assert bench.rejected() == [(1, "y"), (2, "y"), (2, "z")]
    assert not bench.negotiation.owed
    for name in "xyz":
        for rank in range(3):
            bench.submit(rank, name, group="g", size=3)
    assert bench.ready() == ["x", "y", "z"]


def test_a_mismatch_in_one_group_leaves_the_next_one_of_that_name_alone() -> None:
    bench = Bench(2)
    for _ in range(2):
        for _ in range(2):
            bench.submit(0, "n", group="g", size=2)
    bench.submit(1, "n", group="g", size=2)
    bench.submit(1, "n", group="g", size=2, shape=(9,))
    assert bench.rejected() == [(0, "n"), (0, "n"), (1, "n"), (1, "n")]
    for _ in range(2):
        bench.submit(1, "n", group="g", size=2)
    assert bench.ready() == ["n", "n"]
    assert not bench.negotiation.pending


def test_disagreeing_about_the_group_itself_is_a_conflict() -> None:
    bench = Bench(2)
    bench.submit(0, "x", group="g", size=2)
    bench.submit(1, "x")
    assert "disagree about `x`" in bench.negotiation.conflict


def test_a_duplicate_name_fails_everywhere_also_where_it_comes_later() -> None:
    bench = Bench()
    bench.submit(0, "a")
    bench.submit(1, "a")
    bench.negotiation.duplicate("a", 0, "line 1", "line 2", 0.0)
    (verdict,) = bench.verdicts()
    assert isinstance(verdict, DuplicateName)
    assert (verdict.rank, verdict.first_site, verdict.second_site) == (0, "line 1", "line 2")
    assert bench.rejected() == [(0, "a"), (1, "a")]
    bench.submit(2, "a")
    assert bench.rejected() == [(2, "a")]


def test_a_duplicate_of_what_was_released_changes_nothing() -> None:
    bench = Bench(1)
    bench.submit(0, "a")
    assert bench.ready() == ["a"]
    bench.negotiation.duplicate("a", 0, "", "", 0.0)
    assert bench.rejected() == []
    assert not bench.negotiation.owed


def test_a_duplicate_in_a_held_group_ends_the_group() -> None:
    bench = Bench(2)
    for rank in (0, 1):
        bench.submit(rank, "x", group="g", size=2)
    bench.negotiation.duplicate("x", 0, "", "", 0.0)
    assert bench.rejected() == [(0, "x"), (1, "x")]
    for rank in (0, 1):
        bench.submit(rank, "y", group="g", size=2)
    assert bench.rejected() == [(0, "y"), (1, "y")]


def test_a_rank_that_will_not_submit_owes_nothing_any_more() -> None:
    bench = Bench()
    bench.submit(0, "a", shape=(4,))
    bench.submit(1, "a", shape=(5,))
    bench.reject_mismatches()
    bench.rejected()
    bench.negotiation.owed.discard_rank(2)
    for rank in range(3):
        bench.submit(rank, "a")
    assert bench.ready() == ["a"]


def test_equal_signatures_are_one_object_until_nobody_defines_them() -> None:
    bench = Bench(2)
    bench.submit(0, "a")
    bench.submit(1, "a")
    assert len(bench.table) == 1
    bench.table.forget(bench.definitions[0])
    assert len(bench.table) == 1
    bench.table.forget(bench.definitions[1])
    assert len(bench.table) == 0


def test_a_local_id_may_be_defined_anew() -> None:
    table, known = SignatureTable(), dict[int, LocalDefinition]()
    table.define(known, Definition(0, signature("a"), ""))
    table.define(known, Definition(0, signature("b"), ""))
    assert [info.name for info in table] == ["b"]
    assert known[0].info.name == "b"


# -- joining ----------------------------------------------------------------------------------------------------------


def test_nobody_waits_for_a_rank_that_has_joined() -> None:
    bench = Bench()
    bench.submit(0, "a")
    bench.join(2)
    assert bench.ready() == []
    bench.submit(1, "a")
    (complete,) = bench.negotiation.ready
    assert complete.absent == (2,)
    assert not complete.same_local_id
    assert bench.ready() == ["a"]
    bench.submit(0, "b")
    bench.join(1)  # completes the entries that waited for it
    assert bench.ready() == ["b"]


def test_what_a_rank_submitted_before_it_joined_counts() -> None:
    bench = Bench(2)
    bench.submit(1, "a")
    bench.join(1)
    bench.submit(0, "a")
    (complete,) = bench.negotiation.ready
    assert complete.absent == ()
    assert complete.same_local_id


def test_when_all_have_joined_each_is_told_who_was_the_last() -> None:
    bench = Bench()
    bench.join(2)
    bench.join(0)
    assert bench.ready() == []
    assert bench.negotiation.joined == (0, 2)
    bench.join(1)
    (complete,) = bench.negotiation.ready
    assert complete.extras == {0: (1,), 1: (1,), 2: (1,)}
    assert bench.ready() == ["join.noname"]
    assert bench.negotiation.joined == ()
    bench.submit(0, "a")
    bench.submit(1, "a")
    assert bench.ready() == []  # they wait for rank 2 again


def test_what_is_in_flight_when_the_last_rank_joins_comes_before_the_end_of_joining() -> None:
    bench = Bench(2)
    bench.join(1)
    bench.submit(0, "x", group="g", size=2)
    bench.join(0)
    assert bench.rejected() == [(0, "x")]  # its group will never be complete
    assert bench.ready() == ["join.noname"]
    assert not bench.negotiation.owed
    bench = Bench(2)
    bench.submit(0, "a")
    bench.submit(0, "a")
    bench.join(0)
    assert bench.ready() == []
    bench.join(1)
    assert bench.ready() == ["a", "a", "join.noname"]
    assert not bench.negotiation.pending


def test_what_needs_everyones_data_is_refused_while_ranks_have_joined() -> None:
    bench = Bench()
    bench.join(1)
    for kind, op in [
        (OpKind.ALLGATHER, ReduceOp.SUM), (OpKind.BROADCAST, ReduceOp.SUM), (OpKind.ALLTOALL, ReduceOp.SUM),
        (OpKind.REDUCESCATTER, ReduceOp.SUM), (OpKind.ALLREDUCE, ReduceOp.MIN), (OpKind.ALLREDUCE, ReduceOp.ADASUM),
    ]:  # fmt: skip
        for rank in (0, 2):
            bench.submit(rank, f"{kind}{op}", kind=kind, op=op)
        (verdict,) = bench.verdicts()
        assert isinstance(verdict, Impossible)
        assert verdict.joined == (1,)
        assert "not supported with join: rank 1 has joined" in verdict.reason
        assert [rank for rank, _ in bench.rejected()] == [0, 2]
        assert not bench.negotiation.owed
    for rank in (0, 2):
        bench.submit(rank, "b", kind=OpKind.BARRIER)
    assert bench.ready() == ["b"]
    assert bench.negotiation.joined == (1,)


def test_a_rank_that_joins_owes_nothing() -> None:
    bench = Bench()
    bench.submit(0, "a", shape=(4,))
    bench.submit(1, "a", shape=(5,))
    bench.reject_mismatches()
    bench.rejected()
    bench.join(2)
    assert not bench.negotiation.owed
    bench.submit(0, "a", shape=(4,))
    bench.submit(1, "a", shape=(5,))  # all that are waited for are there
    assert bench.rejected() == [(0, "a"), (1, "a")]
    assert not bench.negotiation.owed


def test_a_group_of_those_that_have_not_joined_is_released_as_a_whole() -> None:
    bench = Bench()
    bench.join(0)
    for name in "xy":
        bench.submit(1, name, group="g", size=2)
    bench.submit(2, "x", group="g", size=2)
    assert bench.ready() == []
    bench.submit(2, "y", group="g", size=2)
    assert bench.ready() == ["x", "y"]


def test_joining_twice_is_two_joins() -> None:
    bench = Bench(2)
    bench.join(0)
    bench.join(0)
    bench.join(1)
    assert bench.ready() == ["join.noname"]
    assert bench.negotiation.joined == (0,)
    bench.submit(1, "a")
    assert bench.ready() == ["a"]
    bench.join(1)
    assert bench.ready() == ["join.noname"]
    assert not bench.negotiation.pending


def test_thousands_that_wait_behind_each_other_for_a_rank_that_joins() -> None:
    for other, ready, rejected in ((4, 3000, 0), (9, 0, 6000)):
        bench = Bench()
        for _ in range(3000):
            bench.submit(0, "n")
            bench.submit(1, "n", shape=(other,))
        bench.join(2)
        assert (len(bench.ready()), len(bench.rejected())) == (ready, rejected)


def test_a_factor_that_is_not_a_number_is_the_same_on_all_ranks() -> None:
    bench = Bench()
    for rank in range(3):
        sent = msgspec.structs.replace(signature("x"), prescale=float("nan"), postscale=float("nan"))
        bench.table.define(bench.definitions[rank], Definition(0, sent, f"line {rank}"))
        bench.negotiation.submit(rank, bench.definitions[rank][0], (), 0.0, b"")
    assert bench.ready() == ["x"]
    assert not bench.verdicts()
    for definitions in bench.definitions:
        bench.table.forget(definitions)
    assert not len(bench.table)
