"""The faults of a campaign: the act, its possible places, and the user's time limit.

Limits are those that users are promised, in seconds from the fault. A stall is to be reported after the stall time; as
its limit counts a second and a half more: a process that does not answer is given a second before it is examined.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from chaos.phases import PHASES

MOVING = ("pack", "transfer", "unpack")
"""Phases in which a plane works, and may be stuck in a library."""

STALL = 1.0
"""Seconds after which campaigns have a stall reported, so that they need not wait for the usual ten."""

STALLED = STALL + 1.5


@dataclass(frozen=True, slots=True)
class Fault:
    """Kind of fault.

    Attributes:
        name: As in the table.
        play: How the campaign plays it; a method of :class:`chaos.trials.Trial`.
        deed: The rank's act on itself (:mod:`chaos.victim`), if it does.
        limit: Seconds within which the user must be notified.
        phases: Phases of a collective in which it can strike, beside other places.
        spots: Places in the training loop: ``between`` two steps, or ``amid`` one, with a tensor in flight; ``apart`` is between two
            steps while no rank is in a collective.
        outside: Whether it can come from outside as well, at any instant.
        deadly: Whether the rank is lost.
        weight: How often it is drawn, compared with the others.
        says: Word that the report must have.
        loop: The ranks' program: ``training`` (:mod:`chaos.victim`), or ``wrapped``, which trains a model that is
            wrapped in ``DistributedDataParallel`` (:mod:`chaos.wrapped`).
    """

    name: str
    play: str
    deed: str = ""
    limit: float = 1.0
    phases: tuple[str, ...] = ()
    spots: tuple[str, ...] = ("between", "amid")
    outside: bool = False
    deadly: bool = False
    weight: int = 2
    says: str = ""
    loop: str = "training"


FAULTS = (
    Fault("a rank raises", "failing", "raise", says="Boom"),
    Fault("a rank's cell ends early", "failing", "end", spots=("between",), says="finished"),
    Fault("a rank is in another collective", "failing", "other", limit=2.0, says="other.tensor"),
    Fault(
        "a rank gives another shape", "failing", "mismatch", limit=2.0, spots=("between",), says="grad.big"
    ),
    Fault("a rank is out of memory (its limit)", "failing", "exhaust", says="MemoryError"),
    Fault(
        "a rank is out of descriptors (its limit)",
        "failing",
        "exhaust_descriptors",
        weight=1,
        says="Too many open files",
    ),
    Fault(
        "the transport fails",
        "failing",
        "break",
        phases=MOVING,
        spots=(),
        says="transport failed",
    ),
    Fault("a rank computes for long", "stalling", "compute", limit=STALLED, weight=1),
    Fault("a rank is in a long C call", "stalling", "call_c", limit=STALLED, weight=1),
    Fault("a rank is stopped (SIGSTOP) for a while", "pausing", "stop", STALLED, PHASES, weight=2),
    Fault("interrupt, ranks in Python code", "interrupting", "compute", limit=2.0, says="interrupted"),
    Fault("interrupt, ranks in a collective", "interrupting", "linger", 2.0, MOVING, says="interrupted"),
    Fault("interrupt, at any instant", "interrupting_any", "", 2.0, spots=(), outside=True, weight=3),
    Fault("interrupt, a rank in a C call", "interrupting_deaf", "call_c", limit=2.0, weight=1),
    Fault("interrupt, a rank stopped", "interrupting_stopped", "stop", 2.0, PHASES, weight=1),
    Fault("SIGKILL", "dying", "kill", 1.0, PHASES, outside=True, deadly=True, weight=8, says="SIGKILL"),
    Fault(
        "SIGKILL, no rank in a collective",
        "dying",
        "kill",
        1.0,
        spots=("apart",),
        deadly=True,
        says="SIGKILL",
    ),
    Fault(
        "SIGKILL of two ranks at once",
        "dying_together",
        "",
        1.0,
        spots=(),
        outside=True,
        deadly=True,
        says="SIGKILL",
    ),
    Fault(
        "segmentation fault", "dying", "crash", 1.0, PHASES, deadly=True, weight=4, says="segmentation fault"
    ),
    Fault("os._exit", "dying", "exit", 1.0, PHASES, deadly=True, weight=4, says="exit code 7"),
    Fault("restart of one rank", "restarting", "", 1.0, spots=(), outside=True, deadly=True),
    Fault(
        "SIGKILL, and no process can be forked",
        "dying_unreplaced",
        "",
        2.0,
        spots=(),
        outside=True,
        deadly=True,
        weight=1,
        says="too many files are open",
    ),
    Fault("hostile bytes on every port", "bothering", "", 5.0, spots=(), outside=True, weight=1),
    Fault("a rank writes 100 MB", "flooding", "flood", 5.0, weight=1),
    Fault("the disk is full", "filling_disk", "flood", 5.0, weight=1),
)

RESIZES = (
    Fault("new ranks lack what a cell needs", "resizing", "", 5.0, spots=("between",), says="NameError"),
)
"""Faults of which the views have little to show: nothing was matched."""

WRAPPED = (
    Fault("DDP: a rank raises", "failing", "raise", says="Boom", loop="wrapped"),
    Fault(
        "DDP: a rank skips a backward pass",
        "failing",
        "skip",
        limit=2.0,
        spots=("instead",),
        says="finished",
        loop="wrapped",
    ),
    Fault(
        "DDP: a rank is in another collective",
        "failing",
        "other",
        limit=2.0,
        spots=("instead",),
        says="DDP bucket 0",
        loop="wrapped",
    ),
    Fault(
        "DDP: a rank gives another shape",
        "failing",
        "mismatch",
        limit=2.0,
        spots=("instead",),
        says="DDP bucket 0",
        loop="wrapped",
    ),
    Fault(
        "DDP: interrupt, ranks wait in C++",
        "interrupting_waiting",
        "linger",
        limit=2.0,
        says="interrupted",
        loop="wrapped",
    ),
    Fault("DDP: SIGKILL", "dying", "kill", outside=True, deadly=True, says="SIGKILL", loop="wrapped"),
)
"""What befalls a rank that trains with ``DistributedDataParallel`` on hvdlab's group. The same wrapped model trains on afterwards."""

