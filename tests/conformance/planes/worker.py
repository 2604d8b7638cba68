"""A resident member of a conformance group; any launcher may start it. See ``conformance/planes/harness.py``."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import pickle
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from conformance.planes.actor import CollectiveActor
from conformance.planes.store import StoreClient
from hvdlab.collectives.planes.base import PlaneContext

INDEX_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
CONNECT_TIMEOUT = 45.0


class Worker:
    def __init__(self, connection: Connection, store: StoreClient) -> None:
        self.connection = connection
        self.store = store
        self.actor: CollectiveActor | None = None
        self.threads = set(threading.enumerate())
        self.fds: dict[str, str] | None = None
        self.gave_up = False

    def serve(self) -> None:
        while True:
            try:
                verb, *arguments = self.connection.recv()
            except EOFError:  # the test process has ended
                return
            if verb == "close":
                self.reset()
                self.connection.send(("result", self.leftovers()))
                return
            try:
                result = self.handle(verb, arguments)
            except BaseException as error:  # noqa: BLE001  # everything a case raises is its result
                self.connection.send(("failure", describe(error)))
            else:
                self.connection.send(("result", result))

    def handle(self, verb: str, arguments: list[Any]) -> Any:
        if verb == "configure":
            self.configure(*arguments)
            return None
        return self.call(*arguments)

    def configure(self, spec: dict[str, Any]) -> None:
        """Close the old plane and connect one for the new generation."""
        memory_fd = receive_fd(self.connection) if spec["memory"] else -1
        self.reset()
        if self.fds is None and not spec["library"]:
            self.fds = (
                open_fds() if memory_fd < 0 else {k: v for k, v in open_fds().items() if k != str(memory_fd)}
            )
        self.store.scope(f"{spec['generation']}/")
        context = PlaneContext(
            process_set=0, generation=spec["generation"], index=spec["index"], size=spec["size"], ranks=spec["ranks"],
            hosts=spec["hosts"], store=self.store, memory_fd=memory_fd, options=spec["options"],
        )  # fmt: skip
        self.actor = actor = resolve(spec["actor"])(spec["target"], context)
        actor.connect(CONNECT_TIMEOUT)

    def call(self, function: str, params: dict[str, Any]) -> Any:
        return resolve(function)(self.actor, **params)

    def reset(self) -> None:
        if self.actor is not None:
            self.actor.close()
            self.gave_up = self.gave_up or self.actor.gave_up
            self.actor = None
            if self.fds is None:  # a library under the plane keeps its first use's descriptors open
                self.fds = open_fds()

    def leftovers(self) -> str:
        """Return threads and descriptors that outlived all planes, as text; empty if none."""
        threads = [t.name for t in set(threading.enumerate()) - self.threads]
        fds = {k: v for k, v in open_fds().items() if self.fds is not None and self.fds.get(k) != v}
        if self.gave_up:
            fds = {}
        return " ".join([f"threads {threads}"] * bool(threads) + [f"descriptors {fds}"] * bool(fds))


def resolve(name: str) -> Callable[..., Any]:
    """Return the function ``module:function``."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def open_fds() -> dict[str, str]:
    """Return sockets, pipes and memfds of this process, by number."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        if target.startswith(("socket:", "pipe:", "/memfd:")):
            found[name] = target
    return found


def describe(error: BaseException) -> dict[str, Any]:
    """Return the fields of a ``Failure``; the exception travels too if it can be pickled."""
    sendable: BaseException | None = error
    try:
        pickle.dumps(error)
    except Exception:  # noqa: BLE001  # pickling may raise anything; the text is sent in any case
        sendable = None
    text = "".join(traceback.format_exception(error))
    return {"kind": type(error).__name__, "text": str(error), "traceback": text, "error": sendable}


def receive_fd(connection: Connection) -> int:
    with socket.socket(fileno=os.dup(connection.fileno())) as channel:
        _, fds, _, _ = socket.recv_fds(channel, 1, 1)
    return fds[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--index", type=int)
    parser.add_argument("--size", type=int)
    arguments = parser.parse_args()
    index = arguments.index
    if index is None:
        index = next(int(os.environ[name]) for name in INDEX_VARIABLES if name in os.environ)
    dump = Path(os.environ["HVDLAB_CONFORMANCE_DUMPS"]) / f"dump-{index}"
    with dump.open("w") as file, Client(arguments.socket, family="AF_UNIX") as connection:
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        store = StoreClient(os.environ["HVDLAB_CONFORMANCE_STORE"])
        connection.send((index, os.getpid()))
        Worker(connection, store).serve()
        store.close()
        faulthandler.unregister(signal.SIGUSR1)


if __name__ == "__main__":
    main()
