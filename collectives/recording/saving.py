"""A recording as a file that trace viewers open."""

from __future__ import annotations

import gzip
import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Literal, get_args

import msgspec

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.recording.export import trace_events
from hvdlab.collectives.recording.recording import Recording
from hvdlab.collectives.timeline.tracks import TraceEvent

Format = Literal["json", "json.gz"]
"""Chrome's trace format, and the same compressed."""

# Level 6 takes three times as long for a tenth less.
GZIP_LEVEL = 3


def format_of(path: str | os.PathLike[str], format: str | None = None) -> Format:
    """The format of a file, by its name unless it is given. Raises ``InvalidRequestError`` if there is none such."""
    name = os.path.basename(os.fspath(path))
    for known in get_args(Format):
        if format == known or (format is None and name.endswith(f".{known}")):
            found: Format = known
            return found
    asked = f"a trace can't be written as `{format}`" if format else f"`{name}` says no format of a trace"
    raise InvalidRequestError(f"{asked}: use .json or .json.gz (the same, compressed)")


def save(recording: Recording, path: str | os.PathLike[str], format: str | None = None) -> Path:
    """Write all that a recording has now. The file is there once it is whole, in place of one of the same name.

    Args:
        recording: The recording to write.
        path: The file to write; the end of its name (``.json`` or ``.json.gz``) chooses the format.
        format: ``"json"`` or ``"json.gz"``, whatever the name ends in; by default the name chooses.

    Returns:
        The file's whole path.

    Raises:
        InvalidRequestError: There is no such format.
        OSError: The file could not be written; no unfinished file is left.
    """
    chosen, target = format_of(path, format), Path(path).absolute()
    # In the same directory, so that it can replace the target; no other process chooses this random name.
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        with unfinished.open("xb") as file:
            write(trace_events(recording), file, chosen)
        unfinished.replace(target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return target


def write(portions: Iterable[list[TraceEvent]], file: IO[bytes], format: Format) -> None:
    """Write events as one trace. Raises ``OSError``."""
    if format == "json.gz":
        with gzip.GzipFile("", "wb", GZIP_LEVEL, file, mtime=0) as packed:
            for piece in _json(portions):
                packed.write(piece)
        return
    for piece in _json(portions):
        file.write(piece)


def _json(portions: Iterable[list[TraceEvent]]) -> Iterator[bytes]:
    """The array form of the format, an event per line."""
    encoder, between = msgspec.json.Encoder(), b"[\n"
    for portion in portions:
        if portion:
            yield between + b",\n".join(map(encoder.encode, portion))
            between = b",\n"
    yield b"[]\n" if between == b"[\n" else b"\n]\n"
