"""Frames below Python."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable

import pytest

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.kernel_ext.notebook import stack_probe
from hvdlab.kernel_ext.notebook.pool import Pool

StartPool = Callable[..., Pool]


def test_native_frames_are_read_from_outside(start_pool: StartPool) -> None:
    pytest.importorskip("psutil")
    try:
        stack_probe.program()
    except InvalidRequestError:
        pytest.skip("py-spy is not installed")
    pool = start_pool(2)
    handle = pool.start_run("def wait():\n    import time; time.sleep(60)\nwait()", label="[4]")
    while not all(stack.frames for stack in pool.where().stacks.values()):
        time.sleep(0.01)
    found = pool.native()
    handle.interrupt()
    handle.wait()
    if "py-spy failed" in repr(found):
        pytest.skip(f"processes can't be looked into here: {found}")
    lines = found.stacks[0]
    assert "wait (<cell [4]> line" in " ".join(lines)
    assert any("nanosleep" in line or "time_sleep" in line or "libc" in line for line in lines), lines
    assert repr(found).startswith("ranks 0,1, with native frames:")


def test_without_py_spy_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *args, **kwargs: None)
    with pytest.raises(InvalidRequestError, match="pip install py-spy"):
        stack_probe.native_stacks({0: 1})


def test_what_py_spy_says_is_told() -> None:
    found = stack_probe.NativeStacks({1: ("a", "b"), 0: ("a", "b"), 2: ("c",)})
    assert repr(found).splitlines() == [
        "ranks 0,1, with native frames:",
        "  a",
        "  b",
        "rank 2, with native frames:",
        "  c",
    ]
