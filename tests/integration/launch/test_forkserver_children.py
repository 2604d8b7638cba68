"""Processes that packages start in a fork server, beside the ranks."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hvdlab.kernel_ext.forkserver.program import PROGRAM, PROGRAM_NAME
from hvdlab.launch.forkserver.children import ChildTable, SupervisedChild
from hvdlab.launch.forkserver.client import ForkServer
from hvdlab.launch.forkserver.messages import CONTROLLER, ForkServerMessage
from support.patience import PATIENCE
from support.ranks.fork_server import ForkedRanks, loaded

STARTS_PROCESSES = """
import subprocess
import time

found = {subprocess.run(["false"]).returncode for _ in range(100)}
if found != {1}:
    raise ImportError(f"exit codes {found}")
"""
"""A package that runs programs while it is imported, as ``ctypes.util.find_library`` and ``platform`` do."""


def test_a_package_may_run_programs_while_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "starts_processes.py").write_text(STARTS_PROCESSES)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "HVDLAB_PRELOAD": "starts_processes"}
    ranks = ForkedRanks(ForkServer.start(PROGRAM_NAME, environment))
    try:
        loaded(ranks.warm)
        ranks.fork([0])
        assert ranks.run(0, "import sys; 'starts_processes' in sys.modules") == "True"
        assert ranks.losses == []
    finally:
        ranks.close()


def test_a_thread_of_a_package_may_reap_its_own_process_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with selectors.DefaultSelector() as selector, subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        waitid, wait4 = os.waitid, os.wait4

        def waitid_of_this(idtype: int, number: int, options: int) -> Any:
            """The process of the tests may have other children."""
            return waitid(os.P_PID, process.pid, options)

        def wait4_too_late(pid: int, options: int) -> Any:
            assert process.wait() == 0
            return wait4(pid, options)

        monkeypatch.setattr(os, "waitid", waitid_of_this)
        monkeypatch.setattr(os, "wait4", wait4_too_late)
        assert ChildTable(selector, PROGRAM).reap() == []
        assert process.returncode == 0


def test_reports_to_a_stopped_controller_hold_nothing_up() -> None:
    lines = [b"rank %d has ended\n" % rank for rank in range(1000)]
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the system makes it the least that there is
    child = SupervisedChild(CONTROLLER, os.getpid(), -1, -1, channel=ours)
    told = threading.Event()
    with selectors.DefaultSelector() as selector:
        table = ChildTable(selector, PROGRAM)
        table.add(child)

        def tell() -> None:
            for line in lines:
                table.notify_controller(line)
            told.set()

        teller = threading.Thread(target=tell)
        teller.start()
        try:
            assert told.wait(PATIENCE)
            read = theirs.recv(1 << 16)  # it runs again
            while len(read) < len(b"".join(lines)):
                for key, _ in selector.select(PATIENCE):
                    assert key.data() == []
                read += theirs.recv(1 << 16)
            assert read == b"".join(lines)
        finally:
            theirs.close()  # which frees a teller that is held up
            teller.join()
            child.close()


def test_each_rank_has_random_numbers_of_its_own() -> None:
    ranks = ForkedRanks(ForkServer.start(PROGRAM_NAME, {**os.environ, "HVDLAB_PRELOAD": "numpy,torch"}))
    try:
        loaded(ranks.warm)
        ranks.fork([0, 1, 2])
        drawn = "import random, numpy, torch; [random.random(), numpy.random.rand(), torch.rand(1).item()]"
        numbers = {number for rank in range(3) for number in ranks.run(rank, drawn).strip("[]").split(", ")}
        assert len(numbers) == 9
    finally:
        ranks.close()


TRAINS = """
import os
import sys
import time

import hvdlab.bindings.framework_hooks.torch as hooks

class Says:
    def find_spec(self, name, path=None, target=None):
        if name == "begins_with_training":
            open({place!r}, "w").close()

sys.meta_path.append(Says())
type(hooks.HOOKS).training = ("begins_with_training",)
while not os.path.exists({go!r}):
    time.sleep(0.01)
"""
"""A package that makes the hooks of torch name a module for training, and writes a file when that is imported. Its own import waits for another file."""


@pytest.mark.parametrize("idle", [True, False], ids=["idle before the first rank", "a rank at once"])
def test_what_training_imports_is_imported_while_there_is_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, idle: bool
) -> None:
    place, go = tmp_path / "imported", tmp_path / "go"
    (tmp_path / "trains.py").write_text(TRAINS.format(place=str(place), go=str(go)))
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "HVDLAB_PRELOAD": "torch,trains"}
    ranks = ForkedRanks(ForkServer.start(PROGRAM_NAME, environment))
    try:
        if idle:
            go.touch()
            until = time.monotonic() + PATIENCE
            while not place.exists():
                assert time.monotonic() < until
                time.sleep(0.01)
        else:
            send = ranks.warm.send

            def send_first(order: ForkServerMessage) -> None:
                send(order)
                go.touch()

            # The order is there when the imports are done.
            monkeypatch.setattr(ranks.warm, "send", send_first)
            ranks.fork([0])
            assert ranks.run(0, "1 + 1") == "2"
            assert not place.exists()
    finally:
        ranks.close()
    assert place.exists() == idle
