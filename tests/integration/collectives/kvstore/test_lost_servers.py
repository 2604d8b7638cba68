"""Servers that are lost with their host, and servers that are stopped: the messages."""

from __future__ import annotations

import logging
import os
import signal
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdlab import kvstore
from hvdlab.collectives import context
from hvdlab.collectives.kvstore.servers import connection as links
from hvdlab.collectives.text import LOG
from hvdlab.collectives.time_limits import Deadline
from hvdlab.kvstore import KVStoreError
from support.patience import eventually
from support.ranks.resident import Ranks

KEYS = {0: (3,), 1: (2, 2), 2: (5,), 4: (40,)}
"""With three servers each has one of the first three keys, and all have parts of the last."""
SETTINGS = {"MXNET_KVSTORE_BIGARRAY_BOUND": "30"}


class Said(logging.Handler):
    """Texts of warnings."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


_kv: Any = None
_said = Said()


# -- on the ranks -----------------------------------------------------------------------------------------------------


def begin(on_own_hosts: bool) -> list[int]:
    """Three rounds; the servers' process ids."""
    global _kv
    if on_own_hosts:
        os.environ["HVDLAB_HOST"] = f"host{context.engine().rank}"
    LOG.addHandler(_said)
    _kv = kvstore.create("dist_async")
    _kv.set_optimizer("test")
    _kv.init(list(KEYS), [np.zeros(shape) for shape in KEYS.values()])
    for _ in range(3):
        push_all()
    settle("begun")
    pull_all()
    return [server.pid for server in _kv.servers()]


def push_all() -> None:
    _kv.push(list(KEYS), [np.ones(shape) for shape in KEYS.values()])


def settle(name: str) -> None:
    """Wait until all that was pushed before on any worker has been applied."""
    _kv.pull(list(KEYS), out=[np.zeros(shape) for shape in KEYS.values()])
    _kv._workers.largest([0], name)


def pull_all() -> list[float]:
    outs = [np.zeros(shape) for shape in KEYS.values()]
    _kv.pull(list(KEYS), out=outs)
    for out in outs:
        assert (out == out.flat[0]).all()
    return [float(out.flat[0]) for out in outs]


def name_what_is_lost() -> list[str]:
    """The errors of keys that were there; others can still be pulled."""
    texts = []
    for key, shape in KEYS.items():
        try:
            _kv.pull(key, out=np.zeros(shape))
        except KVStoreError as error:
            texts.append(f"{key}: {error}")
    with pytest.raises(KVStoreError, match="is lost"):
        _kv.push(1, np.ones(KEYS[1]))
    _kv.push(0, np.ones(KEYS[0]))
    assert [server.index for server in _kv.servers()] == [0, 2]
    return texts


def pull_while_it_is_stopped(pid: int) -> list[str]:
    """Pull from a stopped server, which continues once that was reported."""
    links.SILENT_SECONDS = _kv._links[0]._warn_after = 0.1
    links._POLL_MILLISECONDS = 50

    class GoesOn(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "is stopped" in record.getMessage():
                os.kill(pid, signal.SIGCONT)

    LOG.addHandler(GoesOn())
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    # The thread that gets the signal stops the others, and one of them could answer before.
    eventually(lambda: all(") T " in (one / "stat").read_text() for one in threads.iterdir()))
    pull_all()
    return _said.texts


def pull_after_a_cut() -> list[float]:
    """A pull of a worker that can't reach the servers of other hosts for longer than a server may take to be started again."""
    links.RECOVER_WITHIN = 0.01
    tries = dict.fromkeys((id(link) for link in _kv._links if not link.local), 3)

    def after_a_few(self: links.ServerLink, deadline: Deadline) -> socket.socket:
        tries[id(self)] -= 1
        if tries[id(self)] >= 0:
            raise OSError("no route to host")
        return open_link(self, deadline)

    open_link, links.ServerLink._open_socket = links.ServerLink._open_socket, after_a_few  # type: ignore[method-assign]
    for link in _kv._links:
        if not link.local:
            with link._changed:
                link._drop_connection()
    pulled = pull_all()
    assert all(left < 0 for left in tries.values())
    return pulled


# -- tests ------------------------------------------------------------------------------------------------------------


def lose_host(ranks: Ranks, number: int, pids: list[int]) -> None:
    """Nothing of the host is left that could start its server again."""
    ranks.kill(number)
    os.kill(pids[number], signal.SIGKILL)


def test_keys_of_a_lost_host_are_named() -> None:
    with Ranks(3, env=SETTINGS) as ranks:
        pids = ranks.run(begin, True, timeout=100)[0]
        lose_host(ranks, 1, pids)
        for texts in ranks.run(name_what_is_lost, ranks=[0, 2], timeout=60):
            assert [text.partition(":")[0] for text in texts] == ["1", "4"]
            assert all("of host1" in text and "which kept the values of 1, 4" in text for text in texts)


def test_a_worker_that_is_cut_off_has_its_servers_as_long_as_it_may_come_back() -> None:
    with Ranks(2, env=SETTINGS, tls=True) as ranks:
        ranks.run(begin, True, timeout=100)
        assert ranks.run(pull_after_a_cut, ranks=[1], timeout=60) == [[6.0] * len(KEYS)]


def test_a_stopped_server_is_named_and_goes_on() -> None:
    with Ranks(1, env=SETTINGS) as ranks:
        ((pid,),) = ranks.run(begin, False, timeout=100)
        (said,) = ranks.run(pull_while_it_is_stopped, pid, timeout=60)
    (named,) = (text for text in said if "it is stopped" in text)
    assert f"(process {pid}) has not answered" in named
    assert f"(kill -CONT {pid} lets it go on)" in named
    assert said[-1].endswith("answers again")
