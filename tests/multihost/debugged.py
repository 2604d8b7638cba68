"""A pool over two hosts whose far rank is debugged through a port here: ``python debugged.py HOSTS``.

Prints what was found, in JSON.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from dap_port import DapPort
from hvdlab.kernel_ext.debugger.relay import Relay
from hvdlab.kernel_ext.pool import Pool

CELL = "import socket\nhere = socket.gethostname()\nshown = here.upper()\nprint(shown)\n"
FILE = "/tmp/ipykernel_1/1.py"


SUM = """\
import os
import numpy as np
import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.dtypes import ReduceOp
context.init()
float(hvd.allreduce(np.full(1, 1.0 + int(os.environ["RANK"])), op=ReduceOp.SUM)[0])
"""


def main(hosts: str) -> dict[str, Any]:
    pool = Pool.start(2, launcher="mpi", hosts=hosts, timeout=90)
    try:
        sums = list(pool.run(SUM))
        relay = Relay(pool.client, 1)
        try:
            return {"sums": sums, **look(pool, relay.port)}
        finally:
            relay.close()
    finally:
        pool.stop()


def look(pool: Pool, port: int) -> dict[str, Any]:
    with DapPort(port) as debugger:
        assert debugger.ask("initialize", adapterID="x", pathFormat="path")["success"]
        assert debugger.ask("attach", justMyCode=True)["success"]
        points = [{"line": 3}]
        debugger.ask("setBreakpoints", source={"path": FILE}, breakpoints=points)
        debugger.ask("configurationDone")
        run = pool.start_run(CELL, file=FILE, line_offset=0)
        thread = debugger.wait(lambda one: one.get("event") == "stopped")["body"]["threadId"]
        frame = debugger.ask("stackTrace", threadId=thread)["body"]["stackFrames"][0]
        value = debugger.ask("evaluate", expression="here", frameId=frame["id"])["body"]["result"]
        debugger.ask("terminate")
        results = run.wait(60)
    return {
        "here": socket.gethostname(),
        "line": frame["line"],
        "value": value,
        "ok": results.ok,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
