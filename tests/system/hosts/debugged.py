"""A pool over two hosts whose far rank is debugged from here: ``python debugged.py HOSTS``.

Prints its findings, in JSON.
"""

from __future__ import annotations

import json
import queue
import socket
import sys
from collections.abc import Callable
from typing import Any

from hvdlab.kernel_ext.notebook.debugger.hub import connections_of
from hvdlab.kernel_ext.notebook.pool import Pool
from hvdlab.kernel_ext.wire.debug import DebugOpened, FromServer

CELL = "import socket\nhere = socket.gethostname()\nshown = here.upper()\nprint(shown)\n"
FILE = "/tmp/ipykernel_1/1.py"
PATIENCE = 60

SUM = """\
import os
import numpy as np
import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.types import ReduceOp
context.init()
float(hvd.allreduce(np.full(1, 1.0 + int(os.environ["RANK"])), op=ReduceOp.SUM)[0])
"""

Json = dict[str, Any]


class FarDebugger:
    """Session with the debug server of one rank, by the pool's mail."""

    def __init__(self, pool: Pool, rank: int) -> None:
        self._rank, self._seq = rank, 0
        self._mail: queue.SimpleQueue[FromServer | str] = queue.SimpleQueue()
        self._session = connections_of(pool.client).session(self)
        self._session.open(rank)
        opened = self._mail.get(timeout=PATIENCE)
        assert isinstance(opened, DebugOpened), opened
        assert not opened.error

    def heard(self, rank: int, mail: FromServer) -> None:
        self._mail.put(mail)

    def gone(self, rank: int, reason: str) -> None:
        self._mail.put(reason)

    def ask(self, command: str, **arguments: object) -> Json:
        """Send a request and return its answer."""
        self._seq += 1
        seq = self._seq
        request = {"type": "request", "seq": seq, "command": command, "arguments": arguments}
        self._session.send(self._rank, json.dumps(request).encode())
        return self.wait(lambda one: one["type"] == "response" and one["request_seq"] == seq)

    def wait(self, wanted: Callable[[Json], bool]) -> Json:
        """Return the next such message, and drop those before it."""
        while True:
            mail = self._mail.get(timeout=PATIENCE)
            assert not isinstance(mail, str | DebugOpened), mail
            message: Json = json.loads(mail.message)
            if wanted(message):
                return message


def main(hosts: str) -> Json:
    pool = Pool.start(2, launcher="mpi", hosts=hosts, timeout=90)
    try:
        return {"sums": list(pool.run(SUM)), **look(pool, FarDebugger(pool, 1))}
    finally:
        pool.stop()


def look(pool: Pool, debugger: FarDebugger) -> Json:
    assert debugger.ask("initialize", adapterID="x", pathFormat="path")["success"]
    assert debugger.ask("attach", justMyCode=True)["success"]
    debugger.ask("setBreakpoints", source={"path": FILE}, breakpoints=[{"line": 3}])
    debugger.ask("configurationDone")
    run = pool.start_run(CELL, file=FILE)
    thread = debugger.wait(lambda one: one.get("event") == "stopped")["body"]["threadId"]
    frame = debugger.ask("stackTrace", threadId=thread)["body"]["stackFrames"][0]
    value = debugger.ask("evaluate", expression="here", frameId=frame["id"])["body"]["result"]
    debugger.ask("terminate")
    results = run.wait(PATIENCE)
    return {
        "here": socket.gethostname(),
        "line": frame["line"],
        "value": value,
        "ok": results.ok,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
