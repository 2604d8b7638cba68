"""Engine of this process: ``init()`` makes it, and everything that users call uses it.

The engine also reports an exception that ends the program, so that the other ranks learn why this one leaves.

The core, the launchers and all that is shown know a rank by the number it was started with, which stays. Scripts see these
numbers, too, unless ``HVDLAB_RANK_NUMBERS=consecutive``: then the number of a rank is its position in the world, from 0
to ``size() - 1``, as scripts for Horovod expect. The coordinator puts the ranks first that were there first.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from hvdlab.collectives import failures
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.errors import (
    AbortedError,
    CollectiveError,
    ForkedProcessError,
    HvdlabError,
    InvalidRequestError,
    NotInitializedError,
    Pending,
    ReleasedError,
    StartError,
)
from hvdlab.collectives.settings import CONSECUTIVE, TOKEN, Settings

if TYPE_CHECKING:
    from hvdlab.collectives.coordinator.process import CoordinatorProcess
    from hvdlab.collectives.rendezvous.discovery import DiscoveredWorld

Companion = TypeVar("Companion")
E = TypeVar("E", bound=BaseException)


class _Context:
    """Engine of this process, and whether ``init()`` made it: ``shutdown()`` closes only such a one. An adopted one belongs to the pool."""

    def __init__(self) -> None:
        #: Reentrant, since :func:`init` calls :func:`take_settings` and :func:`next_world` under it.
        self.lock = threading.RLock()
        #: The engine in use, after ``init()``.
        self.engine: Engine | None = None
        #: The pool's engine, which ``init()`` uses instead of making one.
        self.adopted: Engine | None = None
        #: The coordinator of a world of one, which this process has started.
        self.coordinator: CoordinatorProcess | None = None
        #: The world of a launcher other than hvdlab's.
        self.found: DiscoveredWorld | None = None
        self.forked_by: int | None = None  # the rank that this process was forked by
        #: The coordinator that the environment named, if any, and the secret that was removed from there.
        self.secret: tuple[str | None, str] = (None, "")
        #: An engine, and the objects that bindings keep beside it, by the function that made each; see :func:`companion`.
        self.companions: tuple[Engine | None, dict[Any, Any]] = (None, {})
        #: How many worlds this process has looked for in a store that outlives worlds; see :func:`next_world`.
        self.worlds_sought = 0
        #: How many times this process has joined a world; see :func:`joined_worlds`.
        self.worlds_joined = 0


_context = _Context()


def init(settings: Settings | None = None) -> Engine:
    """Join the world that the environment names, and wait until it is complete; a world of one if it names none.

    Does nothing if this process is initialized already. After :func:`shutdown` it can be called again, any number
    of times.

    Args:
        settings: How to join; by default those of the environment. Not used where a pool's engine was adopted.

    Returns:
        The engine of this process.

    Raises:
        StartError: No coordinator answers, or some ranks are not there in time; the text names them. Or there is no secret
            to show.
        SystemExit: With code 0, if this rank was released before elastic training admitted it, since its host leaves the job.
        InvalidRequestError: A variable of the environment can't be read.
    """
    with _context.lock:
        if _context.engine is not None:
            if not _context.engine.leaving:
                return _context.engine
            shutdown()  # finishes one that was interrupted: this rank is perhaps still connected
        if _context.adopted is not None and not _context.adopted.closed:
            engine = _context.adopted
            engine.wait_for_world(engine.settings.start_timeout)
        else:
            engine = _join(settings or _find(take_settings()))
        _context.engine, _context.forked_by = engine, None
        _context.worlds_joined += 1
        return engine


def take_settings() -> Settings:
    """Return the settings of the environment, and remove the secret from it: no child, crash reporter or cell needs it.

    The secret is kept for the next call, such as that of :func:`init` after :func:`shutdown`.

    Raises:
        InvalidRequestError: A variable of the environment can't be read.
    """
    settings = Settings.from_env()
    with _context.lock:
        os.environ.pop(TOKEN, "")
        if settings.token:
            _context.secret = (settings.coordinator, settings.token)
        # A secret is for its coordinator alone: another one, which the environment names by now, must not get it.
        coordinator, token = _context.secret
        return dataclasses.replace(settings, token=token if coordinator == settings.coordinator else "")


def _find(settings: Settings) -> Settings:
    """Return the settings to join the world for which a launcher that is not hvdlab's started this process, if one did."""
    if settings.coordinator is not None:
        return settings
    if _context.found is None:
        from hvdlab.collectives.rendezvous.discovery import discover

        _context.found = discover(os.environ, settings)
    return settings if _context.found is None else _context.found.settings(settings)


