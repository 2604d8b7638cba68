"""``hvdlab.timeline()``, ``hvdlab.ranks()``, ``hvdlab.membership()``, ``hvdlab.metrics()``, ``hvdlab.trace()`` and ``hvdlab.export()``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from hvdlab.widgets.source import pool_of, recording_of

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]  # has no types

    from hvdlab.collectives.metrics.export import Exporter, RecordingExport
    from hvdlab.widgets.membership import MembershipWidget
    from hvdlab.widgets.metrics import MetricsWidget
    from hvdlab.widgets.ranks import RanksWidget
    from hvdlab.widgets.timeline import TimelineWidget


def timeline(pool: Any = None, *, height: int = 420) -> TimelineWidget:
    """The collectives of all ranks as they happen: which ranks wait, which transfer, and which came last.

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
    """A live table of the ranks: state, process, waiting, lateness.

    Args:
        pool: The pool; by default the notebook's, or the next one if there is none yet.

    Raises:
        InvalidRequestError: No ranks are running.
        ModuleNotFoundError: anywidget is not installed.
    """
    recording = recording_of(pool, coming=True)
    try:
        from hvdlab.widgets.ranks import RanksWidget
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    return RanksWidget(recording)


def membership(pool: Any = None) -> MembershipWidget:
    """Which ranks there are, since when and from where, and when others came and went, live; with buttons.

    The buttons resize the pool, repair lost ranks, restart ranks and bring newcomers what the others know, also while a cell
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
        from hvdlab.widgets.membership import MembershipWidget
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    return MembershipWidget(recording, lambda: pool_of(pool))


def metrics(pool: Any = None) -> MetricsWidget:
    """Charts of what all ranks measure, live: what ``hvd.metric()`` reported, where the time goes, lateness, bandwidth,
    CPU, memory and GPUs.

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
    """All collectives that were recorded, as a pandas table with a row per tensor, collective and rank.

    ``docs/reference/trace.md`` has the columns. The newest million rows are kept, from the first use of this or of a view
    on, and with what the coordinator still has of the time before; ``table.attrs["dropped"]`` says how many are missing.

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
    """Hand the metrics of all ranks to a tracker: what was recorded so far, and what comes, until the pool ends.

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
    return RecordingExport(recording, exporter, patterns(names), lambda name: name.startswith(DERIVED))


def _missing(error: ModuleNotFoundError) -> ModuleNotFoundError:
    text = f"live views need {error.name}; `pip install 'hvdlab[lab]'` brings it"
    return ModuleNotFoundError(text, name=error.name)
