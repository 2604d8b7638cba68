"""A key of ``torch.distributed``'s TCP store, which torchrun's ranks, and those with MASTER_ADDR, can all reach."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.errors import InvalidRequestError, StartError

_PAUSE = 0.2


class Store:
    """See :class:`~hvdlab.collectives.bootstrap.board.Board`.

    torchrun's agent serves the store itself. Otherwise rank 0 does, in a way that lets ``init_process_group`` use the same
    port afterwards. As with ``init_process_group``, any process that reaches the port while the job starts can read the store.

    Args:
        environ: Has ``MASTER_ADDR`` and ``MASTER_PORT``.
        key: Name of the job.
        serve: Whether this rank serves the store, unless torchrun's agent does.
        deadline: Limit for finding the store.

    Attributes:
        of_rank_0: Whether rank 0 serves the store, which then ends when rank 0 closes it.

    Raises:
        StartError: There is no PyTorch here, or the store can't be reached in time.
    """

    def __init__(self, environ: Mapping[str, str], key: str, *, serve: bool, deadline: Deadline) -> None:
        self._host, self._port = environ["MASTER_ADDR"], _port(environ)
        self._key = f"hvdlab/{key}"
        self.of_rank_0 = environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._store: Any = self._open(serve and self.of_rank_0, deadline)
        self._published = False

    def _open(self, serve: bool, deadline: Deadline) -> Any:
        import torch.distributed as dist

        limit = timedelta(seconds=max(1.0, deadline.remaining() or 0.0))
        try:
            return dist.TCPStore(  # type: ignore[attr-defined]  # torch imports it without exporting it
                self._host, self._port, None, serve, limit, wait_for_workers=False, multi_tenant=True
            )
        except (RuntimeError, ValueError, OSError) as error:
            what = f"Rank 0 can't serve {self.place}"
            if not serve:
                what = (
                    f"This rank has not reached {self.place} within {deadline.seconds:g} s: rank 0 has not come to "
                    "hvd.init(), has ended, or is not to be reached there"
                )
            raise StartError(f"{what} ({_first_line(error)}). {self.advice}") from error

    def publish(self, data: bytes) -> None:
        try:
            self._store.set(self._key, data)
        except RuntimeError as error:
            raise StartError(
                f"{self.place} does not take rank 0's announcement: {_first_line(error)}"
            ) from error
        self._published = True

    def read(self, seconds: float) -> bytes | None:
        import torch.distributed as dist

        try:
            self._store.wait([self._key], timedelta(seconds=max(0.01, seconds)))
            return bytes(self._store.get(self._key))
        except dist.DistStoreError:  # not there within this time
            return None
        except RuntimeError as error:
            raise StartError(
                f"{self.place} is gone ({_first_line(error)}): rank 0 has ended, or torchrun's agent."
            ) from error

    def pause(self, seconds: float) -> None:
        time.sleep(min(seconds, _PAUSE))

    def withdraw(self) -> None:
        if self._published and self._store is not None:
            self._published = False
            with suppress(RuntimeError):
                self._store.delete_key(self._key)

    def close(self) -> None:
        self._store = None

    @property
    def place(self) -> str:
        return f"the store at {self._host}:{self._port}"

    @property
    def advice(self) -> str:
        return (
            "MASTER_ADDR must be an address of rank 0's host that all others reach, and MASTER_PORT a port that is "
            "free there and open between the hosts."
        )


def usable(environ: Mapping[str, str]) -> bool:
    """Whether the environment names a store, and PyTorch is there to use it."""
    named = bool(environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"))
    return named and importlib.util.find_spec("torch") is not None


def _port(environ: Mapping[str, str]) -> int:
    text = environ["MASTER_PORT"]
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise InvalidRequestError(f"MASTER_PORT={text!r} is no port.")
    return int(text)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".")
