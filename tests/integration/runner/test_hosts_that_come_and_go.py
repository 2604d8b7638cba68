"""Elastic jobs whose hosts are found while they run. Hosts are names that a shell of the test's takes to this machine."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.runner.run_function import run
from integration.runner.conftest import Launcher, Ran

Elastic = Callable[..., Ran]

SHELL = """\
#!/bin/sh
host=$1; shift
[ "$host" = hangs ] && exec sleep 1000
[ -e "refuses-$host" ] && { echo "no route to $host" >&2; touch "refused-$host"; exit 255; }
echo $$ >"shell-$host"
exec sh -c "$*"
"""

SCRIPT = """
    import os, pathlib, sys, time
    import numpy as np
    import hvdlab.numpy as hvd
    from hvdlab.collectives import context
    from hvdlab.collectives.elastic import ObjectState, run_fn

    hvd.init()
    print("begins as", hvd.rank(), os.environ["HOROVOD_HOSTNAME"])
    first = os.environ["HOROVOD_HOSTNAME"] == "a" and hvd.rank() == 0
    # For each number of ranks that is seen, the hosts that there are from then on.
    steps = [step.split("=") for step in sys.argv[1:]]

    def train(state):
        while state.step < len(steps):
            total = hvd.allreduce(np.ones(1), op=hvd.Sum, name="x")
            assert total.item() == hvd.size()
            state.batch += 1
            wanted, hosts = steps[state.step]
            mended = [word[5:] for word in hosts.split("+") if word.startswith("mend:")]
            if hvd.size() == int(wanted) and all(os.path.exists("refused-" + host) for host in mended):
                if first:
                    print("batch", state.batch, "with", hvd.size(), flush=True)
                    for word in hosts.split("+"):
                        if word == "await:release":
                            while not context.engine().elastic.leaving:
                                time.sleep(0.01)
                        elif word.startswith("kill:"):
                            os.kill(-int(pathlib.Path("shell-" + word[5:]).read_text()), 9)
                        elif word.startswith("mend:"):
                            os.remove("refuses-" + word[5:])
                    names = [word for word in hosts.split("+") if ":" not in word]
                    if names:
                        pathlib.Path("new").write_text("\\n".join(names))
                        os.rename("new", "hosts")
                state.step += 1
            state.commit()
            time.sleep(0.05)  # as a step that computes elsewhere: a newcomer finds a core to start on

    run_fn(train, lambda: None)(ObjectState(hvd.broadcast_object, hvd.rank, batch=0, step=0))
    print("done", hvd.rank(), hvd.size())
"""

SLEEPS_ON_B = """
    import os, time

    if os.environ["HOROVOD_HOSTNAME"] == "b":
        time.sleep(1000)
"""

SLEEPS_ON_B_AT_FIRST = """
    import os, pathlib, time

    if os.environ["HOROVOD_HOSTNAME"] == "b" and not os.path.exists("slept"):
        pathlib.Path("slept").touch()
        time.sleep(1000)
