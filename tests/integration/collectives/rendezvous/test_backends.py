"""The private file by which ranks of one host meet."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.errors import StartError
from hvdlab.collectives.rendezvous import discovery
from hvdlab.collectives.rendezvous.backends import DirectoryBackend
from hvdlab.collectives.rendezvous.discovery import CoordinatorInfo, await_info
from hvdlab.collectives.system import host_key
from hvdlab.collectives.time_limits import Deadline
from support.patience import HOUR, PATIENCE


def board(*parents: Path, key: str = "job", shared: bool = False) -> DirectoryBackend:
    return DirectoryBackend(parents, key, shared=shared)


def own(parent: Path) -> Path:
    return parent / f"hvdlab-{os.geteuid()}"


@pytest.mark.parametrize("shared", [False, True])
def test_what_is_published_is_read_and_goes_away(tmp_path: Path, shared: bool) -> None:
    writer, reader = board(tmp_path, shared=shared), board(tmp_path, shared=shared)
    assert reader.read(0) is None
    writer.publish(b"one")
    writer.publish(b"two")
    assert reader.read(0) == b"two"
    writer.withdraw()
    assert reader.read(0) is None
    assert list(tmp_path.iterdir()) == []


def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        board(tmp_path).publish(b"secret")
    finally:
        os.umask(old)
    (file,) = own(tmp_path).iterdir()
    assert stat.S_IMODE(own(tmp_path).stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_directory_that_others_may_enter_is_not_trusted(tmp_path: Path) -> None:
    own(tmp_path).mkdir()
    own(tmp_path).chmod(0o755)
    with pytest.raises(StartError, match="not trusted"):
        board(tmp_path).publish(b"secret")
    with pytest.raises(StartError, match="not trusted"):
        board(tmp_path).read(0)


def test_a_link_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    own(tmp_path).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartError, match="not trusted"):
        board(tmp_path).publish(b"secret")


def test_a_planted_file_is_not_trusted(tmp_path: Path) -> None:
    own(tmp_path).mkdir(mode=0o700)
    planted = own(tmp_path) / "job"
    planted.write_bytes(b"{}")
    planted.chmod(0o666)
    with pytest.raises(StartError, match="not trusted"):
        board(tmp_path).read(0)


def test_jobs_that_end_do_not_take_the_directory_from_those_that_start(tmp_path: Path) -> None:
    one, other = board(tmp_path, key="one"), board(tmp_path, key="other")
    for _ in range(20):
        threads = [threading.Thread(target=b.publish, args=(b"x",)) for b in (one, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        one.withdraw()
        assert board(tmp_path, key="other").read(0) == b"x"
        other.withdraw()


def test_ranks_meet_elsewhere_if_somebody_has_taken_the_name(tmp_path: Path) -> None:
    taken, free = tmp_path / "tmp", tmp_path / "cache"
    taken.mkdir()
    own(taken).mkdir()
    own(taken).chmod(0o777)  # as far as trust goes, that of another user
    (own(taken) / "job").write_bytes(b"forged")
    board(taken, free).publish(b"good")
    assert board(taken, free).read(0) == b"good"
    assert board(free).read(0) == b"good"


def test_ranks_find_what_was_written_before_somebody_took_the_first_name(tmp_path: Path) -> None:
    first, second = tmp_path / "run", tmp_path / "tmp"
    own(second).mkdir(mode=0o700, parents=True)
    board(first, second).publish(b"good")  # one that is there wins over one that could be made
    first.mkdir()
    own(first).mkdir()
    own(first).chmod(0o777)
    assert board(first, second).read(0) == b"good"


def test_the_newest_card_counts(tmp_path: Path) -> None:
    first, second = tmp_path / "run", tmp_path / "tmp"
    for parent in (first, second):
        own(parent).mkdir(mode=0o700, parents=True)
    board(first).publish(b"old")
    os.utime(own(first) / "job", (1, 1))
    board(second).publish(b"new")
    assert board(first, second).read(0) == b"new"


# -- cards --------------------------------------------------------------------------------------------------------


@pytest.fixture
def believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Believe the first card that is found."""
    monkeypatch.setattr(discovery, "LEFTOVER_SECONDS", 0.0)


def card_of(coordinator: CoordinatorProcess, size: int = 2) -> CoordinatorInfo:
    return CoordinatorInfo(size, host_key(), coordinator.address, token=coordinator.token)


def test_the_card_of_an_earlier_job_is_passed_over(tmp_path: Path) -> None:
    with CoordinatorProcess.start(size=2, timeout=PATIENCE) as earlier:
        stale = card_of(earlier)
    board(tmp_path).publish(stale.encode())
    with CoordinatorProcess.start(size=2, timeout=PATIENCE) as coordinator:
        good = card_of(coordinator)
        publish = threading.Timer(0.3, board(tmp_path).publish, (good.encode(),))
        publish.start()
        assert await_info(board(tmp_path), 2, Deadline(PATIENCE)) == good
        publish.join()


