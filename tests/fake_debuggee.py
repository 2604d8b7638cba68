"""A pool's connection with one rank behind it, whose debug server answers every request and remembers what it got."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from hvdlab.collectives.client import Membership
from hvdlab.kernel_ext.debugger.messages import Close, Open, Opened, Said, decode_to_server
from hvdlab.kernel_ext.payloads import encode

Json = dict[str, Any]


class FakeDebuggee:
    """Stands where a relay needs a client.

    Attributes:
        mail: What came for the rank, in order: ``"open"``, ``"close"``, or the command of a request.
        error: What the debug server refuses a session with, if anything.
        before_answer: Called before it answers a request.
    """

    def __init__(self) -> None:
        self.mail: list[str] = []
        self.error = ""
        self.before_answer: Callable[[], object] = lambda: None
        self._deliver: Callable[[int, bytes], None] = lambda rank, body: None

    def on_mail(self, topic: str, deliver: Callable[[int, bytes], None]) -> None:
        self._deliver = deliver

    def on_membership(self, changed: Callable[[Membership], None]) -> None:
        """The rank stays."""

    def post(self, topic: str, body: bytes, ranks: Sequence[int]) -> None:
        mail = decode_to_server(body)
        if isinstance(mail, Open):
            self.mail.append("open")
            self._deliver(ranks[0], encode(Opened(mail.session, self.error)))
        elif isinstance(mail, Close):
            self.mail.append("close")
        else:
            request: Json = json.loads(mail.message)
            self.mail.append(request["command"])
            self.before_answer()
            answer = {"type": "response", "request_seq": request["seq"], "command": request["command"]}
            said = json.dumps({**answer, "seq": 1, "success": True}).encode()
            self._deliver(ranks[0], encode(Said(mail.session, said)))
