"""Discovery of a world's servers: the workers exchange the addresses that they know, and start servers on hosts without any."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.errors import HvdlabError, StartError
from hvdlab.collectives.kvstore.servers.connection import ServerLink
from hvdlab.collectives.kvstore.servers.starting import ServerAddress, ServerStarter
from hvdlab.collectives.kvstore.workers import Workers, wait_for_handles
from hvdlab.collectives.planes.base import PlaneAborted
from hvdlab.collectives.system import host_key

_NAME_BYTES = 16  # random, so that names of several exchanges differ


class _KnownAddresses(msgspec.Struct, frozen=True):
    """Message of a worker to the others: addresses of its host's servers that it knows, and why it could not start one."""

    rank: int
    host: str
    addresses: tuple[ServerAddress, ...]
    error: str = ""


@dataclass(frozen=True, slots=True)
class KnownServer:
    """Server as a worker knows it.

    Attributes:
        index: Number of the server, from 0, the same on all workers.
        host: Host key of the server's host, which its ranks have in common.
        pid: Process id of the server on its host.
        local: That is the worker's host.
        keys: Number of keys, or parts of keys, of the worker's stores that it has.
        bytes: Size of their values.
    """

    index: int
    host: str
    pid: int
    local: bool
    keys: int
    bytes: int


