"""Metrics on their way to exporters: points with the time of day, the exporters' interface, and a thread for each export.

A slow exporter does not hold up the training. The points come from the batches of ranks, or from a recording. Exporters for the usual
trackers (JSON lines, TensorBoard, Weights & Biases, MLflow) stand at the end; each imports its package when it is made.
"""

from __future__ import annotations

import atexit
import fnmatch
import importlib
import json
import logging
import math
import os
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hvdlab.collectives.errors import InvalidRequestError, ProtocolError
from hvdlab.collectives.time_limits import Deadline, wall_offset
from hvdlab.collectives.tracing.record_format import (
    RECORD_BYTES,
    Alignment,
    ClockSample,
    Event,
    Head,
    Metric,
    RecordType,
    clock_domain,
    read_head,
    read_record,
)

if TYPE_CHECKING:
    from hvdlab.collectives.tracing.recording import Recording

BATCHES_HELD = 256
"""Batches that wait until their host's clock was compared with this one's; older ones make room."""
MOST_WAITING = 100_000
"""Points that may wait for a slow exporter; older ones make room."""
MOST_AT_ONCE = 1_000
"""Points that one call of an exporter gets at most."""
INTERVAL = 1.0
"""Seconds between two reads of a recording, so that an exporter gets points in portions."""
EXIT_WITHIN = 5.0
"""Seconds that an export gets to write the rest, at the end of the process or when another export replaces it."""
FINAL_AFTER = 3.0
"""Seconds after which a point derived from the spans of one second counts as final; until then late spans may change it."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Point:
    """Value of one metric.

    Attributes:
        rank: The rank that recorded it.
        name: As given to ``hvd.metric()``, or one of hvdlab's own.
        value: May be NaN or infinite.
        step: The training step, if it belongs to one.
        time: When it was measured, in seconds since 1970.
    """

    rank: int
    name: str
    value: float
    step: int | None
    time: float


class PointReader:
    """Reader of the metrics in batches of ranks.

    Batches of hosts whose clock has not been compared with this host's yet are held until it has been.

    Attributes:
        refused: How many batches could not be read.
        dropped: How many metrics were dropped because too many batches were held.
    """

    def __init__(self) -> None:
        self.refused = 0
        self.dropped = 0
        self._alignment = Alignment()
        self._alignment.observe(clock_domain())
        #: Batches with metrics of hosts whose clock has not been compared yet, oldest first.
        self._held: deque[bytes] = deque()

    def read(self, batch: bytes) -> list[Point]:
        """Return the metrics of a batch, in the order in which they were recorded, after those that were held until now."""
        try:
            return self._read(batch, read_head(batch))
        except ProtocolError:
            self.refused += 1
            return []

    def _read(self, batch: bytes, head: Head) -> list[Point]:
        types = batch[head.start :: RECORD_BYTES]
        found: list[Point] = []
        samples = list(_events(batch, head, types, RecordType.CLOCK))
        for sample in samples:
            assert isinstance(sample, ClockSample)
            self._alignment.observe(head.clock, sample)
        # Only a sample of a clock can make a held batch readable.
        if samples and self._held:
            # Replaced first: `_metrics()` holds a batch again whose clock still can't be compared.
            held, self._held = self._held, deque()
            for earlier in held:
                # Each by itself: their records are read only now, and a bad one must not take along the others and this batch.
                try:
                    found += self._metrics(earlier, read_head(earlier))
                except ProtocolError:
                    self.refused += 1
        return found + self._metrics(batch, head)

    def _metrics(self, batch: bytes, head: Head) -> list[Point]:
        types = batch[head.start :: RECORD_BYTES]
        if RecordType.METRIC not in types:
            return []
        aligned = self._alignment.offset(head.clock)
        if aligned is None:
            self._hold(batch)
            return []
        offset = wall_offset() + aligned[0] / 1e9
        return [
            Point(head.rank, event.name, event.value, event.step, event.time_ns / 1e9 + offset)
            for event in _events(batch, head, types, RecordType.METRIC)
            if isinstance(event, Metric)
        ]

    def _hold(self, batch: bytes) -> None:
        self._held.append(batch)
        if len(self._held) > BATCHES_HELD:
            oldest = self._held.popleft()
            self.dropped += oldest[read_head(oldest).start :: RECORD_BYTES].count(RecordType.METRIC)


def _events(batch: bytes, head: Head, types: bytes, kind: RecordType) -> Iterator[Event]:
    place = types.find(kind)
    while place >= 0:
        yield read_record(batch, head.start + place * RECORD_BYTES, head)
        place = types.find(kind, place + 1)


class Exporter(Protocol):
    """Destination of metrics. Both methods are called on one thread, one after the other.

    An exporter may also have an attribute ``target``, a text that names its destination: exporting to it again replaces
    the export before.
    """

    def write(self, points: Sequence[Point]) -> None:
        """Write ``points``, at most 1,000. It may block. If it raises, the points count as failed; later ones are tried."""
        ...

    def close(self) -> None:
        """Close the exporter: no more points come. Called once."""
        ...


def checked(exporter: Exporter) -> None:
    """Raise ``InvalidRequestError`` if this is no exporter."""
    for method in ("write", "close"):
        if not callable(getattr(exporter, method, None)) or isinstance(exporter, type):
            what = exporter.__name__ + " itself" if isinstance(exporter, type) else type(exporter).__name__
            raise InvalidRequestError(
                f"an exporter has the methods write(points) and close(), such as those of hvdlab.exporters; this is {what}."
            )


def patterns(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return one or several patterns as a tuple."""
    return (names,) if isinstance(names, str) else tuple(names)


