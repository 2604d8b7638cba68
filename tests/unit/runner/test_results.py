"""Values of a function come back from all ranks, or an error that names the rank and the reason."""

from __future__ import annotations

import pickle
import sys
from types import ModuleType
from typing import Any

import pytest

from hvdlab.runner.function_worker import FunctionReturned, raised, returned
from hvdlab.runner.run_function import RankFailedError, results
from hvdlab.runner.supervisor import JobResult


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Return a result whose class only the rank can import."""
    module = ModuleType("only_on_ranks")
    kind: Any = type("Model", (), {"__module__": module.__name__})
    module.Model = kind  # type: ignore[attr-defined]  # a module of the test's own
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        return pickle.dumps(FunctionReturned(kind()))


def test_value_of_a_class_that_is_missing_here_names_its_rank(unknown: bytes) -> None:
    done = JobResult(results={0: returned(5), 1: unknown})
    with pytest.raises(
        RankFailedError, match=r"rank 1 returned .* No module named 'only_on_ranks'"
    ) as caught:
        results(done, 2)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_failure_of_a_rank_is_raised_although_another_s_value_is_unreadable(unknown: bytes) -> None:
    failed = pickle.dumps(raised(ValueError("boom")))
    with pytest.raises(ValueError, match="rank 1 raised ValueError: boom"):
        results(JobResult(code=1, failed=1, results={0: unknown, 1: failed}), 2)


def test_unreadable_value_of_a_rank_that_was_let_go_does_no_harm(unknown: bytes) -> None:
    assert results(JobResult(results={0: returned(5), 1: unknown}, left={1}), 2) == [5]


def test_line_of_a_ranks_exception_is_its_text_and_not_its_notes() -> None:
    error = ValueError("boom")
    error.add_note("a hint")
    assert raised(error).line == "ValueError: boom"
