"""The files of kept pools, on a disk without room, and while other processes find none of them."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.notebook.kept_pools import LocalKeptPool
from hvdlab.kernel_ext.notebook.prestart import PoolProcesses
from hvdlab.kernel_ext.notebook.registry import KeptPoolEntry, KeptPoolRegistry, Process
from hvdlab.launch import processes
from hvdlab.launch.kept import DEFAULT
from support.patience import PATIENCE


@pytest.fixture
def registry(tmp_path: Path) -> KeptPoolRegistry:
    place = tmp_path / "private" / "pools"
    place.mkdir(mode=0o700, parents=True)
    place.parent.chmod(0o700)
    return KeptPoolRegistry(place)


@pytest.fixture
def kept(tmp_path: Path) -> KeptPoolEntry:
    this = Process.of(os.getpid())
    return KeptPoolEntry(
        "night", 2, "shm", time.time(), "unix:/nowhere", "t", str(tmp_path / "d"), this, this, "/nowhere", ("a", 1), this, "/work"
    )  # fmt: skip


@pytest.fixture
def full(registry: KeptPoolRegistry, kept: KeptPoolEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes no new file, once the pool has been written."""
    registry.write(kept)
    original = os.open

    def fail_to_make(path: Any, flags: int, *mode: int, **kwargs: Any) -> int:
        descriptor = original(path, flags, *mode, **kwargs)
        if flags & os.O_CREAT:
            os.close(descriptor)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return descriptor

    monkeypatch.setattr(os, "open", fail_to_make)


@pytest.mark.usefixtures("full")
def test_a_pool_is_released_on_a_full_disk_and_can_be_claimed_again(
    registry: KeptPoolRegistry, kept: KeptPoolEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.release(kept)
    assert registry.get("night").owner.pid == 0
    monkeypatch.undo()
    assert registry.claim("night", "/work").owner.pid == os.getpid()


class KeepingServer:
    """A fork server that stays; other processes start pools while it answers."""

    pid = os.getpid()

    def __init__(self, others: Iterable[KeptPoolEntry]) -> None:
        self._others = others

    def keep(self, path: str, deadline: Deadline) -> None:
        for other in self._others:
            KeptPoolRegistry().write(other)


class NearCoordinator:
    pid = os.getpid()
    address, token, client_token, directory = "unix:/nowhere", "t", "c", Path("/nowhere")


def keep(name: str, *others: KeptPoolEntry) -> LocalKeptPool:
    """Keep a pool under this name, while others are kept meanwhile."""
    processes = PoolProcesses(cast(Any, KeepingServer(others)), cast(Any, NearCoordinator()), cast(Any, None))
    return LocalKeptPool.begin(
        processes, name, size=3, plane="shm", ports=("a", 1), deadline=Deadline(PATIENCE)
    )


def test_pool_whose_name_was_taken_meanwhile_is_refused(
    kept: KeptPoolEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(InvalidRequestError, match="there is a pool `night` already"):
        keep("night", kept)
    assert KeptPoolRegistry().all() == [kept]


def test_pool_without_name_gets_one_that_is_free_when_it_is_kept(
    kept: KeptPoolEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert keep("", msgspec.structs.replace(kept, name=DEFAULT)).name == f"{DEFAULT}-2"
    assert [found.size for found in KeptPoolRegistry().all()] == [2, 3]


@pytest.mark.usefixtures("full")
def test_a_failed_write_leaves_no_draft_and_the_pool_as_it_was(
    registry: KeptPoolRegistry, kept: KeptPoolEntry, tmp_path: Path
) -> None:
    with pytest.raises(StartError, match="No space left"):
        registry.write(kept)
    assert [path.name for path in (tmp_path / "private" / "pools").iterdir()] == ["night.json"]
    assert registry.get("night") == kept


def test_a_pool_is_kept_although_another_process_removes_the_empty_directory_meanwhile(
    registry: KeptPoolRegistry, kept: KeptPoolEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, lock = tmp_path / "private" / "pools", fcntl.flock
    removed: list[Path] = []

    def lock_after_the_other(descriptor: int, operation: int) -> None:
        if not removed:
            place.rmdir()
            removed.append(place)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_after_the_other)
    registry.write(kept)
    assert [found.name for found in registry.all()] == ["night"]


def test_the_lock_is_not_that_of_a_directory_that_was_removed_and_made_again(
    registry: KeptPoolRegistry, kept: KeptPoolEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, lock = tmp_path / "private" / "pools", fcntl.flock
    made: list[Path] = []

    def lock_after_the_others(descriptor: int, operation: int) -> None:
        if not made:
            place.rmdir()
            place.mkdir(mode=0o700)
            made.append(place)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_after_the_others)
    with registry._locked() as there:
        assert not there
    registry.write(kept)
    assert (place / "night.json").is_file()


def test_rest_of_dead_pool_is_ended_by_descriptor_not_by_number(
    registry: KeptPoolRegistry, kept: KeptPoolEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: list[int] = []
    ended = Process(os.getpid(), 1)
    with subprocess.Popen(["sleep", "60"]) as child:
        left = Process.of(child.pid)
        registry.write(msgspec.structs.replace(kept, coordinator=left, warm=ended, owner=ended))
        with monkeypatch.context() as reused:
            # Another process may have the number by the time of the signal.
            reused.setattr(os, "kill", lambda pid, number: numbers.append(pid))
            found = registry.all()
        if numbers:
            child.kill()
        assert child.wait(PATIENCE) == -signal.SIGTERM
    assert (found, numbers) == ([], [])


def test_pool_stays_if_the_last_descriptor_is_that_of_its_process(
    registry: KeptPoolRegistry, kept: KeptPoolEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.open

    def fail_in_proc(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).startswith("/proc/"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return original(path, *args, **kwargs)

    registry.write(kept)
    with monkeypatch.context() as exhausted:
        exhausted.setattr(processes, "process_status", lambda pid: [])  # as it reads without a descriptor
        exhausted.setattr(os, "open", fail_in_proc)
        with pytest.raises(OSError, match="Too many open files"):
            registry.all()
    assert registry.all() == [kept]


def test_process_that_has_ended_gets_no_signal() -> None:
    with subprocess.Popen(["true"]) as child:
        process = Process.of(child.pid)
    process.send_signal(signal.SIGKILL)
    Process(os.getpid(), 1).send_signal(signal.SIGKILL)
    Process(0, 0).send_signal(signal.SIGKILL)