def _join(settings: Settings) -> Engine:
    coordinator = None
    if settings.coordinator is not None and not settings.token:
        raise StartError(
            f"There is a coordinator at {settings.coordinator}, but no secret in {TOKEN} to show it. A rank takes it out of "
            "its environment when it joins: what it starts is no rank. If this process needs a world of its own, start it "
            "without HVDLAB_COORDINATOR."
        )
    if settings.coordinator is None:
        from hvdlab.collectives.coordinator.process import CoordinatorProcess

        coordinator = CoordinatorProcess.start(size=1, timeout=settings.start_timeout)
        settings = dataclasses.replace(
            settings, coordinator=coordinator.address, token=coordinator.token, rank=0, size=1
        )
    engine = None
    try:
        engine = Engine.connect(settings)
        engine.wait_for_world(settings.start_timeout)
        if settings.timeline and engine.rank == 0:
            engine.start_timeline(settings.timeline, settings.mark_cycles)
        if _context.found is not None:
            # The ranks wait here until rank 0 has closed the store of the rendezvous. One that returned earlier, and called
            # init_process_group() on the same MASTER_PORT, could reach the store that rank 0 was about to close.
            _context.found.complete(engine)
    except BaseException as error:
        if engine is not None:
            engine.close()
        if coordinator is not None:
            coordinator.close()
        _release()
        if isinstance(error, ReleasedError):
            raise SystemExit(0) from None  # as in elastic training
        raise
    _context.coordinator = coordinator
    watch_uncaught()
    return engine


def adopt(engine: Engine | None) -> None:
    """Have ``init()`` use this engine, which the caller owns and closes; ``None`` undoes that."""
    with _context.lock:
        _context.adopted = engine
        _context.engine, _context.companions = None, (None, {})


def in_rank_of_pool() -> bool:
    """Return whether this process is a rank of a pool."""
    engine = _context.adopted
    return engine is not None and not engine.closed


def shutdown() -> None:
    """Leave the world. Collectives in flight fail, but not those of an adopted engine, which stays open. Does nothing if not initialized."""
    with _context.lock:
        engine, _context.engine = _context.engine, None
        companions = _context.companions
        # Those of an adopted engine stay with it: they get its mail, and two of one kind would both answer.
        if companions[0] is not _context.adopted:
            _context.companions = (None, {})
        coordinator, _context.coordinator = _context.coordinator, None
        try:
            # The engine first: it takes leave of its coordinator.
            if engine is not None and engine is not _context.adopted:
                engine.close()
            if coordinator is not None:
                coordinator.close()
        except BaseException:
            # An interrupt, as a rule: without them no later call could take leave, and the coordinator would refuse this rank's next init().
            _context.engine, _context.companions, _context.coordinator = engine, companions, coordinator
            raise


def _release() -> None:
    """Release the world that a launcher other than hvdlab's started; until then :func:`init` joins it again."""
    found, _context.found = _context.found, None
    if found is not None:
        found.release()


def _end() -> None:
    shutdown()
    with _context.lock:
        _release()


def is_initialized() -> bool:
    """Return whether :func:`init` was called, and :func:`shutdown` not since."""
    engine = _context.engine
    return engine is not None and not engine.closed


def engine(what: str = "hvdlab") -> Engine:
    """Return the engine of this process.

    Args:
        what: The user's call, for the error.

    Raises:
        NotInitializedError: ``init()`` was not called.
    """
    found = _context.engine
    if found is None or found.closed:
        if _context.forked_by is not None:
            raise ForkedProcessError(what, _context.forked_by)
        raise NotInitializedError(what)
    return found


def companion(make: Callable[[Engine], Companion], what: str = "hvdlab") -> Companion:
    """Return an object that a binding keeps beside the engine of this process: made once for each engine, and forgotten with it.

    Args:
        make: Makes the object from the engine. It is also the key: the same function gets the same object.
        what: The user's call, for the error.

    Raises:
        NotInitializedError: ``init()`` was not called.
    """
    present = engine(what)
    with _context.lock:
        if _context.companions[0] is not present:
            _context.companions = (present, {})
        kept = _context.companions[1]
        if make not in kept:
            kept[make] = make(present)
        found: Companion = kept[make]
        return found


def joined_worlds() -> int:
    """Return how many times this process has joined a world. The engine of a rank of a pool stays the same over :func:`shutdown`."""
    return _context.worlds_joined


