"""Prompts of the ranks of one cell, put to the user.

:class:`PromptQueue`, which does no I/O, has the ranks that are at a prompt and their order, and :func:`understand` the meaning of a line
that the user typed. :class:`PromptDesk` is the shell around them. The thread that drives the cell asks the user, in a notebook, a console
or a terminal, and waits; if output can be shown beside the question, another thread drives the cell meanwhile. If the rank dies then, or
its cell ends, that thread breaks the wait by a signal.
"""

from __future__ import annotations

import builtins
import contextlib
import contextvars
import getpass
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

from IPython.core.error import StdinNotImplementedError

from hvdlab.collectives.text import format_ranks
from hvdlab.kernel_ext.wire.cells import AT_AN_END, DEBUGGER, PASSWORD, PromptReply, PromptRequest

_TO_SOME = re.compile(r"\s*(all|\d+(?:-\d+)?(?:\s*,\s*\d+(?:-\d+)?)*)\s*:\s?(.*)\Z", re.DOTALL)
_TO_ONE = re.compile(r"\s*@\s*(\d+)\s*\Z")
_WHO = re.compile(r"\s*@\s*\?\s*\Z")


@dataclass(frozen=True, slots=True)
class SendLine:
    """Give ``text`` to these ranks."""

    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Switch:
    """Show the prompt of this rank."""

    rank: int


@dataclass(frozen=True, slots=True)
class ShowNotice:
    """Show the user a notice, and ask again. With an empty text: which ranks wait."""

    text: str = ""


Command = SendLine | Switch | ShowNotice


def understand(line: str, rank: int, waiting: Collection[int], alike: Collection[int]) -> Command:
    """Return the meaning of a typed line.

    Args:
        line: The line.
        rank: The rank whose prompt was shown.
        waiting: All ranks that are at a prompt.
        alike: Those of them whose prompt is of the same kind; ``all:`` means these.
    """
    if _WHO.match(line):
        return ShowNotice()
    if found := _TO_ONE.match(line):
        chosen = int(found[1])
        return Switch(chosen) if chosen in waiting else ShowNotice(_not_there([chosen]))
    if found := _TO_SOME.match(line):
        ranks = sorted(alike) if found[1] == "all" else _numbers(found[1])
        missing = [one for one in ranks if one not in waiting]
        return ShowNotice(_not_there(missing)) if missing else SendLine(tuple(ranks), found[2])
    return SendLine((rank,), line)


def _numbers(text: str) -> list[int]:
    ranks: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        low, high = int(first), int(last or first)
        # A bound, since a typing error such as `0-9999999999` must not fill the memory.
        ranks.update(range(low, min(high, low + 100_000) + 1))
    return sorted(ranks)


def _not_there(ranks: list[int]) -> str:
    return (
        f"{format_ranks(ranks[:100])} {'is' if len(ranks) == 1 else 'are'} not at a prompt; `@?` tells who is"
    )


GATHER = 0.3
"""Seconds after a question in which those of other ranks may come before the user is asked."""
RETURN = 0.6
"""Seconds that ranks which got an answer have to ask again, before the user is asked for other ranks that wait."""
REMEMBERED = 1024
"""How many answers are kept, to be sent again to a rank that may not have got them."""

_KINDS = {DEBUGGER: "in the debugger"}


