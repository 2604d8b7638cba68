"""A transcript as a text file."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from hvdlab.kernel_ext.notebook.output.merge import HOLD, LineMerger, LineSplitter, Piece, Shown, Text, label
from hvdlab.kernel_ext.notebook.output.transcript import Transcript
from hvdlab.kernel_ext.wire.cells import Stream

_HELD = 4 << 20
"""Characters that may wait for the same lines of other ranks; they take the place of time here."""


def write_text(transcript: Transcript, path: Path, ranks: Sequence[int], *, merge: bool = True) -> int:
    """Write the output of these ranks, labelled as in a notebook, and of displays their text form. Return the bytes.

    Raises:
        OSError: The file can't be written.
    """
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file, transcript.lock:
        for piece in _pieces(transcript, ranks, merge=merge):
            file.write(_text(piece, labelled=len(ranks) > 1))
        return file.tell()


def last_lines(transcript: Transcript, ranks: Sequence[int], count: int) -> dict[int, str]:
    """Return the last lines of each of these ranks, both streams together."""
    lines: dict[int, deque[str]] = {rank: deque(maxlen=count) for rank in ranks}
    splitters = {rank: LineSplitter() for rank in ranks}
    ends: dict[int, str] = dict.fromkeys(ranks, "")
    with transcript.lock:
        for rank, what in transcript.entries():
            if rank in lines and isinstance(what, Stream) and what.text:
                lines[rank].extend(splitters[rank].feed(what.text, 0.0))
                ends[rank] = "\n" if what.text.endswith("\n") else ""
    for rank, splitter in splitters.items():
        lines[rank].extend(splitter.flush())
    return {rank: "\n".join(kept) + (ends[rank] if kept else "") for rank, kept in lines.items()}


def _pieces(transcript: Transcript, ranks: Sequence[int], *, merge: bool) -> Iterator[Piece]:
    merger = LineMerger(ranks, merge=merge)
    now = 0.0
    for rank, what in transcript.entries():
        now += HOLD * len(what.text) / _HELD if isinstance(what, Stream) else 0.0
        if isinstance(what, str):
            yield from merger.take(now)
            yield Text("stderr", f"{what}\n")
        elif rank in merger.ranks:
            merger.feed(rank, (what,), now)
            yield from merger.take(now)
    for rank in ranks:
        merger.end(rank, now)
    yield from merger.take_all(now)


def _text(piece: Piece, *, labelled: bool) -> str:
    if isinstance(piece, Text):
        return piece.text
    if isinstance(piece, Shown):
        prefix = label(piece.ranks) if labelled else ""
        lines = str(piece.display.data.get("text/plain", "")).splitlines()
        return "".join(f"{prefix}{line}\n" for line in lines)
    return ""
