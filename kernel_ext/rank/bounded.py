"""Code of the user's that may never return, called so that no thread waits for it for long."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class TookTooLong(Exception):
    """The call did not return in time."""


class _Stop(BaseException):
    """Raised in the thread of a call that took too long."""


def bounded(work: Callable[[], T], seconds: float) -> T:
    """Call ``work`` on a thread of its own and return what it returns. Raises what it raises, whatever that is.

    Raises:
        TookTooLong: It did not return within ``seconds``. It is stopped at its next line of Python; a call into a library
            goes on until it returns.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001  # raised again where it is waited for
            errors.append(error)

    thread = threading.Thread(target=run, name="hvdlab-looking", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        stop = ctypes.pythonapi.PyThreadState_SetAsyncExc
        stop(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Stop))
        raise TookTooLong
    if errors:
        raise errors[0]
    return results[0]
