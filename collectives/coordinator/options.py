"""Settings of the coordinator's state and server, with their defaults."""

from __future__ import annotations

from dataclasses import dataclass, field

from hvdlab.collectives.autotune import TuningOptions

FUSION_THRESHOLD = 64 * 1024 * 1024
"""Bytes of tensors that are fused into one operation at most (a tensor that alone is larger is not split)."""
SCHEDULING_CREDIT = 4 * 1024 * 1024
"""Bytes of tensors with a priority that are ordered and not executed yet, at most (one that alone is larger is ordered nevertheless)."""
HISTORY_BYTES = 64 * 1024 * 1024
"""Payload of the event history, in bytes: views that open later can show no more."""


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """Settings of the state.

    Attributes:
        size: Ranks 0 to ``size - 1`` are expected; ``None``: a client sets them.
        fusion_threshold: Bytes that are fused into one operation at most; 0 fuses nothing.
        flush_delay: Seconds that ready collectives wait for more to fuse with them; 0 executes at once.
        separate_groups: Whether tensors of a group are fused with each other only.
        scheduling_credit: Bytes of tensors with a priority that are executed at a time; 0 orders all at once, in the order of their
            priorities.
        stall_seconds: Seconds after which (and then how often) a waiting collective is reported; 0 never.
        stall_shutdown: Seconds after which a waiting collective ends its generation; 0 never.
        failure_grace: Seconds that a plane's failure waits for the report that explains it, a rank's death.
        dispute_grace: Seconds that ranks which disagree wait for the others, so that the error names all requests.
        history_bytes: Bytes of the history of events at most.
        hierarchical_allreduce, hierarchical_allgather: Whether ranks on several hosts work within each host first;
            ``None`` chooses.
        tuning: How to tune the parameters above, or ``None``.
        incarnation: How many coordinators of these ranks have died before.
        reattach: Seconds that a successor waits for the ranks of its predecessor.
        pid: The coordinator's process id, which its welcome has for peers, or 0.
        require_encryption: Whether to refuse ranks with data that would travel between hosts in the clear: empty, ``1``, or the
            networks that count as encrypted.
        by_seniority: Whether members of process sets are in the order in which they came into the world, those that came
            at once by their numbers; otherwise by their numbers alone.
    """

    size: int | None = None
    fusion_threshold: int = FUSION_THRESHOLD
    flush_delay: float = 0.0
    separate_groups: bool = False
    scheduling_credit: int = SCHEDULING_CREDIT
    stall_seconds: float = 10.0
    stall_shutdown: float = 0.0
    failure_grace: float = 0.25
    dispute_grace: float = 0.5
    history_bytes: int = HISTORY_BYTES
    hierarchical_allreduce: bool | None = None
    hierarchical_allgather: bool | None = None
    tuning: TuningOptions | None = None
    incarnation: int = 0
    reattach: float = 10.0
    pid: int = 0
    require_encryption: str = ""
    by_seniority: bool = False


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Settings of the server. Times are in seconds, sizes in bytes.

    Attributes:
        token: Secret that the Hello of a rank must show.
        client_token: Secret that the Hello of a client must show, which may post cells to ranks; empty admits no client.
        hello_timeout: Time for a stranger to introduce itself, and for the peer of a closing connection to read its backlog.
        ping_after: Silence after which the server asks a peer for a sign of life.
        dead_after: Silence after which the peer counts as lost, unless it is a process of this host that runs.
        backlog_limit: Bytes that can wait for a peer that does not read, before it is dropped.
        tuning_log: File that samples of the tuner are written to, or empty.
        state: Settings of the state.
    """

    token: str
    client_token: str = ""
    hello_timeout: float = 10.0
    ping_after: float = 5.0
    dead_after: float = 30.0
    backlog_limit: int = 256 * 1024 * 1024
    tuning_log: str = ""
    state: CoordinatorOptions = field(default_factory=CoordinatorOptions)
