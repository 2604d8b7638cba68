"""Sleeping on, and waking, a 32-bit word that several processes share (Linux ``futex``), and a memory fence.

The calls are the shared kind (no ``FUTEX_PRIVATE_FLAG``), since the word lies in memory of several processes. They
release the GIL. ``*_BITSET`` lets one call wake exactly those sleepers that have something to do.
"""

from __future__ import annotations

import ctypes
import threading
import time

_SYS_FUTEX = 202  # x86-64
_WAIT_BITSET = 9
_WAKE_BITSET = 10
_EVERYBODY = 0x7FFFFFFF

_syscall = ctypes.CDLL(None).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint32,
]


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def wait(address: int, expected: int, bits: int, deadline: float | None = None) -> None:
    """Sleep while the word at ``address`` equals ``expected``, until a :func:`wake` whose bits overlap ``bits``.

    Returns at once if the word differs; may also return early (a signal). ``deadline`` is on ``time.monotonic()``.
    """
    if deadline is None:
        _syscall(_SYS_FUTEX, address, _WAIT_BITSET, expected, None, None, bits)
        return
    until = max(deadline, 0.0)
    limit = _Timespec(int(until), int(until % 1.0 * 1e9))
    _syscall(_SYS_FUTEX, address, _WAIT_BITSET, expected, ctypes.addressof(limit), None, bits)


def wake(address: int, bits: int) -> None:
    """Wake all that sleep on the word with overlapping ``bits``."""
    _syscall(_SYS_FUTEX, address, _WAKE_BITSET, _EVERYBODY, None, None, bits)


def expired(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


def make_fence() -> threading.Lock:
    """An object of one thread's own for which ``with fence: pass`` is a full memory fence on x86-64.

    x86-64 keeps loads in order and stores in order, but lets a load overtake an earlier store to another address.
    Any locked instruction drains the stores first, and taking and giving back a lock is two of them (in glibc's
    semaphores, which CPython's locks are before 3.13, and in its own ones since).
    """
    return threading.Lock()
