"""Messages between two ranks of a group: send, receive, and receive from any rank.

Only the two ranks of a message submit it, and no other rank hears of it. Messages of one direction and tag arrive in the order in
which they are sent.
"""

from __future__ import annotations

from typing import Any

import torch

from hvdlab.collectives.dtypes import OpKind
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.torch.c10d.arguments import require_dense, require_member, require_tag, single
from hvdlab.torch.c10d.calls import Calls, Submission
from hvdlab.torch.c10d.tensors import array_of, core_dtype, writable_array
from hvdlab.torch.c10d.work import HvdlabWork


class Messages:
    """Sends and receives one rank's messages in a group. Ranks are numbers in the group.

    Args:
        calls: The group's operations.
        rank: This rank.
    """

    def __init__(self, calls: Calls, rank: int) -> None:
        self._calls, self._rank = calls, rank
        self._members = calls.members

    def send(self, tensors: Any, target: int, tag: int) -> HvdlabWork:
        """Send one tensor, which must not change until the message has been received."""
        self._require_other("send", target, tag)
        return self._submit("send", [single("send", tensors)], self._rank, target, tag)

    def receive(self, tensors: Any, source: int, tag: int) -> HvdlabWork:
        """Receive the next message with this tag from a rank, into a tensor."""
        self._require_other("recv", source, tag)
        return self._submit("recv", [single("recv", tensors)], source, self._rank, tag)

    def receive_from_any(self, tensors: Any, tag: int) -> HvdlabWork:
        """Receive the next message with this tag from any rank; the work's ``source_rank()`` says which, once it is there."""
        require_tag("recv", tag)
        given = [single("recv", tensors)]
        submission = self._moved(given, None, self._rank, tag)
        name = self._name("any", self._rank, tag)
        return self._calls.submit("recv", given, submission, name=name, source=None)

    def _require_other(self, operation: str, other: int, tag: int) -> None:
        require_member(operation, other, len(self._members))
        require_tag(operation, tag)
        if other == self._rank:
            raise InvalidRequestError(f"{operation}: rank {other} can't send to itself.")

    def _submit(
        self, operation: str, tensors: list[torch.Tensor], source: int, target: int, tag: int
    ) -> HvdlabWork:
        submission = self._moved(tensors, source, target, tag)
        name = self._name(source, target, tag)
        return self._calls.submit(operation, tensors, submission, name=name, source=source)

    def _moved(self, tensors: list[torch.Tensor], source: int | None, target: int, tag: int) -> Submission:
        """The requests that send or receive tensors; the ``source`` is ``None`` for any rank."""
        submission, receiver = Submission(), self._members[target]
        ranks = (receiver,) if source is None else (self._members[source], receiver)
        sends = source == self._rank
        for tensor in tensors:
            require_dense(tensor, "send" if sends else "recv")
            array, copy = (array_of(tensor), None) if sends else writable_array(tensor)
            request = Request(
                OpKind.SENDRECV,
                input=array,
                output=None if sends else array,
                dtype=core_dtype(tensor),
                root=-1 if source is None else ranks[0],
                ranks=ranks,
                channel=f"{self._calls.name_in_core}.{tag}",
            )
            submission.add(request, copy)
        return submission

    def _name(self, source: int | str, target: int, tag: int) -> str:
        """The core's name for messages of one direction and tag, or for a rank's receives from any rank."""
        return f"{self._calls.name_in_core}.{source}>{target}.{tag}"
