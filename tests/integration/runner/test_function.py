"""``hvdlab.run``: a function on several ranks."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import hvdlab
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.runner import RankFailedError
from support.patience import PATIENCE, PROGRAM_PATIENCE


class Run:
    """``hvdlab.run`` with its output in ``out`` and ``err``."""

    def __init__(self) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return hvdlab.run(*args, stdout=self.out, stderr=self.err, **kwargs)


@pytest.fixture
def run() -> Run:
    return Run()


def _total(start: int, *, step: int = 1) -> tuple[int, int]:
    import numpy as np

    import hvdlab.numpy as hvd
    from hvdlab.collectives import context

    engine = context.init()
    value = np.full(2, start + step * engine.rank)
    return engine.rank, int(hvd.allreduce(value, op=hvd.Sum)[0])


def test_results_by_rank(run: Run) -> None:
    assert run(_total, (10,), {"step": 2}, np=3) == [(0, 36), (1, 36), (2, 36)]


def test_one_rank_by_default(run: Run) -> None:
    assert run(lambda: os.environ["HVDLAB_SIZE"]) == ["1"]


def test_closures_travel(run: Run) -> None:
    seen = {"a": 1}

    class Own:
        def __init__(self, value: int) -> None:
            self.value = value

    found = run(lambda own: (own.value, seen, os.environ["RANK"]), (Own(5),), num_proc=2)
    assert found == [(5, {"a": 1}, "0"), (5, {"a": 1}, "1")]


def test_output_is_shown(run: Run) -> None:
    def speak() -> None:
        print("hello")
        print("oh", file=sys.stderr)

    run(speak, np=2)
    assert sorted(run.out.getvalue().splitlines()) == ["[0]<stdout>:hello", "[1]<stdout>:hello"]
    assert sorted(run.err.getvalue().splitlines()) == ["[0]<stderr>:oh", "[1]<stderr>:oh"]


def test_output_to_files(run: Run, tmp_path: Path) -> None:
    run(lambda: print("hello"), np=2, output_filename=str(tmp_path / "o"))
    assert run.out.getvalue() == ""
    assert (tmp_path / "o/rank.1/stdout").read_text() == "hello\n"


def test_large_results(run: Run) -> None:
    found = run(lambda: os.environ["RANK"].encode() * 30_000_000, np=2)
    assert [len(data) for data in found] == [30_000_000] * 2


def test_variables_for_ranks(run: Run) -> None:
    assert run(lambda: os.environ["MINE"], np=2, env={"MINE": "x"}) == ["x", "x"]


class OddError(Exception):
    """Error that takes other arguments than it has."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")
        self.one = one

    def __reduce__(self) -> Any:
        return OddError, (self.one, 2)


def _fail(kind: str) -> None:
    import numpy as np

    import hvdlab.numpy as hvd
    from hvdlab.collectives import context

    engine = context.init()
    if engine.rank == 1:
        if kind == "odd":
            raise OddError(1, 2)
        if kind == "os":
            raise FileNotFoundError(2, "No such file", "x")
        if kind == "exit":
            sys.exit(3)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("boom")
    hvd.allreduce(np.ones(1), name="loss")


def test_the_first_exception_is_raised_here(run: Run) -> None:
    with pytest.raises(ValueError, match="rank 1 raised ValueError: boom") as caught:
        run(_fail, ("value",), np=3)
    error = caught.value
    assert isinstance(error, RankFailedError)
    assert isinstance(error, RuntimeError)
    assert (error.rank, error.exit_code) == (1, 1)
    assert type(error.__cause__) is ValueError
    assert 'raise ValueError("boom")' in error.remote_traceback
    assert "raise ValueError" in str(error)


def test_exceptions_with_arguments_of_their_own(run: Run) -> None:
    with pytest.raises(OddError) as caught:
        run(_fail, ("odd",), np=2)
    assert caught.value.one == 1
    with pytest.raises(FileNotFoundError) as missing:
        run(_fail, ("os",), np=2)
    assert (missing.value.errno, missing.value.filename) == (2, "x")


@pytest.mark.parametrize(
    ("kind", "code", "said"), [("exit", 3, "exit code 3"), ("kill", 137, "killed by SIGKILL")]
)
def test_ranks_that_end_without_an_exception(run: Run, kind: str, code: int, said: str) -> None:
    with pytest.raises(RankFailedError, match=f"rank 1 failed first: {said}") as caught:
        run(_fail, (kind,), np=2)
    assert (caught.value.rank, caught.value.exit_code) == (1, code)


