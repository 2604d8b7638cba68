"""Hostile frames from a parameter server for a worker's connection to it, from seeds.

::

    python tests/support/fuzz/link.py COUNT
"""

from __future__ import annotations

import os
import random
import socket
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

sys.path.insert(0, str(Path(__file__).parents[2]))  # where the other modules of tests are, for this program


from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.errors import ProtocolError, StartError
from hvdlab.collectives.kvstore.servers import messages as kv
from hvdlab.collectives.kvstore.servers.connection import ServerLink
from hvdlab.collectives.kvstore.servers.memory import SharedFile
from hvdlab.collectives.kvstore.servers.starting import ServerAddress, ServerStarter
from hvdlab.collectives.time_limits import Deadline
from support.fuzz.protocol import make, run, spoil

TO_WORKER: tuple[type[Any], ...] = get_args(kv.ToWorker)


class PairedLink(ServerLink):
    """Link whose server is the other end of a pair of sockets, which each new connection replaces."""

    server: socket.socket | None = None

    def _open_socket(self, deadline: Deadline) -> socket.socket:
        if self.server is not None:
            self.server.close()
        ours, self.server = socket.socketpair()
        self.server.sendall(kv.encode(kv.Attached(7)))
        return ours

    def hear(self, data: bytes, descriptor: int = -1) -> None:
        """Receive these bytes, and a descriptor with them; a connection that breaks by that is made again."""
        with self._changed:
            assert self.server is not None
            if descriptor >= 0:
                socket.send_fds(self.server, [data], [descriptor])
            else:
                self.server.sendall(data)
            self._with_reconnect(self._receive)
            assert self._endpoint is not None
            kept = [each.region.size for each in self._unanswered.values() if each.region is not None]
            assert self._in_flight == sum(kept)

    def renew(self) -> None:
        """Connect again."""
        with self._changed:
            self._recover()

    def end(self) -> None:
        """Stop using the server."""
        with self._changed:
            self._mark_lost(StartError("the test is over"))
            self._drop_connection()
        self._wake()
        for file in (self._arena.file, *self._files.values()):
            file.close()
        if self.server is not None:
            self.server.close()


def one_link(chance: random.Random) -> None:
    """Let a server send any bytes: the connection is made again at worst, and each request gets the answer that comes
    for it."""
    engine = SimpleNamespace(rank=0, closed=False, living=frozenset({0}))
    before = set(threading.enumerate())
    with tempfile.TemporaryDirectory() as directory:
        place = ServerAddress("host", 0, directory, "", "", "token")
        link = PairedLink(cast(Engine, engine), place, ServerStarter(), local=True)
        try:
            for _ in range(chance.randint(4, 40)):
                for _ in range(chance.randint(0, 2)):
                    _ask(link, chance)
                _say(link, chance)
            link.renew()
            last = link.request(lambda number: kv.StockRequest(number, 0))
            stock = kv.Stock(link._sequence, 3, 4)
            link.hear(kv.encode(stock))
            assert last.answer == stock
        finally:
            link.end()
            for thread in set(threading.enumerate()) - before:
                thread.join()


def _ask(link: PairedLink, chance: random.Random) -> None:
    region = link.allocate(100) if chance.random() < 0.5 else None
    link.request(lambda number: kv.Pull(number, 0, "a", "f4", 0), region, keeps=chance.random() < 0.5)


def _say(link: PairedLink, chance: random.Random) -> None:
    kind = chance.choice(TO_WORKER)
    message = make(kind, chance, tame=chance.random() < 0.7)
    try:
        data = kv.encode(message)
    except ProtocolError:  # no server can send it
        return
    if chance.random() < 0.2:
        # A frame that waits for the rest of it takes that from the next message.
        data = spoil(data, chance)
    if chance.random() < 0.6 and kind is kv.SharedStoreMemory:
        file = SharedFile.create("fuzz") if chance.random() < 0.5 else None
        descriptor = os.open(os.devnull, os.O_RDONLY) if file is None else file.descriptor
        link.hear(data, descriptor)
        if file is None:
            os.close(descriptor)
        else:
            file.close()
        return
    link.hear(data)


if __name__ == "__main__":
    run(one_link, int(sys.argv[1]))
