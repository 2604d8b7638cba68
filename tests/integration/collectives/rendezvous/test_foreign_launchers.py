"""Scripts that know of no launcher, started by mpiexec, torchrun, Slurm's variables and by hand."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from support import shared_memory
from support.patience import HOUR, PROGRAM_PATIENCE, eventually

SCRIPT = str(Path(__file__).with_name("script.py"))
BIN = Path(sys.executable).parent
_OURS = (
    "HVDLAB_",
    "HOROVOD_",
    "PMI",
    "OMPI",
    "SLURM_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "TORCHELASTIC",
)

mpiexec = pytest.mark.skipif(not (BIN / "mpiexec").exists(), reason="no mpiexec beside this Python")
torchrun = pytest.mark.skipif(not (BIN / "torchrun").exists(), reason="no torchrun beside this Python")


@pytest.fixture(autouse=True)
def _no_strays() -> Iterator[None]:
    """MPICH leaves its shared memory behind when it is killed."""
    before = shared_memory.entries()
    yield
    for stray in shared_memory.left(before):
        if stray.startswith("mpich_shm_"):
            Path("/dev/shm", stray).unlink(missing_ok=True)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Return an environment of no launcher's, with a temporary directory of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    return {**clean, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1", "HVDLAB_PLANE": "shm"}


class Job:
    """Processes whose output is collected; ended in any case."""

    def __init__(self, commands: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> None:
        self.processes = [
            subprocess.Popen(argv, env=dict(env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for argv, env in commands
        ]

    def ended(self, timeout: float = PROGRAM_PATIENCE) -> list[tuple[int, str, str]]:
        """Exit code, output and errors of each."""
        deadline = time.monotonic() + timeout
        found = []
        try:
            for process in self.processes:
                out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
                found.append((process.returncode, out, err))
        finally:
            for process in self.processes:
                if process.poll() is None:
                    process.kill()
                    process.communicate()
        return found


def run(argv: Sequence[str], env: Mapping[str, str]) -> tuple[int, list[str], str]:
    """Exit code, sorted lines and errors of one command."""
    ((code, out, err),) = Job([(argv, env)]).ended()
    return code, sorted(out.splitlines()), err


def mpi(size: int, *arguments: str) -> list[str]:
    return [str(BIN / "mpiexec"), "-n", str(size), sys.executable, SCRIPT, *arguments]


def torch(size: int, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    return [str(BIN / "torchrun"), "--nproc-per-node", str(size), *options, SCRIPT, *arguments]


def slurm(env: Mapping[str, str], size: int, *arguments: str, job: str = "7") -> Job:
    """Return the processes that srun starts on one host."""
    step = {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": str(size),
        "SLURM_NODEID": "0",
    }
    numbers = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(size)]
    return Job([([sys.executable, SCRIPT, *arguments], {**env, **step, **own}) for own in numbers])


def by_hand(env: Mapping[str, str], size: int, *arguments: str, port: int = 29777) -> Job:
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    return Job(
        [([sys.executable, SCRIPT, *arguments], {**env, **common, "RANK": str(r)}) for r in range(size)]
    )


def places(size: int, plane: str = "shm") -> list[str]:
    total = float(sum(range(size)))
    return [f"{(rank, size, rank, size, 0, 1)} {total} {plane}" for rank in range(size)]


def left_over(env: Mapping[str, str], word: str) -> list[str]:
    """Return the files and directories with this word in their paths. Others may be removed meanwhile."""
    directory = env["TMPDIR"]
    found = [
        os.path.join(place, name) for place, *names in os.walk(directory) for name in itertools.chain(*names)
    ]
    return [path for path in found if word in os.path.relpath(path, directory)]


def nothing_left(env: Mapping[str, str], word: str = "hvdlab") -> None:
    """Check that no secret, socket or directory stays behind: the coordinator may end after the ranks."""
    eventually(lambda: not left_over(env, word), lambda: left_over(env, word))


# -- joining ------------------------------------------------------------------------------------------------------


@mpiexec
@pytest.mark.parametrize("plane", ["shm", "auto"])
def test_mpiexec(env: dict[str, str], plane: str) -> None:
    code, lines, err = run(mpi(3, "train"), {**env, "HVDLAB_PLANE": plane})
    assert (code, lines) == (0, places(3, "mpi" if plane == "auto" else plane)), err
    nothing_left(env)


@mpiexec
def test_ranks_in_wrappers_of_their_own(env: dict[str, str]) -> None:
    wrapped = [*mpi(2)[:3], "sh", "-c", f"{sys.executable} {SCRIPT} train; exit $?"]
    code, lines, err = run(wrapped, env)
    assert (code, lines) == (0, places(2)), err


@torchrun
def test_torchrun(env: dict[str, str]) -> None:
    code, lines, err = run(torch(2, "train"), env)
    assert (code, lines) == (0, places(2)), err
    nothing_left(env)


def test_srun(env: dict[str, str]) -> None:
    ended = slurm(env, 4, "train").ended()
    assert [(code, out.strip()) for code, out, _ in ended] == [(0, line) for line in places(4)], ended
    nothing_left(env)


def test_by_hand(env: dict[str, str]) -> None:
    ended = by_hand(env, 2, "train").ended()
    assert [(code, out.strip()) for code, out, _ in ended] == [(0, line) for line in places(2)], ended
    nothing_left(env)


def test_with_a_secret_of_the_user_s_nothing_secret_is_announced(env: dict[str, str], tmp_path: Path) -> None:
    """In a file that only the user may read, where a launcher would send variables in the clear; and they come back."""
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef\n")
    secret.chmod(0o600)
    strict = {**env, "HVDLAB_TOKEN_FILE": str(secret), "HVDLAB_REQUIRE_ENCRYPTION": "1"}
    ended = by_hand(strict, 2, "again", port=29779).ended()
    assert [(code, out) for code, out, _ in ended] == [(0, "2.0\n")] * 2, ended


def test_a_rendezvous_in_the_clear_is_refused_if_that_is_forbidden(env: dict[str, str]) -> None:
    elsewhere = {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29781", "WORLD_SIZE": "2", "RANK": "0"}
    for rank in ("0", "1"):
        strict = {**env, **elsewhere, "RANK": rank, "HVDLAB_REQUIRE_ENCRYPTION": "1"}
        code, _, err = run([sys.executable, SCRIPT, "train"], strict)
        assert code == 1
        assert "Give all ranks the same secret in HVDLAB_TOKEN" in err


def test_a_secret_that_can_be_guessed_or_read_is_refused(env: dict[str, str], tmp_path: Path) -> None:
    short = slurm({**env, "HVDLAB_TOKEN": "abc"}, 2, "train").ended()
    assert all(code == 1 and "HVDLAB_TOKEN has 3 characters" in err for code, _, err in short), short
    (tmp_path / "open").write_text("0123456789abcdef")
    (tmp_path / "open").chmod(0o644)
    shown = slurm({**env, "HVDLAB_TOKEN_FILE": str(tmp_path / "open")}, 2, "train").ended()
    assert all(code == 1 and "alone (mode 0600)" in err for code, _, err in shown), shown


def test_initializing_again_and_again(env: dict[str, str]) -> None:
    ended = slurm(env, 2, "again").ended()
    assert [(code, out) for code, out, _ in ended] == [(0, "2.0\n")] * 2, ended
    nothing_left(env)


def test_alone_under_a_launcher(env: dict[str, str]) -> None:
    ((code, out, err),) = slurm(env, 1, "train").ended()
    assert (code, out.split(")")[0]) == (0, "(0, 1, 0, 1, 0, 1"), err


@mpiexec
def test_two_jobs_on_one_host_do_not_mix(env: dict[str, str]) -> None:
    jobs = Job([(mpi(2, "train"), env), (mpi(3, "train"), env), (mpi(2, "train"), env)])
    ended = jobs.ended()
    assert [code for code, _, _ in ended] == [0] * 3, ended
    assert [sorted(out.splitlines()) for _, out, _ in ended] == [places(2), places(3), places(2)]
    nothing_left(env)


def test_two_jobs_of_slurm_do_not_mix(env: dict[str, str]) -> None:
    one, other = slurm(env, 2, "train", job="8"), slurm(env, 3, "train", job="9")
    for job, size in ((one, 2), (other, 3)):
        ended = job.ended()
        assert [(code, out.strip()) for code, out, _ in ended] == [(0, line) for line in places(size)], ended


# -- failing ------------------------------------------------------------------------------------------------------


@mpiexec
def test_a_rank_of_mpiexec_fails_midway(env: dict[str, str]) -> None:
    code, _, _ = run(mpi(2, "fail"), env)
    assert code != 0
    nothing_left(env, "socket")


def test_a_rank_of_srun_fails_midway(env: dict[str, str]) -> None:
    ended = slurm(env, 3, "fail").ended()
    assert ended[1][0] == 7
    for code, out, _ in (ended[0], ended[2]):
        assert code == 1
        assert "rank 1" in out
    nothing_left(env)


@torchrun
def test_torchrun_starts_them_anew(env: dict[str, str]) -> None:
    code, lines, err = run(torch(2, "restarted", options=["--max-restarts", "1"]), env)
    assert (code, lines) == (0, ["attempt 1: 2.0"] * 2), err


def test_the_death_of_rank_0_does_not_take_the_others_along(env: dict[str, str]) -> None:
    ended = slurm(env, 3, "first_dies").ended()
    assert ended[0][0] == -9
    for code, out, err in ended[1:]:
        said, _, total = out.splitlines()
        assert (code, total) == (0, "2.0"), err
        assert "rank 0 died" in said
    nothing_left(env)


def test_the_coordinator_that_rank_0_started_has_a_successor(env: dict[str, str]) -> None:
    ended = slurm(env, 3, "coordinator_dies").ended()
    for code, out, err in ended:
        assert (code, out) == (0, "3.0 1 True\n"), err
    assert "the coordinator ended (killed by SIGKILL), and rank 0 has started another" in ended[0][2]
    nothing_left(env)


def test_without_rank_0_the_coordinator_has_no_successor(env: dict[str, str]) -> None:
    """They get the reason and the remedy, without waiting for one."""
    ended = slurm({**env, "HVDLAB_REATTACH": f"{HOUR:g}"}, 3, "coordinator_dies_last").ended()
    for code, out, err in ended[1:]:
        (said,) = out.splitlines()
        assert code == 0, err
        assert "no other one takes its place: the process that started it has ended as well" in said
        assert said.endswith("save what you need and restart the group")


@mpiexec
def test_the_coordinator_of_mpiexec_has_a_successor(env: dict[str, str]) -> None:
    code, lines, err = run(mpi(2, "coordinator_dies"), {**env, "HVDLAB_PLANE": "mpi"})
    assert (code, lines) == (0, ["2.0 1 True"] * 2), err
    nothing_left(env)


def test_rank_0_may_end_before_the_others(env: dict[str, str]) -> None:
    ended = slurm(env, 3, "first_leaves").ended()
    assert [(code, out) for code, out, _ in ended] == [(0, ""), (0, "2.0\n"), (0, "2.0\n")], ended
    nothing_left(env)


def test_a_late_rank_0_is_waited_for(env: dict[str, str]) -> None:
    ended = slurm(env, 2, "late", "1.5").ended()
    assert [(code, out.strip()) for code, out, _ in ended] == [(0, line) for line in places(2)], ended


def test_without_rank_0_the_others_say_so(env: dict[str, str]) -> None:
    ended = slurm({**env, "HVDLAB_START_TIMEOUT": "2"}, 2, "absent", "0").ended()
    assert ended[0][0] == 0
    assert ended[1][0] == 1
    assert "Rank 0 has not said where the coordinator is within 2 s" in ended[1][2]


def test_without_another_rank_all_name_it(env: dict[str, str]) -> None:
    ended = slurm({**env, "HVDLAB_START_TIMEOUT": "6"}, 3, "absent", "2").ended()
    for code, _, err in ended[:2]:
        assert code == 1
        # The one that gives up first is missed by the other.
        assert re.search("StartError: .* (rank 2|ranks 0,2|ranks 1,2) did not come", err), err
    nothing_left(env)
