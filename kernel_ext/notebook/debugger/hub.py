"""The debugger of a notebook's kernel, extended to the ranks of its pool.

ipykernel answers a frontend's debug requests on its control channel, whose thread is free while a cell runs. The hub takes
the place of the kernel's own debugger: it asks that one and the ranks, over the pool's connection, and answers with the answer
that the multiplexer makes of theirs. Everything happens on the control channel's loop; messages of ranks are handed over to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import secrets
import sys
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hvdlab.collectives.client import Client, CoordinatorLostError, Membership
from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.notebook.debugger.dap_state import (
    AskLocal,
    CloseRank,
    Effect,
    Event,
    Expired,
    Json,
    LocalReplied,
    OpenRank,
    Publish,
    RankGone,
    RankOpened,
    RankSaid,
    Remind,
    Reminded,
    ReplyToFrontend,
    Requested,
    SetDebuggedRanks,
    ToRank,
)
from hvdlab.kernel_ext.notebook.debugger.multiplexer import NOBODY, SCOPE, Multiplexer, not_debugged
from hvdlab.kernel_ext.wire.channel import Payload
from hvdlab.kernel_ext.wire.codec import encode
from hvdlab.kernel_ext.wire.debug import (
    DEBUG,
    CloseDebug,
    DebugMessage,
    FromServer,
    OpenDebug,
    decode_from_server,
)

if TYPE_CHECKING:
    from hvdlab.kernel_ext.notebook.pool import Pool


class DebugSessionOwner(Protocol):
    """Owner of a session with ranks. Its methods are called on the client's thread, and must not block."""

    def heard(self, rank: int, mail: FromServer) -> None:
        """Take a message of the rank's debug server."""
        ...

    def gone(self, rank: int, reason: str) -> None:
        """Take the end of a rank, with the reason."""
        ...


class DebuggedNotebook(Protocol):
    """Notebook whose cells a frontend debugs."""

    @property
    def pool(self) -> Pool | None:
        """Return the notebook's pool, if it has one. Any thread."""
        ...

    def runs_on_ranks(self, code: str) -> bool:
        """Return whether a cell with this source runs on ranks only."""
        ...


_desks: weakref.WeakKeyDictionary[Client, DebugConnections] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def connections_of(client: Client) -> DebugConnections:
    """Return the pool's debug connections, one object for each client."""
    with _making:
        desk = _desks.get(client)
        if desk is None:
            desk = _desks[client] = DebugConnections(client)
        return desk


class DebugConnections:
    """Debug connections of a pool: pass mail of debug servers on to the session that it belongs to."""

    def __init__(self, client: Client) -> None:
        # Weak: this object is a value of `_desks`, and a reference to its own key would keep both for ever.
        self._post = weakref.WeakMethod(client.post)
        # From a random number on: ranks of a kept pool may still have sessions of the process before this one.
        self._numbers = itertools.count(1 + (secrets.randbits(30) << 16))
        self._sessions: dict[int, DebugSession] = {}
        self._pids: dict[int, int] = {}
        #: Held while payloads are sent, so that all go out in order.
        self._posting = threading.Lock()
        #: Payloads that were not sent yet, each with its rank: there may be no coordinator.
        self._kept: deque[tuple[int, bytes]] = deque()
        client.on_mail(DEBUG, self._take)
        client.on_membership(self._members)
        client.on_reconnected(lambda membership: self._post_kept())

    def session(self, owner: DebugSessionOwner) -> DebugSession:
        """Begin a session, whose owner gets the messages of debug servers and the ends of ranks."""
        session = DebugSession(self, next(self._numbers), owner)
        self._sessions[session.number] = session
        return session

    def forget(self, session: DebugSession) -> None:
        self._sessions.pop(session.number, None)

    def send(self, payload: Payload, rank: int) -> None:
        """Send a payload to the rank's debug server; without a coordinator, as soon as there is another one."""
        with self._posting:
            self._kept.append((rank, encode(payload)))
        self._post_kept()

    def _post_kept(self) -> None:
        """Send the payloads that wait, if there is a coordinator. Any thread."""
        post = self._post()
        with self._posting:
            while self._kept and post is not None:
                rank, body = self._kept.popleft()
                try:
                    post(DEBUG, body, (rank,))
                except CoordinatorLostError:
                    # Under the lock: the call after the client has reconnected finds it, in front of the later ones.
                    self._kept.appendleft((rank, body))
                    return

    def _take(self, rank: int, body: bytes) -> None:
        mail = decode_from_server(body)
        session = self._sessions.get(mail.session)
        if session is not None:
            session.owner.heard(rank, mail)

    def _members(self, membership: Membership) -> None:
        before, self._pids = self._pids, {member.rank: member.pid for member in membership.members}
        lost = lost_ranks(before, self._pids)
        with self._posting:
            # A new process under the number of a lost rank must not get the payloads of that one.
            self._kept = deque(one for one in self._kept if one[0] not in lost)
        for rank in lost:
            # A copy: the control channel's thread begins and ends sessions meanwhile.
            for session in tuple(self._sessions.values()):
                session.owner.gone(rank, "it has ended")