def same_target(one: Exporter, other: Exporter) -> bool:
    """Return whether two exporters write to the same place, by their ``target``."""
    target = getattr(one, "target", None)
    return type(one) is type(other) and target is not None and target == getattr(other, "target", None)


class Export:
    """Metrics on their way to an exporter, until :meth:`close`.

    Args:
        exporter: Where they go.
        names: Patterns (as of :mod:`fnmatch`) of the metrics to export.
        limit: Points that may wait; older ones make room.

    Attributes:
        exporter: Where they go.
        names: Patterns of the metrics to export.
        exported: Points that were written.
        dropped: Points that made room, as the exporter was too slow.
        failed: Points that the exporter could not write.
        error: The exporter's last error.
    """

    def __init__(self, exporter: Exporter, names: Iterable[str] = ("*",), limit: int = MOST_WAITING) -> None:
        self.exported = self.dropped = self.failed = 0
        self.error: Exception | None = None
        self.exporter = exporter
        self.names = tuple(names)
        #: Whether each name that came so far matches a pattern.
        self._wanted: dict[str, bool] = {}
        self._limit = limit
        #: Points that wait for the exporter, oldest first. Under ``_changed``.
        self._waiting: deque[Point] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(
            target=self._run, name=f"hvdlab-export-{type(exporter).__name__}", daemon=True
        )
        self._thread.start()

    def put(self, points: Iterable[Point]) -> None:
        """Hand ``points`` over. Any thread; never waits. Ignored after :meth:`close`."""
        wanted = [point for point in points if self._wants(point.name)]
        if not wanted:
            return
        with self._changed:
            if self._closing:
                return
            self._waiting.extend(wanted)
            while len(self._waiting) > self._limit:
                self._waiting.popleft()
                self.dropped += 1
            self._changed.notify()

    def _wants(self, name: str) -> bool:
        found = self._wanted.get(name)
        if found is None:
            if len(self._wanted) > 10_000:
                # Programs may make names without end; matching them again costs little.
                self._wanted.clear()
            found = any(fnmatch.fnmatchcase(name, pattern) for pattern in self.names)
            self._wanted[name] = found
        return found

    @property
    def closed(self) -> bool:
        """Return whether :meth:`close` was called."""
        return self._closing

    def close(self, timeout: float | None = None) -> bool:
        """Write the points that wait, close the exporter and end the thread. Idempotent.

        Args:
            timeout: Seconds to wait; ``None`` waits for ever.

        Returns:
            Whether that was done in time; otherwise it goes on.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        # An exporter can close its own export from `write()`, and a thread can't join itself.
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def __repr__(self) -> str:
        lost = f", {self.dropped} dropped" if self.dropped else ""
        bad = f", {self.failed} failed: {self.error!r}" if self.failed else ""
        state = ", closed" if self._closing else ""
        return f"<Export to {type(self.exporter).__name__}: {self.exported} points{lost}{bad}{state}>"

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while points := self._next_points():
            try:
                self.exporter.write(points)
                self.exported += len(points)
            except Exception as error:  # noqa: BLE001  (it is logged, and must not end the export of later points)
                self.failed += len(points)
                self._fail(error, "could not write metrics")
        try:
            self.exporter.close()
        except Exception as error:  # noqa: BLE001  (it is logged; this thread has no caller to raise it to)
            self._fail(error, "could not be closed")

    def _fail(self, error: Exception, what: str) -> None:
        # A broken exporter would raise the same with each batch.
        if self.error is None or type(self.error) is not type(error):
            logger.warning("%s %s", type(self.exporter).__name__, what, exc_info=error)
        self.error = error

    def _next_points(self) -> list[Point]:
        """Return the next points; none once all are out and it is being closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return [self._waiting.popleft() for _ in range(min(len(self._waiting), MOST_AT_ONCE))]


