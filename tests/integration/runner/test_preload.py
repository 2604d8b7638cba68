"""``hvdlab run --preload``: ranks that are forked from a process with imports behave as those that are executed."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import hvdlab
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.runner.run_function import RankFailedError
from integration.runner.conftest import Launcher, WaitFor

FLAG = ("--preload", "fractions")
SEES_IMPORTS = "import sys; early = 'fractions' in sys.modules\n"
WHAT_A_PROGRAM_SEES = """
    import atexit, os, signal, sys, threading
    print(__name__, __spec__, sys.argv, sys.path[0], sys.flags.optimize, sys.stdout.line_buffering)
    print(os.getcwd(), os.getpgid(0) == os.getpid(), os.environ["HVDLAB_RANK"], os.environ.get("OPENBLAS_NUM_THREADS"))
    print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.getsignal(signal.SIGTERM), repr(sys.stdin.read()))
    print(threading.current_thread() is threading.main_thread(), sys.modules["__main__"].__dict__ is globals())
    print(sorted(os.listdir("/proc/self/fd"))[:3], len(os.listdir("/proc/self/fd")), sys.orig_argv[1:])
    atexit.register(lambda: print("at exit", __name__))
    threading.Timer(0.1, lambda: print("a thread outlives the main module", __name__)).start()
