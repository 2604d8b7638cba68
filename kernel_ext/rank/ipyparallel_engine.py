"""A rank as an engine of ipyparallel: ``rc[:]``, ``%%px`` and ipyparallel's tools work beside the pool's cells.

Both use one shell and one main thread. ipyparallel's requests run between cells, with the output streams that
ipyparallel expects; the cells get theirs back afterwards.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

import ipyparallel.engine.app as engine_app  # type: ignore[import-untyped]  # has no types
import zmq
import zmq.asyncio
from ipykernel.iostream import OutStream
from ipykernel.kernelapp import IPKernelApp
from ipyparallel.engine.kernel import IPythonParallelKernel  # type: ignore[import-untyped]  # has no types
from ipyparallel.util import (  # type: ignore[import-untyped]  # has no types
    disambiguate_ip_address,
    disambiguate_url,
)
from zmq.utils.monitor import recv_monitor_message

from hvdlab.kernel_ext.rank.agent import RankAgent


def _spare_debugger() -> None:
    """Let ipykernel find no debugpy: an engine has no channel for it, and it costs a rank 8 MB and 0.1 s.

    Users' own ``import debugpy`` is not affected.
    """
    if "ipykernel.debugger" in sys.modules or "debugpy" in sys.modules:
        return
    sys.modules["debugpy"] = None  # type: ignore[assignment]  # how an import is made to fail
    try:
        importlib.import_module("ipykernel.debugger")
    finally:
        del sys.modules["debugpy"]


SELDOM = 30_000
"""Milliseconds between two attempts to connect to a controller, once it has not answered for a while."""

_spare_debugger()  # here, so that it is done once, before the ranks are forked


class JoinFailed(Exception):
    """Error of an engine that the controller has not registered."""


class RankKernel(IPythonParallelKernel):  # type: ignore[misc]  # ipyparallel is untyped
    """ipyparallel's kernel, taking turns with the cells."""

    agent: RankAgent

    async def dispatch_shell(self, *args: Any, **kwargs: Any) -> None:
        """Handle one request between two cells."""
        async with self.agent.foreign():
            handled = super().dispatch_shell(*args, **kwargs)
            if inspect.isawaitable(handled):
                await handled


class RankKernelApp(IPKernelApp):
    """The part of ipykernel's application that an engine makes use of."""

    def init_code(self) -> None:
        """Run no startup files: they would change the variables of a rank that has been in use for a while."""

    def init_extensions(self) -> None:
        """As for startup files."""

    def init_gui_pylab(self) -> None:
        """Plots are set up by the rank."""