class Servers:
    """Links of this worker to the servers of its world.

    Args:
        engine: This rank's engine.

    Attributes:
        stores: Number of stores on servers that the world has had, as far as this worker knows.
    """

    def __init__(self, engine: Engine) -> None:
        self.stores = 0
        self._engine = engine
        self._starter = ServerStarter()
        #: By host key and directory of the server.
        self._links: dict[tuple[str, str], ServerLink] = {}
        #: Held while links are made, so that two threads make one link to a server.
        self._lock = threading.Lock()

    def find(self, workers: Workers) -> tuple[list[ServerLink], list[tuple[int, str]]]:
        """Return links to all servers, in the same order on all workers. Every worker calls it.

        On a host without servers the worker with the lowest rank starts them; a worker that came later learns their addresses from the
        others. If two process sets have each started servers before a store of both, those of the lower rank are used.

        Args:
            workers: The workers of the store.

        Returns:
            The links; and each worker's rank, with the key of its host.

        Raises:
            StartError: A server could not be started (on all workers).
        """
        with self._lock:
            own = tuple(link.address for link in self._links.values() if link.address.host == host_key())
            known = self._exchange(workers, _KnownAddresses(self._engine.rank, host_key(), own))
            # All workers have the same messages, so either all of them or none come to the second exchange, which is collective.
            if any(not self._of_host(known, worker.host) for worker in known):
                known = self._exchange(workers, self._start_missing(known))
            for worker in known:
                if worker.error:
                    raise StartError(f"rank {worker.rank}: {worker.error}")
            addresses = [
                address
                for host in sorted({worker.host for worker in known})
                for address in self._of_host(known, host)
            ]
            links = [self._link(address) for address in addresses]
            for link in links:
                link.neighbours |= {worker.rank for worker in known if worker.host == link.address.host}
            return links, [(worker.rank, worker.host) for worker in known]

    def publish_addresses(self, links: Iterable[ServerLink]) -> str:
        """Leave the servers' addresses at the coordinator, for a restarted worker. Return the name for :meth:`find_published`."""
        name = f"kv.servers.left.{os.urandom(_NAME_BYTES).hex()}"
        addresses = tuple(link.address for link in links)
        neighbours = tuple(tuple(sorted(link.neighbours)) for link in links)
        self._engine.world_store().set(name, msgspec.json.encode((addresses, neighbours)))
        return name

    def find_published(self, name: str) -> list[ServerLink]:
        """Return links to the servers whose addresses another worker has left under this name.

        Raises:
            StartError: The addresses are not there.
        """
        try:
            data = self._engine.world_store().get(name, self._engine.settings.start_timeout)
        except (PlaneAborted, TimeoutError) as error:
            raise StartError(f"where the servers are is not known any more: {error}") from error
        addresses, neighbours = msgspec.json.decode(
            data, type=tuple[tuple[ServerAddress, ...], tuple[tuple[int, ...], ...]]
        )
        with self._lock:
            links = [self._link(address) for address in addresses]
        for link, ranks in zip(links, neighbours, strict=True):
            link.neighbours |= set(ranks)
        return links

    def known(self) -> list[KnownServer]:
        """Return the servers to which this worker is connected. Sends nothing, and waits for nothing."""

        def order(link: ServerLink) -> tuple[str, int, str]:
            return link.address.host, link.address.index, link.address.directory

        links = sorted(self._links.values(), key=order)
        found = []
        for index, link in enumerate(links):
            # A copy, made in one step: the user's thread can open a store meanwhile, and this one acquires no lock.
            stock = list(link.stock.values())
            keys, nbytes = sum(len(keys) for keys in stock), sum(sum(keys.values()) for keys in stock)
            found.append(KnownServer(index, link.address.host, link.pid, link.local, keys, nbytes))
        return found

    @staticmethod
    def _of_host(known: list[_KnownAddresses], host: str) -> list[ServerAddress]:
        found: dict[int, ServerAddress] = {}
        for address in (address for worker in known for address in worker.addresses if address.host == host):
            # The messages are in the order of ranks: where two have started servers, the lower rank's count.
            found.setdefault(address.index, address)
        return [found[index] for index in sorted(found)]

    def _start_missing(self, known: list[_KnownAddresses]) -> _KnownAddresses:
        """Start the servers that this host lacks, if that is this worker's task. Returns its message to the others."""
        host, rank = host_key(), self._engine.rank
        addresses = tuple(self._of_host(known, host))
        first = min(worker.rank for worker in known if worker.host == host)
        if addresses or rank != first:
            return _KnownAddresses(rank, host, addresses)
        settings = self._engine.settings
        remote = any(worker.host != host for worker in known)
        try:
            started = tuple(
                self._starter.start_new(index, settings, remote=remote, timeout=settings.start_timeout)
                for index in range(settings.kv_servers)
            )
        # Sent to all in place of addresses, so that each worker raises it: the others wait for this message.
        except (HvdlabError, OSError) as error:
            return _KnownAddresses(rank, host, (), str(error))
        return _KnownAddresses(rank, host, started)

    def _exchange(self, workers: Workers, own: _KnownAddresses) -> list[_KnownAddresses]:
        """Exchange the known addresses of all workers.

        They go through the coordinator: planes between hosts are in the clear, and addresses have secrets. An allgather gives each
        worker the names under which the others leave their messages. It also brings all workers into one generation.
        """
        name = np.frombuffer(os.urandom(_NAME_BYTES), np.uint8).copy()
        handle = workers.submit_gather(name, "kv.servers")
        wait_for_handles([("servers", handle)])
        result = handle.wait()
        assert isinstance(result.output, np.ndarray)
        names = [part.tobytes().hex() for part in result.output.reshape(-1, _NAME_BYTES)]
        store = self._engine.world_store()
        # Before the first answer is awaited: otherwise all would wait for each other.
        store.set(f"kv.servers.{name.tobytes().hex()}", msgspec.json.encode(own))
        timeout = self._engine.settings.start_timeout
        try:
            return [
                msgspec.json.decode(store.get(f"kv.servers.{each}", timeout), type=_KnownAddresses)
                for each in names
            ]
        except (PlaneAborted, TimeoutError) as error:
            raise StartError(
                f"a worker failed while the workers told each other where the servers are ({error}); create the store again"
            ) from error

    def _link(self, address: ServerAddress) -> ServerLink:
        key = address.host, address.directory
        link = self._links.get(key)
        if link is None:
            link = ServerLink(self._engine, address, self._starter, local=address.host == host_key())
            self._links[key] = link
        return link


_servers: weakref.WeakKeyDictionary[Engine, Servers] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def known_servers(engine: Engine) -> list[KnownServer]:
    """Return the servers to which this rank is connected; empty if it never made a store on servers."""
    with _lock:
        found = _servers.get(engine)
    return [] if found is None else found.known()


def servers_of(engine: Engine) -> Servers:
    """Return the links of an engine to the servers of its world."""
    with _lock:
        found = _servers.get(engine)
        if found is None:
            found = _servers[engine] = Servers(engine)
        return found
