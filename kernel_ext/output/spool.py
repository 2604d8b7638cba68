"""The output of one cell in files: what each rank wrote as text that one can read, and an index with the order.

``rank-3.txt`` has what rank 3 wrote to stdout and stderr, ``rich`` the displays, and ``index`` one record for each
piece. Files are opened for each write: a cell of many ranks needs no descriptor while nothing is written.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from io import BufferedReader
from pathlib import Path

import msgspec

from hvdlab.kernel_ext.wire.cells import Chunk, Clear, Display, Stream

_RECORD = struct.Struct("<iBI")  # rank, kind, bytes
_OUT, _ERR, _RICH, _NOTE = range(4)
_encode = msgspec.msgpack.Encoder().encode
_decode_rich: msgspec.msgpack.Decoder[Display | Clear] = msgspec.msgpack.Decoder(Display | Clear)

NOTE, WARNING = -1, -2
"""In place of a rank, for a line about the run itself."""

Entry = tuple[int, Chunk | str]
"""A rank and what it wrote, or :data:`NOTE` or :data:`WARNING` and a line about the run."""


class Spool:
    """Files in a directory of their own, which is made with the first write.

    Attributes:
        directory: That directory.
        size: Bytes in the files.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.size = 0

    def text_file(self, rank: int) -> Path:
        """The file with what a rank wrote; there is none if it wrote nothing."""
        return self.directory / f"rank-{rank}.txt"

    def append(self, entries: Sequence[Entry]) -> None:
        """Write entries at the end.

        Raises:
            OSError: They could not be written, or not all of them. None of them is in the index then; nothing more
                must be appended.
        """
        # No directories above these: once the pool's directory is removed, it must not come back.
        for directory in (self.directory.parent, self.directory):
            directory.mkdir(mode=0o700, exist_ok=True)
        data: dict[Path, list[bytes]] = {}
        index = bytearray()
        for rank, what in entries:
            kind, raw = _raw(what)
            data.setdefault(self._file(rank, kind), []).append(raw)
            index += _RECORD.pack(rank, kind, len(raw))
        for path, pieces in data.items():
            self._write(path, b"".join(pieces))
        self._write(self.directory / "index", bytes(index))

    def entries(self) -> Iterator[Entry]:
        """What was appended, in order; a piece at a time is in memory."""
        path = self.directory / "index"
        if not path.exists():  # the first write failed
            return
        with ExitStack() as stack:
            files: dict[Path, BufferedReader] = {}
            index = stack.enter_context(path.open("rb"))
            while len(record := index.read(_RECORD.size)) == _RECORD.size:
                rank, kind, length = _RECORD.unpack(record)
                path = self._file(rank, kind)
                if path not in files:
                    files[path] = stack.enter_context(path.open("rb"))
                yield rank, _entry(kind, files[path].read(length))

    def remove(self) -> None:
        """Delete the files."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.size = 0

    def _file(self, rank: int, kind: int) -> Path:
        return self.text_file(rank) if kind in (_OUT, _ERR) else self.directory / "rich"

    def _write(self, path: Path, raw: bytes) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            view = memoryview(raw)
            while view:
                written = os.write(fd, view)
                self.size += written
                view = view[written:]
        finally:
            os.close(fd)


def _raw(what: Chunk | str) -> tuple[int, bytes]:
    if isinstance(what, str):
        return _NOTE, what.encode("utf-8", "backslashreplace")
    if isinstance(what, Stream):
        return _ERR if what.name == "stderr" else _OUT, what.text.encode("utf-8", "backslashreplace")
    return _RICH, _encode(what)


def _entry(kind: int, raw: bytes) -> Chunk | str:
    if kind == _RICH:
        return _decode_rich.decode(raw)
    text = raw.decode("utf-8", "replace")
    return text if kind == _NOTE else Stream("stderr" if kind == _ERR else "stdout", text)