@dataclass(frozen=True, slots=True)
class Question:
    """A rank's question."""

    rank: int
    request: PromptRequest


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer that a rank gets."""

    rank: int
    reply: PromptReply


class PromptQueue:
    """The questions of one cell.

    Attributes:
        deadline: When to look at :meth:`next_prompt` again, though nothing has happened.
    """

    def __init__(self) -> None:
        #: Rank and number to each question without an answer, in the order in which they came.
        self._waiting: dict[tuple[int, int], PromptRequest] = {}
        self._answered: dict[tuple[int, int], PromptReply] = {}  # the newest
        #: Ranks that got an answer and may ask again at once, as debuggers do: until then the user stays with them.
        self._expected: set[int] = set()
        #: When the user is asked for other ranks all the same.
        self._expected_until = 0.0
        #: Until when questions of other ranks can come first: the prompt shows whether others wait, and
        #: stays as it is.
        self._gather_until = 0.0
        #: The rank that got the last answer, or that the user chose: its questions come first.
        self._current: int | None = None

    # -- events ---------------------------------------------------------------------------------------------------

    def prompt_asked(self, rank: int, request: PromptRequest, now: float) -> list[Answer]:
        """Queue a rank's question, perhaps a repetition. Returns the answer if there is one already."""
        # A rank repeats its question if the answer was lost with a coordinator: the user is not asked twice.
        known = self._answered.get((rank, request.number))
        if known is not None:
            return [Answer(rank, known)]
        if (rank, request.number) not in self._waiting:
            self._waiting[rank, request.number] = request
            awaited = rank in self._expected
            self._expected.discard(rank)
            # When all ranks that got an answer have asked again, there is no other rank to wait for.
            self._gather_until = now if awaited and not self._expected else now + GATHER
        return []

    def prompt_withdrawn(self, rank: int, number: int) -> None:
        """Drop a question: the rank has gone on without an answer."""
        self._waiting.pop((rank, number), None)

    def rank_gone(self, rank: int) -> None:
        """Drop the questions of a rank that has ended the cell, or died."""
        self._expected.discard(rank)
        if self._waiting:
            for key in [key for key in self._waiting if key[0] == rank]:
                del self._waiting[key]

    def clear(self) -> None:
        """Drop all questions, as the cell was interrupted."""
        self._waiting.clear()
        self._expected.clear()

    # -- the next question ----------------------------------------------------------------------------------------

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that wait for an answer."""
        return tuple(sorted({rank for rank, _ in self._waiting})) if self._waiting else ()

    @property
    def deadline(self) -> float | None:
        if not self._waiting:
            return None
        return max(self._gather_until, self._expected_until if self._expected else 0.0)

    def next_prompt(self, now: float) -> Question | None:
        """Return the question to ask the user now, if any: of the rank that got the last answer, or of the lowest rank."""
        if not self._waiting or now < self._gather_until or (self._expected and now < self._expected_until):
            return None
        rank = self._current if self._current in self.ranks else self.ranks[0]
        assert rank is not None
        return Question(rank, self._request_of(rank))

    def label(self, question: Question) -> str:
        """Return the prompt with the rank's name, and whether other ranks wait.

        It does not name them: a prompt stays as it is while more ranks come to theirs.
        """
        also = " (others wait, @? tells)" if any(rank != question.rank for rank in self.ranks) else ""
        return f"[rank {question.rank}]{also} {question.request.prompt}"

    def status(self) -> str:
        """Return the ranks at a prompt, in words; empty if there are none."""
        if not self._waiting:
            return ""
        return f"{format_ranks(self.ranks)} {'is' if len(self.ranks) == 1 else 'are'} at a prompt"

    def overview(self) -> str:
        """Return the ranks that wait, a line each, and how to answer them."""
        lines = []
        for (rank, _), request in sorted(self._waiting.items()):
            kind = f" {_KINDS[request.kind]}" if request.kind in _KINDS else ""
            lines.append(f"  rank {rank}{kind}: {request.prompt.strip()}")
        return "\n".join(
            [
                *lines,
                "`@2` goes to rank 2, `all: next` answers all that wait, `0,2: continue` some of them",
            ]
        )

    def answered(self, question: Question, line: str, now: float) -> tuple[list[Answer], str]:
        """Take the user's line at this question. Returns the answers for ranks, and a text for the user."""
        rank, request = question.rank, question.request
        if request.number not in {number for one, number in self._waiting if one == rank}:
            return [], ""
        alike = self._alike(request.kind)
        if request.kind == DEBUGGER or len(self.ranks) > 1:
            command = understand(line, rank, self.ranks, alike)
        else:
            command = SendLine((rank,), line)  # no other rank could be meant
        match command:
            case ShowNotice(text):
                return [], text or self.overview()
            case Switch(other):
                self._current = other
                return [], ""
            case SendLine(ranks, text):
                if rank in ranks or self._current not in self.ranks:
                    self._current = rank
                return self._answer(ranks, text, "", now), ""

    def end(self, ranks: Iterable[int], error: str, now: float) -> list[Answer]:
        """Answer these ranks with an error in place of a line."""
        return self._answer(tuple(ranks), "", error, now)

    # -- helpers --------------------------------------------------------------------------------------------------

    def _request_of(self, rank: int) -> PromptRequest:
        return next(request for (one, _), request in self._waiting.items() if one == rank)

    def _alike(self, kind: str) -> list[int]:
        return [rank for rank in self.ranks if self._request_of(rank).kind == kind]

    def _answer(self, ranks: tuple[int, ...], text: str, error: str, now: float) -> list[Answer]:
        answers = []
        for rank in ranks:
            number = self._request_of(rank).number
            del self._waiting[rank, number]
            reply = self._answered[rank, number] = PromptReply(number, text, error)
            answers.append(Answer(rank, reply))
        while len(self._answered) > REMEMBERED:
            del self._answered[next(iter(self._answered))]
        self._expected, self._expected_until = set(ranks), now + RETURN
        return answers


NO_STDIN = (
    "{what} can't ask: what runs this notebook takes no input (as nbclient, nbconvert and papermill, and "
    "frontends that do not allow stdin). Set the value in the cell, or bring it with %hvd_push"
)
IN_BACKGROUND = "{what} can't ask from a cell in the background; run the cell without --background, or bring the value with %hvd_push"