def test_a_function_that_ends_its_process_well(run: Run) -> None:
    with pytest.raises(RankFailedError, match="ended before its function returned"):
        run(lambda: sys.exit(0), np=2)


def test_results_that_can_not_be_pickled(run: Run) -> None:
    with pytest.raises(RankFailedError, match="rank 0 returned a generator, which can't be pickled"):
        run(lambda: (x for x in range(0)), np=1)


def test_an_exception_that_can_not_be_pickled(run: Run) -> None:
    def fail() -> None:
        error = ValueError("boom")
        error.lock = threading.Lock()  # type: ignore[attr-defined]  # on purpose
        raise error

    with pytest.raises(RankFailedError, match="rank 0 raised ValueError: boom"):
        run(fail, np=1)


def test_exception_only_ranks_can_import_keeps_its_traceback(run: Run) -> None:
    def fail() -> None:
        import types

        module = types.ModuleType("only_on_ranks")
        module.OwnError = type("OwnError", (Exception,), {"__module__": module.__name__})  # type: ignore[attr-defined]
        sys.modules[module.__name__] = module
        raise module.OwnError("boom")

    with pytest.raises(RankFailedError, match=r"rank 0 raised only_on_ranks\.OwnError: boom") as caught:
        run(fail, np=1)
    assert "raise module.OwnError" in caught.value.remote_traceback
    assert caught.value.__cause__ is None


def test_arguments_that_can_not_be_pickled(run: Run) -> None:
    with pytest.raises(InvalidRequestError, match="can't be sent to the ranks"):
        run(lambda lock: 1, (threading.Lock(),), np=1)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"np": 2, "num_proc": 3}, InvalidRequestError),
        ({"np": 0}, InvalidRequestError),
        ({"np": 3, "hosts": "localhost:2"}, InvalidRequestError),
    ],
)
def test_wrong_calls(run: Run, arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        run(lambda: 1, **arguments)
    with pytest.raises(InvalidRequestError, match="calls a function"):
        run(3)


def test_a_coordinator_that_can_not_be_started_leaves_no_agent(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = set(psutil.Process().children())
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "much")
    with pytest.raises(InvalidRequestError, match="HOROVOD_FUSION_THRESHOLD"):
        run(lambda: 1, np=2)
    assert set(psutil.Process().children()) <= others


def test_from_another_thread(run: Run) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run(lambda: os.environ["RANK"], np=2)))
    thread.start()
    thread.join(60)
    assert found == [["0", "1"]]


def test_from_a_script_without_a_main_guard(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("def square(x): return x * x\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, helper, hvdlab\nprint(hvdlab.run(lambda: helper.square(int(os.environ['RANK'])), np=3))\n"
    )
    ran = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=PROGRAM_PATIENCE,
        check=False,
        cwd="/",
    )
    assert ran.stdout == "[0, 1, 4]\n", ran.stderr


def test_an_interrupt_ends_the_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time, hvdlab\n"
        "def wait():\n    open(f'ready{os.environ[\"RANK\"]}', 'w').close()\n    time.sleep(100)\n"
        "try:\n    hvdlab.run(wait, np=2)\nexcept KeyboardInterrupt:\n    print('interrupted')\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    until = time.monotonic() + PATIENCE
    while len(list(tmp_path.glob("ready*"))) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=PATIENCE)
    assert out == "interrupted\n"
    assert process.returncode == 0


def test_the_same_signature_as_horovod() -> None:
    import inspect

    given = list(inspect.signature(hvdlab.run).parameters)
    horovod = (
        "func args kwargs num_proc min_num_proc max_num_proc slots reset_limit cooldown_range hosts hostfile "
        "host_discovery_script start_timeout ssh_port ssh_identity_file disable_cache output_filename verbose use_gloo "
        "use_mpi mpi_args network_interface network_interfaces executable np min_np max_np"
    )
    assert " ".join(given).startswith(horovod)


def test_who_asks_for_mpi_is_told_that_it_has_no_effect() -> None:
    err = io.StringIO()
    assert hvdlab.run(os.getpid, np=1, use_mpi=True, stderr=err)
    assert "use_mpi= and mpi_args= have no effect" in err.getvalue()
