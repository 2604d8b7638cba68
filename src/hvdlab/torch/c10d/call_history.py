"""The last calls of each group, to find out whether a call can't complete because a rank has skipped an earlier one.

The coordinator can't distinguish two calls of one kind, shape and dtype: if a rank skips one, its later calls are matched with the
others' earlier ones, and no call fails before that rank makes no more. So each rank remembers the lines of its last calls,
and how many steps its optimizers had taken by then: all calls of DDP's backward pass come from one line. A rank whose call
can't complete asks the missing ranks for their last calls, and compares.

The two hooks in torch that error reports need are here as well: a count of optimizer steps, and ``backward()``, which raises the
errors of collectives that its C++ waits for, as in DDP's backward pass, as they are.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from types import FunctionType
from typing import Any, Protocol

import msgspec
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hvdlab.collectives.context import own_error
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.text import visible
from hvdlab.collectives.time_limits import Deadline
from hvdlab.torch.dynamo import untraced_frame

KEPT = 64
"""Calls of each group that a rank remembers."""
MOST_SKIPPED = 8
"""The most skipped calls that are searched for."""
LEAST_ALIKE = 2
"""How many calls behind the skipped ones have to be alike: fewer prove nothing."""
PATIENCE = 0.5
"""Seconds that the other ranks have to answer."""

_TOPIC = "c10d.history"


class CallRecord(msgspec.Struct, frozen=True, array_like=True):
    """One call of a rank.

    Attributes:
        number: Its number in the rank's errors.
        operation: Its name in torch.
        site: The user's line of code, and the part of a model that it is for.
        step: Steps that the rank's optimizers had taken before it.
    """

    number: int
    operation: str
    site: str
    step: int = 0

    def __str__(self) -> str:
        return f"{self.operation} #{self.number} ({visible(self.site)})"

    def is_like(self, other: CallRecord) -> bool:
        return (self.operation, self.site) == (other.operation, other.site)


class CallHistoryMessage(msgspec.Struct, frozen=True, array_like=True):
    """Mail between ranks: the last calls of a group in one generation; with ``asks``, a request for these.

    ``first`` is how many calls of this generation came before ``calls``. ``number`` is the asking rank's count of its requests; the answer
    has the same.
    """

    group: str
    generation: int
    first: int = 0
    calls: tuple[CallRecord, ...] = ()
    asks: bool = False
    number: int = 0


class Shift(msgspec.Struct, frozen=True):
    """The first difference between two ranks' calls.

    Attributes:
        own, other: The first calls that differ, of this rank and of the other.
        skipped: How many calls the other rank has skipped; negative if this rank has.
    """

    own: CallRecord
    other: CallRecord
    skipped: int

    def sentence(self, rank: int, own: int) -> str:
        """Return the shift in words. ``rank`` is the other rank, ``own`` the rank that compares."""
        count = abs(self.skipped)
        calls = "a call" if count == 1 else f"{count} calls"
        who, missed, instead, whom = (
            (rank, self.own, self.other, own) if self.skipped > 0 else (own, self.other, self.own, rank)
        )
        return (
            f"rank {who} skipped {calls}: where rank {whom} called {missed}, it called {instead}, and the calls behind that met "
            "the wrong ones"
        )


def find_shift(own: CallHistoryMessage, other: CallHistoryMessage) -> Shift | None:
    """Find out whether one rank has skipped calls: whether, from some call on, its calls are those that the other makes later.

    Lines that differ for another reason, such as those of a root and of other ranks, are no shift.

    Returns:
        The shift; ``None`` if the calls that both ranks remember show none.
    """
    first = max(own.first, other.first)
    ours, theirs = own.calls[first - own.first :], other.calls[first - other.first :]
    at = next(
        (i for i, pair in enumerate(zip(ours, theirs, strict=False)) if not pair[0].is_like(pair[1])), 0
    )
    # Lines that differ from the first call on are those of a root and of other ranks, or differ since before
    # that call.
    if not at:
        return None
    # Calls that one rank skipped can look like extra calls of the other, and the other way round: the explanation that makes more
    # of the later calls alike is chosen.
    best, skipped = LEAST_ALIKE - 1, 0
    for count in range(1, MOST_SKIPPED + 1):
        for of_other, alike in (
            (count, _alike(ours[at + count :], theirs[at:])),
            (-count, _alike(ours[at:], theirs[at + count :])),
        ):
            if alike > best:
                best, skipped = alike, of_other
    return Shift(ours[at], theirs[at], skipped) if skipped else None


class Drift(msgspec.Struct, frozen=True):
    """The first call that two ranks made in different steps of their optimizers.

    Attributes:
        own, other: The call, as this rank and as the other made it.
        ahead: By how many steps the other rank's lead over this one had grown by then; negative if it had shrunk, never 0.
    """

    own: CallRecord
    other: CallRecord
    ahead: int

    def sentence(self, rank: int, own: int) -> str:
        """Return the drift in words. ``rank`` is the other rank, ``own`` the rank that compares."""
        who = rank if self.ahead > 0 else own
        return (
            f"rank {own} made {self.own} after {_steps(self.own.step)} of its optimizers, and rank {rank} made it after "
            f"{_steps(self.other.step)}: rank {who} has probably skipped a backward pass or another call before"
        )


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


def find_drift(own: CallHistoryMessage, other: CallHistoryMessage) -> Drift | None:
    """Find out whether, from some call on, two ranks made their calls in different steps.

    Optimizers that only some ranks have make the counts differ, too. So a difference that was there at the first call that both
    remember does not count, nor one that comes and goes.

    Returns:
        The drift; ``None`` if the calls that both ranks remember show none.
    """
    first = max(own.first, other.first)
    pairs = list(zip(own.calls[first - own.first :], other.calls[first - other.first :], strict=False))
    before = pairs[0][1].step - pairs[0][0].step if pairs else 0
    ahead = [other.step - own.step - before for own, other in pairs]
    at = next((i for i, difference in enumerate(ahead) if difference), None)
    if at is None or any(difference * ahead[at] <= 0 for difference in ahead[at:]):
        return None
    return Drift(*pairs[at], ahead[at])


def _alike(some: Sequence[CallRecord], others: Sequence[CallRecord]) -> int:
    """Return the number of pairs of calls, if both calls of every pair are alike; otherwise 0."""
    pairs = list(zip(some, others, strict=False))
    return len(pairs) if all(one.is_like(other) for one, other in pairs) else 0


class _Record:
    """The last calls of one group in its present generation, and the count of all."""

    def __init__(self, generation: int) -> None:
        self.generation, self.count = generation, 0
        self.calls: deque[CallRecord] = deque(maxlen=KEPT)


class CallSource(Protocol):
    """A group that remembers its calls by itself."""

    def calls_of(self, group: str, generation: int) -> CallHistoryMessage:
        """Return the last calls of the group in a generation. Any thread; must not block."""
        ...


class Histories:
    """The last calls of all groups of this rank. One object for each engine.

    Args:
        engine: The rank's engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        #: Notified when an answer has come, which the control thread stores while a user's thread waits.
        self._changed = threading.Condition()
        #: The calls of each group's present generation; with the following, guarded by the condition.
        self._records: dict[str, _Record] = {}
        #: Where the calls of groups are that remember them by themselves.
        self._sources: dict[str, CallSource] = {}
        #: How many requests this rank has sent.
        self._number = 0
        #: The answers to each request, by rank, as long as a thread waits for them: several may ask about one group at once.
        self._answers: dict[int, dict[int, CallHistoryMessage]] = {}
        engine.on_mail(_TOPIC, self._on_mail)

    def add(self, group: str, generation: int, call: CallRecord) -> None:
        """Record a call that was submitted in this generation of the group's process set."""
        with self._changed:
            record = self._records.get(group)
            if record is None or record.generation != generation:
                record = self._records[group] = _Record(generation)
            record.count += 1
            record.calls.append(call)

    def attach(self, group: str, source: CallSource) -> None:
        """Read the calls of a group from its own memory of them, until :meth:`forget`."""
        with self._changed:
            self._sources[group] = source

    def forget(self, group: str) -> None:
        """Forget the calls of a group that is gone."""
        with self._changed:
            self._records.pop(group, None)
            self._sources.pop(group, None)

    def explain(self, group: str, generation: int, missing: Sequence[int]) -> str:
        """Ask the missing ranks for their calls in this generation, and return which rank, of these or this one, has skipped calls.

        Returns:
            A sentence; empty if no rank has, as far as the ranks answer within :data:`PATIENCE`.
        """
        own = self._calls_of(group, generation)
        others = [rank for rank in missing if rank != self._engine.rank and rank in self._engine.living]
        if not own.calls or not others:
            return ""
        for rank, said in sorted(self._ask(group, generation, others).items()):
            found = find_shift(own, said) or find_drift(own, said)
            if found is not None:
                return found.sentence(rank, self._engine.rank)
        return ""

    def _ask(self, group: str, generation: int, others: Sequence[int]) -> dict[int, CallHistoryMessage]:
        deadline, answers = Deadline(PATIENCE), dict[int, CallHistoryMessage]()
        with self._changed:
            self._number += 1
            number = self._number
            # Before the question is sent: an answer to a number that is not in here is dropped.
            self._answers[number] = answers
            try:
                question = CallHistoryMessage(group, generation, asks=True, number=number)
                self._engine.post(_TOPIC, msgspec.msgpack.encode(question), others)
                while not answers.keys() >= set(others) and not deadline.expired:
                    self._changed.wait(deadline.remaining())
            finally:
                del self._answers[number]
        return answers

    def _calls_of(self, group: str, generation: int) -> CallHistoryMessage:
        with self._changed:
            source = self._sources.get(group)
            if source is not None:
                return source.calls_of(group, generation)
            record = self._records.get(group)
            if record is None or record.generation != generation:
                return CallHistoryMessage(group, generation)
            return CallHistoryMessage(
                group, generation, record.count - len(record.calls), tuple(record.calls)
            )

    def _on_mail(self, sender: int, body: bytes) -> None:
        """Handle another rank's request for calls, or its answer. Control thread."""
        message = msgspec.msgpack.decode(body, type=CallHistoryMessage)
        if message.asks:
            answer = msgspec.structs.replace(
                self._calls_of(message.group, message.generation), number=message.number
            )
            self._engine.post(_TOPIC, msgspec.msgpack.encode(answer), [sender])
            return
        with self._changed:
            answers = self._answers.get(message.number)
            if answers is not None:
                answers[sender] = message
                self._changed.notify_all()


