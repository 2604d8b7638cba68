"""Debuggers in a rank: ``breakpoint()``, ``pdb``, IPython's debugger, post-mortem debugging of a failed cell, and JupyterLab's.

JupyterLab's is debugpy's server (:class:`DebugServer`), started when a frontend wants it, and spoken to by mail. Nothing is imported
until then, and no port is opened: the server gets one end of a pair of sockets, and the rank sends the bytes from the other end as mail. The
server works on threads of its own, so a rank that has stopped at a breakpoint still answers everything else.

Cells are compiled under names of ours, such as ``<cell [7]>``; frontends know them by a file's name. The server gets each
pair of names from here, and translates.
"""

from __future__ import annotations

import asyncio
import bdb
import contextlib
import ctypes
import gc
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import queue
import re
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import ipykernel
import IPython
import traitlets
from IPython.core.error import StdinNotImplementedError, UsageError

from hvdlab.kernel_ext.rank.cell_source import CellCompiler, label_of
from hvdlab.kernel_ext.rank.errors import is_ours
from hvdlab.kernel_ext.rank.stdin import LeftDebugger, PausableEngine
from hvdlab.kernel_ext.wire.codec import encode
from hvdlab.kernel_ext.wire.debug import (
    DEBUG,
    CloseDebug,
    DebugMessage,
    DebugOpened,
    FramingError,
    OpenDebug,
    Unframer,
    decode_to_server,
    frame,
)

POST_MORTEM = "__import__('hvdlab.kernel_ext.rank.debugger', fromlist=['post_mortem']).post_mortem()"
HAS_FAILED = "getattr(__import__('sys'), 'last_traceback', None) is not None"
"""Whether :func:`post_mortem` finds frames. An expression: to run a cell would drop them."""
"""The cell that ``%hvd_debug`` runs."""

_LOOKS_BACK = re.compile(
    r"%debug|%tb|\bpm\(|post_mortem|\blast_(?:traceback|value|exc|type)|\bsys\.exc_info|call_pdb"
)

_DEBUGGERS = frozenset({"bdb", "pdb", "IPython.core.debugger"})

_REPLACED = "REPLACED BY KeyboardInterrupt"
"""What pybind11's RuntimeError says if an interrupt comes while pybind11 turns an error of C++ into an exception."""

_plain_stop_here = bdb.Bdb.stop_here


_LAST = frozenset({"last_type", "last_value", "last_traceback", "last_exc"})
"""Where Python keeps the error that was shown last."""


def looks_back(source: str) -> bool:
    """Return whether a cell looks at the error that the cell before it failed with."""
    return bool(_LOOKS_BACK.search(source))


def forget_failure(shell: Any) -> None:
    """Let go of the error that a cell has ended with, and with it of all that its frames hold."""
    kept = vars(sys).keys() & _LAST
    failed = "last_value" in kept and sys.last_value is not None
    for name in kept:
        delattr(sys, name)
    # IPython's renderers keep the last traceback that they have rendered.
    for handler in (getattr(shell, "InteractiveTB", None), getattr(shell, "SyntaxTB", None)):
        for name in ("tb", "etype", "evalue"):
            if getattr(handler, name, None) is not None:
                setattr(handler, name, None)
    if failed:
        gc.collect()  # showing a traceback leaves cycles of frames, which may hold a model's activations


def stop_here(debugger: bdb.Bdb, frame: FrameType) -> bool:
    """In place of ``Bdb.stop_here``: stepping goes over hvdlab's own functions, and out of a cell into the end of it."""
    plumbing = is_ours(frame) or frame.f_globals.get("__name__") == "IPython.core.displayhook"
    return not plumbing and _in_cell(frame) and bool(_plain_stop_here(debugger, frame))


def _in_cell(frame: FrameType) -> bool:
    """Return whether a frame is the cell's, or was called by it. On other threads there is nothing else to stop in."""
    if threading.current_thread() is not threading.main_thread():
        return True
    caller: FrameType | None = frame
    while caller is not None:
        if label_of(caller.f_code.co_filename):
            return True
        caller = caller.f_back
    return False


