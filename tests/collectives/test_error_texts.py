"""What users read of errors."""

from __future__ import annotations

import pytest

from hvdlab.collectives.errors import AbortedError, Cause, CauseKind, Pending, call_name


def test_a_tensor_without_a_name_is_known_by_its_kind() -> None:
    assert call_name("barrier", "barrier.noname") == "barrier"
    assert call_name("allreduce", "loss") == "allreduce `loss`"
    assert call_name("allreduce", "barrier.noname") == "allreduce `barrier.noname`"


def test_an_abort_says_what_happened_and_then_what_to_do() -> None:
    pending = Pending("barrier", "barrier.noname", (0, 1), (2,), {0: "cell [7] line 4"})
    cause = Cause(CauseKind.CELL_ENDED, (2,), "rank 2 finished its cell without it")
    assert str(AbortedError(pending, cause)) == (
        "barrier (cell [7] line 4): ranks 0,1 waited; rank 2 finished its cell without it\n"
        "Every rank must call it: probably an `if` or a loop went another way there, or its cell did not run on all "
        "ranks. For some ranks only, use a process set. The group is intact."
    )


@pytest.mark.parametrize("kind", CauseKind)
def test_each_cause_comes_with_what_to_do(kind: CauseKind) -> None:
    said = str(AbortedError(Pending("barrier", "b"), Cause(kind, (2,), "why")))
    head, _, advice = said.partition("\n")
    assert head == "barrier `b`: why"
    # The coordinator's loss says itself whether there may be another.
    assert advice.endswith(".") == (kind is not CauseKind.COORDINATOR_LOST)
