"""``hvdlab run`` with real processes: successes, and the ranks' input and output."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from hvdlab.launch import mpi
from hvdlab.runner.cli import main
from integration.runner.conftest import Launcher

ENVIRONMENT = """
    import json, os
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS HOROVOD_RANK " \\
        "HOROVOD_SIZE HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE HOROVOD_CROSS_RANK HOROVOD_CROSS_SIZE HOROVOD_HOSTNAME " \\
        "HOROVOD_FUSION_THRESHOLD HVDLAB_RANK HVDLAB_SIZE PMI_RANK HOROVOD_ELASTIC".split()
    print(json.dumps({name: os.environ[name] for name in names if name in os.environ}))
"""
ALLREDUCE = """
    import numpy as np
    import hvdlab.numpy as hvd
    from hvdlab.collectives import context
    engine = context.init()
    print(engine.rank, engine.size, int(hvd.allreduce(np.full(3, engine.rank), op=hvd.Sum)[0]))
"""


def test_ranks_find_each_other(launcher: Launcher) -> None:
    ran = launcher.python(3, ALLREDUCE)
    assert ran.code == 0, ran.err
    assert sorted(ran.out.splitlines()) == [f"[{rank}]<stdout>:{rank} 3 3" for rank in range(3)]
    assert not ran.err


def test_eight_ranks(launcher: Launcher) -> None:
    ran = launcher.python(8, ALLREDUCE)
    assert ran.code == 0, ran.err
    assert [ran.of(rank) for rank in range(8)] == [[f"{rank} 8 28"] for rank in range(8)]


def test_the_environment_of_ranks(launcher: Launcher) -> None:
    ran = launcher.python(2, ENVIRONMENT, flags=("--fusion-threshold-mb", "1"), env={"PMI_RANK": "7"})
    found = [json.loads(ran.of(rank)[0]) for rank in range(2)]
    port = found[0]["MASTER_PORT"]
    for rank, variables in enumerate(found):
        assert variables == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": "2",
            "HOROVOD_LOCAL_RANK": str(rank),
            "HOROVOD_LOCAL_SIZE": "2",
            "HOROVOD_CROSS_RANK": "0",
            "HOROVOD_CROSS_SIZE": "1",
            "HOROVOD_HOSTNAME": "localhost",
            "HOROVOD_FUSION_THRESHOLD": str(1 << 20),
            "HVDLAB_RANK": str(rank),
            "HVDLAB_SIZE": "2",
        }


def test_any_program(launcher: Launcher) -> None:
    ran = launcher.run("-np", "2", "bash", "-c", "echo $RANK; echo oh >&2; printf partial")
    assert ran.code == 0
    assert ran.of(1) == ["1", "partial"]
    assert ran.of(0, "stderr") == ["oh"]


def test_floods_are_complete(launcher: Launcher) -> None:
    script = """
        import os, sys
        rank = os.environ["RANK"]
        for number in range(20_000):
            print(f"{rank} line {number}", file=sys.stderr if number % 10 == 0 else sys.stdout)
    """
    ran = launcher.python(4, script, env={"PYTHONUNBUFFERED": ""})
    assert ran.code == 0
    for rank in range(4):
        assert ran.of(rank) == [f"{rank} line {n}" for n in range(20_000) if n % 10]
        assert ran.of(rank, "stderr") == [f"{rank} line {n}" for n in range(0, 20_000, 10)]
    assert len(ran.out.splitlines()) + len(ran.err.splitlines()) == 80_000


def test_output_that_is_no_text(launcher: Launcher) -> None:
    script = """
        import os, sys
        sys.stdout.buffer.write(bytes(range(256)) * 4000)
    """
    ran = launcher.python(2, script, flags=("--output-filename", "out"))
    assert ran.code == 0
    assert not ran.out
    for rank in range(2):
        assert (launcher.directory / f"out/rank.{rank}/stdout").read_bytes() == bytes(range(256)) * 4000
    assert launcher.python(2, script).code == 0


def test_output_to_files(launcher: Launcher) -> None:
    ran = launcher.run("-np", "11", "--output-filename", "out", "bash", "-c", "echo $RANK; echo e$RANK >&2")
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    for rank in range(11):
        place = launcher.directory / f"out/rank.{rank:02}"
        assert (place / "stdout").read_text() == f"{rank}\n"
        assert (place / "stderr").read_text() == f"e{rank}\n"


def test_timestamps(launcher: Launcher) -> None:
    ran = launcher.run("-np", "1", "--prefix-output-with-timestamp", "echo", "hi")
    assert ran.out.endswith("[0]<stdout>:hi\n")
    assert len(ran.out) > len("[0]<stdout>:hi\n") + 10


def test_rank_0_reads_what_is_piped_in(launcher: Launcher) -> None:
    ran = launcher.run("-np", "2", "cat", input="one\ntwo\n")
    assert ran.code == 0
    assert ran.out == "[0]<stdout>:one\n[0]<stdout>:two\n"


def test_a_timeline(launcher: Launcher) -> None:
    # A file holds what all ranks have recorded by rank 0's end, at which rank 1 can be in the middle of the allreduce.
    script = (
        ALLREDUCE
        + "    import time\n    while engine.rank == 0 and len(engine.living) > 1: time.sleep(0.01)\n"
    )
    ran = launcher.python(2, script, flags=("--timeline-filename", "t.json"))
    assert ran.code == 0, ran.err
    assert main(["trace", "check", str(launcher.directory / "t.json")]) == 0
    events = json.loads((launcher.directory / "t.json").read_text())
    spans = [event for event in events if event.get("ph") == "X"]
    assert {event["pid"] for event in spans} == {0, 1}, events  # though no rank called shutdown()


def test_a_configuration_file(launcher: Launcher) -> None:
    (launcher.directory / "c.yaml").write_text("num-proc: 2\nparams: {fusion-threshold-mb: 3}\n")
    ran = launcher.run("--config-file", "c.yaml", sys.executable, launcher.script(ENVIRONMENT))
    assert [json.loads(ran.of(rank)[0])["HOROVOD_FUSION_THRESHOLD"] for rank in range(2)] == [
        str(3 << 20)
    ] * 2


def test_flags_without_effect_are_told_once(launcher: Launcher) -> None:
    ran = launcher.run("-np", "2", "--num-nccl-streams", "2", "true")
    assert ran.launcher == ["--num-nccl-streams has no effect here: NCCL has one stream for each process set"]


TORCH = """
    import sys
    import {module} as hvd, torch
    hvd.init()
    found = [hvd.rank(), hvd.size(), hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), hvd.mpi_enabled()]
    sys.stdout.write(" ".join(map(str, found)) + "\\n")  # at once: mpiexec may mix what comes in pieces