def lost_ranks(before: Mapping[int, int], now: Mapping[int, int]) -> list[int]:
    """Return the ranks that are gone, or have another process than before."""
    return [rank for rank, pid in before.items() if now.get(rank) != pid]


class DebugSession:
    """Session of one frontend with any number of ranks. Any thread."""

    def __init__(self, desk: DebugConnections, number: int, owner: DebugSessionOwner) -> None:
        self._desk, self.number, self.owner = desk, number, owner

    def open(self, rank: int) -> None:
        """Have the rank's debug server listen; it answers with :class:`~hvdlab.kernel_ext.wire.debug.DebugOpened`."""
        self._send(OpenDebug(self.number), rank)

    def send(self, rank: int, message: bytes) -> None:
        """Send a message of the Debug Adapter Protocol to the rank's debug server."""
        self._send(DebugMessage(self.number, message), rank)

    def leave(self, rank: int) -> None:
        """End the session of this rank: its stopped threads go on."""
        self._send(CloseDebug(self.number), rank)

    def close(self) -> None:
        """Take no more mail."""
        self._desk.forget(self)

    def _send(self, payload: Payload, rank: int) -> None:
        # The loss of a coordinator says nothing about the rank, which may wait at a breakpoint: only the membership ends it.
        self._desk.send(payload, rank)


ANSWER_WITHIN = 8.0
"""Seconds that a frontend waits for ranks; then it gets the answers that there are."""
START_WITHIN = 20.0
"""The same, while debug servers start."""
STEP_WITHIN = 1.0
"""Seconds that the selected rank has to step before the frontend is shown the others."""
CONNECT_ATTEMPTS = 3
CONNECT_WITHIN = 10.0
"""Seconds that the kernel's own debugger has to answer over a new connection."""

Process = Callable[[Json], Awaitable[Json]]


