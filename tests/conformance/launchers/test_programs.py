"""Programs on the ranks of every launcher: exit codes, output, signals, and ranks that are started again."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from conformance.launchers.programs import ProgramRanks
from conformance.launchers.sites import Site
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.launch.starter import Capability
from hvdlab.runner.cli import main
from support.patience import PATIENCE

# Ray leaves files and sockets to the collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)

LINES = 20_000
"""Some 200 KB of output: more than any pipe takes at once."""
WRITES = f"""\
import os, sys
rank = int(os.environ["HVDLAB_RANK"])
for line in range({LINES}):
    print("line", line)
sys.stdout.write("the last words of " + str(rank))
sys.exit(3 + rank)
"""
WAITS = """\
import time
try:
    print("up", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    raise SystemExit(7)
"""
CHILD = """\
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def capable(site: Site) -> None:
    """Skip launchers that run no programs; their refusal has the reason."""
    capabilities = site.launcher().capabilities
    if Capability.PROGRAMS not in capabilities:
        with pytest.raises(InvalidRequestError, match="can't be given a program to run, because"):
            capabilities.require(Capability.PROGRAMS, site.name, "choose another one.")
        pytest.skip(capabilities.lacks[Capability.PROGRAMS])


def test_exit_codes_are_reported_after_the_last_line_of_output(programs: ProgramRanks) -> None:
    programs.run(WRITES)
    for rank in (0, 1):
        end, output = programs.end_of(rank)
        assert (end.code, end.signal) == (3 + rank, 0)
        lines = output[1].decode().splitlines()
        assert lines == [*(f"line {number}" for number in range(LINES)), f"the last words of {rank}"]


def test_interrupt_arrives_at_one_rank(programs: ProgramRanks) -> None:
    if Capability.SIGNALS not in programs.launcher.capabilities:
        pytest.skip(programs.launcher.capabilities.lacks[Capability.SIGNALS])
    starter = programs.run(WAITS)
    for rank in (0, 1):
        programs.wait_for_output(rank, b"up\n")
    starter.signal(1, signal.SIGINT)
    end, output = programs.end_of(1)
    assert (end.code, output[1]) == (7, b"up\ninterrupted\n")
    starter.signal(0, signal.SIGKILL)
    end, _ = programs.end_of(0)
    assert (end.code, end.signal) == (None, signal.SIGKILL)


def test_program_that_does_not_exist_is_reported_with_the_code_of_a_shell(
    site: Site, programs: ProgramRanks
) -> None:
    if site.name == "popen":
        pytest.skip("`nice` starts its programs")
    programs.execute(("/no/such/program",))
    for rank in (0, 1):
        end, _ = programs.end_of(rank)
        assert (end.pid, end.code) == (0, 127)
        assert "/no/such/program" in end.reason


def test_lost_rank_runs_the_program_again(programs: ProgramRanks) -> None:
    if Capability.SINGLE_RANKS not in programs.launcher.capabilities:
        pytest.skip(programs.launcher.capabilities.lacks[Capability.SINGLE_RANKS])
    starter = programs.run(WRITES)
    for which in (0, 1):
        end, output = programs.end_of(1, which)
        assert end.code == 4
        assert output[1].endswith(b"the last words of 1")
        if not which:
            starter.start([1], 2)
    assert programs.end_of(0)[0].code == 3


def test_closing_ends_ranks_with_their_children(programs: ProgramRanks) -> None:
    starter = programs.run(CHILD)
    if programs.shows_output_at_once:
        for rank in (0, 1):
            programs.wait_for_output(rank, b"up")
    starter.close(0.0)
    for rank in (0, 1):
        end, _ = programs.end_of(rank)
        assert end.code is None


def test_preloaded_modules_are_imported_before_the_program_begins(programs: ProgramRanks) -> None:
    capabilities = programs.launcher.capabilities
    if Capability.PRELOADS not in capabilities:
        pytest.skip(capabilities.lacks[Capability.PRELOADS])
    programs.run("import sys; print('colorsys' in sys.modules)", preload=("colorsys",))
    for rank in (0, 1):
        end, output = programs.end_of(rank)
        assert (end.code, output[1]) == (0, b"True\n"), (end, output)


def test_command_line_returns_the_first_failing_code_after_all_output(
    site: Site, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os, sys\n"
        "rank = int(os.environ['HVDLAB_RANK'])\n"
        "for line in range(500): print('line', line)\n"
        "if rank == 0: sys.exit(0)\n"
        "print('last')\n"
        "sys.exit(5)\n"
    )
    words = ["run", *site.flags, "-np", "2", "--start-timeout", str(int(2 * PATIENCE)), sys.executable]
    assert main([*words, str(script)]) == 5
    out, err = capfd.readouterr()
    assert "rank 1" in err
    if not site.logs:
        lines = [line.removeprefix("[1]<stdout>:") for line in out.splitlines() if line.startswith("[1]<")]
        assert lines == [*(f"line {number}" for number in range(500)), "last"]
