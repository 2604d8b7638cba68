"""The coordinator of a job dies: another one takes over, and ranks that can go on do."""

from __future__ import annotations

import os
import sys

from integration.runner.conftest import Launcher

SCRIPT = """
    import contextlib, os, pathlib, signal, sys, time
    import numpy as np
    import hvdlab.numpy as hvd
    from hvdlab.collectives import context
    from hvdlab.collectives.errors import AbortedError

    def parent(pid):
        return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

    def children(pid):
        for tasks in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # the thread has ended since the listing
                yield from map(int, tasks.read_text().split())

    def kill_the_coordinator():
        launcher = parent(os.getppid())
        # When the thread that has started it ends, another thread has it as its child, perhaps one that was looked at before.
        for _ in range(1000):
            for pid in children(launcher):
                with contextlib.suppress(OSError):
                    if "hvdlab.collectives.coordinator" in pathlib.Path(f"/proc/{pid}/cmdline").read_text():
                        os.kill(pid, signal.SIGKILL)
                        return
            time.sleep(0.01)
        sys.exit("there is no coordinator")

    rank = context.init().rank
    for step in range(3):
        hvd.barrier()
        # Rank 1 must have left it, or else the barrier would be lost there and be over here.
        left = pathlib.Path(f"{__file__}.{step}")
        if rank == 1:
            left.touch()
        else:
            while not left.exists():
                time.sleep(0.001)
            kill_the_coordinator()
        while True:
            try:
                # Of the kind that needs the coordinator: small ones that are waited for do without.
                started = hvd.allreduce_async(np.ones(3), f"x{step}", op=hvd.Sum)
                total = hvd.synchronize(started)
                break
            except AbortedError as error:
                assert error.cause.kind == "coordinator_lost"
        if rank == 0:
            open(f"{__file__}.{step}.told").close()  # until the test has read that the launcher is connected again
    print("done", total[0], context.engine().incarnation)
"""

ELASTIC = """
    import os, pathlib, signal
    import numpy as np
    import hvdlab.numpy as hvd
    from hvdlab.collectives.elastic import ObjectState, run_fn

    def parent(pid):
        return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

    def kill_the_coordinator():
        launcher = parent(os.getppid())
        for tasks in pathlib.Path(f"/proc/{launcher}/task").glob("*/children"):
            for pid in map(int, tasks.read_text().split()):
                if "hvdlab.collectives.coordinator" in pathlib.Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)

    hvd.init()
    killed = False

    def train(state):
        global killed
        while state.batch < 10:
            hvd.allreduce(np.ones(1), op=hvd.Sum, name="x")
            if hvd.rank() == 1 and state.batch == 5 and not killed:
                killed = True
                kill_the_coordinator()
            state.batch += 1
            state.commit()

    state = ObjectState(hvd.broadcast_object, hvd.rank, batch=0)
    run_fn(train, lambda: None)(state)
    print("done", hvd.rank(), hvd.size(), state.batch)
"""


def test_a_job_goes_on(launcher: Launcher) -> None:
    script = launcher.script(SCRIPT)
    lines: list[str] = []
    told = [f"{script}.{step}.told" for step in range(3)]
    for pipe in told:
        os.mkfifo(pipe)
    process = launcher.start("-np", "2", sys.executable, script)
    assert process.stderr is not None
    for pipe in told:
        for line in process.stderr:
            lines.append(line)
            if "another coordinator took over within" in line:
                break
        os.close(os.open(pipe, os.O_WRONLY))
    ran = launcher.finish(process)
    assert ran.code == 0, ran.err
    assert [ran.of(rank) for rank in range(2)] == [["done 2.0 3"]] * 2
    assert len([line for line in lines if line.startswith("hvdlab: ")]) == 3, lines
    assert not ran.launcher


def test_elastic_training_goes_on(launcher: Launcher) -> None:
    ran = launcher.python(2, ELASTIC, flags=("--min-np", "2"))
    assert ran.code == 0, ran.err
    assert [ran.of(rank) for rank in range(2)] == [["done 0 2 10"], ["done 1 2 10"]]