class Prompter(Protocol):
    """Asks the user for a line.

    Attributes:
        shows_beside: Whether the question leaves room for the cell's output, and for a line that names the ranks at a prompt.
            A terminal's does not: output would tear the line that the user is typing.
    """

    shows_beside: bool

    def ask(self, prompt: str, *, hidden: bool) -> str:
        """Return a line from the user; if ``hidden``, it is not shown while it is typed.

        Raises:
            EOFError: The user has ended the input.
            KeyboardInterrupt: The user has interrupted.
            StdinNotImplementedError: No user can be asked here.
        """
        ...


class PromptLink(Protocol):
    """Link to the ranks that ask. Must not block."""

    def reply(self, rank: int, reply: PromptReply) -> None:
        """Send a rank the answer to its question."""
        ...


class ProcessPrompter:
    """Asks where this process has its input: in a Jupyter kernel that is the frontend's own input box.

    Args:
        shows_beside: As in :class:`Prompter`.
    """

    def __init__(self, *, shows_beside: bool = False) -> None:
        self.shows_beside = shows_beside

    def ask(self, prompt: str, *, hidden: bool) -> str:
        try:
            # Looked up when it is needed: a kernel puts its own functions there while a cell runs.
            return getpass.getpass(prompt) if hidden else builtins.input(prompt)
        except OSError as error:  # stdin is closed, or no terminal
            raise StdinNotImplementedError(str(error)) from None


SIGNAL = signal.SIGURG
"""Breaks a wait for the user. Ignored by default: one that comes too late does no harm."""
SENT_AGAIN_AFTER = 0.2
"""Seconds until that signal is sent again if its handler was not called: Python looks for signals before it begins to wait, and
misses one that comes in between until the wait is over."""

Meanwhile = Callable[[], AbstractContextManager[object]]


class _Withdrawn(BaseException):
    """The question that the user is asked has no answer any more."""


