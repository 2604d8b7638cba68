"""Logs of coordinators and servers for their operators."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from hvdlab.collectives.text import operator_log


@pytest.mark.parametrize(
    ("level", "written"), [(10, ["warning", "note"]), (20, ["warning", "note"]), (30, ["warning"]), (40, [])]
)
def test_lines_of_the_level_and_above_go_to_stderr(
    level: int, written: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    log = operator_log("coordinator", level=level)
    log.warning("warning")
    log.info("note")
    assert capsys.readouterr().err.splitlines() == [f"hvdlab coordinator: {text}" for text in written]


def test_a_journal_gets_lines_of_all_levels_with_their_times(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    log = operator_log("coordinator", level=50, journal=str(journal))
    with closing(log.handlers[-1]):
        log.info("a note")
    day, time, text = journal.read_text().split(" ", 2)
    assert (len(day), len(time), text) == (10, 8, "a note\n")


def test_a_journal_that_was_moved_away_is_begun_again(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    log = operator_log("coordinator", level=50, journal=str(journal))
    with closing(log.handlers[-1]):
        log.info("first")
        journal.rename(tmp_path / "moved")
        log.info("second")
    assert journal.read_text().endswith(" second\n")
    assert (tmp_path / "moved").read_text().endswith(" first\n")
