"""Messages between two ranks of a group: send, receive, and receive from any rank.

Only the two ranks of a message submit it, and no other rank hears of it. Messages of one direction and tag arrive in the order in
which they are sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from hvdlab.collectives.dtypes import OpKind
from hvdlab.collectives.engine.request import Request
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.sites import call_site
from hvdlab.torch.c10d.any_source import AnySourceWork
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
        self._members, self._any_source = calls.members, calls.world.any_source

    def send(self, tensors: Any, target: int, tag: int) -> HvdlabWork:
        """Send one tensor, which must not change until the message has been received."""
        self._require_other("send", target, tag)
        work = self._submit("send", [single("send", tensors)], self._rank, target, tag)
        self._count(self._any_source.sends, work, target, tag)
        return work

    def receive(self, tensors: Any, source: int, tag: int) -> HvdlabWork:
        """Receive the next message with this tag from a rank, into a tensor."""
        self._require_other("recv", source, tag)
        given = [single("recv", tensors)]
        # Count before submitting: a receive from any source that is matched meanwhile must get the message after this one.
        self._any_source.receives(self._calls.counted_as, self._members[source], tag)
        work = self._submit("recv", given, source, self._rank, tag)
        self._count(self._any_source.receives, work, source, tag, counted=True)
        return work

    def receive_from_any(self, tensors: Any, tag: int) -> AnySourceWork:
        """Receive the next message with this tag from any rank; the work's ``source_rank()`` says which, once it is there."""
        calls = self._calls
        calls.require_usable("recv")
        require_tag("recv", tag)
        given, site = [single("recv", tensors)], call_site(2)
        require_dense(given[0], "recv")

        def submit(work: AnySourceWork, rank: int) -> None:
            source = self._members.index(rank)
            submission = self._moved(given, source, self._rank)
            for request in submission.requests:
                request.label = calls.recorded_as("recv")
            work.set_source(submission.deliver(), source)
            self._count(self._any_source.receives, work, source, tag, counted=True)
            calls.begin(work, submission, self._name(source, self._rank, tag), site, announce=False)
            calls.engine.flush()

        work = AnySourceWork(
            self._any_source,
            calls.counted_as,
            self._members,
            tag,
            submit,
            site,
            calls.engine,
            calls.process_set,
            calls.label("recv from any rank"),
            given,
            None,
            calls.seconds,
        )
        work.record("hvdlab:recvAnySource", given)
        self._any_source.add(calls.counted_as, self._members, tag, work)
        return work

    def _require_other(self, operation: str, other: int, tag: int) -> None:
        require_member(operation, other, len(self._members))
        require_tag(operation, tag)
        if other == self._rank:
            raise InvalidRequestError(f"{operation}: rank {other} can't send to itself.")

    def _count(
        self,
        count: Callable[[str, int, int, int], None],
        work: HvdlabWork,
        other: int,
        tag: int,
        *,
        counted: bool = False,
    ) -> None:
        """Count a message for receives from any source, unless ``counted`` already; if it fails, discount it."""
        group, rank = self._calls.counted_as, self._members[other]
        if not counted:
            count(group, rank, tag, 1)
        work.on_failure = functools.partial(count, group, rank, tag, -1)

    def _submit(
        self, operation: str, tensors: list[torch.Tensor], source: int, target: int, tag: int
    ) -> HvdlabWork:
        submission = self._moved(tensors, source, target)
        name = self._name(source, target, tag)
        return self._calls.submit(operation, tensors, submission, name=name, source=source)

    def _moved(self, tensors: list[torch.Tensor], source: int, target: int) -> Submission:
        submission, ranks = Submission(), (self._members[source], self._members[target])
        sends = source == self._rank
        for tensor in tensors:
            require_dense(tensor, "send" if sends else "recv")
            array, copy = (array_of(tensor), None) if sends else writable_array(tensor)
            request = Request(
                OpKind.SENDRECV,
                input=array,
                output=None if sends else array,
                dtype=core_dtype(tensor),
                root=ranks[0],
                ranks=ranks,
            )
            submission.add(request, copy)
        return submission

    def _name(self, source: int, target: int, tag: int) -> str:
        """The core's name for messages of one direction and tag."""
        return f"{self._calls.name_in_core}.{source}>{target}.{tag}"
