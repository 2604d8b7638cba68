"""Elastic jobs: a lost rank comes back under its number while the others live on."""

from __future__ import annotations

import os

import hvdlab
from integration.runner.conftest import Launcher

LONG = 20.0
"""Seconds within which ranks that come, come one after the other."""

SCRIPT = """
    import os, signal, sys, time
    import numpy as np
    import hvdlab.numpy as hvd
    from hvdlab.collectives.elastic import ObjectState, run_fn

    hvd.init()
    born = int(os.environ["HVDLAB_RANK"])
    how, again = sys.argv[1:]
    print("pid", os.getpid())

    def train(state):
        while state.batch < 10 or hvd.size() < int(again):
            hvd.allreduce(np.ones(1), op=hvd.Sum, name="x")
            if born == 1 and state.batch >= 5 and (how == "always" or not os.path.exists("died")):
                open("died", "w").close()
                if how == "raise":
                    raise ValueError("boom")
                os.kill(os.getpid(), signal.SIGKILL)
            state.batch += 1
            state.commit()
            time.sleep(0.05)

    state = ObjectState(hvd.broadcast_object, hvd.rank, batch=0)
    run_fn(train, lambda: None)(state)
    print("done", hvd.rank(), hvd.size())
"""


def test_a_lost_rank_comes_back(launcher: Launcher) -> None:
    ran = launcher.python(3, SCRIPT, "kill", "3", flags=("--min-np", "2"))
    assert ran.code == 0, ran.err
    assert ran.launcher == ["rank 1: killed by SIGKILL; starting it anew (1 of 10)"]
    assert [ran.of(rank)[-1] for rank in range(3)] == ["done 0 3", "done 2 3", "done 1 3"]
    assert [len([line for line in ran.of(rank) if line.startswith("pid")]) for rank in range(3)] == [1, 2, 1]


def test_an_exception_counts_as_a_loss(launcher: Launcher) -> None:
    ran = launcher.python(2, SCRIPT, "raise", "2", flags=("--min-np", "1"))
    assert ran.code == 0, ran.err
    assert ran.launcher == ["rank 1: exit code 1; starting it anew (1 of 10)"]


def test_the_others_go_on_when_the_limit_is_reached(launcher: Launcher) -> None:
    ran = launcher.python(3, SCRIPT, "always", "2", flags=("--min-np", "2", "--reset-limit", "0"))
    assert ran.code == 0, ran.err
    assert ran.launcher == ["rank 1: killed by SIGKILL; going on without it"]
    assert [ran.of(rank)[-1] for rank in (0, 2)] == ["done 0 2", "done 1 2"]


def test_too_few_are_left(launcher: Launcher) -> None:
    ran = launcher.python(2, SCRIPT, "always", "2", flags=("--min-np", "2", "--reset-limit", "1"))
    assert ran.code == 137
    assert "rank 1 failed first: killed by SIGKILL" in ran.launcher[1]


NEVER_JOINS = """
    import os, sys, time

    rank, size = os.environ["HVDLAB_RANK"], int(os.environ["HVDLAB_SIZE"])
    if rank in sys.argv[1:]:
        time.sleep(1000)
    import numpy as np
    import hvdlab.numpy as hvd
    from hvdlab.collectives.elastic import ObjectState, run_fn

    # The time runs from the first that comes, so the others come with it.
    open("ready" + rank, "w").close()
    while len([name for name in os.listdir() if name.startswith("ready")]) < size - len(sys.argv[1:]):
        time.sleep(0.01)
    hvd.init()

    def train(state):
        while state.batch < 3:
            hvd.allreduce(np.ones(1), op=hvd.Sum, name="x")
            state.batch += 1
            state.commit()

    run_fn(train, lambda: None)(ObjectState(hvd.broadcast_object, hvd.rank, batch=0))
    print("done", hvd.rank(), hvd.size())
"""


def test_the_others_begin_without_a_rank_that_never_joins(launcher: Launcher) -> None:
    ran = launcher.python(
        3, NEVER_JOINS, "1", flags=("--min-np", "2"), env={"HVDLAB_START_TIMEOUT": f"{LONG:g}"}
    )
    assert ran.launcher == [f"rank 1 did not come to hvd.init() within {LONG:g} s; going on without it"]
    assert ran.code == 0, ran.err
    assert [ran.of(rank) for rank in range(3)] == [["done 0 2"], [], ["done 1 2"]]


def test_too_few_ranks_join(launcher: Launcher) -> None:
    ran = launcher.python(2, NEVER_JOINS, "1", flags=("--min-np", "2"), env={"HVDLAB_START_TIMEOUT": "2"})
    assert ran.launcher == ["rank 1 did not come to hvd.init() within 2 s, and --min-np is 2"]
    assert ran.code == 1


def test_a_function_returns_what_the_ranks_that_are_left_did() -> None:
    def work() -> int:
        import hvdlab.numpy as hvd
        from hvdlab.collectives import context

        rank = context.init().rank
        hvd.barrier()
        if rank == 1:
            os._exit(3)
        return rank

    assert hvdlab.run(work, np=3, min_np=2, reset_limit=0) == [0, 2]