class RecordingExport(Export):
    """Export of all points of a recording, from its beginning, and of those that come until the recording or this is closed.

    It replaces another export of the same recording with the same target, and goes on where that one ended if it
    is about the same metrics.

    Args:
        recording: The recording.
        exporter: Gets the points.
        names: Patterns of the metrics to export.
        amended: Beginnings of the names of series whose points may be changed after they came.
        interval: Seconds between two looks.
    """

    def __init__(
        self,
        recording: Recording,
        exporter: Exporter,
        names: Iterable[str],
        amended: tuple[str, ...],
        interval: float = INTERVAL,
    ) -> None:
        super().__init__(exporter, names)
        self._recording: Recording = recording
        self._amended = amended
        self._interval = interval
        # Before this export is among the open ones, or it would replace itself.
        #: Number of the next point to export.
        self._next = self._replace()
        #: Points that late spans may still change, by rank, name and time.
        self._may_change: dict[tuple[int, str, int], Point] = {}
        #: Latest time of a point so far, on the recording's axis.
        self._newest_ns = 0
        self._stopping = threading.Event()
        self._reader = threading.Thread(target=self._read, name="hvdlab-export-reader", daemon=True)
        atexit.register(self.close, EXIT_WITHIN)
        _open.add(self)
        self._reader.start()

    def close(self, timeout: float | None = None) -> bool:
        """Export the points recorded so far, close the exporter and end the threads. Idempotent.

        Returns:
            Whether that was done within ``timeout`` seconds; otherwise it goes on.
        """
        deadline = Deadline(timeout)
        self._stopping.set()
        # After the flag, which the reader checks when it wakes.
        self._recording.wake_waiters()
        if threading.current_thread() is not self._reader:
            # First: the reader hands the last points over, which `put()` ignores after the close below.
            self._reader.join(deadline.remaining())
        self._unregister()
        return super().close(deadline.remaining())

    def _replace(self) -> int:
        """End the export that this one replaces. Returns the number of the first point that it has not exported."""
        following = 0
        for other in list(_open):
            if other._recording is self._recording and same_target(other.exporter, self.exporter):
                other.close(EXIT_WITHIN)
                if other.names == self.names:
                    following = max(following, other._next)
        return following

    def _unregister(self) -> None:
        atexit.unregister(self.close)
        _open.discard(self)

    # -- the reader ---------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        version, recording = -1, self._recording
        while not self._stopping.is_set() and not (recording.closed and version == recording.version):
            recording.wait(version, self._stopping.is_set)
            version = recording.version
            # The version was read before the points: a change since then wakes the reader once more.
            self._export_new(last=False)
            if not recording.closed:
                self._stopping.wait(self._interval)
        self._export_new(last=True)
        self._unregister()
        super().close(0)  # without a wait: the export's own thread writes the rest and ends

    def _export_new(self, *, last: bool) -> None:
        """Hand over new points that are final; the ``last`` time also those that might still have changed."""
        recording = self._recording
        self._next, points = recording.points_since(self._next)
        if len(points):
            self._newest_ns = max(self._newest_ns, int(points["time"].max()))
        series, offset = recording.series(), self._offset()
        ready = []
        for time_ns, value, step, number in zip(
            points["time"].tolist(),
            points["value"].tolist(),
            points["step"].tolist(),
            points["series"].tolist(),
            strict=True,
        ):
            one = series[number]
            when = time_ns / 1e9 + offset
            point = Point(one.rank, one.name, value, None if math.isnan(step) else int(step), when)
            if one.name.startswith(self._amended):
                self._may_change[one.rank, one.name, time_ns] = point
            else:
                ready.append(point)
        self.put([*ready, *self._pop_final(last)])

    def _pop_final(self, everything: bool) -> list[Point]:
        until = math.inf if everything else self._newest_ns - FINAL_AFTER * 1e9
        found = [key for key in self._may_change if key[2] <= until]
        return [self._may_change.pop(key) for key in found]

    def _offset(self) -> float:
        """Return seconds from the recording's axis to the time of day.

        If this host's clock can't be compared with the ranks', the newest point counts as measured now: it was, but for the
        fraction of a second that it took to come here.
        """
        ahead = self._recording.clock_offset_ns()
        if ahead is None:
            return time.time() - self._newest_ns / 1e9
        return wall_offset() - ahead / 1e9


