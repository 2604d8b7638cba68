"""What users read of errors."""

from __future__ import annotations

from hvdlab.collectives.errors import AbortedError, Cause, CauseKind, Pending, call_name


def test_a_tensor_without_a_name_is_known_by_its_kind() -> None:
    assert call_name("barrier", "barrier.noname") == "barrier"
    assert call_name("allreduce", "loss") == "allreduce `loss`"
    assert call_name("allreduce", "barrier.noname") == "allreduce `barrier.noname`"


def test_an_abort_is_one_sentence() -> None:
    pending = Pending("barrier", "barrier.noname", (0, 1), (2,), {0: "cell [7] line 4"})
    cause = Cause(CauseKind.CELL_ENDED, (2,), "rank 2 finished its cell without it")
    assert str(AbortedError(pending, cause)) == (
        "barrier (cell [7] line 4): ranks 0,1 waited; rank 2 finished its cell without it"
    )
