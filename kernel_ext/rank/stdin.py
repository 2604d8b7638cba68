"""Asking the user from a rank: ``input()``, ``getpass()`` and a debugger's prompts.

The thread that asks waits; the rank's control thread goes on answering, and the coordinator knows that this rank is at a
prompt, so that it does not take the ranks that wait for this one for stuck.
"""

from __future__ import annotations

import bdb
import cmd
import itertools
import os
import sys
import threading
import time
from typing import Any, Protocol

from IPython.core.error import StdinNotImplementedError

from hvdlab.kernel_ext.rank.interrupts import InterruptDelivery
from hvdlab.kernel_ext.rank.output import OutputQueue
from hvdlab.kernel_ext.wire.cells import (
    AT_AN_END,
    DEBUGGER,
    INPUT,
    LONGEST_PROMPT,
    NO_NOTEBOOK,
    PASSWORD,
    PromptReply,
    PromptRequest,
    PromptWithdrawn,
)
from hvdlab.kernel_ext.wire.channel import Payload
from hvdlab.kernel_ext.wire.codec import TO_POOL, encode

AT_A_PROMPT = "at a prompt"

INTERRUPTED = "the cell was interrupted"
"""What ends a question on another thread than the main one, which alone gets signals."""

_WHAT = {INPUT: "input()", PASSWORD: "getpass()", DEBUGGER: "the debugger"}


class LeftDebugger(BaseException):
    """An interrupt at a debugger's prompt. A debugger takes a KeyboardInterrupt for one of the command that it carries out,
    and asks again; this exception leaves the debugger, and the cell reports it as the KeyboardInterrupt that it was."""


class PausableEngine(Protocol):
    """Part of the engine that prompts and the debugger need: mail, and pauses of a rank that waits for the user."""

    def pause(self, reason: str = ...) -> None: ...
    def resume(self, reason: str = ...) -> None: ...
    def post(self, topic: str, body: bytes) -> None: ...


class _Waiting:
    def __init__(self, request: PromptRequest) -> None:
        self.request = request
        # Signals interrupt the main thread's wait only; the control thread ends those of other threads.
        self.on_main = threading.current_thread() is threading.main_thread()
        self.reply: PromptReply | None = None
        self.ended = threading.Event()

    def end(self, reply: PromptReply) -> None:
        if self.reply is None:
            self.reply = reply
            # After the reply is there: the thread that this wakes reads it.
            self.ended.set()