def next_world() -> int:
    """Return how many times this was called before in this process: ranks that look for the same world get the same number."""
    with _context.lock:
        _context.worlds_sought += 1
        return _context.worlds_sought - 1


# -- the numbers by which scripts know ranks ----------------------------------------------------------------------------


def own_number(what: str = "hvd.rank()") -> int:
    """Return the number of this rank; ``what`` is the user's call, for the error."""
    here = engine(what)
    return shown_number(here.rank) if here.settings.rank_numbers == CONSECUTIVE else here.rank


def shown_number(rank: int) -> int:
    """Return the number by which scripts know a rank of the core; the core's own number for a rank that is not in the world."""
    here = engine()
    if here.settings.rank_numbers != CONSECUTIVE:
        return rank
    ranks = here.ranks()
    return ranks.index(rank) if rank in ranks else rank


def core_rank(number: int, what: str = "hvd.add_process_set()") -> int:
    """Return the rank of the core that scripts know by this number; ``what`` is the user's call, for the error.

    Raises:
        InvalidRequestError: Numbers are consecutive, and there are fewer ranks.
        AbortedError: There are fewer ranks because elastic training has to begin again.
        NotInitializedError: ``init()`` was not called.
    """
    here = engine(what)
    if here.settings.rank_numbers != CONSECUTIVE:
        return number
    ranks = here.ranks()
    if not 0 <= number < len(ranks):
        if here.failure is not None:  # perhaps it is a number of the world that has ended
            raise AbortedError(Pending(what, f"{what}.noname"), here.failure)
        there = f"they are 0 to {len(ranks) - 1}" if len(ranks) > 1 else "there is rank 0 alone"
        raise InvalidRequestError(f"There is no rank {number}; {there}.")
    return ranks[number]


# -- exceptions that end the program -----------------------------------------------------------------------------------


def report_uncaught(error: BaseException) -> None:
    """Send clients and other ranks the report about an exception that is about to end the program."""
    if not is_initialized():
        return
    here = engine()
    report = failures.describe_uncaught(error, here.rank)
    here.farewell = report.error
    here.post(failures.UNCAUGHT_TOPIC, msgspec.json.encode(report))


def own_error(error: E) -> E | CollectiveError:
    """Return hvdlab's own error if a framework's native code has made ``error`` of its text, or ``error`` itself.

    C++ that waits for collectives, as DDP's does, raises a ``RuntimeError`` with the text of ours, words of its own before that and a stack of
    hvdlab's frames behind it. Each own error comes back once, with the traceback and the context of the error that it replaces.
    """
    if type(error) is not RuntimeError or not is_initialized():
        return error
    sent, text = engine().sent_through_native, str(error)
    for own in reversed(list(sent)):  # a copy, since other threads add to it
        if str(own).partition("\n")[0] in text:
            sent.remove(own)
            own.__cause__, own.__context__ = error.__cause__, error.__context__
            own.__suppress_context__ = error.__suppress_context__
            return own.with_traceback(error.__traceback__)
    return error


def with_own_errors(error: BaseException) -> BaseException:
    """Return the same, with hvdlab's own errors also among all that led to ``error``: for everything that is shown to users."""
    first = link = own_error(error)
    seen = {id(first)}
    # The chain of an exception can be a circle, since users set causes.
    while True:
        before = link.__cause__ or link.__context__
        if before is None or id(before) in seen:
            return first
        own = own_error(before)
        if own is not before and link.__cause__ is not None:
            link.__cause__ = own
        elif own is not before:
            link.__context__ = own
        link = own
        seen.add(id(link))


def watch_uncaught() -> None:
    """Have :func:`report_uncaught` called for uncaught exceptions from now on."""
    # Once only: init() after a shutdown() comes here again, and would put a second hook in front of the first.
    previous = sys.excepthook
    if getattr(previous, "__module__", "") == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            own = with_own_errors(error)
            if own is not error:
                kind, error, trace = type(own), own, own.__traceback__
            report_uncaught(error)
            if isinstance(error, HvdlabError):
                failures.cut_own_frames(trace)
        # Also where the report fails: the user has to see the exception in any case.
        finally:
            previous(kind, error, trace)

    sys.excepthook = hook


def _forget_in_child() -> None:
    # The coordinator process and the engine belong to the parent. The lock can be held by a thread that does not exist in the child.
    _context.lock = threading.RLock()
    parents = _context.engine or _context.adopted
    if parents is not None:
        _context.forked_by = parents.rank
    _context.engine = _context.adopted = _context.coordinator = _context.found = None
    _context.companions, _context.worlds_sought = (None, {}), 0


os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(_end)
