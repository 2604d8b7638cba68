"""``python -m hvdlab.runner.function_worker CALL RESULT``: a rank of ``hvdlab.run(fn)``.

Both arguments are descriptors of anonymous memory: the pickled call to read, and where to write the outcome. Nothing
of it touches a disk or the network, and only the user's own processes can see it.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import traceback
from dataclasses import dataclass
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # has no types


@dataclass(frozen=True)
class FunctionReturned:
    """Value that a function has returned."""

    value: Any


@dataclass(frozen=True)
class FunctionRaised:
    """Exception that a function has raised.

    Attributes:
        pickled: The exception itself, or empty if it can't be pickled.
        line: ``ValueError: boom``.
        traceback: Its traceback as text.
        culprits: Ranks whose failure ended the collective that raised it, if any.
    """

    pickled: bytes
    line: str
    traceback: str
    culprits: tuple[int, ...] = ()


class UnpicklableResultError(RuntimeError):
    """The result of a rank's function can't be sent to the caller."""


def pickled_call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Return the call as ranks read it. Functions of notebooks, scripts and closures travel by value.

    Raises:
        TypeError, pickle.PicklingError: Something of it can't be pickled.
    """
    # Pickled twice: the reader must have the path before it unpickles the function, which imports modules.
    return pickle.dumps((list(sys.path), cloudpickle.dumps((function, args, kwargs))))


def unpickled_call(data: bytes) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the function and its arguments that :func:`pickled_call` made these bytes of.

    This process then finds the modules that the caller finds. Only for bytes that a launcher brought here.
    """
    path, pickled = pickle.loads(data)  # noqa: S301
    sys.path += [entry for entry in path if entry not in sys.path]
    call: tuple[Any, tuple[Any, ...], dict[str, Any]] = pickle.loads(pickled)  # noqa: S301
    return call


def main() -> None:
    """Run the call; exits with 1 if it raises."""
    call, result = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(result, False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # a pipe, but its lines are shown as they come
    # Opened again, at the beginning: the inherited descriptor shares the agent's offset, which is at the
    # end.
    with open(f"/proc/self/fd/{call}", "rb") as file:
        # Safe to unpickle: the launcher made it, on a pipe or in memory that no other user's process can reach.
        data = file.read()
    os.close(call)
    try:
        function, args, kwargs = unpickled_call(data)
        value = function(*args, **kwargs)
    except Exception as raw:  # noqa: BLE001  # the caller gets it
        from hvdlab.collectives.context import report_uncaught, with_own_errors
        from hvdlab.collectives.errors import HvdlabError
        from hvdlab.collectives.failures import cut_own_frames

        error = with_own_errors(raw)
        report_uncaught(error)
        _cut(error)
        if isinstance(error, HvdlabError):
            cut_own_frames(error.__traceback__)
        _write(result, cloudpickle.dumps(raised(error)))
        traceback.print_exception(error)
        sys.exit(1)
    _write(result, returned(value))


def returned(value: Any) -> bytes:
    """Return the bytes that the caller gets for a value: a pickled :class:`FunctionReturned`, or :class:`FunctionRaised` if that can't be pickled."""
    try:
        return bytes(cloudpickle.dumps(FunctionReturned(value)))
    except Exception as error:  # noqa: BLE001  # __reduce__ may raise anything
        rank = os.environ.get("HVDLAB_RANK", "?")
        text = f"rank {rank} returned a {type(value).__qualname__}, which can't be pickled: {error}"
        problem = UnpicklableResultError(text)
        return bytes(cloudpickle.dumps(raised(problem)))


def raised(error: BaseException) -> FunctionRaised:
    """Return the form in which the caller gets an exception."""
    from hvdlab.collectives.failures import blamed_ranks, lines_without_notes

    text = "".join(traceback.format_exception(error))
    line = lines_without_notes(error)[-1].strip()
    try:
        pickled = cloudpickle.dumps(error)
        pickle.loads(pickled)  # noqa: S301  # our own: an exception may be picklable one way only
    except Exception:  # noqa: BLE001  # as in returned()
        pickled = b""
    return FunctionRaised(pickled, line, text, blamed_ranks(error))


def _cut(error: BaseException) -> None:
    """Leave this module's frame out of the traceback."""
    trace = error.__traceback__
    if trace is not None and trace.tb_next is not None:
        error.__traceback__ = trace.tb_next


def _write(descriptor: int, data: bytes) -> None:
    with io.FileIO(descriptor, "wb", closefd=False) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) or 0 :]


if __name__ == "__main__":
    # Imported under its real name: classes of ``__main__`` that are pickled here would not be found by the caller.
    from hvdlab.runner.function_worker import main as run

    run()
