"""Output and reports when a rank's program ends by an exception."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.context import own_error, with_own_errors
from hvdlab.collectives.errors import (
    AbortedError,
    Cause,
    CauseKind,
    HvdlabError,
    InvalidRequestError,
    Pending,
)
from hvdlab.collectives.failures import Failures, cut_own_frames, describe_uncaught


def test_a_traceback_ends_at_the_users_line() -> None:
    context.init()
    try:
        with pytest.raises(InvalidRequestError) as caught:
            hvd.broadcast(np.ones(2), root_rank=5)
    finally:
        context.shutdown()
    error = caught.value
    assert len(traceback.extract_tb(error.__traceback__)) > 1
    cut_own_frames(error.__traceback__)
    frames = traceback.extract_tb(error.__traceback__)
    assert [frame.name for frame in frames] == ["test_a_traceback_ends_at_the_users_line"]


def test_a_traceback_of_our_own_frames_stays() -> None:
    with pytest.raises(Exception, match=r"hvd\.init") as caught:
        context.engine("this")
    assert caught.value.__traceback__ is not None
    own = caught.value.__traceback__.tb_next  # without this test's frame
    before = traceback.extract_tb(own)
    cut_own_frames(own)
    assert traceback.extract_tb(own) == before


# -- errors that native code has made of ours ---------------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[None]:
    context.init()
    yield
    context.shutdown()


def _sent(operation: str) -> tuple[AbortedError, RuntimeError]:
    """Return an error that was passed to native code, and the error that code raises."""
    cause = Cause(CauseKind.CELL_ENDED, (1,), "rank 1 finished its cell without it")
    own = AbortedError(Pending(operation, f"{operation}.noname", (0,), (1,)), cause)
    context.engine().sent_through_native.append(own)
    text = (
        f"Got the following error when running the callback: AbortedError: {own}\n\nAt:\n  work.py(3): wait\n"
    )
    return own, RuntimeError(text)


@pytest.mark.usefixtures("alone")
def test_native_codes_error_is_replaced_by_ours() -> None:
    (first, of_first), (second, of_second) = _sent("all_reduce #1"), _sent("all_reduce #2")
    try:
        raise of_first
    except RuntimeError:
        trace = of_first.__traceback__
    of_first.__context__ = before = KeyError("what was handled then")
    assert own_error(of_second) is second
    assert own_error(of_first) is first
    assert first.__traceback__ is trace
    assert first.__context__ is before
    assert own_error(of_first) is of_first, "an error comes back once"
    for other in (RuntimeError("all_reduce"), ValueError(str(of_first)), first):
        assert own_error(other) is other


def _interrupted(native: RuntimeError, earlier: RuntimeError) -> None:
    """An interrupt while one error is on its way, which came while another one was handled, which was the cause of one of the user's."""
    try:
        try:
            raise earlier
        except RuntimeError as error:
            raise ValueError("the user's own") from error
    except ValueError:
        try:
            raise native
        finally:
            raise KeyboardInterrupt


@pytest.mark.usefixtures("alone")
def test_what_an_error_came_from_is_replaced_as_well() -> None:
    (own, native), (other, of_other) = _sent("all_reduce #1"), _sent("all_reduce #2")
    with pytest.raises(KeyboardInterrupt) as caught:
        _interrupted(native, of_other)
    raised = caught.value
    assert with_own_errors(raised) is raised
    assert raised.__context__ is own
    assert isinstance(own.__context__, ValueError)
    assert own.__context__.__cause__ is other
    assert "running the callback" not in "".join(traceback.format_exception(raised))


@pytest.mark.usefixtures("alone")
def test_a_program_that_ends_with_native_codes_error_shows_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[Any, ...]] = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: shown.append(error))
    context.watch_uncaught()
    own, native = _sent("all_reduce #1")
    try:
        raise native
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    assert shown == [(AbortedError, own, own.__traceback__)]
    assert context.engine().farewell.startswith("AbortedError: all_reduce #1: ")


def test_report_of_an_uncaught_error_is_its_text_and_not_its_notes() -> None:
    error = HvdlabError("the ranks disagree").because_of(7)
    assert describe_uncaught(error, 0).error == "HvdlabError: the ranks disagree"


def test_a_kept_failure_has_the_text_of_its_error_and_not_its_notes() -> None:
    failures = Failures()
    failures.add("the view", HvdlabError("the ranks disagree").because_of(7))
    (kept,) = failures.all()
    assert kept.text.endswith("the ranks disagree")
