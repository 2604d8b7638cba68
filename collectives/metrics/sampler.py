"""Samples of this rank's process and of its GPUs at equal intervals, on a thread of its own; and the names of hvdlab's own metrics.

GPUs are those that NVIDIA's management library shows; that needs ``nvidia-ml-py``. Metrics of users may have any other
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from hvdlab.collectives import system
from hvdlab.collectives.system import process_status

CPU = "hvdlab/cpu"
"""Processor time of the process, in percent of one core."""
RSS = "hvdlab/rss"
"""Memory of the process that is resident, in bytes."""
THREADS = "hvdlab/threads"
"""Threads of the process."""
GPU = "hvdlab/gpu{index}"
"""A GPU of this rank; ``index`` counts those that its process sees."""
GPU_UTILISATION = GPU + "/utilisation"
"""Percent of the time in which the GPU ran something, of this process or of any other."""
GPU_MEMORY = GPU + "/memory"
"""Memory of the GPU that is in use, by this process or any other, in bytes."""
STEP_TIME = "hvdlab/step_time"
"""From the end of one optimizer step to that of the next, in seconds."""
SAMPLES_PER_SECOND = "hvdlab/samples_per_second"
"""Samples per second of this rank."""
GRADIENT_NORM = "hvdlab/gradient_norm"
"""2-norm of all gradients together, as the optimizer gets them."""
LOSS_SCALE = "hvdlab/loss_scale"
"""The factor by which a gradient scaler multiplies the loss."""
LEARNING_RATE = "hvdlab/learning_rate"
"""Learning rate of the optimizer; with ``/`` and the name or number of the parameter group behind it if the groups differ."""

Values = list[tuple[str, float]]

_PAGE = os.sysconf("SC_PAGE_SIZE")

LEAST_INTERVAL = 0.01
"""Seconds between two samples at least."""
REPEATED = 10.0
"""Seconds after which a value that has hardly changed is recorded again."""
_TOLERANCES = {"cpu": 1.0, "utilisation": 1.0, "rss": 1 << 20, "memory": 1 << 20}
"""Largest difference at which a metric of that kind still counts as unchanged: percentage points, bytes."""

Record = Callable[[str, float, None, int], None]

logger = logging.getLogger(__name__)

DevicesInUse = Callable[[], list[tuple[int, str]] | None]
"""Number and UUID of each GPU on which a framework of this process has memory; None as long as it uses none."""

_in_use: DevicesInUse = lambda: None  # a variable that is replaced, not a function that is defined


class Source(Protocol):
    """Source of samples: the process or its GPUs."""

    def sample(self) -> Values:
        """Return the name and value of each metric, measured now. Raises ``OSError`` if that is not possible (any more)."""
        ...

    def close(self) -> None:
        """Release the source's resources."""
        ...


class ProcessUsage:
    """Source for this process. Processor time is counted since the sample before, or since this object was made."""

    def __init__(self) -> None:
        self._before = time.monotonic_ns(), time.process_time_ns()

    def sample(self) -> Values:
        """Return the name and value of each metric, measured now; none while the process has no descriptor left to read them with."""
        now, used = time.monotonic_ns(), time.process_time_ns()
        fields = process_status("self")
        if not fields:
            return []  # no descriptor is left, at this moment: an error would end the samples for good
        cpu = 100 * (used - self._before[1]) / max(now - self._before[0], 1)
        self._before = now, used
        return [
            (CPU, cpu),
            (RSS, float(int(fields[system.RESIDENT]) * _PAGE)),
            (THREADS, float(fields[system.THREADS])),
        ]

    def close(self) -> None:
        """Do nothing: no resource is held."""


def ask_frameworks(in_use: DevicesInUse) -> None:
    """Set the function that returns the GPUs that the process uses: the collective core itself knows no frameworks."""
    global _in_use
    _in_use = in_use


