"""Processes other than ranks that die, and strangers that bother those that live."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time

import psutil

from chaos import census
from chaos.pieces import Pieces
from chaos.strangers import visit
from support.patience import PATIENCE
from support.pool_probe import PoolProbe

PARTS = {"coordinator": "collectives.coordinator", "warm": "hvd-forkserver", "controller": "hvd-controller"}


class Parts(Pieces):
    """Trials of faults in the other processes of a pool."""

    def losing_part(self) -> None:
        run = self.begin()
        self.victim = self.outcome.victim = -1
        self.await_instant()
        wanted = PARTS[self.fault.deed]
        pid = next(pid for pid, name in census.marked(self.campaign.mark).items() if wanted in name)
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)

        def line() -> tuple[float, str] | None:
            return next((told for told in list(self.sink.told) if not told[1].startswith("status:")), None)

        census.settled(lambda: line() is None and not run.done, PATIENCE)
        if (first := line()) is not None:
            self.told(at, first[0], first[1])
        if not run.done:
            time.sleep(self.rng.uniform(0, 0.5))
            run.interrupt()
        ended = run.done
        self.await_end(run)
        if first is None and ended:
            self.told(at, time.monotonic(), self.outcome.said)
        if self.outcome.report is None:
            self.outcome.wrong.append("nobody said that it is gone")

    def bothering(self) -> None:
        """Connect strangers to all listeners; they send no message, or one of another protocol, and stay."""
        self.victim = self.outcome.victim = -1
        run = self.begin(steps=60)
        self.await_instant()
        at = time.monotonic()
        with contextlib.ExitStack() as strangers:
            path = PoolProbe(self.campaign.pool).coordinator.address.removeprefix("unix:")
            unix = strangers.enter_context(socket.socket(socket.AF_UNIX))
            unix.settimeout(self.campaign.hang_after)
            unix.connect(path)
            unix.sendall(len(garbage := self.rng.randbytes(200)).to_bytes(4, "little") + garbage)
            # A connection that is closed with unread bytes is reset.
            with contextlib.suppress(ConnectionResetError):
                while unix.recv(4096):
                    pass
            self.outcome.report = time.monotonic() - at
            theirs = self._ports()
            for port in self.rng.sample(theirs, min(2, len(theirs))):
                visit(strangers, port)
            for port in theirs:
                tcp = strangers.enter_context(socket.socket())
                tcp.settimeout(0.2)  # a port that lets no stranger in does not answer
                # A port may refuse it, or close the connection before all is sent.
                with contextlib.suppress(OSError):
                    tcp.connect(("127.0.0.1", port))
                    tcp.sendall(self.rng.randbytes(self.rng.choice((1, 64, 5000))))
            self._goes_on(run)

    def _ports(self) -> list[int]:
        """Return where processes of the pool listen on the loopback interface."""
        found: set[int] = set()
        for pid in census.marked(self.campaign.mark):
            # Processes of the pool can end while they are listed.
            with contextlib.suppress(psutil.Error):
                listening = psutil.Process(pid).net_connections("tcp4")
                found |= {c.laddr.port for c in listening if c.status == psutil.CONN_LISTEN}
        return sorted(found)
