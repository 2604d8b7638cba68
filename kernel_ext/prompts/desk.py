"""Where the ranks' questions of one cell meet the user: the shell around :class:`~hvdlab.kernel_ext.prompts.queue.PromptQueue`.

The thread that drives the cell asks the user, and waits; if output can be shown beside the question, another thread
drives the cell meanwhile. If the rank dies then, or its cell ends, that thread breaks the wait by a signal.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType

from IPython.core.error import StdinNotImplementedError

from hvdlab.kernel_ext.prompts.prompter import IN_BACKGROUND, NO_STDIN, Prompter
from hvdlab.kernel_ext.prompts.queue import Answer, PromptQueue, Question
from hvdlab.kernel_ext.wire.cells import AT_AN_END, PASSWORD, PromptRequest, Reply

SIGNAL = signal.SIGURG
"""Breaks a wait for the user. Ignored by default: one that comes too late does no harm."""

Meanwhile = Callable[[], AbstractContextManager[object]]


class _Withdrawn(BaseException):
    """The question that the user is asked has no answer any more."""


class PromptDesk:
    """The questions of one cell.

    Args:
        prompter: Asks the user; None if no user can be asked.
        reply: ``reply(rank, reply)`` sends a rank its answer. Must not block.
    """

    def __init__(self, prompter: Prompter | None, reply: Callable[[int, Reply], None]) -> None:
        self._prompter, self._reply = prompter, reply
        self._queue = PromptQueue()
        self._lock = threading.Lock()
        self._asking: Question | None = None
        self._withdrawn = False
        self._open = False  # whether signals raise
        self._refusal = "" if prompter is not None else IN_BACKGROUND
        self.shows_beside = prompter is not None and prompter.shows_beside

    @property
    def asking(self) -> bool:
        """Whether the user is being asked."""
        return self._asking is not None

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that wait for an answer."""
        return self._queue.ranks

    @property
    def deadline(self) -> float | None:
        """When to call :meth:`due` again."""
        return self._queue.deadline

    # -- what happens; the driving thread -------------------------------------------------------------------------

    def asked(self, rank: int, request: PromptRequest, now: float) -> None:
        """A rank asks."""
        self._send(self._queue.asked(rank, request, now))
        if self._refusal or not (self.asking or threading.current_thread() is threading.main_thread()):
            self._refuse(self._refusal or IN_BACKGROUND, now)

    def unasked(self, rank: int, number: int) -> None:
        """A rank has gone on without an answer."""
        self._queue.unasked(rank, number)
        self.withdraw(rank, number)

    def gone(self, rank: int) -> None:
        """A rank has ended the cell, or died."""
        self._queue.gone(rank)
        self.withdraw(rank)

    def interrupted(self) -> None:
        """The ranks are interrupted: those that ask will leave their prompts."""
        self._queue.clear()
        self.break_off()

    # -- any thread -----------------------------------------------------------------------------------------------

    def withdraw(self, rank: int, number: int | None = None) -> None:
        """The rank does not wait for an answer (to this question) any more: do not wait for the user either."""
        asking = self._asking
        if asking is not None and asking.rank == rank and number in (None, asking.request.number):
            self.break_off()

    def break_off(self) -> None:
        """Do not wait for the user any more, whichever rank asks."""
        with self._lock:
            if self._asking is None or self._withdrawn:
                return
            self._withdrawn = True
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, SIGNAL)

    # -- asking ---------------------------------------------------------------------------------------------------

    def due(self, now: float) -> Question | None:
        """The question to ask the user now, if any."""
        return self._queue.due(now)

    def status(self) -> str:
        """Which ranks are at a prompt, in words; empty if none is."""
        return self._queue.status()

    def ask(self, question: Question, meanwhile: Meanwhile = nullcontext) -> str:
        """Ask the user and send the answers to the ranks. Returns text to show to the user. Only on the main thread.

        Args:
            meanwhile: Entered while the user is asked. Within it other threads may call everything but this and
                :meth:`due`.

        Raises:
            KeyboardInterrupt: The user wants the cell to end.
        """
        assert self._prompter is not None
        line, error = "", ""
        label, hidden = self._queue.label(question), question.request.kind == PASSWORD
        with self._lock:
            self._asking, self._withdrawn = question, False
        try:
            with meanwhile(), self._breakable():
                line = self._prompter.ask(label, hidden=hidden)
        except _Withdrawn:
            return ""
        except EOFError:
            error = AT_AN_END
        except StdinNotImplementedError:
            self._refusal = NO_STDIN
        finally:
            with self._lock:
                self._asking = None
        now = time.monotonic()
        if self._refusal:
            self._refuse(self._refusal, now)
            return ""
        if error:
            self._send(self._queue.end([question.rank], error, now) if question.rank in self.ranks else [])
            return ""
        answers, reply = self._queue.answered(question, line, now)
        self._send(answers)
        return reply

    def refuse(self, sentence: str) -> None:
        """Answer these and all later questions with this sentence, which says why the user can't be asked."""
        self._refusal = sentence
        self._refuse(sentence, time.monotonic())

    def _refuse(self, sentence: str, now: float) -> None:
        for rank in self.ranks:
            self._send(self._queue.end([rank], sentence, now))

    def _send(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self._reply(answer.rank, answer.reply)

    @contextmanager
    def _breakable(self) -> Iterator[None]:
        """While the user is asked, let Ctrl-C raise KeyboardInterrupt, and :meth:`break_off` break the wait."""
        before = signal.getsignal(signal.SIGINT)

        def on_signal(number: int, frame: FrameType | None) -> None:
            if self._open:
                raise KeyboardInterrupt
            if number == signal.SIGINT and callable(before):
                before(number, frame)

        previous = {one: signal.signal(one, on_signal) for one in (signal.SIGINT, SIGNAL)}
        try:
            try:
                self._open = True
                if self._withdrawn:
                    raise _Withdrawn
                yield
            finally:
                self._open = False  # first of all, so that no signal raises in what follows
                for number, handler in previous.items():
                    signal.signal(number, handler)
        except KeyboardInterrupt:
            if self._withdrawn:  # a kernel turns anything that breaks its wait into a KeyboardInterrupt
                raise _Withdrawn from None
            raise
