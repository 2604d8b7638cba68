"""``hvdlab.run``: a function on several ranks, from a script or a notebook."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

from hvdlab.collectives.errors import HvdlabError, InvalidRequestError
from hvdlab.collectives.text import visible_coloured
from hvdlab.launch.command import default_python
from hvdlab.runner.function_worker import FunctionRaised, FunctionReturned, pickled_call
from hvdlab.runner.job import JobRun
from hvdlab.runner.options import RunOptions
from hvdlab.runner.output import ConsoleSink, FileSink, Sink, Writer
from hvdlab.runner.supervisor import JobResult

T = TypeVar("T")


class RankFailedError(HvdlabError):
    """A rank failed. If its function raised, this is also an instance of that exception's class where that can be made.

    The exception itself is the ``__cause__``, if it could be pickled.

    Attributes:
        rank: The rank that failed first; -1 if the job ended for another reason.
        exit_code: Exit code of its process.
        remote_traceback: The traceback of the rank's exception as text, or empty.
    """

    rank: int = -1
    exit_code: int = 1
    remote_traceback: str = ""

    def __str__(self) -> str:
        return _text(self)


def run(
    func: Callable[..., T],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[int, int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: object = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    env: Mapping[str, str] | None = None,
    plane: str | None = None,
    preload: Sequence[str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
) -> list[T]:
    """Call ``func(*args, **kwargs)`` on ``np`` new ranks and return its results, by rank.

    The function may come from a notebook, ``__main__`` or a closure, and no ``if __name__ == "__main__"`` is needed.
    The ranks' output is shown as it comes, with their numbers in front. An elastic job returns nothing for ranks that it
    lost for good.

    Args:
        func: Called on each rank. It joins the others by ``hvd.init()``.
        args, kwargs: Its arguments; they must be picklable, as must its result.
        num_proc, np: Number of ranks; by default one for each slot of ``hosts``, or 1.
        min_num_proc, min_np: Makes the job elastic: it continues with so many ranks.
        max_num_proc, max_np: How many ranks an elastic job has at most, where hosts have room for more.
        host_discovery_script: Where hosts come from while the job runs: the command line of a script that prints them, or
            another object that :func:`hvdlab.launch.host_discovery.as_host_source` accepts (``{"a": 2}``, an object with
            ``find()``, a function).
        slots: Slots of each host that is found without a number; 1 by default.
        cooldown_range: Seconds that a host that failed is put aside the first time, and at most.
        reset_limit: How many lost ranks of an elastic job are restarted.
        hosts, hostfile: Hosts and slots, as of ``hvdlab run``.
        start_timeout: Seconds within which all ranks must be there.
        ssh_port, ssh_identity_file, network_interface, network_interfaces: How other hosts are reached.
        output_filename: Directory for the ranks' output, which is not shown then.
        verbose: Whether to print how ranks are started.
        executable: Python interpreter of the ranks.
        env: Variables for the ranks, beside those of this process.
        plane: Data plane.
        preload: Modules that each host imports once, before it forks the ranks; by default each rank is a new interpreter.
        stdout, stderr: Where output is shown; by default ``sys.stdout`` and ``sys.stderr`` as they are now.
        disable_cache, use_gloo, use_mpi, mpi_args: Horovod's; they are accepted and change nothing here (a line on
            ``stderr`` reports it for ``use_mpi`` and ``mpi_args``).

    Raises:
        RankFailedError: A rank failed. The error describes the rank that failed first, and is also an instance of the
            class of the exception that was raised there.
        InvalidRequestError, StartError: The ranks could not be started.
        KeyboardInterrupt: The call was interrupted; all ranks have ended.
    """
    given = {
        "num_proc": _one("np", np, "num_proc", num_proc),
        "min_num_proc": _one("min_np", min_np, "min_num_proc", min_num_proc),
        "max_num_proc": _one("max_np", max_np, "max_num_proc", max_num_proc),
        "slots": slots,
        "cooldown_range": cooldown_range,
        "reset_limit": reset_limit,
        "hosts": hosts,
        "hostfile": hostfile,
        "host_discovery_script": host_discovery_script,
        "start_timeout": start_timeout,
        "ssh_port": ssh_port,
        "ssh_identity_file": ssh_identity_file,
        "output_filename": output_filename,
        "network_interfaces": network_interfaces or network_interface,
        "plane": plane,
        "preload": ",".join(preload or ()) or None,
    }
    given = {dest: value for dest, value in given.items() if value is not None}
    if not {"num_proc", "min_num_proc", "hosts", "hostfile", "host_discovery_script"} & given.keys():
        given["num_proc"] = 1
    err = Writer(stderr or sys.stderr)
    options = RunOptions(given, {}, os.environ)
    for warning in options.warnings():
        err.say(warning)
    if use_mpi or mpi_args:
        err.say(
            "use_mpi= and mpi_args= have no effect: the ranks of a function are started by hvdlab itself."
        )
    function = pickled(func, args, dict(kwargs or {}))
    job = options.job([executable or default_python()], function)
    job.environment.update(env or {})
    sink: Sink
    sink = (
        FileSink(Path(output_filename), job.size)
        if output_filename
        else ConsoleSink(Writer(stdout or sys.stdout), err)
    )
    done = JobRun(job, sink, err if verbose else None, verbose=bool(verbose)).run()
    if done.stopped == signal.SIGINT:
        raise KeyboardInterrupt
    if done.stopped:
        # The job has caught the signal so that its ranks could end; the caller's own handlers get it now.
        signal.raise_signal(done.stopped)
    size = job.size if job.source is None else max(done.outcomes, default=-1) + 1
    return results(done, size)


def _one(first: str, value: int | None, second: str, other: int | None) -> int | None:
    if value is not None and other is not None and value != other:
        raise InvalidRequestError(f"{first}={value} and {second}={other} mean the same; give one of them.")
    return other if value is None else value


def pickled(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    if not callable(func):
        raise InvalidRequestError(f"hvdlab.run() calls a function, and {func!r} is none.")
    try:
        return pickled_call(func, args, kwargs)
    except (TypeError, AttributeError, ValueError, pickle.PicklingError) as error:
        name = getattr(func, "__qualname__", repr(func))
        raise InvalidRequestError(
            f"`{name}` can't be sent to the ranks, because something that it refers to can't be pickled: {error}. "
            "Make it inside the function."
        ) from error


def results(done: JobResult, size: int) -> list[Any]:
    """Return the function's results, by rank; raise the error of the rank that failed first, or the other reason for the job's failure."""
    found: dict[int, Any] = {}
    unreadable: dict[int, Exception] = {}
    for rank, data in done.results.items():
        try:
            if data:
                found[rank] = pickle.loads(data)  # noqa: S301  # safe: our own ranks sent it over pipes of ours
        except Exception as error:  # noqa: BLE001  # of the value's own code, or of a module that is missing here
            unreadable[rank] = error
    failed = done.failed
    ranks: Sequence[int] = range(size)
    if done.code == 0:  # an elastic job went on without ranks that have failed or left
        well = [rank for rank in ranks if rank not in done.outcomes or done.outcomes[rank].ok]
        ranks = [rank for rank in well if rank not in done.left]
        if (bad := next((rank for rank in ranks if rank in unreadable), None)) is not None:
            raise _unreadable(bad, unreadable[bad]) from unreadable[bad]
    if failed is None:
        failed = next((rank for rank in ranks if not isinstance(found.get(rank), FunctionReturned)), None)
    if failed is None and done.code == 0:
        return [found[rank].value for rank in ranks]
    if failed is None:
        raise RankFailedError("; ".join(done.failure) or f"the job ended with exit code {done.code}")
    raise _error(done, failed, found.get(failed))


def _unreadable(rank: int, why: Exception) -> RankFailedError:
    """Return the error for a value that a rank has returned, and that can't be unpickled here."""
    error = RankFailedError(
        f"rank {rank} returned a value that can't be unpickled here: {type(why).__name__}: {why}. "
        "Return one whose classes this process can import, or have the function save it."
    )
    error.rank, error.exit_code = rank, 0
    return error


