"""Keys by which ipyparallel's controller knows its clients and engines, and they it: CurveZMQ.

Without it, ZeroMQ's ports take subscriptions from any process that reaches them, also from those of other users of this host.
The public key lies in the controller's connection files, which only their user can read. All controllers of a cluster have the
same pair of keys: the sockets of an engine, which live as long as it does, know one key.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec
import zmq

from hvdlab.collectives import system

log = logging.getLogger(__name__)

_LIMIT = 4096


class _Keys(msgspec.Struct, frozen=True):
    public: str
    secret: str


def environment(path: Path) -> dict[str, str]:
    """The environment variables that have a controller use the pair of keys in this file, which is made if there is none.

    Raises:
        OSError: The file does not belong to this user alone, or can't be made.
    """
    if not zmq.has("curve"):
        log.warning(
            "this ZeroMQ has no encryption: other users of this host can read what ipyparallel publishes"
        )
        return {}
    keys = _keys(path)
    return {"IPP_ENABLE_CURVE": "1", "IPP_CURVE_PUBLICKEY": keys.public, "IPP_CURVE_SECRETKEY": keys.secret}


def _keys(path: Path) -> _Keys:
    public, secret = zmq.curve_keypair()
    made = _Keys(public.decode(), secret.decode())
    try:
        system.create_private(path, msgspec.json.encode(made).decode())
    except FileExistsError:
        return _read(path)
    return made


def _read(path: Path) -> _Keys:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(f"{path} must belong to user {os.geteuid()} alone (mode 0600)")
        try:
            return msgspec.json.decode(file.read(_LIMIT), type=_Keys)
        except msgspec.DecodeError as error:
            raise OSError(f"{path} holds no keys: {error}") from error
