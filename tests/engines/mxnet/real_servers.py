"""MXNet's own distributed stores: a scheduler, servers and workers on this machine, which run scripts of
``store_scripts.py`` and ``gluon_scripts.py``."""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HANGS_AFTER = 60.0
"""Seconds after which a worker shows where it is, and ends."""


class RealServersFailed(Exception):
    """A process of MXNet's failed or did not end; the text has its output."""


def played_by_mxnet(
    store: str,
    scripts: Sequence[str],
    *,
    workers: int = 2,
    servers: int = 1,
    env: Mapping[str, str] | None = None,
    timeout: float = 100,
) -> list[list[Any]]:
    """Return results of scripts on a store of MXNet's, for each worker; all scripts run on one store, one after the
    other."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    common = {
        **os.environ,
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_NUM_SERVER": str(servers),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": str(HERE),
        **(env or {}),
    }
    roles = ["scheduler", *["server"] * servers, *["worker"] * workers]
    with tempfile.TemporaryDirectory() as folder:
        answers = [Path(folder, f"worker{i}") for i in range(workers)]
        log = Path(folder, "log")
        with log.open("wb") as output:
            arguments = [sys.executable, __file__, store, *scripts]
            processes = []
            for place, role in enumerate(roles):
                answer = str(answers[place - 1 - servers]) if role == "worker" else ""
                processes.append(
                    subprocess.Popen(
                        arguments,
                        env={**common, "DMLC_ROLE": role, "ANSWER": answer},
                        stdout=output,
                        stderr=output,
                    )
                )
            try:
                codes = _ended(processes, timeout)
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
        if set(codes) != {0}:
            raise RealServersFailed(f"{dict(zip(roles, codes, strict=False))}: {log.read_text()[-4000:]}")
        found_by_rank = dict(
            pickle.loads(answer.read_bytes())  # noqa: S301  (our own workers')
            for answer in answers
        )
    return [found_by_rank[rank] for rank in range(workers)]


def _ended(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> list[int | None]:
    """Return their exit codes, as soon as one has failed or all have ended."""
    poll = select.poll()
    waiting = {os.pidfd_open(process.pid): process for process in processes}
    for descriptor in waiting:
        poll.register(descriptor, select.POLLIN)
    try:
        deadline = time.monotonic() + timeout
        left = set(waiting)
        while left and not any(process.poll() for process in processes):
            found = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not found:
                break
            for descriptor, _ in found:
                poll.unregister(descriptor)
                left.discard(descriptor)
                waiting[descriptor].wait()
        return [process.poll() for process in processes]
    finally:
        for descriptor in waiting:
            os.close(descriptor)


def main() -> None:
    import gluon_scripts  # type: ignore[import-not-found]  # mypy knows it as engines.mxnet.gluon_scripts
    import mxnet as mx  # a server or the scheduler stays in here
    import store_scripts  # type: ignore[import-not-found]  # mypy knows it as engines.mxnet.store_scripts

    faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
    kv = mx.kv.create(sys.argv[1])
    scripts = {**vars(store_scripts), **vars(gluon_scripts)}
    results = [scripts[name](kv, store_scripts.Mxnet()) for name in sys.argv[2:]]
    Path(os.environ["ANSWER"]).write_bytes(pickle.dumps((kv.rank, results)))
    kv._barrier()


if __name__ == "__main__":
    main()
