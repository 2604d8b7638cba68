"""Cells that a debugger is to find lie where another user can't have put links to the user's files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from ipykernel.compiler import get_file_name

from hvdlab.magics.attach import write_cell


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"ipykernel_{os.getpid()}"


def test_a_cell_is_written_once(directory: Path) -> None:
    write_cell("x = 1")
    (written,) = directory.iterdir()
    assert str(written) == get_file_name("x = 1")
    assert written.read_text() == "x = 1"
    write_cell("x = 1")
    write_cell("  ")
    assert list(directory.iterdir()) == [written]


def test_no_file_of_the_user_s_is_overwritten_through_a_link(directory: Path, tmp_path: Path) -> None:
    """Also one that is not there yet: what is written would be a file of somebody else's choice."""
    directory.mkdir()
    victim = tmp_path / "authorized_keys"
    Path(get_file_name("x = 1")).symlink_to(victim)
    write_cell("x = 1")
    assert not victim.exists()


def test_a_directory_of_somebody_else_s_gets_nothing(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    directory.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="cells can't be written"):
        write_cell("x = 1")
    assert list((tmp_path / "elsewhere").iterdir()) == []
