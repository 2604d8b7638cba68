"""``%hvd_debug --attach R``: a port for VS Code, or any other debugger that speaks its protocol."""

from __future__ import annotations

import contextlib
import json
import warnings
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from hvdlab.collectives import private
from hvdlab.magics.session import Session, ranks_of

if TYPE_CHECKING:
    from hvdlab.kernel_ext.debugger.relay import Relay
    from hvdlab.kernel_ext.pool import Pool

_open: weakref.WeakKeyDictionary[Session, Ports] = weakref.WeakKeyDictionary()


def attach(session: Session, rank: int, port: int = 0, *, keep: bool = False) -> None:
    """Open a port for a debugger of this rank, and print where it is.

    Args:
        session: The notebook's session.
        rank: The rank.
        port: The port to listen at, on the loopback interface; any free one by default.
        keep: Whether the port stays open for one debugger after the other. By default it closes once one has attached, or
            after ten minutes without one.

    Raises:
        UsageError: There is no such rank, the port is taken, or a debugger has attached to the rank.
    """
    pool = session.need_pool("%hvd_debug")
    if rank not in ranks_of(pool):
        raise UsageError(f"%hvd_debug --attach: there is no rank {rank}; the ranks are {ranks_of(pool)}")
    relay = _ports(session).open(pool, rank, port, keep)
    configuration = {
        "name": f"hvdlab rank {rank}",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": "127.0.0.1", "port": relay.port},
        "justMyCode": True,
    }
    until = "until" if keep else "once, within ten minutes and until"
    print(
        f"rank {rank} can be debugged at 127.0.0.1:{relay.port}, by you only, {until} `%hvd_debug --detach` or the pool's end.\n"
        f"In VS Code's launch.json:\n{json.dumps(configuration, indent=2)}"
    )


def detach(session: Session, rank: int | None = None) -> None:
    """Close the port of this rank, or all ports, and disconnect attached debuggers; ranks that are stopped go on."""
    ports = _ports(session)
    ports.forget_over()
    closed = ports.close(rank)
    print(f"closed {len(closed)} port{'' if len(closed) == 1 else 's'}" if closed else "no port was open")


def _ports(session: Session) -> Ports:
    ports = _open.get(session)
    if ports is None:
        ports = _open[session] = Ports(session)
    return ports


class Ports:
    """The ports that a notebook has opened. They end with its pool.

    While there are any, cells are written to the files that debuggers know them by.
    """

    def __init__(self, session: Session) -> None:
        self._shell = session.shell
        self._session = weakref.ref(session)
        self._relays: dict[int, Relay] = {}
        self._pool: weakref.ref[Pool] | None = None
        session.watchers.append(self._pool_changed)
        session.leaving.callback(self._leave)

    def open(self, pool: Pool, rank: int, port: int, keep: bool) -> Relay:
        from hvdlab.kernel_ext.debugger.relay import Relay

        self.forget_over()
        found = self._relays.get(rank)
        if found is not None and not found.listening:
            raise UsageError(
                f"%hvd_debug --attach: a debugger has attached to rank {rank}; `%hvd_debug --detach {rank}` lets it go"
            )
        if found is not None and port in (0, found.port) and keep == found.keep:
            return found
        if found is not None:
            self.close(rank)
        try:
            relay = Relay(pool.client, rank, port, keep=keep)
        except OSError as error:
            raise UsageError(f"%hvd_debug --attach: port {port} can't be had: {error.strerror}") from None
        if not self._relays:
            self._shell.events.register("pre_run_cell", self._write_cell)
            history = self._shell.history_manager
            for cell in history.input_hist_raw if history is not None else ():
                write_cell(cell)
        self._relays[rank], self._pool = relay, weakref.ref(pool)
        return relay

    def close(self, rank: int | None = None) -> list[int]:
        """Close all ports, or that of one rank. Returns the ranks whose ports were open."""
        closing = [one for one in self._relays if rank in (None, one)]
        for one in closing:
            self._relays.pop(one).close()
        if closing and not self._relays:
            self._shell.events.unregister("pre_run_cell", self._write_cell)
        return closing

    def forget_over(self) -> None:
        """Forget the ports that have closed by themselves."""
        for rank in [rank for rank, relay in self._relays.items() if relay.over]:
            self.close(rank)

    def _pool_changed(self) -> None:
        session = self._session()
        if self._pool is not None and (session is None or session.current is not self._pool()):
            self._pool = None
            self.close()

    def _leave(self) -> None:
        self.close()
        session = self._session()
        if session is not None:
            _open.pop(session, None)
            with contextlib.suppress(ValueError):
                session.watchers.remove(self._pool_changed)

    def _write_cell(self, info: Any) -> None:
        self.forget_over()
        if self._relays:
            write_cell(info.raw_cell or "")


def write_cell(cell: str) -> None:
    """Write a cell to the file that debuggers know it by, as JupyterLab's debugger does for cells that have breakpoints."""
    try:
        from ipykernel.compiler import get_file_name
    except ImportError:
        return
    path = Path(get_file_name(cell))  # type: ignore[no-untyped-call]  # ipykernel is partly untyped
    if not cell.strip():
        return
    # The name of the directory can be foreseen: another user may have made it, with links to this user's files in it.
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        private.create(path, cell)
    except FileExistsError:
        return
    except OSError as error:
        warnings.warn(
            f"breakpoints in cells won't be hit, since cells can't be written: {error}", stacklevel=2
        )
