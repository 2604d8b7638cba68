"""Errors of the core under torch's names of operations."""

from __future__ import annotations

from hvdlab.collectives.errors import AbortedError, Cause, CauseKind, Pending
from hvdlab.torch.c10d.operation_names import renamed


def test_the_name_of_a_call_that_is_its_own_site_stands_once_in_the_text() -> None:
    cause = Cause(CauseKind.WITHDRAWN, (0,), "rank 0 called abort()")
    pending = Pending("barrier", "hvd.made", (1,), (0,), {1: "dist.new_group"})
    text = str(renamed(AbortedError(pending, cause, 0, 3), "dist.new_group"))
    assert text.startswith("dist.new_group: rank 1 waited; rank 0 called abort()"), text


def test_a_line_of_the_user_s_code_stays_in_the_text_without_the_part_of_the_model() -> None:
    cause = Cause(CauseKind.WITHDRAWN, (0,), "rank 0 called abort()")
    pending = Pending("allreduce", "x", (1,), (0,), {1: "train.py:3 layers.2"})
    error = renamed(AbortedError(pending, cause, 0, 3), "all_reduce #1 of group dp", about=" layers.2")
    assert str(error).startswith("all_reduce #1 of group dp (train.py:3): rank 1 waited; "), str(error)
