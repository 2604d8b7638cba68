"""``sys.stdout`` and ``sys.stderr`` of a rank."""

from __future__ import annotations

import codecs
import io
from typing import IO, Any, cast

from hvdlab.kernel_ext.rank.capture import Capture


class RankStream(io.TextIOBase):
    """A text stream into a :class:`Capture`. Thread-safe; ``flush`` has nothing to do, output leaves by itself."""

    def __init__(self, capture: Capture, name: str, fd: int | None) -> None:
        self._capture = capture
        self._put = capture.write
        self._name = name
        self._fd = fd
        self._binary = _RankBinary(self)

    @property
    def name(self) -> str:
        """``<stdout>`` or ``<stderr>``."""
        return f"<{self._name}>"

    @property
    def encoding(self) -> str:  # type: ignore[override]  # the base class declares an attribute
        """Always UTF-8."""
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]  # the base class declares an attribute
        """What can't be encoded is escaped."""
        return "backslashreplace"

    @property
    def buffer(self) -> IO[bytes]:
        """A binary stream into the same place."""
        return cast("IO[bytes]", self._binary)

    def write(self, text: str) -> int:
        """Write text; returns its length. Blocks while the pool is a window behind."""
        if type(text) is not str:
            if not isinstance(text, str):
                raise TypeError(f"write() argument must be str, not {type(text).__name__}")
            text = str.__str__(text)
        if text:
            self._put(self._name, text)
        return len(text)

    def writable(self) -> bool:
        """Yes."""
        return True

    def isatty(self) -> bool:
        """No."""
        return False

    def flush(self) -> None:
        """Nothing to do: what was written leaves within 50 ms, and all of it before the cell ends."""

    def close(self) -> None:
        """Ignored, as user code that closes ``sys.stdout`` would silence all later cells."""

    def fileno(self) -> int:
        """The descriptor that subprocesses may write to; its output arrives in the same place."""
        if self._fd is None:
            raise io.UnsupportedOperation("fileno")
        return self._fd


class _RankBinary(io.RawIOBase):
    """``sys.stdout.buffer``: bytes that are decoded as UTF-8, incomplete characters being kept for the next write."""

    def __init__(self, text: RankStream) -> None:
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        raw = bytes(data)
        self._text.write(self._decoder.decode(raw))
        return len(raw)

    def fileno(self) -> int:
        return self._text.fileno()

    def close(self) -> None:
        """Ignored."""
