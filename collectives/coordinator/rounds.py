"""Rounds of submissions."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from hvdlab.collectives.coordinator.signatures import InternedSignature, LocalDefinition, describe
from hvdlab.collectives.protocol.messages import Party

Extra = tuple[int, ...]
Item = tuple[LocalDefinition, Extra]


class NegotiationRound:
    """The submissions of one name that belong together.

    Attributes:
        info, local: Signature and local id of the first submission.
        agree: Once it is complete, whether all members have submitted it under the same local id.
        heads: What each rank has submitted, by rank.
        extras: The numbers that came along and may differ between ranks, by rank; ``None`` if there are none.
        payloads: Small tensors that came along, by rank; ``None`` if there are none.
        behind: Later submissions of the same name, oldest first; ``None`` if there never were any.
        since: When the first submission came.
        reported: How often it was reported as stalled.
        disputed: When the first signature that differs came, or ``None``.
        absent: Once it is complete, members that have joined and did not submit it.
        priority: That of the first submission, or ``None`` if that had none.
    """

    __slots__ = (
        "absent", "agree", "behind", "disputed", "extras", "heads", "info", "local", "payloads", "priority", "reported",
        "since",
    )  # fmt: skip

    def __init__(
        self, info: InternedSignature, local: int, since: float, priority: int | None = None
    ) -> None:
        self.info = info
        self.local = local
        self.agree = True
        self.heads: dict[int, LocalDefinition] = {}
        self.extras: dict[int, Extra] | None = None
        self.payloads: dict[int, bytes] | None = None
        self.behind: dict[int, deque[Item]] | None = None
        self.since = since
        self.reported = 0
        self.disputed: float | None = None
        self.absent: tuple[int, ...] = ()
        self.priority = priority


def parties_of(heads: Mapping[int, LocalDefinition]) -> tuple[Party, ...]:
    """The ranks, grouped by what they asked for; each group's site is that of its lowest rank."""
    groups: dict[InternedSignature, list[int]] = {}
    for rank in sorted(heads):
        groups.setdefault(heads[rank].info, []).append(rank)
    devices = len({info.signature.device for info in groups}) > 1
    return tuple(
        Party(tuple(ranks), describe(info.signature, device=devices), heads[ranks[0]].site)
        for info, ranks in groups.items()
    )
