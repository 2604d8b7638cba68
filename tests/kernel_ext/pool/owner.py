"""A process that owns a pool: ``python owner.py RANKS [busy] [cluster] [launcher=NAME]``. Says ``up``, then sleeps."""

from __future__ import annotations

import sys
import threading

from hvdlab.kernel_ext.pool import Pool


def main() -> None:
    words = sys.argv[2:]
    launcher = next((w.partition("=")[2] for w in words if w.startswith("launcher=")), "local")
    pool = Pool.start(int(sys.argv[1]), launcher=launcher)
    pool.run("1")
    if "cluster" in words:
        assert pool.cluster is not None
    if "busy" in words:
        pool.start_run("while True: pass")
    print("up", flush=True)
    if "exit" not in words:
        threading.Event().wait(60)


if __name__ == "__main__":
    main()