class RankStdin:
    """The questions of this rank.

    Args:
        engine: Sends the questions, and is paused while one is open.
        capture: The output, of which all goes before a question.
        gate: Knows whether the running cell has been interrupted.
    """

    def __init__(self, engine: PausableEngine, capture: OutputQueue, gate: InterruptDelivery) -> None:
        self._engine, self._capture, self._gate = engine, capture, gate
        # Numbers must also be larger than those of the processes that were this rank before.
        self._numbers = itertools.count(time.time_ns() // 1000)
        #: Open questions by number. The threads that ask add and remove them, other threads end them.
        self._waiting: dict[int, _Waiting] = {}
        #: The main thread's questions that pause the engine; an interrupt may have kept one from ending its pause. No interrupt
        #: comes to other threads, so each of them ends its own.
        self._pauses: set[int] = set()
        #: Whether no process uses the pool: a question would have no answer.
        self._nobody = False
        self._settled = ""  # a cell that the pool does not wait for any more
        #: The cell that was interrupted last. Until the main thread has handled that, its other threads ask nothing.
        self._interrupted_cell = ""
        #: The cell that runs; empty between cells, when no question can be asked.
        self._cell = ""
        # A process that the cell has forked has no thread that sends, and no mail reaches it.
        self._pid = os.getpid()

    # -- what user code calls -------------------------------------------------------------------------------------

    def input(self, prompt: object = "", /) -> str:
        """``input()``."""
        caller = sys._getframe(1)
        debugger = caller.f_code is cmd.Cmd.cmdloop.__code__ and isinstance(
            caller.f_locals.get("self"), bdb.Bdb
        )
        kind = DEBUGGER if debugger else INPUT
        try:
            if debugger and self._gate.interrupted:
                raise KeyboardInterrupt
            return self._ask(kind, str(prompt))
        except KeyboardInterrupt as interrupt:
            if debugger:
                raise LeftDebugger from interrupt
            raise

    def getpass(self, prompt: str = "Password: ", stream: Any = None) -> str:
        """``getpass.getpass()``."""
        return self._ask(PASSWORD, prompt)

    def _ask(self, kind: str, prompt: str) -> str:
        what = _WHAT[kind]
        if os.getpid() != self._pid:
            raise StdinNotImplementedError(f"{what} can't ask from a process that the cell has forked")
        # Once: the main thread may end this cell, and begin the next, while another thread is in here.
        cell = self._cell
        self._check_answerable(cell, what)
        # As Python's own input() does: the cell may have put a stream with a buffer there.
        sys.stdout.flush()
        sys.stderr.flush()
        # The output before the question reaches the notebook before it.
        self._capture.flush()
        request = PromptRequest(cell, next(self._numbers), kind, _shown(prompt))
        waiting = _Waiting(request)
        try:
            # In the block: Ctrl-C may come at any line, and ask_again() would send a question that was left there.
            self._waiting[request.number] = waiting
            # Once more, after the entry in _waiting: an end that comes now is seen here, or _end_all() finds the entry.
            self._check_answerable(cell, what)
            # After the entry in _waiting: an interrupt that comes now is seen here, or interrupted() finds the entry.
            # The main thread may handle the interrupt between input()'s look and this one: a debugger goes by the cell alone.
            interrupted = self._interrupted_cell == cell and (kind == DEBUGGER or not self._gate.interrupted)
            if interrupted and not waiting.on_main:
                raise KeyboardInterrupt
            self._await_reply(waiting)
        finally:
            self._waiting.pop(request.number, None)
        reply = waiting.reply
        assert reply is not None
        if reply.error == INTERRUPTED:
            raise KeyboardInterrupt
        if reply.error == AT_AN_END:
            raise EOFError("the user has ended the input")
        if reply.error:
            raise StdinNotImplementedError(reply.error.format(what=what))
        return reply.text

    def _await_reply(self, waiting: _Waiting) -> None:
        """Post the question, and wait for its end while the engine is paused."""
        request = waiting.request
        try:
            # Stored first: after an interrupt in between, cell_ended() resumes once too often, which has no
            # effect. The other way round the engine would stay paused.
            if waiting.on_main:
                self._pauses.add(request.number)
            self._engine.pause(AT_A_PROMPT)
            self._post(request)
            waiting.ended.wait()
        finally:
            self._waiting.pop(request.number, None)
            if waiting.reply is None or waiting.reply.error == INTERRUPTED:
                self._post(PromptWithdrawn(request.cell, request.number))
            self._engine.resume(AT_A_PROMPT)
            # By its number, not by a count: an interrupt may have come before it was stored.
            self._pauses.discard(request.number)

    def _post(self, mail: Payload) -> None:
        """Send mail to the pool."""
        self._engine.post(TO_POOL, encode(mail))

    def _check_answerable(self, cell: str, what: str) -> None:
        """Raise an error if a question of this cell gets no answer: the cell has ended, or no notebook waits for it."""
        if cell in ("", self._settled) or cell != self._cell or self._nobody:
            raise StdinNotImplementedError(NO_NOTEBOOK.format(what=what))

    # -- the cell; the main thread --------------------------------------------------------------------------------

    def cell_begins(self, cell: str) -> None:
        """Count questions from now on as those of this cell."""
        self._cell = cell

    def cell_ended(self) -> None:
        """From now on no question of this cell gets an answer, also if another thread of the cell asks."""
        self._cell = self._interrupted_cell = ""
        self._end_all(NO_NOTEBOOK)
        while self._pauses:
            self._pauses.pop()
            self._engine.resume(AT_A_PROMPT)

    # -- the control thread ---------------------------------------------------------------------------------------

    def interrupted(self) -> None:
        """End the prompts of other threads, since the cell is being interrupted; a signal ends that of the main thread.

        The main thread may be waiting for one of them where no signal reaches it: a framework that calls back from a thread
        of its own.
        """
        self._interrupted_cell = self._cell
        # A copy: threads that ask add and remove their questions meanwhile.
        for number, waiting in tuple(self._waiting.items()):
            if not waiting.on_main:
                waiting.end(PromptReply(number, "", INTERRUPTED))

    def answered(self, reply: PromptReply) -> None:
        """Handle the pool's answer."""
        waiting = self._waiting.get(reply.number)
        if waiting is not None:
            waiting.end(reply)

    def ask_again(self) -> None:
        """Send all open questions again: the pool may have missed mail."""
        for waiting in tuple(self._waiting.values()):
            self._post(waiting.request)

    def discard_cell(self, cell: str) -> None:
        """End the questions of this cell, of which the pool waits for nothing. If it still runs, it was given up."""
        if cell == self._cell:
            self._settled = cell
            self._end_all(NO_NOTEBOOK)

    def set_owner_present(self, present: bool) -> None:
        """Set whether there is a notebook that can answer. Any thread."""
        self._nobody = not present
        if not present:
            self._end_all(NO_NOTEBOOK)

    def _end_all(self, sentence: str) -> None:
        for number, waiting in tuple(self._waiting.items()):
            waiting.end(PromptReply(number, "", sentence))


def _shown(prompt: str) -> str:
    prompt = prompt if prompt.isascii() else prompt.encode("utf-8", "backslashreplace").decode()
    return prompt if len(prompt) <= LONGEST_PROMPT else f"{prompt[:LONGEST_PROMPT]}… "
