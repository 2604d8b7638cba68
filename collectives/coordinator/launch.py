"""What the starter and the coordinator's process say to each other on pipes."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from hvdlab.collectives.coordinator.fusion import FUSION_THRESHOLD
from hvdlab.collectives.errors import InvalidRequestError


class Launch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings, from the starter.

    Attributes:
        token: Secret that peers have to show.
        directory: A private directory for the socket; the coordinator removes it at its end.
        starter: Process id of the starter.
        size: Number of ranks, or ``None`` to wait for a client's word.
        tcp_host: Address to listen on for ranks of other hosts, or empty.
        fusion_threshold, stall_seconds, ping_after, dead_after: See ``ServerOptions`` and ``CoordinatorOptions``.
    """

    token: str
    directory: str
    starter: int
    size: int | None = None
    tcp_host: str = ""
    fusion_threshold: int = FUSION_THRESHOLD
    stall_seconds: float = 10.0
    ping_after: float = 5.0
    dead_after: float = 30.0


class Ready(msgspec.Struct, frozen=True):
    """The answer: addresses, or why it could not start."""

    address: str = ""
    tls_address: str = ""
    certificate: str = ""
    error: str = ""


_VARIABLES: dict[str, tuple[str, type[int | float]]] = {
    "HOROVOD_FUSION_THRESHOLD": ("fusion_threshold", int),
    "HOROVOD_STALL_CHECK_TIME_SECONDS": ("stall_seconds", float),
}


def settings_from(environ: Mapping[str, str]) -> dict[str, float]:
    """What Horovod's variables say about the coordinator, as fields of :class:`Launch`.

    Raises:
        InvalidRequestError: A variable holds no number of its kind, or a negative one.
    """
    settings: dict[str, float] = {}
    for variable, (name, kind) in _VARIABLES.items():
        text = environ.get(variable, "").strip()
        if not text:
            continue
        try:
            value = kind(text)
        except ValueError:
            value = -1
        if value < 0:
            what = "a whole number of bytes" if kind is int else "a number of seconds"
            raise InvalidRequestError(f"{variable}={text!r}: {what} from 0 was expected.")
        settings[name] = value
    return settings
