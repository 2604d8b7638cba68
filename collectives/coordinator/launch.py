"""What the starter and the coordinator's process say to each other on pipes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from hvdlab.collectives.autotune import TuningOptions
from hvdlab.collectives.coordinator.options import (
    FUSION_THRESHOLD,
    HISTORY_BYTES,
    SCHEDULING_CREDIT,
    CoordinatorOptions,
)
from hvdlab.collectives.knobs import Reader, for_reader


class Launch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings, from the starter.

    Attributes:
        token: Secret that ranks have to show.
        client_token: Secret that clients have to show.
        directory: A private directory for the socket; the coordinator removes it at its end.
        starter: Process id of the starter.
        size: Number of ranks, or ``None`` if a client will say which ranks to expect.
        tcp_host: Address to listen on for ranks of other hosts, or empty.
        linger: Whether to stay after the starter's end until no rank is connected.
        listener: Descriptor of the listening Unix socket, passed on by the starter.
        tls_listener: Descriptor of the listening socket for other hosts, or -1.
        certificate, key: PEM texts of the predecessor, or empty to make new ones.
        generation: How many coordinators there have been before on these sockets.
        keeps: Whether the starter keeps the sockets for a successor: then the directory stays as long as it lives.
        reattach: Seconds that a successor waits for the ranks of its predecessor.
        stall_disable: Neither report nor end what stalls, whatever the other fields say.
        autotune, autotune_log, autotune_*: Whether to tune, the file to log to, and ``TuningOptions``.
        log_level: The least important lines to write to stderr, as ``logging`` counts.
        fusion_threshold, …: See ``ServerOptions`` and ``CoordinatorOptions``.
    """

    token: str
    client_token: str
    directory: str
    starter: int
    size: int | None = None
    tcp_host: str = ""
    linger: bool = False
    listener: int = -1
    tls_listener: int = -1
    certificate: str = ""
    key: str = ""
    generation: int = 0
    keeps: bool = False
    reattach: float = 10.0
    fusion_threshold: int = FUSION_THRESHOLD
    flush_delay: float = 0.0
    separate_groups: bool = False
    scheduling_credit: int = SCHEDULING_CREDIT
    stall_disable: bool = False
    stall_seconds: float = 10.0
    stall_shutdown: float = 0.0
    hierarchical_allreduce: bool | None = None
    hierarchical_allgather: bool | None = None
    history_bytes: int = HISTORY_BYTES
    log_level: int = 30
    autotune: bool = False
    autotune_log: str = ""
    autotune_warmup_samples: int = 3
    autotune_steps_per_sample: int = 10
    autotune_max_samples: int = 20
    ping_after: float = 5.0
    dead_after: float = 30.0
    require_encryption: str = ""
    rank_numbers: str = "stable"


class Ready(msgspec.Struct, frozen=True):
    """The answer: certificate and key of the TLS socket, if there is one, or why it could not start."""

    certificate: str = ""
    key: str = ""
    error: str = ""


def settings_from(environ: Mapping[str, str]) -> dict[str, Any]:
    """What users' environment variables say about the coordinator, as fields of :class:`Launch`.

    Raises:
        InvalidRequestError: Variables do not hold what they should; the text names them.
    """
    return for_reader(Reader.COORDINATOR, environ)


def state_options(launch: Launch) -> CoordinatorOptions:
    """The settings of the coordinator's state."""
    tuning = None
    if launch.autotune:
        tuning = TuningOptions(
            launch.autotune_warmup_samples,
            launch.autotune_steps_per_sample,
            launch.autotune_max_samples,
        )
    return CoordinatorOptions(
        size=launch.size,
        fusion_threshold=launch.fusion_threshold,
        flush_delay=launch.flush_delay,
        separate_groups=launch.separate_groups,
        scheduling_credit=launch.scheduling_credit,
        stall_seconds=0.0 if launch.stall_disable else launch.stall_seconds,
        stall_shutdown=0.0 if launch.stall_disable else launch.stall_shutdown,
        history_bytes=launch.history_bytes,
        hierarchical_allreduce=launch.hierarchical_allreduce,
        hierarchical_allgather=launch.hierarchical_allgather,
        tuning=tuning,
        generation=launch.generation,
        reattach=launch.reattach,
        require_encryption=launch.require_encryption,
        by_seniority=launch.rank_numbers == "consecutive",
        pid=os.getpid(),
    )