"""


def test_scripts_written_for_horovod(launcher: Launcher) -> None:
    ran = launcher.python(2, TORCH.format(module="horovod.torch"), flags=("--as-horovod",))
    assert [ran.of(rank) for rank in range(2)] == [["0 2 2.0 False"], ["1 2 2.0 False"]], ran.err


def test_mpiexec_starts_the_ranks(launcher: Launcher) -> None:
    if reason := mpi.why_unavailable():
        pytest.skip(reason)
    ran = launcher.python(2, TORCH.format(module="hvdlab.torch"), flags=("--mpi",))
    assert ran.code == 0, ran.err
    lines = sorted(line.partition(" ")[2] for line in ran.out.splitlines())
    assert lines == ["0 2 2.0 True", "1 2 2.0 True"]


def test_stalls_are_told(launcher: Launcher) -> None:
    script = """
        import numpy as np
        import hvdlab.numpy as hvd
        from hvdlab.collectives import context
        engine = context.init()
        if engine.rank == 1:
            open("told").close()  # waits until the test opens the pipe, too
        hvd.allreduce(np.ones(1), name="late")
    """
    # Rank 1 goes on when the warning has been read, however late either rank begins.
    told = launcher.directory / "told"
    os.mkfifo(told)
    flags = ("--stall-check-warning-time-seconds", "1")
    process = launcher.start("-np", "2", *flags, sys.executable, launcher.script(script))
    assert process.stderr is not None
    warning = next((line for line in process.stderr if "stalled: allreduce `late`" in line), "")
    assert "rank 1 missing" in warning
    os.close(os.open(told, os.O_WRONLY))
    assert launcher.finish(process).code == 0


@pytest.mark.parametrize("arguments", [["--version"], ["run", "--version"]])
def test_version(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    import hvdlab

    assert main(arguments) == 0
    assert capsys.readouterr().out == f"{hvdlab.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "usage"),
        (["walk"], "usage"),
        (["run", "-np", "2"], "no program"),
        (["run", "python"], "how many ranks"),
        (["run", "-np", "2", "--config-file", "/nowhere", "true"], "can't be read"),
    ],
)
def test_wrong_calls(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_check_build_tells_the_truth(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = launcher.run("--check-build")
    assert ran.code == 0
    assert "[X] PyTorch" in ran.out
    assert "[X] shm" in ran.out
    assert "[ ] cuda/nccl: " in ran.out
    from hvdlab.runner import cli

    monkeypatch.setattr(mpi, "program", lambda: None)
    assert "[ ] MPI (mpiexec): `mpiexec` is neither" in cli.build_report()


def test_a_reader_that_goes_away(launcher: Launcher) -> None:
    process = launcher.start("-np", "2", "bash", "-c", "for i in $(seq 20000); do echo $i; done")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(60) == 0


def test_a_program_beside_the_script_hides_no_module_of_ours(launcher: Launcher) -> None:
    (launcher.directory / "msgspec.py").write_text("raise SystemExit('the wrong one')")
    (launcher.directory / "selectors.py").write_text("raise SystemExit('the wrong one')")
    process = launcher.run("-np", "1", "echo", "hi", env={"PYTHONSAFEPATH": "1"})
    assert process.out == "[0]<stdout>:hi\n"


def test_nothing_is_left_in_the_temporary_directory(launcher: Launcher, tmp_path: Path) -> None:
    place = tmp_path / "t"
    place.mkdir()
    assert launcher.python(2, ALLREDUCE, env={"TMPDIR": str(place)}).code == 0
    assert list(place.iterdir()) == []


def test_command_and_environment_need_not_be_utf8(launcher: Launcher) -> None:
    odd = os.fsdecode(b"Entw\xfcrfe")
    script = launcher.script("import os, sys\nprint(ascii([os.environ['ODD'], *sys.argv[1:]]))")
    done = launcher.run("-np", "1", sys.executable, script, odd, env={"ODD": odd})
    assert done.out.splitlines() == [f"[0]<stdout>:{[odd, odd]!a}"], done.err


AGENTS = """
    import os, pathlib

    def parent(pid):
        return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

    launcher = parent(os.getppid())
    processes = [int(each.name) for each in pathlib.Path("/proc").iterdir() if each.name.isdecimal()]
    commands = [pathlib.Path(f"/proc/{pid}/cmdline").read_text() for pid in processes if parent(pid) == launcher]
    print(sum("hvdlab.launch.host_agent.agent" in command for command in commands))
"""


def test_the_agent_that_came_up_beside_the_coordinator_starts_the_ranks(launcher: Launcher) -> None:
    done = launcher.python(1, AGENTS)
    assert done.of(0) == ["1"], done.err
