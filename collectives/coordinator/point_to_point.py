"""Point-to-point messages: sends, receives from a given rank, and receives from any rank.

A message of one member to another is a round that only these two have to submit. A receive from any rank is a round of its own as
long as it waits, with the receiver alone in its signature. A *channel* (its name and the receiving rank) defines which messages such a
receive accepts. A message that only its sender has submitted and a receive from any rank of its channel are matched: the receive
becomes the receiver's part of the message's round. The order then names the sender.

* A receive that names the sender gets a message before those from any rank do, as it is in the message's round from the start.
* Of several messages the oldest is received, by the oldest receive from any rank.
* So a channel never has both a message that waits for its receiver and a receive from any rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from hvdlab.collectives.coordinator.signatures import Channel, NegotiationRound


class MessageChannels:
    """Table of the incomplete rounds of messages and of receives from any rank, by channel, oldest first."""

    def __init__(self) -> None:
        #: Rounds by channel; dicts as ordered sets, from which a round is removed in one step.
        self._rounds: dict[Channel, dict[NegotiationRound, None]] = {}

    def add(self, current: NegotiationRound) -> None:
        """Add a round, if it has a channel."""
        if current.info.channel is not None:
            self._rounds.setdefault(current.info.channel, {})[current] = None

    def remove(self, current: NegotiationRound) -> None:
        """Remove a round that is complete, or ends before that."""
        channel = current.info.channel
        if channel is not None:
            del self._rounds[channel][current]
            if not self._rounds[channel]:
                del self._rounds[channel]

    def match(self, current: NegotiationRound) -> tuple[NegotiationRound, NegotiationRound] | None:
        """Return the message and the receive from any rank that wait for each other, one of them ``current``; ``None`` without such a pair."""
        channel = current.info.channel
        # A message about which its two ranks disagree gets a verdict, which a receive from any rank must not
        # get with it.
        if channel is None or current.mismatch_since is not None:
            return None
        received: NegotiationRound | None = current
        sent: NegotiationRound | None = current
        if current.info.from_any:
            sent = self._oldest_sent(channel)
        elif waits_for_receiver(current):
            received = self._oldest_received(channel)
        else:
            return None
        return None if received is None or sent is None else (sent, received)

    def _oldest_sent(self, channel: Channel) -> NegotiationRound | None:
        """Return the oldest message on a channel that waits for its receiver; ``None`` if none does."""
        waiting = self._rounds.get(channel, ())
        return next(
            (each for each in waiting if each.mismatch_since is None and waits_for_receiver(each)), None
        )

    def _oldest_received(self, channel: Channel) -> NegotiationRound | None:
        """Return the oldest receive from any rank on a channel; ``None`` if there is none."""
        waiting = self._rounds.get(channel, ())
        return next((each for each in waiting if each.mismatch_since is None and each.info.from_any), None)

    def validate(self, rounds: Iterable[NegotiationRound]) -> None:
        """Assert the invariants that hold between calls; ``rounds`` are all incomplete ones."""
        for channel in self._rounds:
            assert self._oldest_sent(channel) is None or self._oldest_received(channel) is None, channel
        on_channels = {current for current in rounds if current.info.channel is not None}
        assert {current for waiting in self._rounds.values() for current in waiting} == on_channels


def waits_for_receiver(current: NegotiationRound) -> bool:
    """Return whether a round is a message that only its sender has submitted."""
    return not current.info.from_any and current.submissions.keys() == {*current.info.between[:1]}


def give_to_receiver(sent: NegotiationRound, received: NegotiationRound, now: float) -> None:
    """Add a receive from any rank to a message's round, as the receiver's part; the round is complete then.

    If the receive does not fit the message, the round has a mismatch from ``now`` on.
    """
    (target, defined), *_ = received.submissions.items()
    sent.submissions[target] = defined
    # The receiver has submitted it under the local id of another signature.
    sent.same_local_id = False
    # From these numbers the receiver learns which rank has sent.
    sent.extras = dict.fromkeys(sent.info.between, sent.info.between[:1])
    if not defined.info.may_get(sent.info):
        sent.mismatch_since = now


def lost_messages(
    waiting: Iterable[tuple[NegotiationRound, tuple[int, ...]]], idle: AbstractSet[int]
) -> dict[str, list[int]]:
    """Return the messages that wait in vain, since their other rank runs no cell.

    A receive from any rank is lost only if all ranks that can send run no cell.

    Args:
        waiting: Undecided rounds, with the ranks that are missing.
        idle: Ranks without a cell.

    Returns:
        The idle ranks that are missing, by name of the message.
    """
    lost: dict[str, list[int]] = {}
    for current, missing in waiting:
        absent, info = [rank for rank in missing if rank in idle], current.info
        if info.between and absent and (not info.from_any or len(absent) == len(missing)):
            lost[info.name] = absent
    return lost