_BY_NAME = {fault.name: fault for fault in FAULTS}

ON_DEVICES = (
    *(
        _BY_NAME[name]
        for name in (
            "a rank raises",
            "a rank's cell ends early",
            "a rank is in another collective",
            "a rank gives another shape",
            "a rank is stopped (SIGSTOP) for a while",
            "interrupt, ranks in Python code",
            "interrupt, ranks in a collective",
            "interrupt, at any instant",
            "SIGKILL",
            "SIGKILL of two ranks at once",
            "segmentation fault",
            "os._exit",
            "restart of one rank",
        )
    ),
    replace(_BY_NAME["the transport fails"], phases=("pack", "transfer")),
)
"""What befalls ranks whose tensors are on a device, too."""

GPU = (
    Fault("a rank is out of memory (the GPU's)", "failing", "exhaust_device", says="out of memory"),
    Fault("a kernel reads where it must not", "losing_context", "fault_device", deadly=True, says="CUDA"),
)
"""What only a GPU does. After the second a rank has to be started anew, and the others keep what they have on the GPU."""

DEATHS_OF_PARTS = (
    Fault(
        "the coordinator is killed",
        "losing_part",
        "coordinator",
        2.0,
        spots=(),
        outside=True,
        says="coordinator",
    ),
    Fault("the fork server is killed", "losing_part", "warm", 2.0, spots=(), outside=True),
    Fault("the controller is killed", "losing_part", "controller", 2.0, spots=(), outside=True),
)
"""Deaths of processes other than ranks, after which the pool goes on."""

KERNELS = (
    Fault("the notebook kernel is killed", "owner", "", 5.0, spots=(), outside=True, deadly=True, weight=1),
    Fault("the kernel of a kept pool is killed", "keeping_owner", "", 5.0, spots=(), outside=True, weight=1),
)
"""After the first nothing is to be left, and the time is that until nothing is. After the second another process goes on
with the pool, and the time is that until it has it."""


def _watched(fault: Fault) -> Fault:
    """Return the fault as it befalls a rank whose model is wrapped, and whose group is watched."""
    spots = () if not fault.spots else tuple(spot for spot in fault.spots if spot != "any")
    return replace(fault, phases=(), spots=spots, loop="wrapped")


WATCHED = (
    *(replace(fault, name=fault.name.removeprefix("DDP: ")) for fault in WRAPPED),
    *(
        _watched(_BY_NAME[name])
        for name in (
            "a rank's cell ends early",
            "a rank is out of memory (its limit)",
            "a rank is out of descriptors (its limit)",
            "a rank computes for long",
            "a rank is in a long C call",
            "a rank is stopped (SIGSTOP) for a while",
            "interrupt, ranks in Python code",
            "interrupt, at any instant",
            "interrupt, a rank in a C call",
            "interrupt, a rank stopped",
            "SIGKILL of two ranks at once",
            "segmentation fault",
            "os._exit",
            "restart of one rank",
            "SIGKILL, and no process can be forked",
            "hostile bytes on every port",
            "a rank writes 100 MB",
            "the disk is full",
        )
    ),
    Fault("the transport fails", "failing_together", "break", says="failed on rank", loop="wrapped"),
    *(_watched(fault) for fault in DEATHS_OF_PARTS),
    replace(RESIZES[0], loop="wrapped"),
)
"""What befalls ranks that train with ``DistributedDataParallel`` on a watched group: all that befalls ranks, but for places inside of a
data plane of hvdlab's, which a watched group has not. The same wrapped model trains on afterwards."""

ENDS_GLOO = "a rank gives another shape"
"""The fault that Gloo itself answers with the end of the process that gets more bytes than it expects."""
