"""Transfer of values from ranks, without ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import pytest

from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.notebook.requests import RankRequests
from hvdlab.kernel_ext.notebook.variables.transfer import pull
from hvdlab.kernel_ext.wire.channel import Payload, RankReply, RankRequest
from hvdlab.kernel_ext.wire.values import ReleaseTransfer


class InterruptedRequests:
    """Requests that the user interrupts, before or after the ticket is known."""

    def __init__(self, *, has_ticket: bool) -> None:
        self._has_ticket = has_ticket
        self.sent: list[Payload] = []

    def ask(
        self, make: Callable[[int], RankRequest], ranks: Sequence[int], deadline: Deadline
    ) -> dict[int, RankReply]:
        if self._has_ticket:
            make(7)
        raise KeyboardInterrupt

    def send(self, payload: Payload, ranks: Sequence[int]) -> None:
        self.sent.append(payload)


@pytest.mark.parametrize(
    ("has_ticket", "sent"), [(False, []), (True, [ReleaseTransfer(7)])], ids=["before", "after"]
)
def test_interrupted_pull_releases_transfer_that_was_opened(has_ticket: bool, sent: list[Payload]) -> None:
    requests = InterruptedRequests(has_ticket=has_ticket)
    with pytest.raises(KeyboardInterrupt):
        pull(cast(RankRequests, requests), "loss", [0, 1])
    assert requests.sent == sent
