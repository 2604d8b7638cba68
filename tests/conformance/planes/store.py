"""A key-value store for tests: served by threads of the parent, used by workers as a plane's ``KeyValue``."""

from __future__ import annotations

import os
import socket
import threading
from multiprocessing.connection import Client, Connection, Listener

from hvdlab.collectives.planes.base import KeyValue


class StoreServer:
    """Server of ``set`` and a blocking ``get`` on a Unix socket; one thread per client, all joined by :meth:`close`."""

    def __init__(self, path: str) -> None:
        self._listener = Listener(path, family="AF_UNIX", backlog=64)
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._connections: list[Connection] = []
        self._threads = [threading.Thread(target=self._accept, name="conformance-store")]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:  # close() has shut the listener
                return
            thread = threading.Thread(target=self._serve, args=(connection,), name="conformance-store-client")
            with self._changed:
                if self._closed:
                    connection.close()
                    return
                self._connections.append(connection)
                self._threads.append(thread)
            thread.start()

    def _serve(self, connection: Connection) -> None:
        with connection:
            while True:
                try:
                    verb, key, argument = connection.recv()
                except (EOFError, OSError):  # the worker has ended, or close() its connection
                    return
                answer = self._set(key, argument) if verb == "set" else self._get(key, argument)
                try:
                    connection.send(answer)
                except OSError:  # the worker was killed while it waited
                    return

    def _set(self, key: str, value: bytes) -> bytes:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()
        return b""

    def _get(self, key: str, timeout: float) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or key in self._values, timeout)
            return self._values.get(key)

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            for connection in self._connections:
                _hang_up(connection)
        listening = self._listener._listener._socket  # type: ignore[attr-defined]  # accept() is not woken by close()
        listening.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()


def _hang_up(connection: Connection) -> None:
    try:
        with socket.socket(fileno=os.dup(connection.fileno())) as channel:
            channel.shutdown(socket.SHUT_RDWR)
    except OSError:  # its thread has closed it, maybe just now; or the worker has
        return


class StoreClient(KeyValue):
    """A worker's side, connected once; :meth:`scope` gives each generation its own keys."""

    def __init__(self, path: str) -> None:
        self._connection = Client(path, family="AF_UNIX")
        self._prefix = ""
        self._lock = threading.Lock()
        self.set("hello", b"")

    def scope(self, prefix: str) -> None:
        self._prefix = prefix

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            self._connection.send(("set", self._prefix + key, value))
            self._connection.recv()

    def get(self, key: str, timeout: float) -> bytes:
        with self._lock:
            self._connection.send(("get", self._prefix + key, timeout))
            value = self._connection.recv()
        if value is None:
            raise TimeoutError(f"no value for {key!r} within {timeout} s")
        return bytes(value)

    def close(self) -> None:
        self._connection.close()
