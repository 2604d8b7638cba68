"""A process that owns a pool: ``python owner.py RANKS [busy] [cluster] [hard | stuck] [launcher=NAME]``.

It prints ``up``, then sleeps. ``stuck`` leaves rank 0 in C code with the interpreter's lock; ``hard`` is for 4 ranks
that are difficult to end, and leaves a fork of the owner behind.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading

from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.notebook.pool import Pool

STUCK = "import ctypes; open({!r}, 'w').close(); ctypes.PyDLL(None).sleep(60)"
CHILDREN = (
    "import os, subprocess; subprocess.Popen(['sleep', '60']); os.fork() or __import__('time').sleep(60)"
)


def make_it_hard(pool: Pool) -> None:
    """Rank 0 holds the interpreter's lock, rank 1 is stopped, rank 2 has children, rank 3 ignores SIGTERM."""
    pool.run(CHILDREN, ranks=[2])
    pool.run("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)", ranks=[3])
    os.kill(next(status.pid for status in pool.status() if status.rank == 1), signal.SIGSTOP)
    stick(pool)
    if os.fork() == 0:
        threading.Event().wait(60)


def stick(pool: Pool) -> None:
    """Let rank 0 hold the interpreter's lock."""
    with tempfile.TemporaryDirectory() as directory:
        now = f"{directory}/now"
        os.mkfifo(now)
        pool.start_run(STUCK.format(now), ranks=[0])
        with open(now) as told:
            told.read()


def main() -> None:
    words = sys.argv[2:]
    launcher = next((w.partition("=")[2] for w in words if w.startswith("launcher=")), "local")
    pool = Pool.start(int(sys.argv[1]), launcher=launcher)
    pool.run("1")
    if "cluster" in words:
        assert pool.cluster is not None
    if "busy" in words:
        pool.start_run("while True: pass")
    if "stuck" in words:
        stick(pool)
    if "hard" in words:
        make_it_hard(pool)
    print("up", flush=True)
    if "exit" not in words:
        # Not an event's wait: an interrupt that comes as that begins would be noticed at its end.
        nothing = threading.Condition()
        with nothing:
            Deadline(60).wait_for(nothing, lambda: False)


if __name__ == "__main__":
    main()
