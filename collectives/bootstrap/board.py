"""Where rank 0 puts its card, and where the others look for it."""

from __future__ import annotations

from typing import Protocol

from hvdlab.collectives.bootstrap.card import Card
from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.errors import StartError


class Board(Protocol):
    """A place that all ranks of a job can see, and no process for which the card is not meant."""

    def publish(self, data: bytes) -> None:
        """Show ``data`` in place of what was there. Raises ``StartError`` if that can't be done."""

    def read(self, seconds: float) -> bytes | None:
        """What is there; waits up to ``seconds`` for something, then returns ``None``. Raises ``StartError`` if it can't be read."""

    def pause(self, seconds: float) -> None:
        """Wait up to ``seconds`` for something else than what is there; may return too early."""

    def withdraw(self) -> None:
        """Remove what :meth:`publish` showed. Does not raise."""

    def close(self) -> None:
        """Free what reading needed. Does not raise; idempotent."""

    @property
    def place(self) -> str:
        """The place in words, for error texts."""
        ...

    @property
    def advice(self) -> str:
        """What to do if rank 0's card does not appear though rank 0 is there."""
        ...


_LOOK_SECONDS = 1.0


def await_card(board: Board, size: int, deadline: Deadline, secret: str = "") -> Card:
    """Wait for the card of a coordinator that runs. A card that an earlier job has left is passed over.

    Args:
        board: The board on which rank 0 publishes it.
        size: Number of ranks of the job.
        deadline: Limit for the wait.
        secret: The secret that the user has given to all ranks, if any; the card must be sealed with it.

    Raises:
        StartError: There is none in time, rank 0 says that it could not start, or the seal is wrong.
    """
    old: bytes | None = None
    while not deadline.expired:
        left = deadline.remaining() or 0.0
        data = board.read(min(left, _LOOK_SECONDS))
        if data is not None and data != old:
            card = Card.decode(data, secret)
            if card.error:
                raise StartError(f"Rank 0 could not start the coordinator: {card.error}")
            if card.size != size:
                raise StartError(
                    f"Rank 0's job has {card.size} ranks, this one {size}: two jobs use one {board.place}."
                )
            if card.address and card.answers(left):
                return card
            old = data
        elif data is not None:
            board.pause(left)
    ended = "" if old is None else " (one that is there is of a coordinator that does not answer from here)"
    raise StartError(
        f"Rank 0 has not said where the coordinator is within {deadline.seconds:g} s{ended}: it has not come to "
        f"hvd.init(), or has ended. Looked in {board.place}. {board.advice}"
    )
