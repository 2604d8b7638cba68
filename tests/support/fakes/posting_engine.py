"""An engine that gives the mail of a rank's output to a function of the test."""

from __future__ import annotations

from collections.abc import Callable


class PostingEngine:
    """Engine of a rank that has only output.

    Args:
        take: ``take(topic, body)`` gets each message.
        size: Number of ranks.
    """

    def __init__(
        self, take: Callable[[str, bytes], object] = lambda topic, body: None, size: int = 1
    ) -> None:
        self._take, self.size = take, size

    def post(self, topic: str, body: bytes) -> None:
        """Give a message to the function."""
        self._take(topic, body)
