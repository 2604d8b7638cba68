"""A worker's connection to a parameter server continues after any bytes from it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.kvstore.servers import messages as kv
from hvdlab.collectives.kvstore.servers.starting import ServerAddress, ServerStarter
from hvdlab.collectives.protocol.endpoint import LOST
from support.effort import examples
from support.fuzz.link import PairedLink, one_link
from support.fuzz.protocol import run


@pytest.mark.timeout(3600)
def test_whatever_a_server_says_its_worker_goes_on() -> None:
    run(one_link, examples(100))


def test_a_store_is_used_without_its_memory_where_no_descriptor_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = cast(Engine, SimpleNamespace(rank=0, closed=False, living=frozenset({0})))
    link = PairedLink(
        engine, ServerAddress("host", 0, str(tmp_path), "", "", "token"), ServerStarter(), local=True
    )
    try:
        opened = link.request(lambda number: kv.OpenStore(number, 5, (0,)))
        assert link._endpoint is not None
        assert link._endpoint._descriptors is not None
        link._endpoint._descriptors.append(LOST)  # as if the system had dropped one that came
        link.hear(kv.encode(kv.SharedStoreMemory(5)) + kv.encode(kv.RequestDone(1)))
        assert opened.answer == kv.RequestDone(1)
        assert "this process has as many open files as it may have" in caplog.text
    finally:
        link.end()