"""


@pytest.fixture
def elastic(launcher: Launcher, tmp_path: Path) -> Elastic:
    """Return a function that runs the script with a discovery script that prints a file."""
    shell = tmp_path / "shell"
    shell.write_text(SHELL)
    shell.chmod(0o755)

    def start(
        hosts: str,
        *steps: str,
        flags: tuple[str, ...] = (),
        find: str = "cat hosts",
        script: str = SCRIPT,
        size: int = 1,
    ) -> Ran:
        (tmp_path / "hosts").write_text(hosts.replace("+", "\n"))
        given = ("--min-np", "1", "--host-discovery-script", find, "--ssh", str(shell))
        return launcher.python(size, script, *steps, flags=(*given, *flags, "--network-interface", "lo"))

    return start


def test_ranks_join_and_leave_with_their_hosts(elastic: Elastic) -> None:
    ran = elastic("a", "1=a+b+c", "3=a+c", "2=a+b+c", "3=a", "1=a")
    assert ran.code == 0, ran.err
    said = ran.launcher
    assert said[0] in ("starting ranks 1,2 on b, c", "starting ranks 1-2 on b, c"), ran.err
    for line in (
        "b is not found any more: rank 1 leaves at the next commit",
        "rank 1 has left b",
        "starting rank 1 on b",
        "rank 2 has left c",
    ):
        assert line in said, ran.err
    assert ran.of(0)[0] == "begins as 0 a"
    assert ran.of(0)[-1] == "done 0 1"
    begun, again = [line for line in ran.of(1) if "begins" in line]
    assert begun in ("begins as 1 b", "begins as 2 b")  # c may have been let in before
    assert again == "begins as 2 b"  # behind those that were there
    assert not [line for line in said if "anew" in line or "failed" in line]


def test_a_host_that_is_lost_is_survived_and_comes_back(elastic: Elastic) -> None:
    ran = elastic("a+b", "2=kill:b", "1=a+b", "2=a", "1=a", flags=("--blacklist-cooldown-range", "2", "8"))
    assert ran.code == 0, ran.err
    assert [line for line in ran.launcher if line.startswith("b is put aside for 2 s: ")], ran.err
    assert "b is tried again" in ran.launcher
    assert "starting rank 1 on b" in ran.launcher
    assert ran.of(0)[-1] == "done 0 1"


def test_a_rank_trains_on_while_the_host_in_place_of_its_own_refuses(
    elastic: Elastic, tmp_path: Path
) -> None:
    (tmp_path / "refuses-b").touch()
    ran = elastic("a", "1=b", "1=mend:b", "2=b", flags=("--blacklist-cooldown-range", "1", "2"))
    assert ran.code == 0, ran.err
    assert [line for line in ran.launcher if line.startswith("b is put aside for 1 s: ")], ran.err
    assert [line for line in ran.of(0) if line.endswith("with 2")], (
        ran.err
    )  # it was there until the other had come
    assert ran.of(1)[-1].startswith("done"), ran.err


def test_the_program_ends_on_a_rank_whose_host_is_gone_and_whose_substitute_is_lost(elastic: Elastic) -> None:
    ran = elastic("a", "1=b", "2=await:release+kill:b", "1=b")
    assert ran.code == 0, ran.err
    said = [line for line in ran.launcher if "rank 0" in line or "put aside" in line]
    assert said[0] == "a is not found any more: rank 0 leaves at the next commit", ran.err
    assert sorted(said[1:]) == [
        "b is put aside for 10 s: `shell` for b ended with exit code -9",
        "rank 0 stays until others have come: fewer than 1 (--min-np) would be left",
    ], ran.err
    assert ran.of(0)[-1] == "done 0 1"


def test_a_host_that_refuses_is_reported_once_and_training_goes_on(elastic: Elastic, tmp_path: Path) -> None:
    (tmp_path / "refuses-b").touch()
    flags = ("--blacklist-cooldown-range", "1", "2")
    ran = elastic("a+b", "1=mend:b", "2=a", flags=flags)
    assert ran.code == 0, ran.err
    assert [line for line in ran.launcher if line.startswith("b is put aside for 1 s: ")], ran.err
    assert ran.of(0)[-1] == "done 0 2"


OTHER_VERSION = """
    import os, pathlib
    import hvdlab
    import hvdlab.numpy as hvd
    from hvdlab.collectives import context
    from hvdlab.collectives.elastic import ObjectState, run_fn
    from hvdlab.collectives.errors import StartError

    tried = pathlib.Path("tried")
    if os.environ["HOROVOD_HOSTNAME"] == "b":
        hvdlab.__version__ = "9.9.9"
    try:
        hvd.init()
    except StartError:
        with tried.open("a") as file:
            file.write("refused\\n")
        raise

    def train(state):
        # Until the other host's rank was refused twice, which is when the host is put aside.
        while tried.exists() is False or len(tried.read_text().splitlines()) < 2:
            state.check_host_updates()
        print("done", hvd.rank(), hvd.size())

    run_fn(train, lambda: None)(ObjectState(lambda obj: obj, hvd.rank))