class GpuUsage:
    """Source for the GPUs that this process uses: those on which a framework has memory, or the only one that it can see.

    Args:
        library: The module ``pynvml``, initialized.
    """

    def __init__(self, library: Any) -> None:
        self._nvml = library
        self._handles = [library.nvmlDeviceGetHandleByIndex(i) for i in range(library.nvmlDeviceGetCount())]
        self._uuids = [_text(library.nvmlDeviceGetUUID(handle)) for handle in self._handles]

    @classmethod
    def find(cls) -> GpuUsage | None:
        """Return a source; ``None`` without GPUs, their driver or ``nvidia-ml-py``."""
        pynvml = system.open_nvml("GPUs are not sampled")
        if pynvml is None:
            return None
        try:
            return cls(pynvml)
        except pynvml.NVMLError as error:
            logger.warning("GPUs are not sampled: %s", error)
            pynvml.nvmlShutdown()
            return None

    def sample(self) -> Values:
        """Return the utilisation and memory of each GPU that is used; a value that a GPU, such as a MIG instance, does not report is left out."""
        values: Values = []
        for index, handle in self._used():
            busy = self._ask(self._nvml.nvmlDeviceGetUtilizationRates, handle)
            if busy is not None:
                values.append((GPU_UTILISATION.format(index=index), float(busy.gpu)))
            memory = self._ask(self._nvml.nvmlDeviceGetMemoryInfo, handle)
            if memory is not None:
                values.append((GPU_MEMORY.format(index=index), float(memory.used)))
        return values

    def _ask(self, question: Callable[[Any], Any], handle: Any) -> Any:
        try:
            return question(handle)
        except self._nvml.NVMLError:
            return None

    def _used(self) -> Iterator[tuple[int, Any]]:
        used = _in_use()
        if used is not None:
            for index, uuid in used:
                handle = self._by_uuid(f"GPU-{uuid}") or self._by_uuid(f"MIG-{uuid}")
                if handle is not None:
                    yield index, handle
            return
        visible = self._visible()
        if len(visible) == 1:
            yield 0, visible[0]

    def _visible(self) -> list[Any]:
        """Return the GPUs that CUDA would show to this process, in its order."""
        text = os.environ.get("CUDA_VISIBLE_DEVICES")
        if text is None:
            return self._handles
        found = []
        for piece in text.split(","):
            handle = self._named(piece.strip())
            if handle is None:  # CUDA ignores all further entries, too
                break
            found.append(handle)
        return found

    def _named(self, piece: str) -> Any:
        if piece.isdecimal():
            return self._handles[int(piece)] if int(piece) < len(self._handles) else None
        return self._by_uuid(piece) if piece.startswith(("GPU-", "MIG-")) else None

    def _by_uuid(self, start: str) -> Any:
        for uuid, handle in zip(self._uuids, self._handles, strict=True):
            if uuid.startswith(start):
                return handle
        return self._ask(self._nvml.nvmlDeviceGetHandleByUUID, start)

    def close(self) -> None:
        """Shut the library down."""
        self._ask(lambda _: self._nvml.nvmlShutdown(), None)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


class Thinning:
    """Filter of samples: each is recorded, unless it is hardly different from the last that was.

    Otherwise an idle rank would fill the history with samples of nothing.
    """

    def __init__(self, repeated_ns: int = int(REPEATED * 1e9)) -> None:
        self._repeated_ns = repeated_ns
        self._recorded: dict[str, float] = {}
        self._at_ns = 0

    def wanted(self, values: Values, now_ns: int) -> bool:
        """Return whether to record these."""
        if now_ns - self._at_ns < self._repeated_ns and not self._changed(values):
            return False
        self._recorded, self._at_ns = dict(values), now_ns
        return True

    def _changed(self, values: Values) -> bool:
        if len(values) != len(self._recorded):
            return True
        for name, value in values:
            before = self._recorded.get(name)
            if before is None or abs(value - before) > _TOLERANCES.get(name.rpartition("/")[2], 0):
                return True
        return False


class Sampler:
    """Thread that samples the sources of :func:`find_sources` until it is closed.

    Args:
        record: Called with name, value, no step and the time in ns; must neither block nor raise.
        interval: Seconds between two samples; 0.01 at least.
        label: Goes into the thread's name; the rank.
    """

    def __init__(self, record: Record, interval: float, label: str) -> None:
        self._record = record
        self._interval = max(interval, LEAST_INTERVAL)
        self._thinning = Thinning()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"hvdlab-metrics-{label}", daemon=True)
        self._thread.start()

    def close(self, timeout: float) -> None:
        """End it. Idempotent."""
        self._closing.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            # A thread can't join itself.
            self._thread.join(timeout)

    def _run(self) -> None:
        sources = find_sources()  # here, on this thread: the search for devices may be slow
        try:
            due = time.monotonic()
            while sources:
                due = max(due + self._interval, time.monotonic())  # missed samples are not made up for
                if self._closing.wait(due - time.monotonic()):
                    return
                self._sample(sources)
        finally:
            for source in sources:
                source.close()

    def _sample(self, sources: list[Source]) -> None:
        now = time.monotonic_ns()
        values: Values = []
        # A copy, as a source that fails is removed.
        for source in list(sources):
            try:
                values += source.sample()
            except OSError as error:
                # A source that fails must not end the samples of the others.
                logger.warning("%s is not sampled any more: %s", type(source).__name__, error)
                sources.remove(source)
                source.close()
        if values and self._thinning.wanted(values, now):
            for name, value in values:
                self._record(name, value, None, now)


def sample_rank(record: Record, interval: float, rank: int) -> Sampler | None:
    """Begin to sample this process and its GPUs every ``interval`` seconds; ``None`` if that is 0."""
    return Sampler(record, interval, str(rank)) if interval > 0 else None


def find_sources() -> list[Source]:
    """Return the sources that there are: this process, and its GPUs if it has any."""
    gpus = GpuUsage.find()
    return [ProcessUsage()] if gpus is None else [ProcessUsage(), gpus]
