"""Kernel whose cells run on the ranks: IPython's own kernel, and the interface of the ranks that the magics provide for it.

While a cell runs, the thread that takes the client's messages answers what needs no cell (:class:`BusyReplies`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

from ipykernel.ipkernel import IPythonKernel

from hvdlab._version import __version__
from hvdlab.collectives.errors import HvdlabError, InvalidRequestError
from hvdlab.kernel_ext.kernel.cell_routing import CellRouter, asks_ranks
from hvdlab.kernel_ext.kernel.pool_defaults import PoolDefaults, defaults_for_notebook, np_of_request
from hvdlab.kernel_ext.wire.status import Completions, Inspection

KINDS = {
    "complete_request": "complete_reply",
    "inspect_request": "inspect_reply",
    "is_complete_request": "is_complete_reply",
    "kernel_info_request": "kernel_info_reply",
}
"""Requests that may be answered while a cell runs, and the messages that answer them."""


class BusyReplies:
    """Base of a kernel's class, before ipykernel's own classes among its bases.

    ipykernel takes messages on a thread of its own from version 7 on; in older ones everything waits for the cell.
    """

    session: Any
    iopub_socket: Any
    shell_stream: Any
    log: Any

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._main = threading.current_thread()
        self._running = threading.Lock()
        self._runs: Any = None  # the request whose cell runs
        # Ids of requests for cells that the main thread has not ended: the thread of messages adds, the main thread discards.
        self._cells: set[str] = set()
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="hvdlab-aside")
        self._answering: set[asyncio.Task[None]] = set()

    def answer_aside(self, kind: str, content: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the content of the answer to a request; None if it has to wait. Not on the main thread."""
        raise NotImplementedError

    @contextmanager
    def running(self, request: Any) -> Iterator[None]:
        """Mark the request as the one whose cell runs, within this context. Main thread, or that of a subshell."""
        if request.get("header", {}).get("subshell_id") is not None:
            yield  # its end must not make the kernel idle while a cell of the main shell runs
            return
        self._runs = request
        try:
            yield
        finally:
            with self._running:  # after this, _answer() sends no state of this cell any more
                self._runs = None

    async def shell_channel_thread_main(self, msg: Any) -> None:
        """Take a message of the shell channel. The thread of that channel."""
        header = self._header(msg)
        if header.get("msg_type") == "execute_request" and header.get("subshell_id") is None:
            # From now on messages that follow would wait behind this cell, long before the main thread begins it.
            self._cells.add(header["msg_id"])
        request = self._request(msg) if self._cells else None
        if request is None:
            await super().shell_channel_thread_main(msg)  # type: ignore[misc]  # of ipykernel's class
            return
        task = asyncio.create_task(self._answer(msg, *request))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def dispatch_shell(self, msg: Any, /, **how: Any) -> None:
        """Handle a message. Main thread, or that of a subshell."""
        # Read before the message is handled: afterwards it can't be read again.
        msg_id = self._header(msg).get("msg_id", "") if self._cells else ""
        try:
            await super().dispatch_shell(msg, **how)  # type: ignore[misc]  # of ipykernel's class
        finally:
            self._cells.discard(msg_id)

    def _peek(self, msg: Any) -> dict[str, Any]:
        """Return a message, or an empty one if it is not valid, without receiving it: a message can be received only once."""
        try:
            _, frames = self.session.feed_identities(msg, copy=False)
            return dict(self.session.deserialize(frames, content=False, copy=False))
        # ipykernel will report it; the marks that it sends itself are no messages either.
        except (ValueError, TypeError, KeyError):
            return {}

    def _header(self, msg: Any) -> dict[str, Any]:
        return dict(self._peek(msg).get("header", {}))

    def _request(self, msg: Any) -> tuple[str, dict[str, Any]] | None:
        """Return the kind and content of a request that can be answered now; None for any other message."""
        peeked = self._peek(msg)
        header = peeked.get("header", {})
        # Requests of a subshell have a thread of their own, and wait for no cell of the main shell.
        if header.get("msg_type") not in KINDS or header.get("subshell_id") is not None:
            return None
        return header["msg_type"], self.session.unpack(peeked["content"])

    async def _answer(self, msg: Any, kind: str, content: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        try:
            answer = await loop.run_in_executor(self._helper, self.answer_aside, kind, content)
        # The ranks are gone; the cell will report it. Or the request lacks a field, or has one of another type: ipykernel reports
        # that, as it does between cells.
        except (HvdlabError, LookupError, TypeError, AttributeError):
            answer = None
        if answer is None:
            await super().shell_channel_thread_main(msg)  # type: ignore[misc]  # of ipykernel's class
            return
        idents, frames = self.session.feed_identities(msg, copy=False)
        request = self.session.deserialize(frames, copy=False)
        # The protocol has a client wait for the states of each of its requests, also beside a running cell.
        self._say("busy", request)
        self.session.send(self.shell_stream, KINDS[kind], answer, request, ident=idents)
        with self._running:
            self._say("idle", request)
            if self._runs is not None:  # clients take the last state that was sent for the kernel's
                self._say("busy", self._runs)

    def _say(self, state: str, request: Any) -> None:
        self.session.send(
            self.iopub_socket,
            "status",
            {"execution_state": state},
            parent=request,
            ident=self._topic("status"),
        )

    def _topic(self, topic: str) -> bytes:
        found: bytes = super()._topic(topic)  # type: ignore[misc]  # of ipykernel's class
        return found


class KernelBackend(Protocol):
    """Ranks of a kernel. ``complete`` and ``inspect`` may be called from any thread."""

    def begin(self, defaults: Callable[[], PoolDefaults]) -> None:
        """Begin to start ranks in the background; the first cell that needs them reports why there are none."""
        ...

    def cell(self, code: str, *, store_history: bool) -> None:
        """Prepare for a cell that the kernel is going to run."""
        ...

    def complete(self, code: str, cursor: int) -> Completions | None:
        """Return completions from the first rank; None if it does not answer or there is none yet."""
        ...

    def inspect(self, code: str, cursor: int, detail: int) -> Inspection | None:
        """Return documentation from the first rank; None if it does not answer or there is none yet."""
        ...

    def evaluate(self, expressions: Mapping[str, str]) -> dict[str, Any]:
        """Evaluate a client's expressions on the first rank; returns the protocol's ``user_expressions``."""
        ...

    def busy_with(self) -> str:
        """Return the label of a cell that the first rank runs; empty if it is idle or there is none."""
        ...

    def end(self) -> None:
        """End the ranks, or leave them if they are kept, since the kernel ends. Any thread, also while a cell runs."""
        ...


# It has hardly any annotations, and those of ways to be overridden that it does not use.
_Base: Any = IPythonKernel
_OUR_MAGIC = ("%hvd", "%%hvd", "%%local", "%autohvd")
_TYPES = "_jupyter_types_experimental"


class HvdlabKernel(BusyReplies, _Base):  # type: ignore[misc]  # as above
    """Kernel in which plain cells run on all ranks, ``%%local`` ones here.

    Its shell has the magics loaded; a cell for the ranks becomes a call of ``%%hvd_run``, so that output, errors,
    interrupts and prompts are the same in both. Completion and inspection come from the first rank.
    """

    implementation = "hvdlab"
    implementation_version = __version__

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._backend: KernelBackend | None = None
        self._router = CellRouter()

    @property
    def banner(self) -> str:
        """Return the text that a console shows at its start."""
        return f"hvdlab {__version__}: cells run on all ranks, %%local ones in the kernel\n{super().banner}"

    def start(self) -> None:
        """Load the magics, which begin to start ranks, and serve."""
        super().start()
        # First of all transformers: later ones would shift the line numbers that ranks report.
        self.shell.input_transformers_cleanup.insert(0, self._router)
        self.shell.extension_manager.load_extension("hvdlab")

    def set_backend(self, backend: KernelBackend | None) -> None:
        """Set the ranks that the extension brings; with None, when it is unloaded, cells run here."""
        self._backend = backend

    def start_ranks(self) -> None:
        """Begin to start ranks: the extension is loaded."""
        if self._backend is not None:
            self._backend.begin(defaults_for_notebook)

    def do_shutdown(self, restart: bool) -> dict[str, Any]:
        """End the ranks in an orderly way; ipykernel would send them signals in no particular order, and wait."""
        if self._backend is not None:
            self._backend.end()
        return dict(super().do_shutdown(restart))

    # -- cells --------------------------------------------------------------------------------------------------------

    async def do_execute(
        self,
        code: str,
        silent: bool,
        store_history: bool = True,
        user_expressions: Mapping[str, str] | None = None,
        allow_stdin: bool = False,
        *,
        cell_meta: Any = None,
        cell_id: Any = None,
    ) -> dict[str, Any]:
        """Run a cell where it belongs; afterwards ask the first rank for the values of the client's expressions."""
        backend, request = self._backend, self.get_parent("shell")
        # The kernel's debugger has the kernel run a little code, which is meant for this process.
        if backend is None or request.get("header", {}).get("session") == self.session.session:
            alone: dict[str, Any] = await super().do_execute(
                code,
                silent,
                store_history,
                user_expressions,
                allow_stdin,
                cell_meta=cell_meta,
                cell_id=cell_id,
            )
            return alone
        self._router.cell, self._router.options = code, _options(cell_meta)
        backend.cell(code, store_history=store_history and not silent)
        try:
            with self.running(request):
                reply: dict[str, Any] = await super().do_execute(
                    code, silent, store_history, {}, allow_stdin, cell_meta=cell_meta, cell_id=cell_id
                )
                if user_expressions and reply["status"] == "ok":
                    reply["user_expressions"] = backend.evaluate(user_expressions)
        finally:
            self._router.cell = None
        return reply

    def show_help(self, name: str, detail: int) -> None:
        """Show the first rank's documentation of ``name?`` in the frontend's pager."""
        found = self._backend.inspect(name, len(name), detail) if self._backend is not None else None
        if found is not None and found.found:
            self.shell.payload_manager.write_payload({"source": "page", "data": found.data, "start": 0})
        else:
            print(f"Object `{name}` not found.")

    # -- questions ----------------------------------------------------------------------------------------------------

    def do_complete(self, code: str, cursor_pos: int | None) -> dict[str, Any]:
        """Return completions from the first rank, with our own magics; from this process for cells that run here."""
        cursor = len(code) if cursor_pos is None else cursor_pos
        if self._backend is None or not asks_ranks(code):
            return dict(super().do_complete(code, cursor))
        answer = self._backend.complete(code, cursor)
        here = self._magics_here(code, cursor)
        if answer is None or not answer.matches:
            if here is not None:
                return here
            if answer is None:
                return self._unknown(cursor, self._silence())
        reply = _reply(answer if answer is not None else Completions(0, (), cursor, cursor))
        if here is not None:
            # The rank took a magic's name for one of Python's.
            if here["cursor_start"] != reply["cursor_start"]:
                return here
            reply["matches"] += [name for name in here["matches"] if name not in reply["matches"]]
            reply["metadata"][_TYPES] += here["metadata"].get(_TYPES, [])
        return reply

    def do_inspect(
        self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()
    ) -> dict[str, Any]:
        """Return documentation from the first rank; from this process for cells that run here."""
        if self._backend is None or not asks_ranks(code):
            return dict(super().do_inspect(code, cursor_pos, detail_level, omit_sections))
        answer = self._backend.inspect(code, cursor_pos, detail_level)
        if answer is None:
            data = {"text/plain": self._silence()}
            return {"status": "ok", "found": True, "data": data, "metadata": {}}
        return {"status": "ok", "found": answer.found, "data": answer.data, "metadata": {}}

    def do_history(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the cells of this notebook; entries of this session have its number, whichever kind of request asks for them."""
        reply = dict(super().do_history(*args, **kwargs))
        own = self.shell.history_manager.session_number
        reply["history"] = [(session or own, *rest) for session, *rest in reply["history"]]
        return reply

    def answer_aside(self, kind: str, content: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the answer to a request while a cell runs, on another thread; None if it has to wait for the cell's end."""
        if kind == "complete_request" and asks_ranks(content["code"]):
            return self.do_complete(content["code"], content["cursor_pos"])
        if kind == "inspect_request" and asks_ranks(content["code"]):
            return self.do_inspect(content["code"], content["cursor_pos"], content.get("detail_level", 0))
        if kind == "is_complete_request":
            return dict(self.do_is_complete(content["code"]))
        if kind == "kernel_info_request":
            return {"status": "ok", **self.kernel_info}
        return None

    def _magics_here(self, code: str, cursor: int) -> dict[str, Any] | None:
        """Return completions of our own magics, which ranks do not have."""
        word = code[:cursor].rpartition("\n")[2].lstrip()
        if not word.startswith("%") or " " in word or threading.current_thread() is not self._main:
            return None
        reply = dict(super().do_complete(code, cursor))
        kept = [name for name in reply["matches"] if name.startswith(_OUR_MAGIC)]
        if not kept:
            return None
        types = [one for one in reply["metadata"].get(_TYPES, []) if one["text"].startswith(_OUR_MAGIC)]
        return {**reply, "matches": kept, "metadata": {_TYPES: types}}

    def _silence(self) -> str:
        """Return a line that explains why the first rank has not answered."""
        label = self._backend.busy_with() if self._backend is not None else ""
        if label:
            return f"rank 0 runs cell {label} and does not answer; ask again when that has ended"
        return "rank 0 does not answer: the ranks are starting, or there are none (`%hvd_pool status` tells)"

    @staticmethod
    def _unknown(cursor: int, why: str) -> dict[str, Any]:
        return {
            "status": "ok",
            "matches": [],
            "cursor_start": cursor,
            "cursor_end": cursor,
            "metadata": {"hvdlab": why},
        }


def _options(cell_meta: Any) -> str:
    """Return the options of ``%%hvd_run`` that a client gives with a cell."""
    try:
        np = np_of_request(cell_meta)
    except InvalidRequestError:  # a client's own metadata under our name; run the cell all the same
        return ""
    return f"-np {np}" if np is not None else ""


def _reply(answer: Completions) -> dict[str, Any]:
    types = answer.types or ("",) * len(answer.matches)
    return {
        "status": "ok",
        "matches": list(answer.matches),
        "cursor_start": answer.start,
        "cursor_end": answer.end,
        "metadata": {
            _TYPES: [
                {"start": answer.start, "end": answer.end, "text": text, "type": kind, "signature": ""}
                for text, kind in zip(answer.matches, types, strict=True)
            ]
        },
    }