_open: weakref.WeakSet[RecordingExport] = weakref.WeakSet()


# -- exporters ---------------------------------------------------------------------------------------------------------


BY_RANK = "{name}/rank{rank}"
"""Name of a rank's metric in a tracker that knows no ranks."""
STEP = "hvdlab/step"
TIME = "hvdlab/time"

_WRITERS = ("torch.utils.tensorboard", "tensorboardX")
_NOT_ALLOWED = re.compile(r"[^\w\-. /:]")


class JsonLines:
    """Exporter to a file, to which it adds lines: ``{"time": 1767225600.5, "rank": 0, "name": "loss", "value": 0.25, "step": 3}`` and so on.

    A step that is not known and values that are not finite, which JSON has no word for, are ``null``.

    Args:
        path: The file; its directory must exist. Lines of several ranks in one file of one host do not mix.

    Raises:
        OSError: It can't be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.target = os.path.abspath(path)
        # Appended without a buffer: each write adds whole lines at the end of the file, also if several ranks write to it.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  (close() closes it)

    def write(self, points: Sequence[Point]) -> None:
        """Add a line for each of the points, all at once."""
        text = memoryview("".join(_line(point) for point in points).encode())
        while text:
            text = text[self._file.write(text) :]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _line(point: Point) -> str:
    value = point.value if math.isfinite(point.value) else None
    fields = {
        "time": round(point.time, 6),
        "rank": point.rank,
        "name": point.name,
        "value": value,
        "step": point.step,
    }
    return json.dumps(fields, ensure_ascii=False) + "\n"


class TensorBoard:
    """Exporter that writes each rank's metrics to a run of its own, ``rank0``, ``rank1``, …, so that a chart has a curve per rank.

    A metric without a step gets the number of its points so far.

    Args:
        directory: The directory for ``tensorboard --logdir``.
        writer: Makes the writer of a run; by default the ``SummaryWriter`` of torch, or without torch that of tensorboardX.

    Raises:
        ModuleNotFoundError: Neither is installed; torch's needs ``tensorboard``.
    """

    def __init__(self, directory: str | os.PathLike[str], writer: Callable[[str], Any] | None = None) -> None:
        self._directory = Path(directory)
        self.target = os.path.abspath(directory)
        self._make = writer or _summary_writer()
        self._writers: dict[int, Any] = {}
        self._counts: dict[tuple[int, str], int] = {}

    def write(self, points: Sequence[Point]) -> None:
        """Add the points to the runs' files."""
        for point in points:
            step = point.step
            if step is None:
                step = self._counts.get((point.rank, point.name), 0)
                self._counts[point.rank, point.name] = step + 1
            self._writer(point.rank).add_scalar(point.name, point.value, step, point.time)
        for writer in self._writers.values():
            writer.flush()

    def _writer(self, rank: int) -> Any:
        if rank not in self._writers:
            self._writers[rank] = self._make(str(self._directory / f"rank{rank}"))
        return self._writers[rank]

    def close(self) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()


