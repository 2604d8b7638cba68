"""Texts of errors for users."""

from __future__ import annotations

import pickle
import traceback

import pytest

from hvdlab.collectives.errors import AbortedError, Cause, CauseKind, MismatchError, Pending, call_name


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


def test_a_traceback_ends_with_the_decision_of_the_coordinator() -> None:
    pending, cause = Pending("barrier", "b"), Cause(CauseKind.CELL_ENDED, (2,), "why", decision=19)
    for error in (AbortedError(pending, cause), MismatchError("b", 0, ()).because_of(19)):
        sent: AbortedError | MismatchError = pickle.loads(pickle.dumps(error))  # noqa: S301  (made here)
        for known in (error, sent):
            assert known.decision == 19
            lines = "".join(traceback.format_exception_only(known)).splitlines()
            assert lines[-1] == "[decision 19 of the coordinator]"
            assert lines.count(lines[-1]) == 1
            assert "decision" not in str(known)
    assert cause == Cause(CauseKind.CELL_ENDED, (2,), "why")
    assert not hasattr(MismatchError("b", 0, ()).because_of(0), "__notes__")


@pytest.mark.parametrize("kind", CauseKind)
def test_each_cause_comes_with_what_to_do(kind: CauseKind) -> None:
    said = str(AbortedError(Pending("barrier", "b"), Cause(kind, (2,), "why")))
    head, _, advice = said.partition("\n")
    assert head == "barrier `b`: why"
    # The error of the coordinator's loss itself tells of a successor.
    assert advice.endswith(".") == (kind is not CauseKind.COORDINATOR_LOST)
