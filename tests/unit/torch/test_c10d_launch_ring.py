"""The comparison of launches of a watched group: rings in, a verdict out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from hvdlab.torch.c10d.launch_ring import (
    COLLECTIVES,
    SENT,
    SLOTS,
    AnyWatchMail,
    InnerEnded,
    Inquiry,
    LateLaunch,
    LaunchAnswer,
    LaunchQuery,
    LaunchReport,
    LaunchRing,
    LaunchSlot,
    LaunchVerdict,
    MakeInner,
    compare_launches,
)

FLOATS = (torch.Size([2]), torch.float32)
Call = tuple[str, Any, str]
"""Operation, shape and dtype, and line of one launch."""
REDUCED: Call = ("all_reduce", FLOATS, "train.py:39")


def report(
    *calls: Call, step: int = 0, parts: dict[int, str] | None = None, members: tuple[int, ...] = (0, 1, 2)
) -> LaunchReport:
    ring = LaunchRing()
    for number, (operation, tensor, site) in enumerate(calls, start=1):
        root = SimpleNamespace(rootRank=1) if operation == "broadcast" else dist.AllreduceOptions()
        ring.add(
            LaunchSlot(
                7,
                COLLECTIVES,
                number,
                100 + number,
                operation,
                tensor,
                root,
                site,
                (parts or {}).get(number, ""),
                step,
            )
        )
    return ring.report(7, COLLECTIVES, members)


def test_a_rank_that_has_not_launched_is_missing() -> None:
    verdict = compare_launches(
        2, (0, 1, 2), {0: report(REDUCED, REDUCED), 1: report(REDUCED), 2: report(REDUCED, REDUCED)}
    )
    assert verdict.waited == (0, 2)
    assert verdict.missing == (1,)
    assert verdict.sites == ("train.py:39", "train.py:39")
    assert not verdict.parties


def test_a_rank_that_does_not_answer_is_missing() -> None:
    inquiry = Inquiry(1, (0, 1, 2), (0, 1, 2))
    assert not inquiry.answered(0, report(REDUCED))
    assert not inquiry.answered(2, report(REDUCED))
    assert not inquiry.answered(2, report(REDUCED))  # the same answer again
    assert inquiry.verdict().missing == (1,)
    assert inquiry.answered(1, report(REDUCED))
    assert inquiry.verdict().missing == ()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (("broadcast", FLOATS, "train.py:31"), "broadcast float32[2] from rank 6"),
        (("all_reduce", (torch.Size([3, 1]), torch.float32), "train.py:31"), "allreduce float32[3, 1] sum"),
        (("all_reduce", (torch.Size([2]), torch.bfloat16), "train.py:31"), "allreduce bfloat16[2] sum"),
        (("barrier", None, "train.py:31"), "barrier sum"),
    ],
)
def test_other_operations_shapes_and_dtypes_are_parties(other: Call, words: str) -> None:
    members = (5, 6, 7)
    reports = {
        5: report(REDUCED, members=members),
        6: report(other, members=members),
        7: report(REDUCED, members=members),
    }
    first, second = compare_launches(1, members, reports).parties
    assert (first.ranks, first.request, first.site) == ((5, 7), "allreduce float32[2] sum", "train.py:39")
    assert (second.ranks, second.site) == ((6,), "train.py:31")
    assert second.request == words


@pytest.mark.parametrize(
    "operation", ["all_gather of lists", "reduce_scatter of lists", "all_to_all", "gather", "scatter"]
)
def test_shapes_that_may_differ_are_not_compared(operation: str) -> None:
    reports = {rank: report((operation, (torch.Size([rank]), torch.int64), "a.py:1")) for rank in range(2)}
    assert compare_launches(1, (0, 1), reports).parties == ()


def test_a_skipped_call_is_named() -> None:
    lines = [("all_reduce", FLOATS, f"train.py:{line}") for line in (10, 11, 12, 13, 14)]
    verdict = compare_launches(5, (0, 1), {0: report(*lines), 1: report(*lines[:2], *lines[3:])})
    assert verdict.missing == (1,)
    assert verdict.note.startswith(
        "rank 1 skipped a call: where rank 0 called all_reduce #103 (train.py:12), it called all_reduce #103"
    )


def test_the_part_of_a_model_stands_behind_the_line() -> None:
    mine = report(REDUCED, parts={1: ", DDP bucket 2: fc.weight"})
    assert compare_launches(1, (0, 1), {0: mine}).sites == ("train.py:39, DDP bucket 2: fc.weight",)


def test_a_rank_that_is_far_ahead_has_launched_it_and_is_not_compared() -> None:
    ahead = report(*[REDUCED] * (SENT + 10))
    assert ahead.first == 10
    verdict = compare_launches(3, (0, 1), {0: report(*[REDUCED] * 3), 1: ahead})
    assert verdict.missing == ()
    assert verdict.parties == ()


def test_the_ring_keeps_the_last_launches_of_each_channel_and_inner_group() -> None:
    ring = LaunchRing()
    for number in range(1, SLOTS + 6):
        ring.add(LaunchSlot(1, COLLECTIVES, number, number, "all_reduce", FLOATS, None, "a.py:1", "", 0))
    assert [slot.number for slot in ring.slots(1, COLLECTIVES)] == list(range(6, SLOTS + 6))
    ring.add(LaunchSlot(1, "0>1.7", 1, SLOTS + 6, "send", FLOATS, None, "a.py:2", "", 0))
    ring.add(LaunchSlot(2, COLLECTIVES, 1, SLOTS + 7, "all_reduce", FLOATS, None, "a.py:3", "", 0))
    assert [slot.site for slot in ring.slots(1, "0>1.7")] == ["a.py:2"]
    assert [slot.site for slot in ring.slots(2, COLLECTIVES)] == ["a.py:3"]
    ring.drop_last()
    assert ring.report(2, COLLECTIVES, (0, 1)) == LaunchReport()


@pytest.mark.parametrize(
    "mail",
    [
        LateLaunch("g", 3, "0>1.7", 4),
        LaunchQuery("g", 3, COLLECTIVES, 4),
        LaunchAnswer("g", 3, COLLECTIVES, 1, report(REDUCED), True),
        LaunchVerdict(
            "g", 3, COLLECTIVES, 1, (0,), ("a.py:1",), (1,), (1,), (((0,), "barrier", "a.py:1"),), "note"
        ),
        InnerEnded("g", 4),
        MakeInner("g", 4),
    ],
)
def test_mail_comes_back_from_the_wire(mail: Any) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(mail), type=AnyWatchMail) == mail
