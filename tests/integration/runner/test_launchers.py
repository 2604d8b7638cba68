"""``hvdlab run --launcher``: ours, one that an installed package offers, and refused ones."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from integration.runner.conftest import Launcher
from support.fakes.popen_launcher import offer

ALLREDUCE = """
    import os, sys
    import numpy as np
    import hvdlab.numpy as hvd
    from hvdlab.collectives import context
    engine = context.init()
    print(engine.rank, int(hvd.allreduce(np.full(3, engine.rank + 1), op=hvd.Sum)[0]), os.getpriority(0, 0))
    sys.exit(5 * engine.rank)
"""


@pytest.fixture
def offered(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a command that finds the package that offers a launcher."""
    offer(tmp_path)
    places = (tmp_path, Path(__file__).parents[2], *filter(None, [os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": os.pathsep.join(map(str, places))}


def test_a_package_offers_a_launcher(launcher: Launcher, offered: dict[str, str]) -> None:
    nice = os.getpriority(os.PRIO_PROCESS, 0) + 1
    ran = launcher.python(
        2, ALLREDUCE, flags=("--launcher", "popen", "--launcher-option", "nice=1", "--verbose"), env=offered
    )
    assert ran.code == 5, ran.err
    assert [ran.of(rank) for rank in range(2)] == [[f"0 3 {nice}"], [f"1 3 {nice}"]]
    assert "popen: ranks 0,1" in ran.launcher
    assert "rank 1 on popen-host failed first: exit code 5" in ran.launcher
    assert "can't be" not in ran.err


def test_a_rank_of_its_that_is_killed_ends_the_others(launcher: Launcher, offered: dict[str, str]) -> None:
    program = "if [ $RANK = 1 ]; then kill -SEGV $$; fi; exec sleep 1000"
    ran = launcher.run("-np", "2", "--launcher", "popen", "bash", "-c", program, env=offered)
    assert ran.code == 139
    assert "rank 1 on popen-host failed first: killed by SIGSEGV (segmentation fault)" in ran.launcher


def test_it_is_asked_only_for_what_it_can_do(launcher: Launcher, offered: dict[str, str]) -> None:
    flags = ("-np", "2", "--launcher", "popen")
    ran = launcher.run(*flags, "--min-np", "1", "true", env=offered)
    assert ran.code == 2
    assert ran.err == (
        "hvdlab: ranks of the launcher `popen` can't be started one by one, because its queue gives out whole jobs; run "
        "the job without --min-np, or choose another one by --launcher.\n"
    )
    ran = launcher.run(*flags, "--launcher-option", "colour=red", "true", env=offered)
    assert (ran.code, ran.launcher) == (
        2,
        ["the launcher `popen` has no option `colour`; it takes `nice`."],
    )
    ran = launcher.run("-np", "2", "--launcher", "slrum", "true", env=offered)
    assert ran.code == 2
    assert ran.launcher[0].startswith("there is no launcher 'slrum'; choose one of local, ssh, ")
    ran = launcher.run("-np", "2", "--launcher", "broken", "true", env=offered)
    assert ran.code == 1
    assert "`broken` (no_such_module:Launcher) can't be used: ModuleNotFoundError" in ran.launcher[0]


def test_ours_can_be_named(launcher: Launcher) -> None:
    for flags in (("--launcher", "local"), ("--launcher", "SSH", "-H", "localhost:2")):
        ran = launcher.run("-np", "2", *flags, sys.executable, "-c", "print('up')")
        assert (ran.code, sorted(ran.out.splitlines()), ran.err) == (
            0,
            ["[0]<stdout>:up", "[1]<stdout>:up"],
            "",
        )
    ran = launcher.run("-np", "1", "--launcher", "ssh", "true")
    assert (ran.code, ran.launcher) == (2, ["the launcher `ssh` needs hosts; name them as hosts='a:4,b:4'."])
    ran = launcher.run("-np", "1", "--launcher", "mpi", "--launcher-option", "a=b", "true")
    assert (ran.code, ran.launcher) == (2, ["the launcher `mpi` has no option `a`; it takes none."])
    ran = launcher.run("-np", "1", "--launcher", "local", "-H", "elsewhere", "true")
    assert ran.code == 2
    assert "needs a launcher that reaches other hosts" in ran.launcher[0]
