"""Messages to ranks, and their order, when a coordinator has taken another's place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from hvdlab.collectives.client import Client
from hvdlab.collectives.types import Membership
from hvdlab.kernel_ext.notebook.cells.dispatch import DISCARDS_AT_ONCE, CellDispatcher, CellRequest
from hvdlab.kernel_ext.notebook.cells.driver import CellHandle
from hvdlab.kernel_ext.notebook.cells.results import CellResults, RankDeath
from hvdlab.kernel_ext.notebook.cells.sink import NullSink, OutputSink
from hvdlab.kernel_ext.notebook.elastic import Bounds, UnsyncedRanks
from hvdlab.kernel_ext.notebook.output.transcript import TranscriptStore
from hvdlab.kernel_ext.wire.cells import CellDone, CellError, DiscardCell, JoinedCell, Output, RunCell, Stream
from hvdlab.kernel_ext.wire.channel import Payload
from hvdlab.kernel_ext.wire.codec import TO_POOL, decode_to_rank, encode
from support.patience import PATIENCE


class Said:
    """Client that records the messages sent."""

    def __init__(self) -> None:
        self.said: list[tuple[str, tuple[int, ...]]] = []
        self.mail: dict[str, Callable[[int, bytes], Any]] = {}
        self.orders: list[RunCell] = []
        self.discarded: list[str] = []

    def on_mail(self, topic: str, callback: Callable[[int, bytes], Any]) -> None:
        self.mail[topic] = callback

    def on_stall(self, callback: Callable[[Any], Any]) -> None:
        pass

    def membership(self) -> Membership:
        return Membership()

    def cell_started(
        self,
        cell: str,
        ranks: Sequence[int],
        *,
        label: str = "",
        mail: Sequence[tuple[str, bytes, Sequence[int]]] = (),
    ) -> None:
        self.said.append(("cell started", tuple(ranks)))
        for piece in mail:
            self.post(*piece)

    def post(self, topic: str, body: bytes, to: Sequence[int]) -> None:
        payload = decode_to_rank(body)
        if isinstance(payload, RunCell):
            self.orders.append(payload)
        elif isinstance(payload, DiscardCell):
            self.discarded.append(payload.cell)
        joins = " joins" if getattr(payload, "joins", False) else ""
        self.said.append((type(payload).__name__ + joins, tuple(to)))

    def interrupt(self, ranks: Sequence[int]) -> None:
        self.said.append(("interrupt", tuple(ranks)))


class LivingRanks:
    """Ranks that live, on other hosts."""

    def loss_reason(self, rank: int) -> str:
        return ""

    def losses(self, ranks: Iterable[int]) -> dict[int, str]:
        return {}

    def local_pid(self, rank: int) -> int | None:
        return None


def runs_of(client: Said, newcomers: UnsyncedRanks | None = None) -> CellDispatcher:
    return CellDispatcher(
        cast(Client, client), LivingRanks(), TranscriptStore(Path("/proc/nowhere")), newcomers=newcomers
    )


def start(
    runs: CellDispatcher, cell: str, elastic: Bounds | None = None, sink: OutputSink | None = None
) -> CellHandle:
    request = CellRequest("pass", label="[1]", elastic=elastic)
    return runs.dispatch(cell, [0, 1], request, sink or NullSink())


def test_an_interrupt_comes_after_its_cell_and_before_that_can_end() -> None:
    """Earlier reports of ranks come with their answers; a cell that is sent then must not get the interrupt."""
    client = Said()
    runs = runs_of(client)
    start(runs, "a")
    runs.connection_lost()
    runs.interrupt([0, 1])
    client.said.clear()
    runs.resync([0, 1], running={})
    assert client.said == [
        ("cell started", (0, 1)),
        ("RunCell", (0, 1)),
        ("interrupt", (0, 1)),
        ("ResendFrom", (0,)),
        ("ResendFrom", (1,)),
    ]


def test_first_to_fail_beside_a_death_goes_by_the_clock_here() -> None:
    runs = runs_of(Said())
    here, there = (CellError("ValueError", "bad", ("tb",), when) for when in (1000, 10))
    results = CellResults(
        (0, 1, 2),
        {0: CellDone("a", here, 0.0), 1: CellDone("a", there, 0.0)},
        deaths={2: RankDeath(2, "killed by SIGKILL", 1)},
        arrivals={1: ("behind", 2000)},
    )
    runs.finish("a", results)
    assert runs.first_to_fail == 0


def test_an_interrupt_is_for_one_cell() -> None:
    client = Said()
    runs = runs_of(client)
    first = start(runs, "a")
    runs.interrupt([0, 1])
    for rank in (0, 1):
        client.mail[TO_POOL](rank, encode(CellDone("a", None, 0.0)))
    assert first.wait(PATIENCE).ok
    start(runs, "b")
    runs.connection_lost()
    client.said.clear()
    runs.resync([0, 1], running={"b": (0, 1)})
    assert ("interrupt", (0, 1)) not in client.said
    assert ("RunCell", (0, 1)) in client.said


def run_cell(runs: CellDispatcher, client: Said, cell: str, ranks: Sequence[int], *messages: Payload) -> None:
    handle = runs.dispatch(cell, ranks, CellRequest("pass", label="[1]"), NullSink())
    for rank in ranks:
        for message in messages or (CellDone(cell, None, 0.0),):
            client.mail[TO_POOL](rank, encode(message))
    handle.wait(PATIENCE)


def test_cells_that_wrote_nothing_are_discarded_with_the_next_cell() -> None:
    """A message of their own would wake a thread of each rank, for nothing that takes memory."""
    client = Said()
    runs = runs_of(client)
    run_cell(runs, client, "a", [0, 1])
    run_cell(runs, client, "b", [0])  # not on all of the ranks that have a
    assert [order.discards for order in client.orders] == [(), ()]
    assert not client.discarded
    start(runs, "c")
    assert client.orders[-1].discards == ("a", "b")
    assert not client.discarded


@pytest.mark.parametrize(
    "messages",
    [
        (Output("a", (Stream("stdout", "x"),), 1), CellDone("a", None, 0.0, total=1)),
        (CellDone("a", None, 0.0, has_value=True, value_repr="1"),),
        (CellDone("a", CellError("ValueError", "no", (), 0), 0.0),),
    ],
)
def test_other_cells_are_discarded_at_once(messages: tuple[Payload, ...]) -> None:
    client = Said()
    runs = runs_of(client)
    run_cell(runs, client, "a", [0, 1], *messages)
    assert client.discarded == ["a"]
    start(runs, "b")
    assert client.orders[-1].discards == ()


def test_cells_of_a_kept_pool_are_discarded_at_once() -> None:
    """The next notebook must not be shown a cell whose end the notebook before has seen."""
    client = Said()
    runs = CellDispatcher(
        cast(Client, client), LivingRanks(), TranscriptStore(Path("/proc/nowhere")), kept=True
    )
    run_cell(runs, client, "a", [0, 1])
    assert client.discarded == ["a"]


def test_few_cells_wait_to_be_discarded() -> None:
    client = Said()
    runs = runs_of(client)
    for number in range(DISCARDS_AT_ONCE + 1):
        run_cell(runs, client, f"{number}", [number % 2])
    start(runs, "last")
    waited = [cell for order in client.orders for cell in order.discards]
    assert sorted([*waited, *client.discarded]) == sorted(map(str, range(DISCARDS_AT_ONCE + 1)))
    for number in range(DISCARDS_AT_ONCE + 1):
        run_cell(runs, client, f"again {number}", [5 + number])
    assert client.discarded == [f"again {DISCARDS_AT_ONCE}"]


def test_only_a_rank_that_was_cut_off_reports_its_cell_itself() -> None:
    client = Said()
    runs = runs_of(client)
    start(runs, "a")
    runs.rank_reconnected(1)
    assert [order.announced for order in client.orders] == [True, False]


class TellingSink(NullSink):
    """Something happens to the pool while the end of a cell is written."""

    def __init__(self) -> None:
        self.runs: CellDispatcher | None = None
        self.notes: list[str] = []
        self.lines_left: list[list[str]] = []

    def note(self, text: str, *, warning: bool = False) -> None:
        self.notes.append(text)

    def finished(self, results: CellResults) -> None:
        assert self.runs is not None
        self.runs.notice("the coordinator was replaced")
        self.lines_left.append(self.runs.take_notices())


def test_a_line_that_comes_while_a_cell_ends_is_not_lost() -> None:
    client, sink = Said(), TellingSink()
    sink.runs = runs = runs_of(client)
    handle = start(runs, "a", sink=sink)
    runs.notice("in time")
    for rank in (0, 1):
        client.mail[TO_POOL](rank, encode(CellDone("a", None, 0.0)))
    assert handle.wait(PATIENCE).ok
    assert sink.lines_left == [[]]  # the cell was there yet
    assert (sink.notes, runs.take_notices()) == (["in time"], ["the coordinator was replaced"])
    runs.notice("later")
    assert runs.take_notices() == ["later"]
    runs.silence()
    runs.notice("after the end")
    assert runs.take_notices() == []


def test_a_rank_that_joined_is_a_newcomer_until_it_says_that_it_entered() -> None:
    client, newcomers = Said(), UnsyncedRanks()
    runs = runs_of(client, newcomers)
    handle = start(runs, "a", elastic=Bounds())
    handle.drive_in_background()
    newcomers.add("resize", [2, 3], range(4))
    assert runs.join("a", (2, 3))
    assert newcomers.all() == {}
    client.mail[TO_POOL](2, encode(JoinedCell("a")))
    for rank in range(4):
        client.mail[TO_POOL](rank, encode(CellDone("a", None, 0.0)))
    handle.wait(PATIENCE)
    assert set(newcomers.all()) == {3}
    # The cell has ended: none is sent it any more.
    assert not runs.join("a", (3,))
    assert set(newcomers.all()) == {3}


def test_a_rank_that_joined_is_sent_the_cell_as_one_that_joins_again() -> None:
    """Messages to it can be lost with the coordinator; the next one can know of the cell on the other ranks alone."""
    client = Said()
    runs = runs_of(client)
    start(runs, "a", elastic=Bounds())
    runs.join("a", (2,))
    assert client.said[-2:] == [("cell started", (2,)), ("RunCell joins", (2,))]
    runs.connection_lost()
    runs.join("a", (3,))
    client.said.clear()
    runs.resync([0, 1, 2, 3], running={"a": (0, 1, 2)})
    assert client.said[:3] == [
        ("cell started", (3,)),
        ("RunCell joins", (2, 3)),
        ("RunCell", (0, 1)),
    ]
