"""The files of kept pools, on a disk without room."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from hvdlab.collectives.errors import StartError
from hvdlab.kernel_ext.notebook.registry import KeptPoolEntry, KeptPoolRegistry, Process


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


@pytest.mark.usefixtures("full")
def test_a_failed_write_leaves_no_draft_and_the_pool_as_it_was(
    registry: KeptPoolRegistry, kept: KeptPoolEntry, tmp_path: Path
) -> None:
    with pytest.raises(StartError, match="No space left"):
        registry.write(kept)
    assert [path.name for path in (tmp_path / "private" / "pools").iterdir()] == ["night.json"]
    assert registry.get("night") == kept