def _summary_writer() -> Callable[[str], Any]:
    for name in _WRITERS:
        try:
            found: Callable[[str], Any] = importlib.import_module(name).SummaryWriter
        except ImportError:
            continue
        return found
    raise ModuleNotFoundError(
        "event files need the package tensorboard (with torch) or tensorboardX", name="tensorboard"
    )


class WandB:
    """Exporter to a run of Weights & Biases.

    Its own step only grows, and ranks differ in their steps. So a metric is drawn over ``hvdlab/step``, its training step,
    or over ``hvdlab/time``, in seconds since 1970, if it has none. The run is left open: the code that has begun it finishes it.

    Args:
        run: The run that ``wandb.init()`` returned; by default the active one.
        key: Name in the run; ``{name}`` and ``{rank}`` are filled in.

    Raises:
        ModuleNotFoundError: wandb is not installed.
        InvalidRequestError: ``key`` has other fields, or no run is active.
    """

    def __init__(self, run: Any = None, *, key: str = BY_RANK) -> None:
        self._key = key_of(key)
        self._run = _active() if run is None else run
        self.target = getattr(self._run, "id", None)
        self._known: set[str] = set()

    def write(self, points: Sequence[Point]) -> None:
        """Log the points; those of one step together."""
        rows: dict[tuple[str, float], dict[str, float]] = {}
        for point in points:
            key = self._key(point)
            axis = (TIME, point.time) if point.step is None else (STEP, point.step)
            if key not in self._known:
                self._known.add(key)
                self._run.define_metric(key, step_metric=axis[0])
            row = rows.get(axis)
            if row is None or key in row:  # a second value in the same step comes after the first
                if row is not None:
                    self._run.log(rows.pop(axis))
                row = rows[axis] = {axis[0]: axis[1]}
            row[key] = point.value
        for row in rows.values():
            self._run.log(row)

    def close(self) -> None:
        """Do nothing: no resource is held."""


def _active() -> Any:
    wandb: Any = importlib.import_module("wandb")
    if wandb.run is None:
        raise InvalidRequestError(
            "no run of Weights & Biases is active: call wandb.init() first, or give the run."
        )
    return wandb.run


class MLflow:
    """Exporter to a run of MLflow, with the time at which each was measured.

    A metric without a step gets step 0; MLflow can draw it over time. Characters that MLflow does not accept in names become
    ``_``. The run is left open: the code that has begun it ends it.

    Args:
        run_id: The run; by default the one that is active (``mlflow.start_run()``), or a new one.
        key: Name in MLflow; ``{name}`` and ``{rank}`` are filled in.
        client: An ``MlflowClient``; by default one for the tracking server that is set.

    Raises:
        ModuleNotFoundError: mlflow (or mlflow-skinny) is not installed.
        InvalidRequestError: ``key`` has other fields.
    """

    def __init__(self, run_id: str | None = None, *, key: str = BY_RANK, client: Any = None) -> None:
        mlflow: Any = importlib.import_module("mlflow")
        self._metric: Any = importlib.import_module("mlflow.entities").Metric
        self._key = key_of(key)
        if run_id is None:
            run = mlflow.active_run() or mlflow.start_run()
            run_id = run.info.run_id
        self.run_id = self.target = run_id
        self._client = mlflow.MlflowClient() if client is None else client

    def write(self, points: Sequence[Point]) -> None:
        """Log the points in one request."""
        metrics = [self._metric(self._name(p), p.value, round(p.time * 1000), p.step or 0) for p in points]
        self._client.log_batch(self.run_id, metrics=metrics)

    def _name(self, point: Point) -> str:
        return _NOT_ALLOWED.sub("_", self._key(point))

    def close(self) -> None:
        """Do nothing: no resource is held."""


def key_of(pattern: str) -> Callable[[Point], str]:
    """Return a function that fills ``pattern`` in, as ``str.format`` does, with ``name`` and ``rank``.

    Raises:
        InvalidRequestError: It has other fields.
    """
    try:
        pattern.format(name="loss", rank=0)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise InvalidRequestError(
            f"key={pattern!r} may have {{name}} and {{rank}} in it: {error!r}"
        ) from None
    return lambda point: pattern.format(name=point.name, rank=point.rank)