def stop_tracing() -> None:
    """Stop the tracing of this thread: a cell has ended in which the user may have been stepping."""
    tracer = sys.gettrace()
    if isinstance(getattr(tracer, "__self__", None), bdb.Bdb):
        sys.settrace(None)


def cut_debugger(error: BaseException) -> BaseException:
    """Return the error that a cell has ended with, without a debugger's own frames if it comes out of one.

    An interrupt that became another error on its way is a KeyboardInterrupt again.
    """
    if isinstance(error, bdb.BdbQuit) and not error.args:
        error.args = ("the debugger was left with quit, which ends the cell",)
    left = isinstance(error, LeftDebugger)
    if left or isinstance(error, (bdb.BdbQuit, StdinNotImplementedError)):
        link = error.__traceback__
        while link is not None and link.tb_next is not None:
            if link.tb_next.tb_frame.f_globals.get("__name__") in _DEBUGGERS:
                link.tb_next = None
            link = link.tb_next
    if left or (isinstance(error, RuntimeError) and _REPLACED in str(error)):
        return KeyboardInterrupt().with_traceback(error.__traceback__)
    return error


def make_breakpoint(original: Callable[..., object]) -> Callable[..., object]:
    """Return the function for ``breakpoint()`` to call.

    Args:
        original: What it called before, for a debugger that the user has chosen by ``PYTHONBREAKPOINT``.
    """

    def breakpoint(*args: Any, header: str | None = None, **kwargs: Any) -> object:
        chosen = os.environ.get("PYTHONBREAKPOINT", "")
        if chosen == "0":
            return None
        if chosen and chosen != "pdb.set_trace":
            if header is not None:
                kwargs["header"] = header
            return original(*args, **kwargs)
        from IPython.core.debugger import Pdb

        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_back is not None and is_ours(frame):
            frame = frame.f_back
        debugger: Any = Pdb()  # IPython has no annotations
        if header is not None:
            debugger.message(header)
        debugger.set_trace(frame)
        return None

    return breakpoint


def post_mortem() -> None:
    """Look at the frames of the error that the last cell has ended with here, in IPython's debugger."""
    from IPython.core.debugger import Pdb

    trace = getattr(sys, "last_traceback", None)
    if trace is None:
        raise UsageError(
            "nothing is left to look at here: the last cell on this rank did not fail, "
            "or another one has begun since (what a cell failed with is kept until then)"
        )
    debugger: Any = Pdb()  # IPython has no annotations
    debugger.reset()
    debugger.interaction(None, trace)


INSIST = 0.3
"""Seconds after which a rank that has stopped is interrupted again."""

LOADS = 3
"""Attempts to import debugpy."""

STOPPED = "stopped by the debugger"
OTHER_DEBUGGER = "debugpy.listen() or debugpy.connect() has brought another debugger to it"

_LAST_LINE = 1 << 20
_OURS = ("hvdlab", "IOPub", "Heartbeat", "Control", "IPythonHistorySavingThread", "pydevd.")
_PACKAGE = Path(__file__).parents[1]


