"""A rank alone in a fresh interpreter, for decisions that a process makes once: plot backends, progress bars,
warnings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
from ipykernel.zmqshell import ZMQInteractiveShell
from traitlets.config import Config

from hvdlab.collectives import context


def run_in_new_rank(*cells: str, preload: str = "") -> list[dict[str, Any]]:
    """Run cells, after the statements ``preload``; return the pool's view of each."""
    path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    script = f"{preload}\nfrom tests.support.ranks.alone import main\nmain()"
    ran = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(cells),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    )
    assert ran.returncode == 0, ran.stderr
    found: list[dict[str, Any]] = json.loads(ran.stdout)
    return found


def main() -> None:
    """In the new interpreter: run the cells of standard input, write the pool's view to standard output."""
    from integration.kernel_ext.rank.conftest import Rank

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