"""


@pytest.mark.parametrize("where", ["the shell", "the script"])
def test_a_host_where_a_start_hangs_is_put_aside_and_the_others_begin(elastic: Elastic, where: str) -> None:
    """Its shell never prints anything, or its rank never comes to ``hvd.init()``."""
    shell = where == "the shell"
    ran = elastic(
        "a+hangs" if shell else "a+b",
        "1=a",
        flags=("--max-np", "2", "--blacklist-cooldown-range", "600", "600", "--start-timeout", "15"),
        script=SCRIPT if shell else SLEEPS_ON_B + SCRIPT,
        size=2,
    )
    assert ran.code == 0, ran.err
    why = "did not start there within 15 s" if shell else "did not come to hvd.init()"
    aside = f"{'hangs' if shell else 'b'} is put aside for 600 s: rank 1 {why}"
    clause = "rank 1 on b did not come to hvd.init() within 15 s; going on without it"
    assert ran.launcher == ([aside] if shell else [clause, aside])
    assert ran.of(0)[-1] == "done 0 1"


def test_a_newcomer_that_never_comes_leaves_its_number_to_the_next(elastic: Elastic) -> None:
    flags = ("--blacklist-cooldown-range", "1", "2", "--start-timeout", "15", "--elastic-timeout", "15")
    ran = elastic("a", "1=a+b", "2=a", flags=flags, script=SLEEPS_ON_B_AT_FIRST + SCRIPT)
    assert ran.code == 0, ran.err
    clause = "rank 1 on b did not come to hvd.init() within 15 s; going on without it"
    aside = "b is put aside for 1 s: rank 1 did not come to hvd.init()"
    start = "starting rank 1 on b"
    assert [line for line in ran.launcher if line in (start, clause, aside)] == [start, clause, aside, start]
    assert ran.of(0)[-1] == "done 0 2"


def test_a_host_with_another_version_is_reported_once_and_training_goes_on(elastic: Elastic) -> None:
    ran = elastic("a+b", script=OTHER_VERSION, flags=("--blacklist-cooldown-range", "600", "600"))
    assert ran.code == 0, ran.err
    said = [line for line in ran.err.splitlines() if line.startswith("hvdlab coordinator: refused: ")]
    assert len(said) == 1, ran.err
    assert "rank 1 has hvdlab 9.9.9, but the coordinator has hvdlab" in said[0]
    assert ran.of(0) == ["done 0 1"]


def test_a_script_that_fails_is_reported_once(elastic: Elastic, tmp_path: Path) -> None:
    find = "[ -e asked ] && { echo no quota >&2; exit 3; }; cat hosts; touch asked"
    ran = elastic("a:2", "1=a", find=find, flags=("--max-np", "1"))
    assert ran.code == 0, ran.err
    assert [line for line in ran.launcher if "is no help" in line] in (
        [],  # it ended before the second question
        [
            "the host discovery script is no help: it failed with exit code 3: no quota; the hosts that it found before stay"
        ],
    )


def test_too_few_hosts_for_long(elastic: Elastic) -> None:
    ran = elastic("", "1=a", flags=("--elastic-timeout", "2"))
    assert ran.code == 1
    assert ran.launcher == [
        "there were no hosts for 1 ranks (--min-np) within 2 s (--elastic-timeout); ending 0 ranks"
    ]


def test_a_function_with_a_list_of_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = tmp_path / "shell"
    shell.write_text(SHELL)
    shell.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HVDLAB_SSH", str(shell))

    def work() -> tuple[int, str, bool]:
        import hvdlab.numpy as hvd
        from hvdlab.collectives import context

        rank = context.init().rank
        hvd.barrier()
        return rank, os.environ["HOROVOD_HOSTNAME"], "torch" in sys.modules

    found = run(
        work, np=3, min_np=1, max_np=3, host_discovery_script={"a": 2, "b": 4}, network_interface="lo"
    )
    # Both are this machine, so that ranks share memory and none loads Gloo.
    assert found == [(0, "a", False), (1, "a", False), (2, "b", False)]
    with pytest.raises(InvalidRequestError, match="no source of hosts"):
        run(work, np=1, host_discovery_script=3)
    with pytest.raises(InvalidRequestError, match="--max-np 1 must be -np 2 at least"):
        run(work, np=2, max_np=1, host_discovery_script={"a": 2})
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
