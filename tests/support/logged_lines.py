"""Lines that a log gets."""

from __future__ import annotations

import logging
import threading

from support.patience import PATIENCE


class LoggedLines(logging.Handler):
    """Handler of a log of its own, which keeps the lines.

    Attributes:
        log: The log.
    """

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._records: list[tuple[int, str]] = []
        self.log = logging.Logger("test")  # noqa: LOG001  (one for each test)
        self.log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        with self._changed:
            self._records.append((record.levelno, record.getMessage()))
            self._changed.notify_all()

    def lines(self, level: int = logging.NOTSET) -> list[str]:
        """Return the lines from a level on."""
        return [text for of_record, text in self._records if of_record >= level]

    def wait_for(self, text: str, level: int = logging.NOTSET) -> None:
        """Wait until a line from a level on has this text in it."""
        with self._changed:
            found = self._changed.wait_for(lambda: any(text in line for line in self.lines(level)), PATIENCE)
        assert found, f"{text!r} is not in {self.lines(level)}"
