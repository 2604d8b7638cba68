"""The cause is told first and whole; consequences are one line each."""

from __future__ import annotations

import re

from hvdlab.kernel_ext.cells.failure import CellFailed, CellInterrupted, failure_of
from hvdlab.kernel_ext.cells.results import CellResults, Death
from hvdlab.kernel_ext.output.report import report
from hvdlab.kernel_ext.payloads import CellDone, CellError


def results(errors: dict[int, CellError | None], **kwargs: object) -> CellResults:
    done = {rank: CellDone("c", error, 0.1) for rank, error in errors.items()}
    deaths = kwargs.get("deaths", {})
    assert isinstance(deaths, dict)
    return CellResults(sorted({*errors, *deaths}), done, **kwargs)  # type: ignore[arg-type]


def shown(found: CellResults) -> list[str]:
    return [re.sub(r"\x1b\[\d+m", "", line) for line in report(found)]


def aborted(when: int, *culprits: int) -> CellError:
    return CellError("AbortedError", "stopped", ("tb",), when, True, "allreduce `grad.fc.weight`", culprits)


BAD = CellError("ValueError", "bad", ("Traceback", "line 4", "ValueError: bad"), 1)


def test_the_failed_rank_comes_first_and_the_others_are_folded() -> None:
    assert shown(results({0: aborted(2, 3), 1: aborted(3, 3), 2: aborted(4, 3), 3: BAD})) == [
        "rank 3 failed:",
        "Traceback",
        "line 4",
        "ValueError: bad",
        "",
        "ranks 0-2: stopped in allreduce `grad.fc.weight` because rank 3 failed",
    ]


def test_a_rank_that_came_late_is_folded_with_the_others() -> None:
    found = shown(results({0: aborted(2, 3), 1: aborted(3, 0, 2, 3), 2: aborted(4, 3), 3: BAD}))
    assert found[-1] == "ranks 0-2: stopped in allreduce `grad.fc.weight` because rank 3 failed"


def test_equal_errors_are_told_once() -> None:
    assert shown(results({0: BAD, 1: BAD})) == ["ranks 0,1 failed with the same error:", *BAD.traceback]


def test_a_second_error_is_one_line() -> None:
    other = CellError("KeyError", "'x'", ("tb",), 9)
    assert shown(results({0: other, 1: BAD}))[-1] == "rank 0: KeyError: 'x'"


def test_a_death_is_the_headline() -> None:
    found = results({0: aborted(9, 2), 1: aborted(9, 2)}, deaths={2: Death(2, "killed by SIGKILL", 3)})
    assert shown(found) == [
        "rank 2 died: killed by SIGKILL",
        "ranks 0,1: stopped in allreduce `grad.fc.weight` because rank 2 died",
    ]


def test_an_interrupt_is_told_once() -> None:
    stop = CellError("KeyboardInterrupt", "", ("tb",), 1, interrupted=True)
    found = results({0: stop, 1: stop}, interrupted=True, stopped={0, 1})
    assert shown(found) == ["KeyboardInterrupt: ranks 0,1 were interrupted", "tb"]
    failure = failure_of(found)
    assert isinstance(failure, CellInterrupted)
    assert type(failure).__name__ == "KeyboardInterrupt"


def test_ranks_stopped_because_of_the_failure_are_folded() -> None:
    stop = CellError("KeyboardInterrupt", "", ("tb",), 5, interrupted=True)
    assert shown(results({0: stop, 1: BAD, 2: stop}, stopped={0, 2}))[-1] == "ranks 0,2: interrupted"


def test_nothing_is_told_when_all_is_well() -> None:
    assert report(results({0: None})) == []
    assert failure_of(results({0: None})) is None


def test_the_exception_bears_the_name_and_text_of_the_cause() -> None:
    failure = failure_of(results({0: None, 1: BAD}))
    assert isinstance(failure, CellFailed)
    assert type(failure).__name__ == "ValueError"
    assert str(failure) == "bad"
    assert failure.results.errors[1] is BAD
