"""An agent on a Dask worker: the actor that runs it, and the launcher's connection to that."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import threading
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

from hvdlab.launch.exec_agent import wire
from hvdlab.launch.exec_agent.link import agent_command


class AgentActor:
    """Runs an agent on a worker, until it is hung up or dropped, or the worker ends: then the agent's input ends.

    Its methods run on the worker's event loop, so that they take none of the threads of the worker's tasks.

    Args:
        python: The agent's interpreter.

    Raises:
        OSError: There is no such interpreter.
    """

    def __init__(self, python: str) -> None:
        self._agent = subprocess.Popen(
            agent_command(python),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        self._reports: asyncio.StreamReader | None = None

    async def order(self, data: bytes) -> None:
        """Pass this on to the agent."""
        await asyncio.to_thread(self._write, bytes(data))

    async def reports(self) -> bytes:
        """What the agent says next; waits for it. Nothing once it has ended."""
        if self._reports is None:
            self._reports, _ = await _read_pipe(self._agent.stdout)
        return await self._reports.read(wire.PIECE)

    async def hang_up(self) -> None:
        """Let the agent end its ranks and itself."""
        assert self._agent.stdin is not None
        self._agent.stdin.close()

    def _write(self, data: bytes) -> None:
        assert self._agent.stdin is not None
        view = memoryview(data)
        with contextlib.suppress(BrokenPipeError, ValueError):  # the agent's end is reported; it was hung up
            while view:
                view = view[self._agent.stdin.write(view) or 0 :]


class ActorConnection:
    """The connection to the agent on a worker; see :class:`~hvdlab.launch.exec_agent.link.AgentConnection`.

    A coroutine on the client's event loop passes on what is written to and read from the pipes.

    Args:
        client: Dask's client.
        worker: Address of the worker.
        python: The agent's interpreter.
    """

    def __init__(self, client: Any, worker: str, python: str) -> None:
        self._client, self._worker, self._python = client, worker, python
        self.inbox, self._reports = os.pipe2(os.O_CLOEXEC)
        self._orders, self.outbox = os.pipe2(os.O_CLOEXEC)
        self._lock = threading.Lock()
        #: The descriptors that this side has to close; guarded by the lock.
        self._open = {self.inbox, self.outbox}
        #: Why the agent is lost, once it is.
        self._said = ""
        self._over = threading.Event()
        self._relaying: Future[None] = asyncio.run_coroutine_threadsafe(
            self._relay(), client.loop.asyncio_loop
        )

    def end_text(self, host: str, greeted: bool) -> str:
        """What Dask says."""
        self._over.wait(1.0)
        return f"its agent on the Dask worker {host} is gone" + (f": {self._said}" if self._said else "")

    def hang_up(self) -> None:
        """See :class:`~hvdlab.launch.exec_agent.link.AgentConnection`."""
        self._close(self.outbox)

    def kill(self) -> None:
        """Drop the actor: nothing refers to it any more, and Dask deletes it."""
        self._relaying.cancel()

    def close(self, timeout: float) -> None:
        """See :class:`~hvdlab.launch.exec_agent.link.AgentConnection`."""
        self.hang_up()
        if not self._over.wait(timeout):
            self.kill()
            self._over.wait(timeout)
        self._close(self.inbox)

    def _close(self, descriptor: int) -> None:
        with self._lock:
            if descriptor in self._open:
                self._open.remove(descriptor)
                os.close(descriptor)

    # -- the client's event loop --------------------------------------------------------------------------------------

    async def _relay(self) -> None:
        """Start the agent, and pass on orders and reports until it ends."""
        try:
            async with _closing_pipes(self._orders, self._reports) as (orders, reports):
                with self._client.as_current():
                    actor = await self._client.submit(
                        AgentActor,
                        self._python,
                        actor=True,
                        workers=[self._worker],
                        allow_other_workers=False,
                        key=f"hvdlab-agent-{uuid.uuid4().hex}",
                    )
                sending = asyncio.ensure_future(self._send(actor, orders))
                try:
                    while data := await actor.reports():
                        reports.write(bytes(data))
                        await reports.drain()
                finally:
                    sending.cancel()
        except Exception as error:  # noqa: BLE001  # whatever Dask, the worker or the actor raises
            self._said = f"{type(error).__name__}: {error}".splitlines()[0]
        finally:
            self._over.set()

    async def _send(self, actor: Any, orders: asyncio.StreamReader) -> None:
        while data := await orders.read(wire.PIECE):
            await actor.order(data)
        await actor.hang_up()


async def _read_pipe(pipe: Any) -> tuple[asyncio.StreamReader, asyncio.BaseTransport]:
    """A reader of a pipe's file, and the transport whose end closes the file."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader, loop=loop), pipe)
    return reader, transport


@contextlib.asynccontextmanager
async def _closing_pipes(
    readable: int, writable: int
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """The ends of two pipes as streams, which are closed in the end."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        reader, reading = await _read_pipe(stack.enter_context(os.fdopen(readable, "rb", 0)))
        stack.callback(reading.close)
        file = stack.enter_context(os.fdopen(writable, "wb", 0))
        writing, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, file)
        stack.callback(writing.close)
        yield reader, asyncio.StreamWriter(writing, protocol, None, loop)
