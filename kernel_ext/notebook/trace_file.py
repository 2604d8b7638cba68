"""Trace files of a pool: written while it runs, saved at once, and read again by ``hvdlab trace``.

The notebook's process writes them, so that writing goes on while ranks hang or die.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hvdlab.collectives.client import Client, CoordinatorLostError
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.tracing.timeline_file import TimelineFile
from hvdlab.kernel_ext.notebook.registry import KeptPoolEntry, KeptPoolRegistry

if TYPE_CHECKING:
    from hvdlab.collectives.tracing.recording import Recording

DISK_WITHIN = 10.0
"""Seconds that a slow disk gets to write the rest."""
CONNECT_WITHIN = 10.0
"""Seconds that the coordinator of a kept pool has to let ``hvdlab trace`` in."""
EVERY = 2.0
"""Seconds between two tables of ``hvdlab trace top``."""
CLEAR = "\x1b[H\x1b[2J"
"""Escape sequence that empties a terminal before the next table."""


class TraceFileWriter:
    """Writes to a file until :meth:`stop`. Raises ``OSError`` if it can't be created.

    Args:
        client: Brings the ranks' events.
        path: The file.
    """

    def __init__(self, client: Client, path: Path) -> None:
        self.path = path
        self._client = client
        self._file = TimelineFile.start(path)
        try:
            _take_history(client)
            client.on_events(self._file.feed)
        except BaseException:
            self._file.close(DISK_WITHIN)
            raise

    def stop(self) -> None:
        """Complete the file, with all that every rank has recorded by now. Raises ``OSError`` if the disk failed."""
        self._client.gathered()
        with contextlib.suppress(CoordinatorLostError):
            self._client.off_events(self._file.feed)
        self._file.close(DISK_WITHIN)


def save_trace(client: Client, path: str | os.PathLike[str], format: str | None = None) -> Path:
    """Write the client's recording to a file, with all that every rank has recorded by now.

    Raises:
        InvalidRequestError: There is no such format.
        OSError: It could not be written.
    """
    from hvdlab.collectives.tracing.trace_file import format_of, save_recording

    chosen = format_of(path, format)
    return save_recording(client.gathered(), path, chosen)


def _take_history(client: Client) -> None:
    """Fetch the coordinator's past events into the recording; only the first listener gets them.

    Raises:
        CoordinatorLostError: The connection has ended.
        TimeoutError: The coordinator does not answer.
    """
    assert client.recording is not None  # the first access makes it
    client.flush()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidRequestError(f"{self.prog}: {message}; `{self.prog} --help` says more")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line of ``hvdlab trace``."""
    found = _Parser(
        prog="hvdlab trace",
        description="What ranks did: of a trace that was written as .json or .json.gz, or of a pool that is kept.",
        allow_abbrev=False,
    )
    commands = found.add_subparsers(dest="command", required=True, metavar="COMMAND")
    save = commands.add_parser("save", help="write it as .json or .json.gz, which Perfetto opens")
    save.add_argument("file", metavar="FILE", type=Path)
    save.add_argument("--from", metavar="TRACE", type=Path, dest="trace", help="of this file")
    summary = commands.add_parser(
        "summary", help="each rank in a line: how often it was last, how long others waited"
    )
    top = commands.add_parser(
        "top", help="the collectives that ranks waited in for longest; of a pool, as it runs"
    )
    top.add_argument("-n", type=int, default=20, metavar="N", help="how many (20)")
    top.add_argument("--once", action="store_true", help="of a pool: say it once")
    for command in (summary, top):
        command.add_argument(
            "trace", metavar="TRACE", type=Path, nargs="?", help="a file; without one, of a pool"
        )
    for command in (save, summary, top):
        command.add_argument(
            "--pool", metavar="NAME", help="a pool that is kept (`hvdlab pools`); by default the only one"
        )
    return found


def main(arguments: Sequence[str]) -> int:
    """Run ``hvdlab trace``: save, summarize or follow a trace file or a kept pool. Returns the exit code.

    Raises:
        InvalidRequestError: The command can't be read, or there is no such pool, or a file is no trace.
        HvdlabError: The pool does not answer.
    """
    options = parser().parse_args(arguments)
    if options.trace is not None and options.pool is not None:
        raise InvalidRequestError("give a trace or --pool, not both")
    try:
        with _opened(options) as (recording, client):
            if options.command == "save":
                _save(recording, client, options.file)
            elif options.command == "summary":
                print(_summary(recording))
            else:
                _top(recording, client, options)
    except OSError as error:
        if not error.filename:
            raise
        raise InvalidRequestError(f"{error.filename}: {error.strerror}") from None
    return 0


@contextmanager
def _opened(options: argparse.Namespace) -> Iterator[tuple[Recording, Client | None]]:
    """Yield the recording that the options name, and for a pool's the connection that updates it."""
    if options.trace is not None:
        from hvdlab.collectives.tracing.trace_file import load_trace

        yield load_trace(options.trace), None
        return
    kept = KeptPoolRegistry().get(options.pool) if options.pool else _the_only_one()
    with Client.connect(kept.address, kept.client_token, timeout=CONNECT_WITHIN) as client:
        recording = client.recording
        client.flush()
        yield recording, client


def _the_only_one() -> KeptPoolEntry:
    pools = KeptPoolRegistry().all()
    if len(pools) == 1:
        return pools[0]
    if not pools:
        raise InvalidRequestError("no pool is kept here (`%hvd_pool start --keep`); give the file of a trace")
    names = ", ".join(pool.name for pool in pools)
    raise InvalidRequestError(f"say which pool, by --pool: {names}")


def _save(recording: Recording, client: Client | None, file: Path) -> None:
    from hvdlab.collectives.tracing.trace_file import save_recording

    path = save_recording(recording, file) if client is None else save_trace(client, file)
    print(
        f"wrote {path} ({recording.count:,} spans, {path.stat().st_size / 1e6:,.1f} MB); https://ui.perfetto.dev opens it"
    )


def _summary(recording: Recording) -> str:
    from hvdlab.collectives.tracing import rank_activity

    if not recording.count:
        return rank_activity.report_head(recording)
    return f"{rank_activity.report_head(recording)}\n\n{rank_activity.report_ranks(recording)}"


def _top(recording: Recording, client: Client | None, options: argparse.Namespace) -> None:
    from hvdlab.collectives.tracing import rank_activity

    follow = client is not None and not options.once
    clear = CLEAR if follow and sys.stdout.isatty() else ""
    ended = threading.Event()

    def end(reason: str) -> None:
        # Before the wake-up: the thread that prints reads it then.
        ended.set()
        recording.wake_waiters()

    if client is not None:
        client.on_lost(end)
    while True:
        version = recording.version
        text = _summary(recording)
        if recording.count:
            text += f"\n\n{rank_activity.report_collectives(recording, options.n)}"
        print(f"{clear}{text}", flush=True)
        if not follow:
            return
        if not ended.wait(EVERY):
            recording.wait(version, ended.is_set)  # print again only once there is something new
        if ended.is_set():
            print("the pool has ended")
            return
