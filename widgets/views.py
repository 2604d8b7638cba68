"""``hvdlab.timeline()``, ``hvdlab.ranks()``, ``hvdlab.membership()``, ``hvdlab.metrics()``, ``hvdlab.trace()`` and ``hvdlab.export()``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from hvdlab.collectives.errors import InvalidRequestError

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]  # has no types

    from hvdlab.collectives.metrics.export import Exporter, RecordingExport
    from hvdlab.collectives.tracing.recording import Recording
    from hvdlab.widgets.metrics import MetricsWidget
    from hvdlab.widgets.pool_membership import ChangeablePool
    from hvdlab.widgets.rank_tables import MembershipWidget, RanksWidget
    from hvdlab.widgets.timeline import TimelineWidget

Finder = Callable[[], Any]

Waiting = Callable[[], "Recording | None"]

_finders: list[Finder] = []
"""Functions that return the pool of the notebook in which the user is; the newest is asked first. The extension adds them."""

_waiting: list[Waiting] = []
"""Functions that return the recording of the pool that comes next; the newest is asked first. The extension adds them."""


def add_finder(finder: Finder) -> None:
    """Add a function that returns the pool to use when none is named; ``None`` if it has none."""
    _finders.append(finder)


def remove_finder(finder: Finder) -> None:
    """Undo :func:`add_finder`. Nothing happens if ``finder`` is not known."""
    if finder in _finders:
        _finders.remove(finder)


def add_awaiting(waiting: Waiting) -> None:
    """Add ``waiting`` to those that are asked for the recording of the pool that comes next."""
    _waiting.append(waiting)


def remove_awaiting(waiting: Waiting) -> None:
    """Undo :func:`add_awaiting`. Nothing happens if ``waiting`` is not known."""
    if waiting in _waiting:
        _waiting.remove(waiting)


def _awaited() -> Recording | None:
    return next((found for waiting in reversed(_waiting) if (found := waiting()) is not None), None)


def pool_of(source: Any = None) -> ChangeablePool | None:
    """Return the pool to use, by default the notebook's; None if there is none now, or ``source`` is no pool."""
    if source is None:
        source = next((pool for finder in reversed(_finders) if (pool := finder()) is not None), None)
    return source if hasattr(source, "on_membership_change") else None


def recording_of(source: Any = None, *, coming: bool = False) -> Recording:
    """Return the recording of a pool, a client or of itself; by default that of the notebook's pool.

    It includes the time before this call.

    Args:
        source: A pool, a client or a recording; by default the notebook's pool.
        coming: Without a pool, return the recording of the notebook's next pool, which is empty until then.

    Raises:
        InvalidRequestError: There is no pool, or this process is one of its ranks.
        TypeError: ``source`` leads to no recording.
    """
    # Imported here, since these import numpy, which views need and loading the extension does not.
    from hvdlab.collectives import context
    from hvdlab.collectives.client import Client
    from hvdlab.collectives.tracing.recording import Recording

    if source is None:
        if context.in_rank_of_pool():
            raise InvalidRequestError(
                "this is a rank, which does not see the others: call it in the notebook's own process, in a cell without "
                "%%hvd_run, or under %%local where cells run on the ranks"
            )
        source = next((pool for finder in reversed(_finders) if (pool := finder()) is not None), None)
        if source is None and coming and (awaited := _awaited()) is not None:
            return awaited
        if source is None:
            raise InvalidRequestError(
                "no ranks are running: start some with `%hvd_pool start -np 8` or a %%hvd_run cell, or name a pool"
            )
    if isinstance(source, Recording):
        return source
    client = getattr(source, "client", source)
    if isinstance(client, Client):
        return client.gathered()
    raise TypeError(f"a pool is needed here, not {type(source).__name__}")


def timeline(pool: Any = None, *, height: int = 420) -> TimelineWidget:
    """Return a live view of the collectives of all ranks: which ranks wait, which transfer, and which came last.

    Args:
        pool: The pool; by default the notebook's, or the next one if there is none yet.
        height: Height of the drawing at most, in pixels.

    Raises:
        InvalidRequestError: No ranks are running.
        ModuleNotFoundError: anywidget is not installed.
    """
    recording = recording_of(pool, coming=True)
    try:
        from hvdlab.widgets.timeline import TimelineWidget
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    return TimelineWidget(recording, height=height)


