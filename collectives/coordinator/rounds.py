"""Rounds of negotiation: the submissions of one name that belong together."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from hvdlab.collectives.coordinator.signatures import InternedSignature, LocalDefinition, describe
from hvdlab.collectives.protocol.messages import Party

Extra = tuple[int, ...]
Item = tuple[LocalDefinition, Extra]


class NegotiationRound:
    """Submissions of one name that belong together, at most one from each rank.

    Attributes:
        info, local: Signature and local id of the first submission.
        same_local_id: Whether all ranks that have submitted it did so under the local id of the first.
        submissions: Definitions under which ranks have submitted it, by rank.
        extras: Numbers that came along and can differ between ranks, by rank; ``None`` if there are none.
        payloads: Small tensors that came along, by rank; ``None`` if there are none.
        queued: Later submissions of the same name by rank, oldest first; ``None`` if there never were any.
        since: Time at which the first submission came (monotonic seconds).
        reported: How many times it was reported as stalled.
        stalled: Entry of the decision log about that; 0 until then.
        mismatch_since: Time at which the first signature that differs came, or ``None``.
        absent: Once it is complete, members that have joined and did not submit it.
        priority: Priority of the first submission, or ``None`` if that had none.
    """

    __slots__ = (
        "absent", "extras", "info", "local", "mismatch_since", "payloads", "priority", "queued", "reported", "same_local_id", "since",
        "stalled", "submissions",
    )  # fmt: skip

    def __init__(
        self, info: InternedSignature, local: int, since: float, priority: int | None = None
    ) -> None:
        self.info = info
        self.local = local
        self.same_local_id = True
        self.submissions: dict[int, LocalDefinition] = {}
        # Empty dicts only where they are needed: nearly every round needs none of these three.
        self.extras: dict[int, Extra] | None = None
        self.payloads: dict[int, bytes] | None = None
        self.queued: dict[int, deque[Item]] | None = None
        self.since = since
        self.reported = self.stalled = 0
        self.mismatch_since: float | None = None
        self.absent: tuple[int, ...] = ()
        self.priority = priority


def parties_of(submissions: Mapping[int, LocalDefinition]) -> tuple[Party, ...]:
    """Group the ranks by the request that they made; each group's site is that of its lowest rank."""
    groups: dict[InternedSignature, list[int]] = {}
    for rank in sorted(submissions):
        groups.setdefault(submissions[rank].info, []).append(rank)
    devices = len({info.signature.device for info in groups}) > 1
    return tuple(
        Party(tuple(ranks), describe(info.signature, device=devices), submissions[ranks[0]].site)
        for info, ranks in groups.items()
    )