@pytest.mark.parametrize("kind", ["error", "sealed by another", "size"])
def test_leftover_that_refuses_is_replaced_before_it_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(discovery, "LEFTOVER_SECONDS", HOUR)
    leftover = {
        "error": CoordinatorInfo(2, error="it rained").encode(SECRET),
        "sealed by another": CoordinatorInfo(2, host_key(), "unix:/his").encode("his own"),
        "size": CoordinatorInfo(3, host_key(), "unix:/theirs").encode(SECRET),
    }[kind]
    place = board(tmp_path)
    place.publish(leftover)
    with CoordinatorProcess.start(size=2, timeout=PATIENCE, token=SECRET) as coordinator:
        shown = CoordinatorInfo(2, host_key(), coordinator.address).encode(SECRET)
        # As soon as the rank waits for other data, rank 0 comes.
        monkeypatch.setattr(place, "pause", lambda seconds: place.publish(shown))
        assert await_info(place, 2, Deadline(PATIENCE), SECRET).local == coordinator.address


def test_failure_that_comes_while_a_rank_waits_is_believed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "LEFTOVER_SECONDS", HOUR)
    place = board(tmp_path)
    place.publish(CoordinatorInfo(2, error="an earlier job's").encode())
    failed = CoordinatorInfo(2, error="it rained").encode()
    monkeypatch.setattr(place, "pause", lambda seconds: place.publish(failed))
    with pytest.raises(StartError, match="it rained"):
        await_info(place, 2, Deadline(PATIENCE))


def test_if_only_the_earlier_one_is_there_the_text_says_so(tmp_path: Path) -> None:
    with CoordinatorProcess.start(size=2, timeout=PATIENCE) as earlier:
        stale = card_of(earlier)
    board(tmp_path).publish(stale.encode())
    with pytest.raises(StartError, match="does not answer"):
        await_info(board(tmp_path), 2, Deadline(0.5))


def test_a_missing_rank_0_is_named_in_time(tmp_path: Path) -> None:
    with pytest.raises(
        StartError, match=r"Rank 0 has not said .* within 0.3 s: it has not come to hvd.init"
    ) as caught:
        await_info(board(tmp_path), 2, Deadline(0.3))
    assert str(own(tmp_path)) in str(caught.value)
    assert "HVDLAB_RENDEZVOUS_DIR" in str(caught.value)


def test_rank_0s_failure_is_everybodys(tmp_path: Path, believed: None) -> None:
    board(tmp_path).publish(CoordinatorInfo(2, error="it rained").encode())
    with pytest.raises(StartError, match="Rank 0 could not start the coordinator: it rained"):
        await_info(board(tmp_path), 2, Deadline(PATIENCE))


def test_a_card_of_another_size_is_refused(tmp_path: Path, believed: None) -> None:
    with CoordinatorProcess.start(size=3, timeout=PATIENCE) as coordinator:
        board(tmp_path).publish(card_of(coordinator, 3).encode())
        with pytest.raises(StartError, match="has 3 ranks, this one 2"):
            await_info(board(tmp_path), 2, Deadline(PATIENCE))


SECRET = "given to all ranks by the user"


def test_a_sealed_card_holds_no_secret_and_is_read_by_who_has_it(tmp_path: Path) -> None:
    with CoordinatorProcess.start(size=2, timeout=PATIENCE, token=SECRET) as coordinator:
        card = CoordinatorInfo(2, host_key(), coordinator.address)
        shown = card.encode(SECRET)
        assert SECRET.encode() not in shown
        board(tmp_path).publish(shown)
        found = await_info(board(tmp_path), 2, Deadline(PATIENCE), SECRET)
        assert (found.local, found.token) == (coordinator.address, "")


def test_a_card_that_somebody_else_has_written_is_refused(tmp_path: Path, believed: None) -> None:
    """A user who can write there would have the ranks join a coordinator of their own, and give it their secret."""
    forged = CoordinatorInfo(2, host_key(), "unix:/his")
    for shown in (forged.encode(), forged.encode("his own")):
        board(tmp_path).publish(shown)
        with pytest.raises(StartError, match="not sealed with this rank's HVDLAB_TOKEN"):
            await_info(board(tmp_path), 2, Deadline(PATIENCE), SECRET)
    good = CoordinatorInfo(2, host_key(), "unix:/ours").encode(SECRET)
    with pytest.raises(StartError, match="not sealed"):
        CoordinatorInfo.decode(good.replace(b"/ours", b"/hiss"), SECRET)


def test_a_rank_without_the_secret_is_told_so() -> None:
    with pytest.raises(StartError, match="Rank 0 was given HVDLAB_TOKEN, and this rank was not"):
        CoordinatorInfo.decode(CoordinatorInfo(2).encode(SECRET))
