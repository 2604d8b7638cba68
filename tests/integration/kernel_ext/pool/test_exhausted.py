"""Where there is no disk, no file descriptor, no process or little shared memory left: a sentence, and a pool that works.

Each case is a program of its own, in a mount namespace or control group of its own where one is needed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.alone, pytest.mark.timeout(400)]

BEGIN = """
import os, re, resource, signal, sys
from hvdlab.kernel_ext.notebook.pool import Pool

SUM = "float(hvd.allreduce(np.ones({0}, np.float32), op=ReduceOp.SUM, name='sum')[0])"

def told(call, *words):
    try:
        call()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        assert "Traceback" not in found.split("last words")[0], found
        for word in words:
            assert word in found, found
    else:
        raise AssertionError(f"this was to fail: {words}")

def sums(pool, count=10):
    results = pool.run(SUM.format(count))
    assert results.ok, results.root_cause
    assert list(results) == [float(pool.size)] * pool.size

def prepare(pool):
    begin = "import os, subprocess, numpy as np\\nimport hvdlab.numpy as hvd\\nfrom hvdlab.collectives import context\\n"
    assert pool.run(begin + "from hvdlab.collectives.types import ReduceOp\\ncontext.init()").ok

def kill(pool, rank):
    os.kill(next(s.pid for s in pool.status() if s.rank == rank), signal.SIGKILL)
    pool.client.wait_for(lambda world: all(member.rank != rank for member in world.members), 60)
"""


def run(program: str, tmp_path: Path, *, before: str = "", **environment: str) -> None:
    """Run a program with a pool; it must end well and leave nothing in its temporary directory."""
    script = tmp_path / "program.py"
    body = "".join(f"    {line}\n" for line in program.strip().splitlines())
    script.write_text(f"{BEGIN}\nif __name__ == '__main__':\n{body}")
    command = f"{before} exec {sys.executable} {script}"
    prefix = ["unshare", "--mount"] if "mount " in before else []
    done = subprocess.run(
        [*prefix, "sh", "-ec", command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def may_mount() -> bool:
    probe = ["unshare", "--mount", "true"]
    return os.geteuid() == 0 and subprocess.run(probe, capture_output=True, check=False).returncode == 0


mounts = pytest.mark.skipif(not may_mount(), reason="needs mount namespaces")


@pytest.mark.soak
@mounts
def test_64_mib_of_shared_memory_are_enough(tmp_path: Path) -> None:
    program = """
with Pool.start(2) as pool:
    prepare(pool)
    sums(pool, 30_000_000)
    gathered = pool.run("hvd.allgather(np.ones(10_000_000, np.float32)).shape[0]")
    assert list(gathered) == [20_000_000] * 2, gathered.root_cause
"""
    run(program, tmp_path, before="mount -t tmpfs -o size=64m tmpfs /dev/shm;")


@mounts
def test_a_disk_that_fills_up_costs_only_what_is_written_to_it(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    program = f"""
small = {str(small)!r}
with Pool.start(2) as pool:
    prepare(pool)
    with open(small + "/filler", "wb", buffering=0) as filler:
        told(lambda: [filler.write(bytes(4096)) for _ in range(1 << 20)], "No space left on device")
    sums(pool, 1_000_000)
    results = pool.run("for _ in range(10): print('y' * 999_999)", label="[3]")
    assert results.ok
    kept = pool.transcripts.find("3").transcript
    assert kept.total == 20_000_000
    assert kept.lost > 15_000_000
    assert "are free in" in kept.why
    failed = pool.run(f"open({{small!r}} + '/mine', 'w').write('y' * 10_000_000)")
    assert "No space left on device" in failed.root_cause.evalue
    kill(pool, 1)
    assert pool.repair() == (1,)
    prepare(pool)
    sums(pool)
    pool.resize(3)
    prepare(pool)
    sums(pool)
os.unlink(small + "/filler")
assert not [name for name in os.listdir(small) if name.startswith("hvdlab")], os.listdir(small)
"""
    run(program, tmp_path, before=f"mount -t tmpfs -o size=8m tmpfs {small};", TMPDIR=str(small))


@pytest.mark.soak
@mounts
def test_a_pool_that_can_not_start_on_a_full_disk_says_so(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    program = f"""
small = {str(small)!r}
with open(small + "/filler", "wb", buffering=0) as filler:
    told(lambda: [filler.write(bytes(4096)) for _ in range(1 << 20)], "No space left on device")
