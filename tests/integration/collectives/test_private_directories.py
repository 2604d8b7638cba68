"""Directories of our own: another user may take a name first, but neither leads us into his nor keeps us from having one."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from hvdlab.collectives import system
from support import ordinary_user


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    """Return one directory in each of three parents, the first of which is missing."""
    for parent in ("tmp", "cache"):
        (tmp_path / parent).mkdir()
    return [tmp_path / parent / system.private_name() for parent in ("run", "tmp", "cache")]


def take(place: Path) -> None:
    """As far as trust goes, this is another user's."""
    place.mkdir()
    place.chmod(0o755)


def test_the_runtime_directory_comes_first_and_the_caches_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    environ = {"XDG_RUNTIME_DIR": "/somewhere", "XDG_CACHE_HOME": "/caches"}
    users = Path(f"/run/user/{os.geteuid()}")
    assert system.private_parents(environ) == [Path("/somewhere"), users, Path("/tmp"), Path("/caches")]
    assert system.private_parents({"XDG_RUNTIME_DIR": "run"}) == [
        users,
        Path("/tmp"),
        Path.home() / ".cache",
    ]


def test_one_that_is_there_wins_over_one_that_could_be_made(places: list[Path]) -> None:
    assert system.choose_private(places) == places[1]
    places[2].mkdir(mode=0o700)
    assert system.choose_private(places) == places[2]


def test_a_name_that_is_taken_is_passed_over(places: list[Path]) -> None:
    take(places[1])
    assert system.choose_private(places) == places[2]


def test_a_link_is_a_name_that_is_taken(places: list[Path], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    places[1].symlink_to(tmp_path / "elsewhere")
    assert system.choose_private(places) == places[2]


def test_nothing_is_made_where_others_could_replace_it(places: list[Path]) -> None:
    places[1].parent.chmod(0o777)
    assert system.choose_private(places) == places[2]
    places[1].parent.chmod(0o1777)
    assert system.choose_private(places) == places[1]


def test_another_user_s_directory_is_not_ours(tmp_path: Path) -> None:
    """The user is real here: another user does not trust a directory of root's."""
    if os.getuid() != 0:
        pytest.skip("needs root, to be two users")
    with tempfile.TemporaryDirectory(prefix="hvd-p-", dir="/tmp") as directory:
        os.chmod(directory, 0o1777)
        taken = Path(directory) / "taken"
        taken.mkdir(mode=0o700)
        assert ordinary_user.run(system.is_private, taken) is False
        free = Path(directory) / "free"
        assert ordinary_user.run(system.choose_private, [taken, free]) == free
        taken.chmod(0o777)
        with pytest.raises(PermissionError, match="belongs to user 0"):
            ordinary_user.run(system.create_private, taken / "file", "text")


def test_a_file_is_made_for_us_alone_and_follows_no_link(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        (tmp_path / "own").mkdir()
        system.create_private(tmp_path / "own" / "cell.py", "x = 1")
    finally:
        os.umask(old)
    made = tmp_path / "own" / "cell.py"
    assert made.read_text() == "x = 1"
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    assert stat.S_IMODE(made.parent.stat().st_mode) == 0o700
    victim = tmp_path / "victim"
    victim.write_text("dear")
    (tmp_path / "own" / "other.py").symlink_to(victim)
    (tmp_path / "own" / "third.py").symlink_to(tmp_path / "nothing")
    for name in ("other.py", "third.py"):
        with pytest.raises(FileExistsError):
            system.create_private(tmp_path / "own" / name, "x = 1")
    assert victim.read_text() == "dear"
    assert not (tmp_path / "nothing").exists()


def test_a_directory_that_is_a_link_is_not_entered(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match=r"(?i)not a directory|symbolic"):
        system.create_private(tmp_path / "link" / "cell.py", "x = 1")
