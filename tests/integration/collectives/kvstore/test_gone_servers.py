"""Servers that can't be started again at once: interrupts come through, and the log gives the reason."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdlab import kvstore
from hvdlab.collectives.errors import StartError
from hvdlab.collectives.kvstore.servers import connection as links
from hvdlab.collectives.kvstore.servers import starting
from hvdlab.collectives.text import LOG
from support.interrupting import press_ctrl_c, when_this_thread_waits
from support.ranks.resident import Ranks


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.gone = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        if "has been gone" in self.texts[-1]:
            self.gone.set()


def interrupt_while_the_server_is_gone() -> list[str]:
    """An interrupt while a thread looks for the server is one, every time; the store goes on with the server."""
    warnings = _Warnings()
    LOG.addHandler(warnings)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # the one of these ranks raises once in a function
    links.STALL_SECONDS = 0.05
    links._POLL_MILLISECONDS = 10
    kv = kvstore.create("dist_async")
    kv.set_optimizer("test")
    kv.init("w", np.zeros(3))
    ensure, looking = starting.ServerStarter.ensure_running, threading.Event()
    out = np.zeros(3)

    def full(self: Any, address: Any, timeout: float) -> None:
        looking.set()
        raise StartError("no space left on device")

    for number in range(1, 4):
        looking.clear()
        starting.ServerStarter.ensure_running = full  # type: ignore[method-assign]
        pid = kv._links[0].pid
        os.kill(pid, signal.SIGKILL)
        assert looking.wait(30)  # the link's own thread does
        assert number > 1 or warnings.gone.wait(30)
        pressing = when_this_thread_waits(press_ctrl_c, frozenset({"_recover"}))
        with pytest.raises(KeyboardInterrupt):
            kv.pull("w", out=out)
        pressing.join()
        starting.ServerStarter.ensure_running = ensure  # type: ignore[method-assign]
        kv.pushpull("w", np.ones(3), out=out)
        assert out.tolist() == [number] * 3
        assert kv._links[0].pid != pid
    return [text for text in warnings.texts if "has been gone" in text]


def test_an_interrupt_comes_through_and_the_cause_is_logged() -> None:
    with Ranks(1) as ranks:
        (texts,) = ranks.run(interrupt_while_the_server_is_gone, timeout=60)
    assert texts
    assert all("no space left on device" in text for text in texts)


def start_servers_that_do_not_come_up(directory: str) -> tuple[list[str], int]:
    """Return the files and the number of descriptors that are left over."""
    tempfile.tempdir = directory
    ensure = starting.ServerStarter.ensure_running
    starting._parent_directory = lambda settings: directory

    def full(self: Any, address: Any, timeout: float) -> None:
        raise StartError("no space left on device")

    starting.ServerStarter.ensure_running = full  # type: ignore[method-assign]
    left = 0
    try:
        for number in range(3):
            with pytest.raises(StartError, match="no space left on device"):
                kvstore.create("dist_async")
            if number == 0:
                left = -len(os.listdir("/proc/self/fd"))
        left += len(os.listdir("/proc/self/fd"))
    finally:
        starting.ServerStarter.ensure_running = ensure  # type: ignore[method-assign]
    return os.listdir(directory), left


def test_a_server_that_did_not_come_up_leaves_no_secrets_on_the_disk(tmp_path: Path) -> None:
    with Ranks(1) as ranks:
        assert ranks.run(start_servers_that_do_not_come_up, str(tmp_path)) == [([], 0)]
