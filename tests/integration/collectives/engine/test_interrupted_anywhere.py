"""Ctrl-C between any two steps of a wait: the rank reads the coordinator's later messages, and its spans go on.

Python raises KeyboardInterrupt where a function begins, after a call of a C function and when a loop goes round. Each of
these places in a collective is tried in turn.
"""

from __future__ import annotations

import contextlib
import dis
import sys
import threading
from functools import cache
from types import CodeType, FrameType
from typing import Any, cast

import msgspec
import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.engine import inline_execution
from hvdlab.collectives.engine.entries import CompletionHooks, Fail, Handle, HandleOwner, RunBatch
from hvdlab.collectives.engine.locked_state import LockedState, complete
from hvdlab.collectives.engine.requests import Request, Result
from hvdlab.collectives.engine.span_log import SpanLog
from hvdlab.collectives.errors import AbortedError, CauseKind
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.endpoint import Endpoint
from hvdlab.collectives.types import SUM, DType, OpKind
from support.engine_probe import EngineProbe
from support.patience import PATIENCE
from support.ranks.resident import Ranks, resident_ranks

Outcome = tuple[Result | None, Exception | None]
ENOUGH = 100
"""Places that are there in any case."""


one = resident_ranks(1, scope="function")


# -- on the rank --------------------------------------------------------------------------------------------------


@cache
def _places(code: CodeType) -> frozenset[int]:
    """Return offsets of the instructions before which an interrupt may be raised."""
    found: set[int] = set()
    called = False
    for instruction in dis.get_instructions(code):
        if called:
            found.add(instruction.offset)
        called = instruction.opname.startswith("CALL")
        if instruction.opname.startswith("JUMP_BACKWARD"):
            found.add(instruction.argval)
    return frozenset(found)


class Interrupt:
    """Tracer that raises KeyboardInterrupt at the first place in the engine that this thread comes to and none was
    raised at before.

    Args:
        tried: The places where one was raised.
        within: Name of a function that has to have begun; empty for anywhere.
    """

    def __init__(self, tried: set[tuple[CodeType, int]], within: str = "") -> None:
        self.tried, self._within = tried, within
        self.where = ""

    def __enter__(self) -> None:
        sys.settrace(self._called)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, argument: object) -> Any:
        if "/collectives/" not in frame.f_code.co_filename or "/tests/" in frame.f_code.co_filename:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        self._come_to(frame, -1)
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode" and frame.f_lasti in _places(frame.f_code):
            self._come_to(frame, frame.f_lasti)
        return self._step

    def _come_to(self, frame: FrameType, offset: int) -> None:
        place = (frame.f_code, offset)
        if (
            not self.where
            and place not in self.tried
            and self._is_within(frame if offset >= 0 else frame.f_back)
        ):
            self.tried.add(place)
            self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
            raise KeyboardInterrupt

    def _is_within(self, frame: FrameType | None) -> bool:
        while self._within and frame is not None and frame.f_code.co_name != self._within:
            frame = frame.f_back
        return not self._within or frame is not None


def reduce_once() -> None:
    """Run one collective; those before may have left an end of their generation behind."""
    while True:
        try:
            total = hvd.allreduce(np.ones(4), op=hvd.Sum)
        except AbortedError as error:
            if error.cause.kind not in ("interrupted", "withdrawn"):
                raise
        else:
            assert total[0] == 1
            return