def ranks(pool: Any = None) -> RanksWidget:
    """Return a live table of the ranks: state, process, waiting, lateness.

    Args:
        pool: The pool; by default the notebook's, or the next one if there is none yet.

    Raises:
        InvalidRequestError: No ranks are running.
        ModuleNotFoundError: anywidget is not installed.
    """
    recording = recording_of(pool, coming=True)
    try:
        from hvdlab.widgets.rank_tables import RanksWidget
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    return RanksWidget(recording)


def membership(pool: Any = None) -> MembershipWidget:
    """Return a live table of the ranks, since when and from where, and of those that came and went; with buttons.

    The buttons resize the pool, repair lost ranks, restart ranks and bring newcomers the others' variables, also while a cell
    runs. The view asks before a button ends a rank.

    Args:
        pool: The pool; by default the notebook's, or the next one if there is none yet.

    Raises:
        InvalidRequestError: No ranks are running.
        TypeError: ``pool`` is no pool.
        ModuleNotFoundError: anywidget is not installed.
    """
    recording = recording_of(pool, coming=True)
    if pool is not None and pool_of(pool) is None:
        raise TypeError(f"a pool is needed here, not {type(pool).__name__}")
    try:
        from hvdlab.widgets.rank_tables import MembershipWidget
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    return MembershipWidget(recording, lambda: pool_of(pool))


def metrics(pool: Any = None) -> MetricsWidget:
    """Return live charts of all ranks: metrics of ``hvd.metric()``, shares of time, lateness, bandwidth, CPU, memory and GPUs.

    ``pool.metrics()`` and ``hvdlab.metrics().table()`` have the numbers as a pandas table.

    Args:
        pool: The pool; by default the notebook's, or the next one if there is none yet.

    Raises:
        InvalidRequestError: No ranks are running.
        ModuleNotFoundError: anywidget is not installed.
    """
    recording = recording_of(pool, coming=True)
    try:
        from hvdlab.widgets.metrics import MetricsWidget
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    return MetricsWidget(recording)


@overload
def trace(pool: Any = None, *, arrow: Literal[False] = False) -> DataFrame: ...
@overload
def trace(pool: Any = None, *, arrow: Literal[True]) -> Any: ...
def trace(pool: Any = None, *, arrow: bool = False) -> Any:
    """Return all collectives that were recorded, as a pandas table with a row per tensor, collective and rank.

    ``docs/reference/trace.md`` has the columns. The newest million rows are kept, from the first use of this or of a view
    on, and with the coordinator's records of the time before; ``table.attrs["dropped"]`` counts those that are missing.

    Args:
        pool: The pool; by default the notebook's.
        arrow: Return a ``pyarrow.Table`` instead.

    Raises:
        InvalidRequestError: No ranks are running.
        ModuleNotFoundError: pandas, or pyarrow, is not installed.
    """
    recording = recording_of(pool)
    return recording.arrow() if arrow else recording.table()


def export(exporter: Exporter, pool: Any = None, *, names: str | Sequence[str] = "*") -> RecordingExport:
    """Hand the metrics of all ranks to a tracker: those recorded so far, and further ones until the pool ends.

    Ranks themselves have ``hvd.export()``, which goes on when the notebook is closed. This one also has the metrics that are
    computed from the spans of all ranks (``hvdlab/share/wait``, ``hvdlab/bandwidth/…``, ``hvdlab/lateness``).

    Args:
        exporter: One of :mod:`hvdlab.exporters`, or any object with ``write(points)`` and ``close()``.
        pool: The pool; by default the notebook's.
        names: Patterns of the metrics to export, such as ``["loss*", "hvdlab/share/*"]``; by default all.

    Returns:
        The export, with ``exported``, ``dropped`` and ``failed`` counts. ``close()`` ends it.

    Raises:
        InvalidRequestError: No ranks are running, or ``exporter`` lacks one of the methods.
    """
    from hvdlab.collectives.metrics.export import RecordingExport, checked, patterns
    from hvdlab.collectives.tracing.derived_series import DERIVED

    recording = recording_of(pool)
    checked(exporter)
    return RecordingExport(recording, exporter, patterns(names), DERIVED)


def _missing(error: ModuleNotFoundError) -> ModuleNotFoundError:
    text = f"live views need {error.name}; `pip install 'hvdlab[lab]'` brings it"
    return ModuleNotFoundError(text, name=error.name)