"""
ENDS = {
    "returns": "pass",
    "exits with a number": "raise SystemExit(7)",
    "exits with a text": "import sys; sys.exit('for a reason')",
    "raises": "def f():\n    raise ValueError('boom')\n\nf()\n",
    "is interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(10)",
    "is killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "is no Python": "this is no Python",
    "uses processes": "import multiprocessing as m\nif __name__ == '__main__':\n"
    "    with m.get_context('spawn').Pool(1) as p: print(p.map(abs, [-3]))\n",
}


def alike(launcher: Launcher, *command: str, **options: Any) -> None:
    """Fail unless a command does and prints the same when it is forked and when it is executed."""
    forked, executed = (
        launcher.run("-np", "1", *flags, *command, **options) for flags in (FLAG, ())
    )  # fmt: skip
    assert (forked.code, forked.out, forked.err) == (executed.code, executed.out, executed.err)


def test_imports_are_there_and_the_agent_is_the_parent(launcher: Launcher) -> None:
    done = launcher.python(
        3,
        SEES_IMPORTS
        + "import os; print(early, 'host_agent.agent' in open(f'/proc/{os.getppid()}/cmdline').read())",
        flags=FLAG,
    )
    assert done.code == 0, done.err
    assert [done.of(rank) for rank in range(3)] == [["True True"]] * 3


@pytest.mark.parametrize("options", [(), ("-O", "-W", "error"), ("-I",)], ids=" ".join)
def test_a_script_sees_what_it_always_sees(launcher: Launcher, options: tuple[str, ...]) -> None:
    script = launcher.script(WHAT_A_PROGRAM_SEES)
    alike(launcher, sys.executable, *options, script, "an argument", "-m", input="what was piped in\n")


def test_a_link_to_a_script(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "start").symlink_to(launcher.script("import helper; print(helper.__file__)"))
    (tmp_path / "helper.py").touch()
    alike(launcher, sys.executable, "bin/start")


def test_code_and_modules(launcher: Launcher, tmp_path: Path) -> None:
    alike(launcher, sys.executable, "-c", "import sys; print(__name__, sys.argv, sys.path[0])", "x")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import sys; print(__name__, __package__, __file__, sys.argv, sys.path[0], len(sys.path))"
    )
    alike(launcher, sys.executable, "-m", "package", "x")
    alike(launcher, sys.executable, "package", "x")
    (package / "__main__.py").write_text("import sys; print(__name__, sys.argv, len(sys.path))")
    shutil.make_archive(str(package), "zip", package)
    alike(launcher, sys.executable, "package.zip", "x")
    forked = launcher.run("-np", "1", *FLAG, sys.executable, "-m", "no_such_module")
    assert forked.code == 1
    assert "No module named no_such_module" in forked.err.replace("'", "")


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_ends(launcher: Launcher, end: str) -> None:
    alike(launcher, sys.executable, launcher.script(end))


def test_a_script_that_is_missing(launcher: Launcher) -> None:
    alike(launcher, sys.executable, "missing.py")


def test_each_rank_has_random_numbers_of_its_own(launcher: Launcher) -> None:
    done = launcher.python(
        3,
        "import random, numpy, torch; print(random.random(), numpy.random.rand(), float(torch.rand(1)))",
        flags=("--preload", "torch,numpy"),
    )
    assert done.code == 0, done.err
    drawn = [number for rank in range(3) for number in done.of(rank)[0].split()]
    assert len(set(drawn)) == 9


def test_ranks_train_together_and_a_lost_one_is_forked_anew(launcher: Launcher, tmp_path: Path) -> None:
    script = f"""
        import os, signal, sys
        early = "torch" in sys.modules
        import torch, hvdlab.torch as hvd
        hvd.init()
        state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0)

        @hvd.elastic.run
        def train(state):
            while state.step < 6 or hvd.size() < 3:
                if state.step == 3 and hvd.rank() == 1 and not os.path.exists({str(tmp_path / "killed")!r}):
                    open({str(tmp_path / "killed")!r}, "w").close()
                    os.kill(os.getpid(), signal.SIGKILL)
                hvd.allreduce(torch.ones(2), name="x")
                state.step += 1
                state.commit()

        train(state)
        print("done", early, hvd.size())
    """
    done = launcher.python(3, script, flags=("--preload", "torch", "--min-np", "2"))
    assert done.code == 0, done.err
    assert [done.of(rank)[-1] for rank in range(3)] == ["done True 3"] * 3


def test_without_its_preloading_process_the_job_goes_on(
    launcher: Launcher, tmp_path: Path, wait_for: WaitFor
) -> None:
    script = launcher.script(
        f"""
        import os, sys, time
        early = "fractions" in sys.modules
        import numpy as np
        import hvdlab.numpy as hvd
        from hvdlab.collectives.elastic import ObjectState, run_fn
        place = {str(tmp_path)!r}
        if os.path.exists(place + "/zygote-is-gone"):
            open(place + "/back", "w").close()
        hvd.init()
        if not os.path.exists(place + "/back"):
            open(f"{{place}}/rank-{{hvd.rank()}}", "w").close()
            while not os.path.exists(place + "/zygote-is-gone"):
                time.sleep(0.01)
            if hvd.rank() == 1:
                sys.exit(3)

        def train(state):
            back = False
            while not back or hvd.size() < 2:
                back = hvd.allreduce(np.array([os.path.exists(place + "/back")]), op=hvd.Min).item()
                state.commit()

        run_fn(train, lambda: None)(ObjectState(hvd.broadcast_object, hvd.rank))
        print("done", early)
        """
    )
    process = launcher.start("-np", "2", "--min-np", "1", *FLAG, sys.executable, script)
    wait_for(lambda: all((tmp_path / f"rank-{rank}").exists() for rank in range(2)))
    (zygote,) = (
        pid for pid in launcher.descendants() if Path(f"/proc/{pid}/comm").read_text().strip() == "hvd-zygote"
    )
    os.kill(zygote, signal.SIGKILL)
    (tmp_path / "zygote-is-gone").touch()
    done = launcher.finish(process)
    assert done.code == 0, done.err
    assert "ranks start without preloaded modules: their process ended, killed by SIGKILL" in done.launcher
    assert done.of(0) == ["done True"]
    assert done.of(1) == ["done False"]


def test_a_module_that_can_not_be_imported_is_said_once(launcher: Launcher) -> None:
    done = launcher.python(2, SEES_IMPORTS + "print(early)", flags=("--preload", "no_such_module,fractions"))
    assert done.code == 0
    assert [line for line in done.launcher if "no_such_module" in line] == [
        "--preload no_such_module: ModuleNotFoundError: No module named 'no_such_module'"
    ]
    assert done.of(0) == done.of(1) == ["True"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "exit code 1"),
        ("import os; os._exit(5)", "exit code 5"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "segmentation fault"),
    ],
    ids=["it starts a thread", "it exits", "it crashes"],
)  # fmt: skip
def test_a_module_that_ruins_the_preloading_process(
    launcher: Launcher, tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "ruins.py").write_text(text)
    done = launcher.python(
        2,
        "print('ran')",
        flags=("--preload", "ruins"),
        env={"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
    )
    assert done.code == 0, done.err
    assert done.of(0) == done.of(1) == ["ran"]
    assert any(line.endswith(f"their process ended, {said}") for line in done.launcher), done.err


def test_an_import_without_end_is_no_start_without_end(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("import time\nwhile True: time.sleep(1)")
    done = launcher.python(
        2,
        "print('ran')",
        flags=("--preload", "endless", "--start-timeout", "3"),
        env={"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
    )
    assert done.code == 1
    assert any("ranks 0,1" in line and "3 s" in line for line in done.launcher), done.err


def test_a_program_that_is_no_python(launcher: Launcher) -> None:
    done = launcher.run("-np", "1", *FLAG, "bash", "-c", "echo")
    assert done.code == 2
    assert "`bash` is no Python program that could be forked" in done.launcher[0]


def test_a_function(capfd: pytest.CaptureFixture[str]) -> None:
    def early(value: int) -> tuple[bool, int]:
        return "fractions" in sys.modules, value

    assert hvdlab.run(early, (3,), np=2, preload=["fractions"]) == [(True, 3)] * 2
    assert hvdlab.run(early, (3,), np=1) == [(False, 3)]

    def fails() -> None:
        raise KeyError("no")

    with pytest.raises(KeyError) as failed:
        hvdlab.run(fails, np=2, preload=["fractions"])
    assert isinstance(failed.value, RankFailedError)
    with pytest.raises(InvalidRequestError, match="Python program"):
        hvdlab.run(early, (3,), np=1, executable="/bin/true", preload=["fractions"])