class DebugHub:
    """Debugger of one notebook's kernel and its ranks. The extension makes it when it is loaded; it costs nothing until a
    frontend switches the debugger on.

    Args:
        kernel: An ipykernel with a debugger.
        notebook: Knows the pool, and which cells run on ranks only.
    """

    def __init__(self, kernel: Any, notebook: DebuggedNotebook) -> None:
        self._kernel, self._notebook = kernel, notebook
        self._debugger = kernel.debugger
        self._ask_kernel: Process = kernel.debugger.process_request
        # File name of a cell to whether it runs on ranks only.
        self._cells: dict[str, bool] = {}
        # Rank to the reason, as last shown to the user, why it can't be debugged.
        self._reported: dict[int, str] = {}
        # None until a frontend switches the debugger on.
        self._mux: Multiplexer | None = None
        self._keys = itertools.count(1)
        # Key of a frontend's request to its answer.
        self._answers: dict[int, asyncio.Future[Json]] = {}
        # The control channel's loop.
        self._loop: asyncio.AbstractEventLoop | None = None
        # Held while the kernel's own debugger answers a request.
        self._turn = asyncio.Lock()
        # Kept here, since a loop holds its tasks only weakly.
        self._tasks: set[asyncio.Task[None]] = set()
        # The session with the ranks, and the pool that it belongs to.
        self._session: tuple[Pool, DebugSession] | None = None
        # Wakes `prepare`, on the main thread, after each event.
        self._changed = threading.Condition()
        kernel.debugger.process_request = self.process
        if kernel.debugger.is_started:
            self._join()

    def close(self) -> None:
        """Give the kernel its own debugger back. Ranks go on."""
        if self._debugger.process_request == self.process:
            del self._debugger.process_request
        if self._session is not None:
            pool, session = self._session
            for rank in pool.ranks:
                session.leave(rank)
            session.close()

    def _join(self) -> None:
        """Take over a debugger that was switched on before the extension was loaded."""
        _spare_children()
        self._loop = self._kernel.control_thread.io_loop.asyncio_loop
        known = dict(self._debugger.breakpoint_list)
        for path in known:
            with contextlib.suppress(OSError):
                self._cells[path] = self._notebook.runs_on_ranks(Path(path).read_text(encoding="utf-8"))
        self._mux = self._make()
        self._mux.adopt(known)

    def _make(self) -> Multiplexer:
        return Multiplexer(self._attach(), _cells_begin(), self._cells)

    @property
    def on(self) -> bool:
        """Return whether a frontend has switched the debugger on. Any thread."""
        return self._mux is not None and self._mux.on

    # -- main thread ----------------------------------------------------------------------------------------------

    def prepare(self, ranks: Sequence[int]) -> list[str]:
        """Wait until the debug servers of these ranks know the breakpoints: a cell is about to run there.

        Returns sentences about ranks that can't be debugged, if the user has not seen them yet.
        """
        loop = self._loop
        if not self.on or loop is None:
            self._reported = {}
            return []
        loop.call_soon_threadsafe(self._handle, SetDebuggedRanks(tuple(ranks)))
        asked = threading.Event()
        loop.call_soon_threadsafe(asked.set)  # behind the event: once it is set, the ranks count as pending
        deadline = Deadline(START_WITHIN)
        asked.wait(deadline.remaining())
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting(), deadline.remaining())
        return self._news(ranks)

    def _news(self, ranks: Sequence[int]) -> list[str]:
        mux = self._mux
        if mux is None:
            return []
        late = {rank: f"its debugger did not start within {START_WITHIN:g} s" for rank in mux.pending}
        now = {rank: why for rank, why in (mux.left_out | late).items() if rank in ranks}
        before = self._reported
        self._reported = {r: w for r, w in before.items() if r not in ranks} | now
        return [not_debugged(rank, why) for rank, why in sorted(now.items()) if before.get(rank) != why]

    def _waiting(self) -> bool:
        return self._mux is not None and self._mux.on and bool(self._mux.pending)

    # -- the control channel's loop -------------------------------------------------------------------------------

    async def process(self, request: Json) -> Json:
        """Answer a debug request; takes the place of the method of the kernel's debugger."""
        self._loop = asyncio.get_running_loop()
        command = request.get("command")
        if self._mux is None:
            if command == SCOPE:
                return {"type": "response", "success": True, "command": SCOPE, "body": dict(NOBODY)}
            if command != "initialize":  # the debugger is off
                return await self._ask_kernel(request)
            _spare_children()
            self._mux = self._make()
        if command == "dumpCell":
            return await self._dump(request)
        key = next(self._keys)
        answer: asyncio.Future[Json] = self._loop.create_future()
        self._answers[key] = answer  # before the event is handled, which can answer at once
        starting = command == "attach"
        self._handle(Requested(key, request, bool(self._debugger.stopped_threads)))
        if starting:
            self._do(self._mux.wait_for(key, self._ranks()))
        late = self._loop.call_later(START_WITHIN if starting else ANSWER_WITHIN, self._handle, Expired(key))
        try:
            return await answer
        finally:
            late.cancel()
            del self._answers[key]

    async def _dump(self, request: Json) -> Json:
        reply = await self._local(request)
        path = (reply.get("body") or {}).get("sourcePath")
        if path:
            self._cells[path] = self._notebook.runs_on_ranks(request["arguments"]["code"])
        return reply

    async def _local(self, request: Json) -> Json:
        async with self._turn:
            if request.get("command") == "initialize":
                return await self._connect(request)
            return await self._ask_kernel(request)

    async def _connect(self, request: Json) -> Json:
        """Switch the kernel's own debugger on.

        ipykernel opens a new connection to debugpy each time. Its first bytes can be lost, if debugpy has not quite closed the
        last connection, and ipykernel would wait for the answer for ever, with every later request behind it.
        """
        for _ in range(CONNECT_ATTEMPTS):
            answer = asyncio.ensure_future(self._ask_kernel(dict(request)))
            # In this step ipykernel starts debugpy, which blocks the loop as long as a cell runs.
            await asyncio.sleep(0)
            with contextlib.suppress(asyncio.TimeoutError):
                return await asyncio.wait_for(answer, CONNECT_WITHIN)
            self._debugger.stop()
            self._debugger.is_started = False
            if (client := getattr(self._debugger, "tcp_client", None)) is not None:
                client.message_queue.tcp_buffer = (
                    ""  # otherwise half a message would be the head of the next one
                )
        raise TimeoutError(
            f"debugpy, the debugger of the kernel itself, did not answer within {CONNECT_WITHIN:g} s, "
            f"{CONNECT_ATTEMPTS} times; switch the debugger on again, or restart the kernel"
        )

    async def _answer_locally(self, order: AskLocal) -> None:
        try:
            reply = await self._local(order.request)
        except Exception as error:  # noqa: BLE001  # the frontend must get an answer
            reply = {
                "type": "response",
                "success": False,
                "message": f"{type(error).__name__}: {error}",
                "body": {},
            }
        self._handle(LocalReplied(order.key, reply))

    def _handle(self, event: Event) -> None:
        if self._mux is not None:
            self._do(self._mux.handle(event))
        # After each event, whichever it was: `prepare` waits for ranks that become ready, are refused or end.
        with self._changed:
            self._changed.notify_all()

    def _do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, AskLocal):
                task = asyncio.get_running_loop().create_task(self._answer_locally(effect))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif isinstance(effect, ReplyToFrontend):
                answer = self._answers.get(effect.key)
                if answer is not None and not answer.done():
                    answer.set_result(effect.response)
            elif isinstance(effect, Publish):
                self._kernel._publish_debug_event(effect.event)
            elif isinstance(effect, Remind):
                asyncio.get_running_loop().call_later(STEP_WITHIN, self._handle, Reminded())
            else:
                self._to_rank(effect)

    def _to_rank(self, effect: OpenRank | CloseRank | ToRank) -> None:
        session = self._talk()
        if session is None:
            return
        if isinstance(effect, OpenRank):
            session.open(effect.rank)
        elif isinstance(effect, CloseRank):
            session.leave(effect.rank)
        else:
            session.send(effect.rank, json.dumps(effect.message).encode())

    def _ranks(self) -> tuple[int, ...]:
        pool = self._notebook.pool
        return tuple(pool.ranks) if pool is not None else ()

    def _talk(self) -> DebugSession | None:
        """Return the session with the ranks of the present pool."""
        pool = self._notebook.pool
        if self._session is not None and self._session[0] is not pool:
            self._session[1].close()
            self._session = None
        if self._session is None and pool is not None:
            self._session = pool, connections_of(pool.client).session(self)
        return self._session[1] if self._session is not None else None

    def pool_changed(self) -> None:
        """End the debugging of ranks of an earlier pool: there is another pool, or none. Any thread."""
        session = self._session
        if session is None or self._loop is None or self._notebook.pool is session[0]:
            return
        for rank in self._mux.known if self._mux is not None else ():
            self.gone(rank, "the pool was stopped")

    def _attach(self) -> Json:
        """Return the arguments of `attach` for ranks, the same as ipykernel's for itself."""
        arguments: Json = {
            "justMyCode": bool(self._debugger.just_my_code),
            "stopAllThreadsOnSuspend": False,
        }
        if not self._debugger.just_my_code:
            arguments["debugOptions"] = ["DebugStdLib"]
        return arguments

    # -- the client's thread --------------------------------------------------------------------------------------

    def heard(self, rank: int, mail: FromServer) -> None:
        """Hand a message of a rank's debug server over to the loop."""
        if isinstance(mail, DebugMessage):
            self._later(RankSaid(rank, json.loads(mail.message)))
        else:
            self._later(RankGone(rank, mail.error, refused=True) if mail.error else RankOpened(rank))

    def gone(self, rank: int, reason: str) -> None:
        """Report to the loop that a rank can't be debugged any more. Any thread."""
        self._later(RankGone(rank, reason))

    def _later(self, event: Event) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the kernel ends
                self._loop.call_soon_threadsafe(self._handle, event)


def _spare_children() -> None:
    """Keep debugpy from starting the kernel's child processes, such as those of a pool, under itself.

    They would wait for a debugger of their own, and JupyterLab can't attach to them.
    """
    with contextlib.suppress(ImportError):
        import debugpy  # noqa: T100  # to configure what ipykernel is about to start

        debugpy.configure({"subProcess": False})
        patching = sys.modules.get("_pydev_bundle.pydev_monkey")
        if patching is not None:  # debugpy runs already
            vars(patching)["_get_apply_arg_patching"] = lambda: False


def _cells_begin() -> str:
    from ipykernel.compiler import get_tmp_directory

    return str(Path(get_tmp_directory())) + "/"  # type: ignore[no-untyped-call]  # ipykernel is partly untyped
