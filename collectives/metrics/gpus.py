"""The GPUs that this rank uses, as NVIDIA's management library sees them. Needs ``nvidia-ml-py``."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

from hvdlab.collectives import system
from hvdlab.collectives.metrics import names
from hvdlab.collectives.metrics.process import Values

logger = logging.getLogger(__name__)


DevicesInUse = Callable[[], list[tuple[int, str]] | None]
"""Number and UUID of each GPU on which a framework of this process has memory; None as long as it uses none."""

_in_use: DevicesInUse = lambda: None  # what a name holds, not a function that is defined


def ask_frameworks(in_use: DevicesInUse) -> None:
    """From now on, call ``in_use`` to learn which GPUs the process uses: the collective core itself knows no frameworks."""
    global _in_use
    _in_use = in_use


class GpuUsage:
    """Samples the GPUs that this process uses: those on which a framework has memory, or the only one that it can see.

    Args:
        library: The module ``pynvml``, initialized.
    """

    def __init__(self, library: Any) -> None:
        self._nvml = library
        self._handles = [library.nvmlDeviceGetHandleByIndex(i) for i in range(library.nvmlDeviceGetCount())]
        self._uuids = [_text(library.nvmlDeviceGetUUID(handle)) for handle in self._handles]

    @classmethod
    def find(cls) -> GpuUsage | None:
        """``None`` without GPUs, their driver or ``nvidia-ml-py``."""
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
        """Utilisation and memory of each GPU that is used; a value that a GPU does not report (a MIG instance, say) is left out."""
        values: Values = []
        for index, handle in self._used():
            busy = self._ask(self._nvml.nvmlDeviceGetUtilizationRates, handle)
            if busy is not None:
                values.append((names.GPU_UTILISATION.format(index=index), float(busy.gpu)))
            memory = self._ask(self._nvml.nvmlDeviceGetMemoryInfo, handle)
            if memory is not None:
                values.append((names.GPU_MEMORY.format(index=index), float(memory.used)))
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
        """The GPUs that CUDA would show to this process, in its order."""
        text = os.environ.get("CUDA_VISIBLE_DEVICES")
        if text is None:
            return self._handles
        found = []
        for piece in text.split(","):
            handle = self._named(piece.strip())
            if handle is None:  # CUDA ignores what follows, too
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
        """Let go of the library."""
        self._ask(lambda _: self._nvml.nvmlShutdown(), None)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