class RankEngine(engine_app.IPEngine):  # type: ignore[misc]  # ipyparallel is untyped
    """An engine that shares its process with a rank, which owns the signals, the loop and the process's end."""

    # A nanny is one more process for each engine, to which ipyparallel sends signals; the pool needs none.
    enable_nanny = False
    agent: RankAgent
    links: Links
    connection_info: dict[str, Any]
    request = ""
    """The last request to join that was fulfilled."""

    def init_connector(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return the functions that connect sockets; the first also has :attr:`links` watch whether a socket is connected."""
        connect, tunnel = super().init_connector()
        self._connect = connect
        self.links = Links()

        def watched(socket: Any, *args: Any, **kwargs: Any) -> Any:
            # ZeroMQ goes on trying to reach a controller that has died, ten times a second by default. None comes back there.
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, SELDOM)
            if socket.type == zmq.ROUTER:
                # The controller's queues have the same names as their predecessors', whose connections may still be
                # about to end: then ZeroMQ would not let the new ones have these names.
                socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            self.links.watch(socket)
            return connect(socket, *args, **kwargs)

        return watched, tunnel

    async def register(self) -> None:
        """Make the controller know this engine, and build its kernel. Raises :class:`JoinFailed`."""
        connect, tunnel = self.init_connector()
        await self.complete_registration(await self._registration(), connect, tunnel)

    async def _registration(self) -> list[bytes]:
        """Return the controller's answer to this engine's registration; it may have heard of the engine already."""
        # A socket for this request alone: no other answer, and no other request that could not be sent, gets in between.
        registrar = self.context.socket(zmq.DEALER)
        try:
            self._connect(registrar, self.registration_url)
            self.session.send(registrar, "unregistration_request", content={"id": self.id})
            self.session.send(registrar, "registration_request", content={"uuid": self.ident, "id": self.id})
            poller = zmq.asyncio.Poller()
            poller.register(registrar, zmq.POLLIN)
            if not await poller.poll(timeout=int(self.timeout * 1000)):
                self.abort()
            answer: list[bytes] = registrar.recv_multipart()
            return answer
        finally:
            registrar.close(linger=0)

    async def reachable(self) -> None:
        """Wait until requests get here. Raises :class:`JoinFailed`."""
        if not await self.links.established(self.timeout):
            raise JoinFailed(f"the connections to the controller are not up after {self.timeout:g} s")

    async def register_again(self, connection: str) -> None:
        """Register this engine with another controller.

        Raises:
            JoinFailed: The controller can't be reached from here, or does not take this engine in.
        """
        if json.loads(connection) != json.loads(self.connection_info_env):
            await self._turn_to(connection)
        _, parts = self.session.feed_identities(await self._registration())
        answer = self.session.deserialize(parts)["content"]
        if answer["status"] != "ok":
            raise JoinFailed(f"the controller refused: {answer.get('evalue', answer)}")
        if answer["id"] != self.id:
            raise JoinFailed(f"the controller calls it engine {answer['id']}")

    async def _turn_to(self, connection: str) -> None:
        """Connect the sockets of the kernel, which stays as it is, to another controller."""
        before, after = self.connection_info, json.loads(connection)
        protocol, host = after["interface"].split("://")
        after["interface"] = f"{protocol}://{disambiguate_ip_address(host, self.location)}"
        if self.using_ssh or after.get("curve_serverkey") != before.get("curve_serverkey"):
            raise JoinFailed(
                "the new controller is out of reach of this rank's sockets; restart the rank to join it"
            )
        await self._on_each_socket("disconnect", before)
        self.links.forget()
        self.connection_info, self.connection_info_env = after, connection
        self.registration_url = f"{after['interface']}:{after['registration']}"
        if after.get("key"):
            self.session.key = after["key"].encode()
        await self._on_each_socket("connect", after)

    async def _on_each_socket(self, what: str, information: Mapping[str, Any]) -> None:
        """Connect or disconnect the kernel's sockets, each in the thread that owns it."""
        leaves = information["broadcast"]
        assert self.id is not None  # it has a kernel, so it was registered once

        def do(socket: Any, *ports: int) -> None:
            for port in ports:
                getattr(socket, what)(disambiguate_url(f"{information['interface']}:{port}", self.location))

        do(self.shell_socket, information["mux"], information["task"], leaves[self.id % len(leaves)])
        kernel: Any = self.kernel
        for schedule, socket, name in (
            (kernel.control_thread.io_loop.add_callback, self.control_socket, "control"),
            (kernel.iopub_socket.schedule, self.iopub_socket, "iopub"),
        ):
            await _there(schedule, functools.partial(do, socket, information[name]), self.timeout)

    def start_heartbeat(self, *args: Any, **kwargs: Any) -> None:
        """None: the pool knows which ranks live, and the controller does not ask."""

    def init_signal(self) -> None:
        """Signals belong to the rank."""

    def abort(self) -> NoReturn:
        """There was no answer; the rank goes on without ipyparallel."""
        raise JoinFailed(f"the controller at {self.registration_url} did not answer in {self.timeout:g} s")

    def exit(self, exit_status: int | str | None = 0) -> None:
        """Called if ipyparallel can't use the controller's answer; the rank goes on without ipyparallel."""
        raise JoinFailed("the controller's answer could not be used; the lines above tell why")

    def redirect_output(self, iopub_socket: Any) -> None:
        """Give ipyparallel's requests their streams; descriptors 1 and 2 stay the rank's."""
        for name in ("stdout", "stderr"):
            stream = OutStream(  # type: ignore[no-untyped-call]  # half of ipykernel has types
                self.session, iopub_socket, name, watchfd=False
            )
            stream.topic = f"engine.{self.id}.{name}".encode("ascii")
            setattr(sys, name, stream)

    async def complete_registration(self, *args: Any, **kwargs: Any) -> None:
        """Build the kernel. ipyparallel names the classes it builds in its module and offers no other way to choose."""
        engine_app.Kernel, engine_app.IPKernelApp = RankKernel, RankKernelApp
        async with self.agent.foreign():
            await super().complete_registration(*args, **kwargs)


async def _there(
    schedule: Callable[[Callable[[], None]], Any], do: Callable[[], None], seconds: float
) -> None:
    """Have the thread that ``schedule`` belongs to call ``do``, and wait for that.

    Raises ``TimeoutError`` after ``seconds``, and what ``do`` raised.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            do()
        except BaseException as error:  # noqa: BLE001  (it is raised where it is waited for)
            done.set_exception(error)
        else:
            done.set_result(None)

    schedule(run)
    # Shielded: the time limit would cancel the future itself, and run() could not store its result any more.
    await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(done)), seconds)


async def join_controller(agent: RankAgent, rank: int, request: str, argv: Sequence[str]) -> str:
    """Register with ipyparallel's controller as engine number ``rank``. The rank lives on if that fails.

    Args:
        agent: The rank's agent, between whose cells requests run.
        rank: Engine number to ask for.
        request: A line with the number of the request, then the controller's connection information for engines, as JSON.
        argv: Options of ``ipengine``.

    Returns:
        A line with the number of the request, then why it failed, if it did.
    """
    RankKernel.agent = RankEngine.agent = agent
    number, _, connection = request.partition("\n")
    try:
        await _join(agent, rank, request, connection, argv)
    except (TimeoutError, JoinFailed, OSError, ValueError, KeyError, zmq.ZMQError) as error:
        async with agent.foreign():  # for the log
            traceback.print_exception(error)
        return f"{number}\n{type(error).__name__}: {error}"
    return f"{number}\n"


async def _join(agent: RankAgent, rank: int, request: str, connection: str, argv: Sequence[str]) -> None:
    """Register, or register again. Cells may run while this waits for the controller's answer: it may have died."""
    if RankEngine.initialized():
        engine = RankEngine.instance()
        if engine.request == request:
            return  # the pool asks again, since it has not got the answer
        await engine.register_again(connection)
    else:
        try:
            async with agent.foreign():
                engine = _initialized(rank, connection, argv)
            await engine.register()
            if engine.id != rank:
                raise JoinFailed(f"the controller calls it engine {engine.id}")
        except BaseException:
            _discard()
            raise
    await engine.reachable()
    # Last: a request that failed before is carried out again when the pool repeats it.
    engine.request = request


def _discard() -> None:
    """Drop an engine that has no kernel yet, so that the next request makes another."""
    if RankEngine.initialized():
        engine = RankEngine.instance()
        links = getattr(engine, "links", None)
        if links is not None:
            links.close()
    RankEngine.clear_instance()


def _initialized(rank: int, connection: str, argv: Sequence[str]) -> RankEngine:
    # ipyparallel's applications assume that the process is theirs.
    path, excepthook = sys.path[:], sys.excepthook
    try:
        engine: RankEngine = RankEngine.instance(
            id=rank, connection_info_env=connection, max_heartbeat_misses=0
        )
        engine.initialize(["--log-level=ERROR", *argv])
        return engine
    finally:
        sys.path[:] = path
        sys.excepthook = excepthook


Socket = zmq.Socket[bytes]


class Links:
    """Connections of an engine's sockets to a controller, and which of them are up. Main thread of the rank.

    ZeroMQ makes them in the background, and again after a controller's death, each at a time of its own. Until then it drops
    a client's requests to an engine, and the client learns nothing of that.
    """

    def __init__(self) -> None:
        self._monitors: dict[Socket, Socket] = {}
        #: Connections that are expected: a socket may have several.
        self._wanted = 0
        #: By socket and endpoint, as one end of a connection says nothing of the socket's others.
        self._up: set[tuple[Socket, bytes]] = set()

    def watch(self, socket: Socket) -> None:
        """Expect one more connection of this socket. Call it before the socket begins to connect."""
        if socket not in self._monitors:
            events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            self._monitors[socket] = socket.get_monitor_socket(events)
        self._wanted += 1

    async def established(self, seconds: float) -> bool:
        """Wait until all expected connections are up, and return whether they are after this many seconds."""
        poller = zmq.asyncio.Poller()
        for monitor in self._monitors.values():
            poller.register(monitor, zmq.POLLIN)
        until = time.monotonic() + seconds
        while not self._all_up():
            remaining = until - time.monotonic()
            if remaining <= 0:
                return False
            await poller.poll(int(remaining * 1000) + 1)
        return True

    def _all_up(self) -> bool:
        for socket, monitor in self._monitors.items():
            while monitor.poll(0):
                event = recv_monitor_message(monitor)
                link = (socket, event["endpoint"])
                if event["event"] == zmq.EVENT_DISCONNECTED:
                    self._up.discard(link)
                else:
                    self._up.add(link)
        return len(self._up) >= self._wanted

    def forget(self) -> None:
        """Forget the connections, which were ended, and expect as many others. Call it before the sockets begin to connect again."""
        self._all_up()  # takes what the monitors still have of the old ones
        self._up.clear()

    def close(self) -> None:
        """Close the monitors."""
        for socket, monitor in self._monitors.items():
            # In this order: ZeroMQ's thread would block on a full monitor that is still enabled and has no reader.
            if not socket.closed:
                socket.disable_monitor()
            monitor.close(linger=0)
        self._monitors.clear()