class DebugServer:
    """Server of debugging sessions, made with the agent; it costs nothing until the first :class:`OpenDebug` comes.

    Args:
        engine: Sends mail to the notebook. It is paused while this rank has stopped: its timers stand still meanwhile.
        loop: The main thread's loop, in which code runs between cells.
        compiler: Knows the frontend's file of each cell, and the name that the cell was compiled under.
    """

    def __init__(
        self, engine: PausableEngine, loop: asyncio.AbstractEventLoop, compiler: CellCompiler
    ) -> None:
        self._engine, self._loop, self._compiler = engine, loop, compiler
        self._lock = threading.Lock()
        self._session = 0
        self._unfit = ""  # what the installed debugpy lacks
        #: Kept from one session to the next: a process has room for one debugger of debugpy's.
        self._server: _Server | None = None
        self._todo: queue.SimpleQueue[OpenDebug | DebugMessage | CloseDebug | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopped: set[int] = set()
        self._main = 1  # the server's number of the main thread
        self._over = threading.Event()  # set while nothing is stopped

    @property
    def active(self) -> bool:
        """Return whether a frontend is debugging this rank."""
        return self._session != 0

    @property
    def stopped(self) -> bool:
        """Return whether a thread of this rank has stopped for the debugger."""
        return bool(self._stopped)

    # -- control thread -------------------------------------------------------------------------------------------

    def on_mail(self, sender: int, body: bytes) -> None:
        """Take mail. A thread of its own works it off, since importing debugpy takes a while."""
        self._do(decode_to_server(body))

    def abandon(self) -> None:
        """End the session, since the process that debugged this rank is gone. Any thread."""
        if self._session:
            self._do(CloseDebug(self._session))

    def _do(self, order: OpenDebug | DebugMessage | CloseDebug) -> None:
        if self._thread is None:
            if not isinstance(order, OpenDebug):
                return
            self._thread = threading.Thread(target=self._work, name="hvdlab-debugger", daemon=True)
            self._thread.start()
        self._todo.put(order)

    def close(self) -> None:
        """End the session, since the rank ends."""
        if self._thread is not None:
            self._todo.put(None)
            self._thread.join()
            self._thread = None

    def interrupted(self, again: Callable[[], object]) -> None:
        """Insist on an interrupt of this rank: if it has stopped, the first one may only have ended the making of a value's text.

        Args:
            again: Interrupts it once more.
        """
        if self._stopped:
            insist = threading.Thread(
                target=self._insist, args=(again,), name="hvdlab-debug-insist", daemon=True
            )
            _exempt(insist)
            insist.start()

    def _insist(self, again: Callable[[], object]) -> None:
        server = self._server
        while server is not None:
            server.interrupt_others()
            if self._over.wait(INSIST) or not server.waiting():
                return
            if threading.main_thread() in server.waiting():
                again()

    # -- own thread -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (order := self._todo.get()) is not None:
            if isinstance(order, OpenDebug):
                self._open(order)
            elif order.session != self._session or self._server is None:
                continue
            elif isinstance(order, DebugMessage):
                # What is no request is dropped.
                with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
                    self._server.send(_adapted(order.message))
            else:
                self._end()
        if self._server is not None:
            self._server.close()

    def _open(self, order: OpenDebug) -> None:
        # What a failed attempt leaves behind spoils the next one.
        error = self._unfit or self._begin(order)
        self._engine.post(DEBUG, encode(DebugOpened(order.session, error)))

    def _begin(self, order: OpenDebug) -> str:
        """Begin a session; returns what is wrong."""
        try:
            if self._session and self._session != order.session:
                self._end()
            if self._server is None:
                if _has_other_debugger():
                    return OTHER_DEBUGGER
                self._server = _Server(self)
            self._session = order.session
            for file, name in self._compiler.files.items():
                self._server.map(file, name)
            self._server.trace()
            self._on_main(self._server.trace_here)
        except Exception as failure:  # noqa: BLE001  # whatever is wrong with an installed debugpy: the frontend gets the text
            self._session = 0
            error = f"debugpy can't be started: {type(failure).__name__}: {failure}"
            if isinstance(failure, AttributeError) and self._server is None:
                self._unfit = error
            return error
        return ""

    def _end(self) -> None:
        """End the session: breakpoints go, and whatever is stopped goes on."""
        # First: events that the server sends from here on belong to no session, and are not posted.
        self._session = 0
        if self._server is not None:
            self._server.send(
                json.dumps(
                    {
                        "type": "request",
                        "seq": 0,
                        "command": "disconnect",
                        "arguments": {"terminateDebuggee": False},
                    }
                ).encode()
            )
            self._on_main(self._untrace)
        self._go_on(None)

    def _on_main(self, callback: Callable[[], object]) -> None:
        """Call something on the main thread, between cells."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the rank is ending
            self._loop.call_soon_threadsafe(callback)

    def _untrace(self) -> None:
        if self._server is not None and not self._session:
            self._server.untrace_here()

    # -- the server's thread --------------------------------------------------------------------------------------

    def handle_message(self, message: bytes) -> None:
        """Handle a message of debugpy's server, and send it to the frontend."""
        said = json.loads(message)
        event = said.get("event") if said.get("type") == "event" else ""
        thread = (said.get("body") or {}).get("threadId", 0)
        if event == "stopped":
            self._stop(thread)
        elif event == "continued":
            everything = (said.get("body") or {}).get("allThreadsContinued")
            self._go_on(None if everything else thread)
        if said.get("type") == "response" and said.get("command") == "threads":
            threads = (said.get("body") or {}).get("threads", ())
            self._main = next((one["id"] for one in threads if one["name"] == "MainThread"), self._main)
        session = self._session
        if session:
            self._engine.post(DEBUG, encode(DebugMessage(session, message)))

    def _stop(self, thread: int) -> None:
        # The set is made under the lock: the server's thread, the main one and _work() change it.
        with self._lock:
            # An event that was on its way when the session ended: _end() lets all go on, and no event of that follows.
            if self._session:
                self._set_stopped(self._stopped | {thread})

    def _go_on(self, thread: int | None) -> None:
        """Record that a thread goes on; all of them do if it is None."""
        with self._lock:
            self._set_stopped(set() if thread is None else self._stopped - {thread})

    def _set_stopped(self, threads: set[int]) -> None:
        """Set which threads are stopped. The caller holds the lock."""
        before, self._stopped = self._stopped, threads
        (self._over.clear if threads else self._over.set)()
        # Only on a change: pauses of the engine add up, and each needs its own resume.
        if bool(before) != bool(threads):
            if threads:
                self._engine.pause(STOPPED)
            else:
                self._engine.resume(STOPPED)

    # -- main thread ----------------------------------------------------------------------------------------------

    def cell_begins(self, file: str, name: str) -> None:
        """Record that a cell, which the frontend calls ``file``, is about to be compiled as ``name``, and to run."""
        if self._session and self._server is not None:
            if file:
                self._server.map(file, name)
            self._server.trace_here()  # an interrupt at a breakpoint has ended the tracing of this thread
        else:
            # The user may have started debugpy, which stops every thread of the rank at a breakpoint but those that are exempt.
            if "pydevd" in sys.modules:
                _exempt()
            self._untrace()

    def cut(self, error: BaseException) -> None:
        """Let a traceback end where the debugger stopped: formatting its frames takes seconds."""
        link = error.__traceback__ if self._server is not None else None
        while link is not None:
            if link.tb_next is not None and _is_pydevds(link.tb_next.tb_frame.f_code):
                link.tb_next = None
            link = link.tb_next

    def cell_ended(self) -> None:
        """Record that the cell's own code has ended: the frames behind it are no place to step to.

        If the cell was stopped, an interrupt has ended it; the server sends no event of that, so this does.
        """
        if not self._session or self._server is None:
            return
        self._server.go_on()
        for thread in self._stopped & {self._main} if self._server.waiting() else self._stopped:
            body = {"threadId": thread, "allThreadsContinued": False}
            self.handle_message(
                json.dumps({"type": "event", "seq": 0, "event": "continued", "body": body}).encode()
            )


def _adapted(message: bytes) -> bytes:
    """Return the request, changed so that no frontend ends a rank, whose memory is sacred, and steps skip the frames that run cells."""
    request = json.loads(message)
    arguments = request.get("arguments") or {}
    if request.get("command") in ("disconnect", "terminate"):
        request["command"] = "disconnect"
        request["arguments"] = {**arguments, "terminateDebuggee": False}
    elif request.get("command") in ("attach", "launch"):
        rules = [{"path": path, "include": False} for path in _plumbing()]
        request["arguments"] = {
            **arguments,
            "rules": [*(arguments.get("rules") or ()), *rules],
            # debugpy would start the cell's child processes under itself, where they would wait for ever.
            "subProcess": False,
        }
    else:
        return message
    return json.dumps(request).encode()


def _plumbing() -> list[str]:
    """Paths of the code that runs between the statements of a cell, so that a step that leaves one ends in the next."""
    packages = [str(_PACKAGE), *(module.__path__[0] for module in (IPython, traitlets, ipykernel))]
    modules = [
        str(module.__file__)
        for name, module in tuple(sys.modules.items())
        if name.partition(".")[0] in sys.stdlib_module_names and getattr(module, "__file__", None)
    ]
    return sorted({path for one in (*packages, *modules) for path in (one, str(Path(one).resolve()))})


def _has_other_debugger() -> bool:
    """Return whether user code has started debugpy, which has room for one debugger in a process."""
    pydevd = sys.modules.get("pydevd")
    return pydevd is not None and pydevd.get_global_debugger() is not None


def load(name: str) -> None:
    """Import a module that puts its parts on the path, and takes them off again.

    The main thread may put the path back at that moment, as it does when it joins ipyparallel: then try again.
    """
    for _ in range(LOADS - 1):
        try:
            importlib.import_module(name)
        except (ValueError, ImportError):
            continue
        return
    importlib.import_module(name)


class _Server:
    """debugpy's server in this process, at the other end of a pair of sockets.

    Args:
        owner: Handles each message that the server sends.
    """

    def __init__(self, owner: DebugServer) -> None:
        # Else debugpy warns, into the user's output, that frozen modules of the standard library can't be stepped into.
        os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
        before = sys.breakpointhook
        load("debugpy.server.api")  # puts pydevd on the path
        import debugpy  # noqa: T100  # only to know where it is
        import pydevd  # type: ignore[import-not-found]
        import pydevd_tracing  # type: ignore[import-not-found]
        from _pydevd_bundle.pydevd_additional_thread_info import (  # type: ignore[import-not-found]
            set_additional_thread_info,
        )
        from _pydevd_bundle.pydevd_api import PyDevdAPI  # type: ignore[import-not-found]
        from _pydevd_bundle.pydevd_constants import get_thread_id  # type: ignore[import-not-found]

        self._api, self._tracing = PyDevdAPI(), pydevd_tracing
        self._number_of, self._info_of = get_thread_id, set_additional_thread_info
        # Importing debugpy has replaced the hook. Outside of a session breakpoint() asks in the notebook.
        self._breakpoint, sys.breakpointhook = sys.breakpointhook, before
        self._mine, theirs = socket.socketpair()
        _exempt()
        original = pydevd.start_client
        pydevd.start_client = lambda host, port: theirs
        try:
            pydevd.settrace(
                host="127.0.0.1",  # not used: there is no address
                port=1,
                suspend=False,
                patch_multiprocessing=False,
                wait_for_ready_to_run=False,
                notify_stdin=False,
                protocol="dap",
                dont_trace_start_patterns=(str(Path(debugpy.__file__).parent),),
            )
        finally:
            pydevd.start_client = original
        self._db = pydevd.get_global_debugger()
        self._before: Callable[..., object] = before
        self._files: dict[str, str] = {}  # what a cell is compiled as, to its file
        self._look()
        if sys.version_info >= (3, 12):
            self._resume_if_interrupted()
        os.register_at_fork(after_in_child=self._forget)
        self._reader = threading.Thread(
            target=self._read, args=(owner,), name="hvdlab-debug-reader", daemon=True
        )
        _exempt(self._reader)
        self._reader.start()

    def _look(self) -> None:
        """Check that all parts of debugpy that are used later are there: other versions may name them otherwise.

        Raises:
            AttributeError: One is missing; it is better to fail now than in a cell.
        """
        db = self._db
        _ = self.waiting(), db._main_lock, db.source_mapping._mappings_to_client, self._tracing.SetTrace
        _ = self._api.SourceMappingEntry, self._api.set_source_mapping, self._api.request_resume_thread
        _ = db.enable_tracing, db.disable_tracing, db.set_tracing_for_untraced_contexts

    def _resume_if_interrupted(self) -> None:
        """Let an interrupt end the stepping with the wait: where tracing survives it, the next line would stop again."""
        wait = self._db.do_wait_suspend

        def waiting(*arguments: object, **more: object) -> object:
            try:
                return wait(*arguments, **more)
            except BaseException:
                self._api.request_resume_thread(self._number_of(threading.current_thread()))
                raise

        self._db.do_wait_suspend = waiting

    def _read(self, owner: DebugServer) -> None:
        unframer = Unframer()
        with contextlib.suppress(OSError, FramingError):
            while data := self._mine.recv(1 << 16):
                for message in unframer.feed(data):
                    owner.handle_message(message)

    def send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):
            self._mine.sendall(frame(message))

    def map(self, file: str, name: str) -> None:
        """Have the server say ``file`` to the frontend for code that is compiled as ``name``."""
        entry = self._api.SourceMappingEntry(1, _LAST_LINE, 1, name)
        with self._db._main_lock:
            before = self._files.get(name)
            if before is not None and before != file:
                self._api.set_source_mapping(self._db, before, [])
            if self._files.get(name) != file or name not in self._db.source_mapping._mappings_to_client:
                self._files[name] = file
                self._api.set_source_mapping(self._db, file, [entry])

    def trace(self) -> None:
        """Trace what runs, on all threads of the user's."""
        _exempt()
        self._db.enable_tracing(self._db.trace_dispatch, apply_to_all_threads=True)
        self._db.set_tracing_for_untraced_contexts()
        if sys.breakpointhook is not self._breakpoint:
            self._before, sys.breakpointhook = sys.breakpointhook, self._breakpoint

    def trace_here(self) -> None:
        if sys.version_info >= (3, 12) or sys.gettrace() is None:
            self._db.enable_tracing()

    def untrace_here(self) -> None:
        if sys.breakpointhook is self._breakpoint:
            sys.breakpointhook = self._before
        self._db.disable_tracing()

    def waiting(self) -> list[threading.Thread]:
        """Threads that have stopped and not gone on, in whatever way."""
        return [thread for thread in threading.enumerate() if self._info_of(thread).is_in_wait_loop]

    def interrupt_others(self) -> None:
        """Raise KeyboardInterrupt in stopped threads that no signal reaches: all but the main thread.

        The main thread may be waiting for one of them: a framework that calls back from a thread of its own.
        """
        for thread in self.waiting():
            if thread is not threading.main_thread():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
                )

    def go_on(self) -> None:
        """Let the main thread run on, without the stop that a step would make next."""
        self._api.request_resume_thread(self._number_of(threading.main_thread()))

    def _forget(self) -> None:
        """In a forked child, where the server's threads are not: a breakpoint would stop it for ever."""
        if sys.version_info >= (3, 12):
            for event in ("PY_START", "PY_RETURN", "PY_UNWIND", "LINE", "JUMP", "RAISE"):
                number = getattr(sys.monitoring.events, event)
                sys.monitoring.register_callback(sys.monitoring.DEBUGGER_ID, number, None)
            return
        self._tracing.SetTrace(None)
        threading.settrace(None)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._mine.shutdown(socket.SHUT_RDWR)


def _is_pydevds(code: CodeType) -> bool:
    return "pydevd" in code.co_filename or "pydevd" in code.co_qualname  # some of it is made by Cython


class DebuggerImports(importlib.abc.MetaPathFinder):
    """Finder that finds no module, and exempts hvdlab's threads from a debugger that a cell imports."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in ("debugpy", "pydevd"):
            _exempt()
        return None


def _exempt(*threads: threading.Thread) -> None:
    """Keep the debugger from threads that are not the user's: were they stopped, the rank would seem dead."""
    for thread in (*threads, *threading.enumerate()):
        if thread in threads or thread.name.startswith(_OURS):
            thread.pydev_do_not_trace = thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]