class OptimizerSteps:
    """Counter of the steps of all optimizers together from now on, by torch's global hook.

    Steps that ``torch.compile`` compiles are not counted: the count would be a constant in the compiled code, which torch would
    compile again each time that it has changed.

    Attributes:
        taken: The count.
    """

    def __init__(self) -> None:
        self.taken = 0
        # Torch's hook must not keep this object, whose end removes the hook.
        counts = weakref.ref(self)

        def count(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not torch.compiler.is_compiling() and (steps := counts()) is not None:
                steps.taken += 1

        hook = register_optimizer_step_post_hook(count)
        weakref.finalize(self, hook.remove)


def keep_errors() -> None:
    """Let ``backward()`` and ``torch.autograd.grad`` raise hvdlab's own errors, from now on in this process.

    C++ keeps nothing of an error but its text. The one function of torch's through which all Python code runs the engine is replaced by one that
    puts the error back. Where torch has no such function (before 2.3), only errors that end a cell or a program are put back.
    """
    graph: Any = torch.autograd.graph
    original = getattr(graph, "_engine_run_backward", None)
    # By its globals, since functools.wraps gives the replacement the name and module of torch's function.
    if not isinstance(original, FunctionType) or original.__globals__ is globals():
        return
    # Callers look it up in either module.
    graph._engine_run_backward = torch.autograd._engine_run_backward = _with_own_errors(original)  # type: ignore[attr-defined]


def _with_own_errors(original: Any) -> Any:
    @functools.wraps(original)
    @untraced_frame
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except RuntimeError as error:
            own = own_error(error)
            if own is error:
                raise
        # Not within the handler: the error that it replaces would be shown as its cause.
        raise own.with_traceback(None)

    return run_backward
