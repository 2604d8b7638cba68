"""A rank alone in a process: runs the cells of standard input (JSON) and writes what the pool saw."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import msgspec
from ipykernel.zmqshell import ZMQInteractiveShell
from traitlets.config import Config

from hvdlab.collectives import context


def main() -> None:
    from tests.kernel_ext.rank.conftest import Rank

    cells = json.load(sys.stdin)
    out = os.dup(1)
    context.adopt = lambda engine: None
    config = Config()
    config.HistoryManager.enabled = False
    rank = Rank(ZMQInteractiveShell.instance(config=config), capture_fds=False)
    found = [_seen(rank.run(cell)) for cell in cells]
    rank.close()
    with os.fdopen(out, "w") as file:
        json.dump(found, file)


def _seen(ran: Any) -> dict[str, Any]:
    return {
        "error": ran.done.error.ename if ran.done.error else None,
        "stdout": ran.text(),
        "stderr": ran.text("stderr"),
        "displays": [{"data": d.data, "metadata": d.metadata} for d in ran.displays],
        "value": msgspec.to_builtins(ran.done.value_repr),
    }
