"""The first failure comes first, its exit code is the job's, and no process is left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from integration.runner.conftest import Launcher, WaitFor
from support.patience import HOUR

PARTS = """
    import os, signal, sys, time
    import numpy as np
    import hvdlab.numpy as hvd
    from hvdlab.collectives import context

    engine = context.init()
    hvd.allreduce(np.ones(1), name="first")
    how = sys.argv[1]
    if engine.rank == 1:
        if how == "raise":
            raise ValueError("boom")
        if how == "exit":
            sys.exit(3)
        if how == "early":
            sys.exit(0)
        if how == "os._exit":
            os._exit(4)
        print("last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), getattr(signal, how))
    try:
        hvd.allreduce(np.ones(1), name="loss")
    finally:
        if how == "raise":  # followers that are done before the culprit
            os._exit(1) if len(sys.argv) > 2 else None
"""


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("raise", 1, "rank 1 failed first: exit code 1 (ValueError: boom)"),
        ("exit", 3, "rank 1 failed first: exit code 3"),
        ("os._exit", 4, "rank 1 failed first: exit code 4"),
        ("SIGKILL", 137, "rank 1 failed first: killed by SIGKILL"),
        ("SIGSEGV", 139, "rank 1 failed first: killed by SIGSEGV (segmentation fault)"),
    ],
)
def test_the_culprit_comes_first(launcher: Launcher, how: str, code: int, said: str) -> None:
    ran = launcher.python(3, PARTS, how, patient=True)
    # The launcher does not wait for the end of a rank that has reported its error.
    assert ran.launcher[0] in {said, said.replace("exit code 1 (ValueError: boom)", "ValueError: boom")}
    assert ran.code == code
    if how == "raise":
        assert "  ValueError: boom" in ran.launcher
    if how.startswith("SIG"):
        assert ran.launcher[2].strip() == "last words"


def test_who_left_early_is_named(launcher: Launcher) -> None:
    ran = launcher.python(3, PARTS, "early", patient=True)
    assert ran.launcher[0].startswith("rank 1 has ended (exit code 0) while others still needed it; rank ")
    assert ran.code == 1


def test_a_rank_that_ends_before_it_joins(launcher: Launcher) -> None:
    script = """
        import os, sys
        from hvdlab.collectives import context
        if os.environ["RANK"] == "2":
            sys.exit(5)
        context.init()
    """
    ran = launcher.python(3, script, flags=("--start-timeout", f"{HOUR:g}"))
    assert ran.launcher[0] == "rank 2 failed first: exit code 5"
    assert ran.code == 5


def test_a_rank_that_leaves_well_before_it_joins(launcher: Launcher) -> None:
    script = """
        import os, sys
        from hvdlab.collectives import context
        if os.environ["RANK"] == "1":
            sys.exit(0)
        context.init()
    """
    ran = launcher.python(2, script)
    assert ran.code == 1
    assert ran.launcher[0].startswith(
        "rank 1 has ended (exit code 0) while others still needed it; rank 0: exit"
    )
    assert "rank 1 ended before the world was complete" in ran.launcher[-1]


def test_ranks_that_do_not_come_are_named(launcher: Launcher) -> None:
    # The time runs from the first that comes, so the others come with it.
    script = """
        import os, time
        from hvdlab.collectives import context
        if os.environ["RANK"] in "12":
            time.sleep(1000)
        open("ready" + os.environ["RANK"], "w").close()
        while not (os.path.exists("ready0") and os.path.exists("ready3")):
            time.sleep(0.01)
        context.init()
    """
    ran = launcher.python(4, script, env={"HVDLAB_START_TIMEOUT": "8"})
    assert ran.launcher == ["ranks 1,2 did not come to hvd.init() within 8 s"]
    assert ran.code == 1


def test_a_program_that_there_is_not(launcher: Launcher) -> None:
    ran = launcher.run("-np", "2", "no-such-program")
    assert ran.code == 127
    assert ran.launcher == ["rank 0 failed first: `no-such-program` can't be run: No such file or directory"]


def test_a_program_that_may_not_be_run(launcher: Launcher) -> None:
    (launcher.directory / "train.py").write_text("")
    ran = launcher.run("-np", "1", "./train.py")
    assert ran.code == 126
    assert ran.launcher[0].endswith("Permission denied; `python ./train.py`?")


def test_the_others_are_ended_with_all_that_they_started(launcher: Launcher, wait_for: WaitFor) -> None:
    script = """
        import os, subprocess, sys, time
        if os.environ["RANK"] == "1":
            while len(os.listdir(".")) < 3:
                time.sleep(0.01)
            sys.exit(9)
        subprocess.Popen(["sleep", "1000"])
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        open("ready" + os.environ["RANK"], "w").close()
        time.sleep(1000)
    """
    ran = launcher.python(3, script)
    assert ran.code == 9
    launcher.wait_for_none()


def test_ranks_that_ignore_sigterm_are_killed(launcher: Launcher) -> None:
    script = """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open("ready" + os.environ["RANK"], "w").close()
        while len([name for name in os.listdir(".") if name.startswith("ready")]) < 2:
            time.sleep(0.01)
        if os.environ["RANK"] == "1":
            sys.exit(9)
        time.sleep(1000)
    """
    ran = launcher.python(2, script)
    assert ran.code == 9
    assert ran.launcher[-1] == "rank 0 did not end in time; killing"


def _pids(directory: Path) -> list[int]:
    return [int(file.read_text()) for file in directory.glob("pid*") if file.read_text()]


SLEEPER = """
    import os, time
    try:
        os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")
        with open("pid" + os.environ["RANK"], "w") as file:
            file.write(str(os.getpid()))
        time.sleep(1000)
    except KeyboardInterrupt:
        print("saved", flush=True)
        raise SystemExit(0)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_all(launcher: Launcher, wait_for: WaitFor, number: int, code: int) -> None:
    process = launcher.start("-np", "3", sys.executable, launcher.script(SLEEPER), patient=True)
    wait_for(lambda: len(_pids(launcher.directory)) == 3)
    process.send_signal(number)
    ran = launcher.finish(process)
    assert ran.code == code
    assert len(ran.launcher) == 1
    assert "Traceback" not in ran.err
    if number == signal.SIGINT:
        assert [ran.of(rank) for rank in range(3)] == [["saved"]] * 3
    launcher.wait_for_none()


def test_signal_that_another_thread_of_the_launcher_takes_ends_all(
    launcher: Launcher, wait_for: WaitFor
) -> None:
    """It interrupts no wait of the main thread then, as one that comes just before the wait begins."""
    process = launcher.start("-np", "1", sys.executable, launcher.script(SLEEPER))
    wait_for(lambda: len(_pids(launcher.directory)) == 1)
    thread = next(
        tid for name in os.listdir(f"/proc/{process.pid}/task") if (tid := int(name)) != process.pid
    )
    assert ctypes.CDLL(None).tgkill(process.pid, thread, signal.SIGTERM) == 0
    assert launcher.finish(process).code == 143


def test_under_nohup_a_job_goes_on(launcher: Launcher, wait_for: WaitFor) -> None:
    ready = launcher.directory / "ready"
    script = "import pathlib, sys, time; pathlib.Path('ready').touch(); sys.stdin.read(); print('end')"
    process = launcher.start(
        "-np",
        "1",
        sys.executable,
        "-c",
        script,
        stdin=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    wait_for(ready.exists)
    process.send_signal(signal.SIGHUP)
    ran = launcher.finish(process)
    assert (ran.code, ran.out) == (0, "[0]<stdout>:end\n")


def test_the_second_interrupt_kills(launcher: Launcher, wait_for: WaitFor) -> None:
    script = SLEEPER.replace("raise SystemExit(0)", "open('caught', 'w').close(); time.sleep(1000)")
    process = launcher.start("-np", "2", sys.executable, launcher.script(script))
    wait_for(lambda: len(_pids(launcher.directory)) == 2)
    process.send_signal(signal.SIGINT)
    wait_for(lambda: (launcher.directory / "caught").exists())
    process.send_signal(signal.SIGINT)
    ran = launcher.finish(process)
    assert ran.code == 130
    assert len(ran.launcher) == 2


def test_an_interrupt_while_ranks_wait_in_a_collective(launcher: Launcher, wait_for: WaitFor) -> None:
    script = """
        import numpy as np, time
        import hvdlab.numpy as hvd
        from hvdlab.collectives import context
        engine = context.init()
        open("ready" + str(engine.rank), "w").close()
        if engine.rank:
            hvd.allreduce(np.ones(1), name="loss")
        time.sleep(100)
    """
    process = launcher.start("-np", "2", sys.executable, launcher.script(script))
    wait_for(lambda: len(list(launcher.directory.glob("ready*"))) == 2)
    process.send_signal(signal.SIGINT)
    ran = launcher.finish(process)
    assert ran.code == 130
    assert ran.launcher == ["interrupted; ending 2 ranks (once more to kill)"]


def test_nothing_outlives_a_launcher_that_is_killed(launcher: Launcher, wait_for: WaitFor) -> None:
    process = launcher.start("-np", "2", sys.executable, launcher.script(SLEEPER))
    wait_for(lambda: len(_pids(launcher.directory)) == 2)
    process.kill()
    process.wait()
    launcher.wait_for_none()


def test_nothing_outlives_an_agent_that_is_killed(launcher: Launcher, wait_for: WaitFor) -> None:
    process = launcher.start("-np", "2", sys.executable, launcher.script(SLEEPER.replace("os.spawnlp", "# ")))
    wait_for(lambda: len(_pids(launcher.directory)) == 2)
    stat = Path(f"/proc/{_pids(launcher.directory)[0]}/stat").read_text()
    os.kill(int(stat.rpartition(") ")[2].split()[1]), signal.SIGKILL)
    ran = launcher.finish(process)
    assert ran.code == 1
    assert "its launcher process for localhost ended with exit code -9" in ran.launcher[0]
    launcher.wait_for_none()
