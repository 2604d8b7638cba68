"""Which of a process's last lines are shown when it could not be started."""

from __future__ import annotations

from hvdlab.kernel_ext.notebook.output.stack_text import last_lines

OTHERS = "".join(f'Thread 0x{n}:\n  File "other.py", line {n} in wait\n\n' for n in range(1, 20))
CRASHED = [
    "Current thread 0x99 (most recent call first):",
    '  File "a.py", line 1 in f',
    '  File "b.py", line 2 in g',
]


def test_the_last_lines() -> None:
    assert last_lines("a\nb\nc\n", 2) == ["b", "c"]
    assert last_lines("", 2) == []


def test_of_a_crash_the_thread_that_crashed() -> None:
    dump = "Fatal Python error: Segmentation fault\n\n" + "\n".join(CRASHED) + "\n\n" + OTHERS
    assert last_lines(dump, 20) == CRASHED
    assert last_lines(OTHERS + "\n".join(CRASHED), 20) == CRASHED
    assert last_lines(dump, 2) == CRASHED[:2]
