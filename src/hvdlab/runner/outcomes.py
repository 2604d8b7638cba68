"""How a process ended, in words and as an exit code."""

from __future__ import annotations

import signal
from dataclasses import dataclass

_WORDS = {
    signal.SIGSEGV: "segmentation fault",
    signal.SIGBUS: "bus error",
    signal.SIGABRT: "abort() was called",
    signal.SIGFPE: "arithmetic error",
    signal.SIGILL: "illegal instruction",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a rank's process.

    Attributes:
        code: Exit code, if no signal ended it.
        signal: Number of the signal that ended it, or 0.
        text: Says it better than the two, if not empty (``its host was lost``).
    """

    code: int = 0
    signal: int = 0
    text: str = ""

    @property
    def ok(self) -> bool:
        return not self.code and not self.signal

    @property
    def exit_code(self) -> int:
        """What a shell would report: the code, or 128 and the signal's number."""
        return 128 + self.signal if self.signal else self.code

    def __str__(self) -> str:
        if self.text:
            return self.text
        if not self.signal:
            return f"exit code {self.code}"
        try:
            known = signal.Signals(self.signal)
        except ValueError:
            return f"killed by signal {self.signal}"
        words = f" ({_WORDS[known]})" if known in _WORDS else ""
        return f"killed by {known.name}{words}"