told(lambda: Pool.start(2), "StartError", "No space left on device")
os.unlink(small + "/filler")
assert not [name for name in os.listdir(small) if name.startswith("hvdlab")], os.listdir(small)
"""
    run(
        program,
        tmp_path,
        before=f"mount -t tmpfs -o size=8m tmpfs {small};",
        TMPDIR=str(small),
        IPYTHONDIR=str(small / "ipython"),
    )


def test_a_notebook_without_file_descriptors_goes_on_with_what_it_has(tmp_path: Path) -> None:
    program = """
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
held = []
def exhaust():
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
resource.setrlimit(resource.RLIMIT_NOFILE, (12, hard))
told(lambda: Pool.start(2), "StartError", "Too many open files")
resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
with Pool.start(2) as pool:
    prepare(pool)
    told(exhaust, "Too many open files")
    sums(pool, 1_000_000)
    assert pool.run("for _ in range(10): print('y' * 999_999)", label="[3]").ok
    kept = pool.transcripts.find("3").transcript
    assert (kept.total, "Too many open files" in kept.why) == (20_000_000, True), kept.why
    told(lambda: pool.resize(3), "Too many open files")
    sums(pool)
    for fd in held:
        os.close(fd)
    pool.resize(3)
    prepare(pool)
    sums(pool)
"""
    run(program, tmp_path)


def test_a_rank_without_file_descriptors_is_told_and_stays(tmp_path: Path) -> None:
    program = """
with Pool.start(2) as pool:
    prepare(pool)
    filled = pool.run('''
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
held = []
def fill():
    try:
        while True: held.append(open(os.devnull))
    except OSError: pass
fill()
print('full')
hvd.allreduce(np.ones(1_000_000, np.float32), name='sum')
''', timeout=100)
    assert "ulimit -n" in filled.root_cause.evalue, filled.root_cause
    assert pool.run("x = 1").ok
    assert pool.run("1 / 0").root_cause.ename == "ZeroDivisionError"
    # The memory of the group that failed is closed meanwhile, which leaves the ranks a descriptor or two.
    again = pool.run("fill()\\n" + SUM.format(1_000_000), timeout=100)
    assert not again.ok
    assert re.search("ulimit -n|Too many open files", again.root_cause.evalue), again.root_cause
    assert pool.run("for file in held: file.close()").ok
    sums(pool, 1_000_000)
    assert list(pool.run("x")) == [1, 1]
"""
    run(program, tmp_path)


@pytest.fixture
def group() -> Iterator[Path]:
    """Yield a control group that limits processes."""
    found = None
    for parent in (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")):
        # The next place is tried where this one can't be written.
        with contextlib.suppress(OSError):
            candidate = parent / f"hvdlab-test-{uuid.uuid4().hex[:8]}"
            candidate.mkdir()
            if (candidate / "pids.max").exists() and os.access(candidate / "cgroup.procs", os.W_OK):
                found = candidate
                break
            candidate.rmdir()
    if found is None:
        pytest.skip("needs a control group with pids")
    yield found
    found.rmdir()


def test_where_no_process_can_be_made_the_pool_stays_as_it_is(tmp_path: Path, group: Path) -> None:
    program = f"""
from pathlib import Path
group = Path({str(group)!r})
def allow(more):
    limit = "max" if more is None else str(int((group / "pids.current").read_text()) + more)
    (group / "pids.max").write_text(limit)

(group / "cgroup.procs").write_text(str(os.getpid()))
for more in (0, 8):
    allow(more)
    told(lambda: Pool.start(3), "StartError")
    allow(None)
with Pool.start(2) as pool:
    prepare(pool)
    assert pool.run("x = 1").ok
    allow(0)
    sums(pool, 1_000_000)
    told(lambda: pool.resize(4), "StartError", "no more processes are allowed here")
    assert "Resource temporarily unavailable" in pool.run("subprocess.run(['true'])").root_cause.evalue
    told(lambda: pool.start_run("1"), "StartError", "can't start new thread")
    assert pool.state == "idle"
    sums(pool)
    kill(pool, 0)
    while 0 not in pool.lost:
        pass
    allow(0)
    assert list(pool.run("x + 1", ranks=[1])) == [2]
    told(lambda: pool.repair(), "StartError", "no more processes are allowed here")
    allow(None)
    assert pool.repair() == (0,)
    prepare(pool)
    sums(pool)
(group.parent / "cgroup.procs").write_text(str(os.getpid()))
"""
    run(program, tmp_path)