class PromptDesk:
    """The questions of one cell.

    Args:
        prompter: Asks the user; None if no user can be asked.
        link: Sends the answers to the ranks; None if ranks get none.
    """

    def __init__(self, prompter: Prompter | None, link: PromptLink | None) -> None:
        self._prompter, self._link = prompter, link
        self._queue = PromptQueue()
        self._lock = threading.Lock()
        # The question that the user is being asked, and whether the wait for the user was broken off.
        self._asking: Question | None = None
        self._withdrawn = False
        self._open = False  # whether signals raise
        # Whether one has raised; the thread that sends it again until then, and how that ends otherwise.
        self._broken = False
        self._repeating: tuple[threading.Thread, threading.Event] | None = None
        self._refusal = "" if prompter is not None else IN_BACKGROUND
        #: Whether any rank has asked so far: mostly none does, and then nothing need be done for prompts at each event of the cell.
        self.in_use = False
        self.shows_beside = prompter is not None and prompter.shows_beside

    @property
    def asking(self) -> bool:
        """Return whether the user is being asked."""
        return self._asking is not None

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that wait for an answer."""
        return self._queue.ranks

    @property
    def deadline(self) -> float | None:
        """Return the time at which to call :meth:`next_prompt` again."""
        return self._queue.deadline

    # -- events; the driving thread -------------------------------------------------------------------------------

    def prompt_asked(self, rank: int, request: PromptRequest, now: float) -> None:
        """Take a rank's question."""
        self.in_use = True
        self._send(self._queue.prompt_asked(rank, request, now))
        # While the main thread asks the user, another one drives the cell; otherwise the driver has to
        # be the main thread.
        if self._refusal or not (self.asking or threading.current_thread() is threading.main_thread()):
            self._refuse(self._refusal or IN_BACKGROUND, now)

    def prompt_withdrawn(self, rank: int, number: int) -> None:
        """Drop a question: the rank has gone on without an answer."""
        self._queue.prompt_withdrawn(rank, number)
        self.withdraw(rank, number)

    def rank_gone(self, rank: int) -> None:
        """Drop the questions of a rank that has ended the cell, or died."""
        self._queue.rank_gone(rank)
        self.withdraw(rank)

    def interrupted(self) -> None:
        """Drop all questions: the ranks are interrupted, and leave their prompts."""
        self._queue.clear()
        self.cancel_current()

    # -- any thread -----------------------------------------------------------------------------------------------

    def withdraw(self, rank: int, number: int | None = None) -> None:
        """Stop waiting for the user if the rank does not wait for an answer (to this question) any more."""
        # Read once: the main thread clears it as soon as the user has answered.
        asking = self._asking
        if asking is not None and asking.rank == rank and number in (None, asking.request.number):
            self.cancel_current()

    def cancel_current(self) -> None:
        """Stop waiting for the user, whichever rank asks."""
        with self._lock:
            if self._asking is None or self._withdrawn:
                return
            self._withdrawn = True
            _signal_main_thread()
            left = threading.Event()
            thread = threading.Thread(
                target=self._repeat_signal, args=(self._asking, left), name="hvdlab-withdraw", daemon=True
            )
            # Where no thread can be started, a signal that Python misses breaks no wait: the user's next line does.
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._repeating = thread, left

    def _repeat_signal(self, question: Question, left: threading.Event) -> None:
        """Send the signal again and again until one has raised, or the user is asked this no longer."""
        while not left.wait(SENT_AGAIN_AFTER):
            with self._lock:
                if self._broken or self._asking is not question:
                    return
                _signal_main_thread()

    # -- asking ---------------------------------------------------------------------------------------------------

    def next_prompt(self, now: float) -> Question | None:
        """Return the question to ask the user now, if any."""
        return self._queue.next_prompt(now)

    def status(self) -> str:
        """Return the ranks at a prompt, in words; empty if there are none."""
        return self._queue.status()

    def ask(self, question: Question, meanwhile: Meanwhile = nullcontext) -> str:
        """Ask the user and send the answers to the ranks. Returns text to show to the user. Only on the main thread.

        Args:
            meanwhile: Entered while the user is asked. Within it other threads may call everything but this and
                :meth:`next_prompt`.

        Raises:
            KeyboardInterrupt: The user has interrupted the cell.
        """
        assert self._prompter is not None
        line, error = "", ""
        label, hidden = self._queue.label(question), question.request.kind == PASSWORD
        try:
            # In the block: Ctrl-C may come right behind it, and the user would count as being asked from then on.
            with self._lock:
                self._asking, self._withdrawn, self._broken = question, False, False
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
                # Under the lock, in which `cancel_current` sends its signal: none is sent for this question after this.
                self._asking = None
                repeating, self._repeating = self._repeating, None
            # Without the lock, which the thread may wait for.
            if repeating is not None:
                repeating[1].set()
                repeating[0].join()
        now = time.monotonic()
        if self._refusal:
            self._refuse(self._refusal, now)
            return ""
        if error:
            # The rank can have died, or gone on, while the user was asked.
            self._send(self._queue.end([question.rank], error, now) if question.rank in self.ranks else [])
            return ""
        # The block is left, so the thread that drove the cell meanwhile has ended: the queue has no lock.
        answers, reply = self._queue.answered(question, line, now)
        self._send(answers)
        return reply

    def refuse(self, sentence: str) -> None:
        """Answer these and all later questions with this sentence, the reason why the user can't be asked."""
        self._refusal = sentence
        self._refuse(sentence, time.monotonic())

    def _refuse(self, sentence: str, now: float) -> None:
        for rank in self.ranks:
            self._send(self._queue.end([rank], sentence, now))

    def _send(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            if self._link is not None:
                self._link.reply(answer.rank, answer.reply)

    @contextmanager
    def _breakable(self) -> Iterator[None]:
        """While the user is asked, let Ctrl-C raise KeyboardInterrupt, and :meth:`cancel_current` break the wait."""
        before = signal.getsignal(signal.SIGINT)

        def on_signal(number: int, frame: FrameType | None) -> None:
            if self._open:
                self._broken = True
                raise KeyboardInterrupt
            if number == signal.SIGINT and callable(before):
                before(number, frame)

        previous = {one: signal.signal(one, on_signal) for one in (signal.SIGINT, SIGNAL)}
        try:
            try:
                # In this order: a withdrawal before this line has left its mark for the next, and the signal of a later one raises.
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


def _signal_main_thread() -> None:
    # To that thread: a signal to the process can arrive on another one, and would not break the main thread's read.
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, SIGNAL)


@contextmanager
def drive_meanwhile(
    step: Callable[[], object], wake: Callable[[], object], failed: Callable[[], object]
) -> Iterator[None]:
    """Have another thread repeat ``step`` until the block is left; that thread has ended then.

    It has the calling thread's context variables, in which a kernel keeps the request that output belongs to.

    Args:
        step: Waits for the next event, and handles it.
        wake: Makes a ``step`` that waits return. Any thread.
        failed: Called, on the other thread, when a step raised; its error is raised when the block is left.
    """
    over = threading.Event()
    errors: list[BaseException] = []

    def go_on() -> None:
        try:
            while not over.is_set():
                step()
        except BaseException as error:  # noqa: BLE001  # raised below, on the thread whose work this is
            errors.append(error)
            failed()

    thread = threading.Thread(
        target=contextvars.copy_context().run, args=(go_on,), name="hvdlab-stand-in", daemon=True
    )
    try:
        thread.start()
    except RuntimeError:  # no thread can be started: output waits for the answer
        yield
        return
    try:
        yield
    finally:
        # Before the wake-up: the other thread looks at the flag after its step.
        over.set()
        wake()
        thread.join()
        if errors:
            raise errors[0]