def _error(done: JobResult, rank: int, found: FunctionReturned | FunctionRaised | None) -> BaseException:
    outcome = done.outcomes.get(rank)
    code = outcome.exit_code if outcome is not None else done.code
    if isinstance(found, FunctionRaised):
        original = _original(found)
        text = f"rank {rank} raised {found.line}\n\n{found.traceback.rstrip()}"
        error = _like(original, text)
        error.__cause__ = original
        error.remote_traceback = found.traceback
    elif done.failure:
        error = RankFailedError("\n".join(done.failure))
    else:
        how = f" ({outcome})" if outcome is not None else ""
        error = RankFailedError(f"rank {rank} ended before its function returned{how}")
    error.rank, error.exit_code = rank, code
    return error


def _original(raised: FunctionRaised) -> BaseException | None:
    """Return the rank's exception, or ``None`` if it can't be pickled, or its class can't be imported here."""
    if not raised.pickled:
        return None
    try:
        error: BaseException = pickle.loads(raised.pickled)  # noqa: S301  # safe, as in results()
    except Exception:  # noqa: BLE001  # as on the rank; its text and traceback go to the caller in any case
        return None
    return error


def _like(original: BaseException | None, text: str) -> RankFailedError:
    """Return an error that ``except`` clauses for ``original``'s class catch, as do those for :class:`RankFailedError`."""
    if isinstance(original, Exception) and not isinstance(original, RankFailedError):
        kind = type(original)
        try:
            both = type(
                kind.__name__, (RankFailedError, kind), {"__module__": kind.__module__, "__str__": _text}
            )
            # Without __init__(), which may need arguments that are unknown here.
            error: RankFailedError = kind.__new__(both)
            error.__dict__.update(vars(original))
            # OSError keeps these three outside of its __dict__.
            if isinstance(original, OSError) and isinstance(error, OSError):
                error.errno, error.strerror, error.filename = (
                    original.errno,
                    original.strerror,
                    original.filename,
                )
            error.args = (text,)
            return error
        except TypeError:  # the two classes have incompatible layouts, or __new__ needs arguments
            pass
    return RankFailedError(text)


def _text(error: BaseException) -> str:
    """Return the error's text. Of the escape sequences that a rank wrote only colours are left."""
    return visible_coloured(str(error.args[0]))