def interrupted_at_each_place(blocked_after: float) -> tuple[int, list[str], bool]:
    """Return how many places there are, where an interrupt made the rank deaf, and whether its spans are sent at the
    end.

    Args:
        blocked_after: Seconds after which a wait leaves everything to the rank's other threads.
    """
    engine = context.engine()
    inline_execution.BLOCKED_AFTER = blocked_after
    SpanLog.INTERVAL = 0.0  # so that each collective finds the flush of the one before done
    heard, sent = threading.Event(), threading.Event()
    engine.on_mail("echo", lambda sender, body: heard.set())
    deaf: list[str] = []
    tried: set[tuple[CodeType, int]] = set()
    unhurt = 0
    # The steps reached differ from run to run; on a busy machine other threads do most, and the way through is short.
    while unhurt < 5 or len(tried) < ENOUGH:
        reduce_once()
        interrupt = Interrupt(tried)
        try:
            with interrupt:
                hvd.allreduce(np.ones(4), op=hvd.Sum)
        except KeyboardInterrupt:
            engine.end_cell("")  # as the runner of the user's code does
        except AbortedError:
            pass
        if not interrupt.where:
            unhurt += 1
            continue
        heard.clear()
        engine.post("echo", b"", [engine.rank])
        if not heard.wait(PATIENCE):
            deaf.append(interrupt.where)
    EngineProbe(engine).handlers.callbacks.own_event_sinks.append(lambda rank, batch: sent.set())
    reduce_once()
    return len(tried), deaf, sent.wait(PATIENCE)


def hooks_at_each_place() -> tuple[int, list[str]]:
    """Return how many places there are, and where an interrupt made a hook be called another number of times than
    once."""
    engine = context.engine()
    tried: set[tuple[CodeType, int]] = set()
    wrong: list[str] = []
    unhurt = 0
    while unhurt < 20 or len(tried) < ENOUGH:
        reduce_once()
        calls: list[Outcome] = []
        called, accepted = threading.Event(), False

        def hook(
            result: Result | None,
            error: Exception | None,
            /,
            calls: list[Outcome] = calls,
            called: threading.Event = called,
        ) -> None:
            calls.append((result, error))
            called.set()

        request = Request(OpKind.ALLREDUCE, None, np.ones(4), None, DType.F64, SUM, on_done=hook)
        interrupt = Interrupt(tried)
        with contextlib.suppress(KeyboardInterrupt, AbortedError), interrupt:
            handle = engine.submit(request)
            accepted = True
            handle.wait()
        engine.end_cell("")
        unhurt += not interrupt.where
        if accepted and not called.wait(PATIENCE):
            wrong.append(f"{interrupt.where}: not called")
        reduce_once()  # the rest of it has ended by then
        if len(calls) > 1:
            wrong.append(f"{interrupt.where}: {calls}")
    return len(tried), wrong


class SentMessages:
    """Endpoint that keeps the messages that it is to send."""

    backlog = 0

    def __init__(self) -> None:
        self.messages: list[m.Message] = []

    def send(self, message: m.Message) -> bool:
        self.messages.append(message)
        return True

    def send_all(self, messages: list[m.Message]) -> bool:
        for message in messages:
            self.send(message)
        return True


