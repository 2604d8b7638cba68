"""Where the main thread stands, seen from another thread."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from hvdlab.kernel_ext.rank.compiler import label_of
from hvdlab.kernel_ext.rank.failures import is_internal, is_ours
from hvdlab.kernel_ext.wire.status import StackFrame

DEEPEST = 200
"""How many of the innermost frames are reported at most."""


def cell_stack(thread: int, suspended: Any = None) -> tuple[StackFrame, ...]:
    """The frames of the cell that runs on ``thread``, from its first line to the innermost; none of hvdlab's below.

    Args:
        thread: Identifier of the thread.
        suspended: The cell's coroutine, if it awaits something: then the thread is elsewhere.
    """
    frames = list(_awaited(suspended)) if suspended is not None else _called(thread)
    first = next((i for i, frame in enumerate(frames) if label_of(frame.f_code.co_filename)), len(frames))
    frames = frames[first:]
    last = len(frames)
    while last and is_internal(frames[last - 1]):
        last -= 1
    # Frames of threading and the like stay if the user's own code waits in them; only below a frame of ours they are hidden.
    hidden = next((i for i in range(last, len(frames)) if is_ours(frames[i])), len(frames))
    return tuple(_describe(frame) for frame in frames[:hidden][-DEEPEST:])


def _called(thread: int) -> list[FrameType]:
    frames = []
    frame = sys._current_frames().get(thread)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def _awaited(awaitable: Any) -> Iterator[FrameType]:
    while awaitable is not None:
        frame = getattr(awaitable, "cr_frame", None) or getattr(awaitable, "gi_frame", None)
        if frame is None:
            return
        yield frame
        awaitable = getattr(awaitable, "cr_await", None) or getattr(awaitable, "gi_yieldfrom", None)


def _describe(frame: FrameType) -> StackFrame:
    code = frame.f_code
    # Only lines that are in memory: this runs on the control thread, where nothing may block.
    entry = linecache.cache.get(code.co_filename)
    lines = entry[2] if entry is not None and len(entry) > 2 else []
    text = lines[frame.f_lineno - 1].strip() if 0 < frame.f_lineno <= len(lines) else ""
    label = label_of(code.co_filename)
    return StackFrame(code.co_name, f"cell {label}" if label else code.co_filename, frame.f_lineno or 0, text)