class InterruptedRank:
    """State of one rank of two in generation 1. It has three collectives in flight, and executes two of them.

    Attributes:
        locked: The state, under its lock.
        sent: Its messages.
        woken: How often the control thread was woken.
        calls: How often the completion hook of each collective was called.
    """

    def __init__(self) -> None:
        self.sent, self.woken, self.calls = SentMessages(), 0, [0, 0, 0]
        self.hooks = CompletionHooks(0, self)
        self.locked = LockedState(0, cast(Endpoint, self.sent), self, self.hooks)
        self.locked.handle(CONFIGURE, 0)
        self.handles = [self._submit(number) for number in range(3)]
        self.locked.flush()
        batches = tuple(m.Batch((self.handles[number].local.id,), reported=True) for number in range(2))
        self.batches = [
            effect
            for effect in self.locked.handle(m.Execute(0, 1, 1, batches), 0)
            if isinstance(effect, RunBatch)
        ]
        self.locked.finish(self.batches[0], [Result()])
        self.locked.queue_message(m.Paused("a test"))

    def wake(self) -> None:
        self.woken += 1

    def _submit(self, number: int) -> Handle:
        def called(result: Result | None, error: Exception | None, /) -> None:
            self.calls[number] += 1

        handle = self.handle(str(number))
        handle.request.on_done = called
        self.locked.submit(handle)
        return handle

    def handle(self, name: str) -> Handle:
        request = Request(OpKind.ALLREDUCE, name, np.ones(4), dtype=DType.F64, reduction=SUM)
        return Handle(cast(HandleOwner, self), request, "line 1", 1)

    def change(self, what: str) -> None:
        if what == "submit":
            self.locked.submit(self.handle("3"))
        elif what == "flush":
            self.locked.flush()
        elif what == "finish":
            self.locked.finish(self.batches[1], [Result()])
        else:
            self.locked.withdraw(self.handles[2], CauseKind.WITHDRAWN, "a test")

    def end_generation(self) -> None:
        """Do as the coordinator does when it is asked to, and check that the rank goes on."""
        assert any(isinstance(one, m.Withdraw) and one.generation == 1 for one in self.sent.messages)
        effects = self.locked.handle(m.Abort(0, 1, "interrupted", (0,), "a test", ""), 0)
        for effect in effects:
            if isinstance(effect, Fail):
                complete(effect.entry, None, effect.error)
        self.hooks.run()
        assert [handle.done() for handle in self.handles] == [True] * 3
        assert self.calls == [1] * 3
        self.locked.handle(msgspec.structs.replace(CONFIGURE, generation=2), 0)
        last = self.handle("0")
        self.locked.submit(last)
        self.locked.flush()
        assert last.local.queue[0] is last
        self.locked.state.validate()


CONFIGURE = m.Configure(0, 1, tuple(m.Member(rank, "host", 100 + rank) for rank in range(2)), "local", {})


def interrupt_twice(change: str, every_pair: bool) -> int:
    """Interrupt a change at each place, and the recovery that follows once more. Return how many pairs of places there were.

    Args:
        change: Change of the state, as :meth:`InterruptedRank.change` knows it.
        every_pair: Whether each place of the recovery is tried after each place of the change, or once.
    """
    pairs = 0
    before: set[tuple[CodeType, int]] = set()
    tried: set[tuple[CodeType, int]] = set()
    while True:
        again = True
        while again:
            rank, first = InterruptedRank(), Interrupt(set(before))
            # ``where`` stays empty once all places have been tried, and nothing is raised then.
            with contextlib.suppress(KeyboardInterrupt), first:
                rank.change(change)
            if not first.where:
                return pairs
            again = rank.locked._update_in_progress
            if again:
                second, woken = Interrupt(tried, "_recover"), rank.woken
                with contextlib.suppress(KeyboardInterrupt), second:
                    rank.locked.flush()
                where = f"{first.where}, then {second.where}"
                assert not rank.locked._update_in_progress or rank.woken > woken, where
                rank.locked.flush()  # as the control thread does
                assert not rank.locked._update_in_progress
                try:
                    rank.end_generation()
                except AssertionError as error:
                    raise AssertionError(where) from error
                again = bool(second.where)
                pairs += again
        before = first.tried
        if every_pair:
            tried = set()


# -- tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocked_after", [0.5, 0.0], ids=["it works itself", "its other threads work"])
def test_a_rank_is_never_deaf_or_dumb_afterwards(one: Ranks, blocked_after: float) -> None:
    ((places, deaf, sent),) = one.run(interrupted_at_each_place, blocked_after, timeout=60)
    assert places >= ENOUGH
    assert deaf == []
    assert sent, "its spans are not sent any more"


def test_a_completion_hook_is_called_once_all_the_same(one: Ranks) -> None:
    ((places, wrong),) = one.run(hooks_at_each_place, timeout=60)
    assert places >= ENOUGH
    assert wrong == []


@pytest.mark.parametrize("every_pair", [False, pytest.param(True, marks=pytest.mark.soak)])
@pytest.mark.parametrize("change", ["submit", "flush", "finish", "withdraw"])
def test_a_second_interrupt_inside_the_recovery_loses_nothing(change: str, every_pair: bool) -> None:
    assert interrupt_twice(change, every_pair) >= 10
