"""The suite of all that needs a GPU: limits, pieces that fail, going on with a later one, and the whole of it rehearsed without a GPU."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import signal
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from support.patience import PATIENCE

ROOT = Path(__file__).parents[3]
WRITES = "{python} -c \"import sys; open(sys.argv[1], 'w').write('{{\\\"wrong\\\": []}}')\" {json}"
"""A piece that ends well."""
RAISES = "{python} -c \"print('started'); raise SystemExit('no luck')\""
SILENT = '{python} -c ""'
"""A piece that ends well and has no result."""
HALF = "{python} -c \"import sys; open(sys.argv[1], 'w').write('{{')\" {json}"
"""A piece that ends in the middle of its result."""
STAYS = "sleep 3600"


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The suite, as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("gpu_suite")
    sys.modules.pop("gpu_suite", None)


def pieces(suite: ModuleType, monkeypatch: pytest.MonkeyPatch, **commands: str) -> None:
    """Let the suite consist of these commands; one that stays is ended at once."""
    made = {
        name: suite.Piece(f"about {name}", 0.0 if command == STAYS else PATIENCE, command, command)
        for name, command in commands.items()
    }
    monkeypatch.setattr(suite, "PIECES", made)


def found(out: Path) -> dict[str, Any]:
    """Return the results in a directory, by piece."""
    results = [json.loads(file.read_text()) for file in out.glob("*.json")]
    return {result["piece"]: result for result in results}


# -- the pieces -----------------------------------------------------------------------------------------------------------


def test_the_pieces_fit_into_what_a_lent_machine_allows(suite: ModuleType) -> None:
    limits = [piece.limit + suite.GRACE for piece in suite.PIECES.values()]
    assert max(limits) < 600
    assert sum(limits) <= 25 * 60


@pytest.mark.parametrize("size", ["full", "small"])
def test_the_commands_name_files_that_exist(suite: ModuleType, size: str) -> None:
    places = {"python": "python", "json": "x.json", "junit": "x.xml", **suite.SIZES[size]}
    for piece in suite.PIECES.values():
        for command in (piece.command, piece.rehearsal):
            words = [word.format(**places) for word in shlex.split(command)]
            named = [word for word in words if word.startswith(("benchmarks/", "tests/"))]
            named += ["tests/support/fakes/checked_gpus.py"] if "support.fakes.checked_gpus" in words else []
            assert named or "hvdlab" in words
            assert [name for name in named if not (ROOT / name).exists()] == []


def test_words_of_faults_choose_one_of_each_kind(suite: ModuleType) -> None:
    from chaos.faults import WATCHED

    chosen = [fault.name for fault in WATCHED if any(word in fault.name for word in suite.WATCHED_FAULTS)]
    assert len(chosen) == suite.SIZES["full"]["watched"]
    for word in suite.WATCHED_FAULTS:
        assert [name for name in chosen if word in name], word


# -- limits ---------------------------------------------------------------------------------------------------------------


def test_command_at_its_limit_is_interrupted(suite: ModuleType, tmp_path: Path) -> None:
    ended = suite.run_within(["sleep", "3600"], 0.0, tmp_path / "log", PATIENCE)
    assert (ended.is_over, ended.exit_code) == (True, -signal.SIGINT)


def test_command_that_ignores_the_interrupt_is_killed(suite: ModuleType, tmp_path: Path) -> None:
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which the command inherits
    try:
        ended = suite.run_within(["sleep", "3600"], 0.0, tmp_path / "log", 0.0)
    finally:
        signal.signal(signal.SIGINT, usual)
    assert (ended.is_over, ended.exit_code) == (True, -signal.SIGKILL)


def test_processes_left_in_sessions_of_their_own_are_killed(suite: ModuleType, tmp_path: Path) -> None:
    leaves = "import subprocess; subprocess.Popen(['sleep', '3600'], start_new_session=True)"
    ended = suite.run_within([sys.executable, "-c", leaves], PATIENCE, tmp_path / "log", 0.1)
    assert (ended.is_over, ended.exit_code) == (False, 0)
    ((pid, name),) = ended.left.items()
    assert name == "sleep"
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert suite.verdict(ended, {}) == suite.FAILED


def test_piece_whose_tests_were_all_skipped_has_not_passed(suite: ModuleType, tmp_path: Path) -> None:
    junit = tmp_path / "found.xml"
    skipped = '<testcase classname="gpu" name="one"><skipped/></testcase>'
    junit.write_text(f"<testsuites><testsuite>{skipped}</testsuite></testsuites>")
    ended = suite.Ended(0, 1.0, False, {})
    assert suite.verdict(ended, suite.of_tests(junit)) == suite.FAILED
    passed, failed = (
        '<testcase classname="gpu" name="two"/>',
        "<testcase classname='a' name='b'><error/></testcase>",
    )
    junit.write_text(f"<testsuites><testsuite>{skipped}{passed}{failed}</testsuite></testsuites>")
    result = suite.of_tests(junit)
    assert result == {"passed": 1, "failed": 1, "skipped": 1, "names_of_failed": ["a::b"]}
    assert suite.verdict(ended, result) == suite.PASSED
    assert suite.figures(result) == ["1 passed, 1 failed, 1 skipped", "a::b"]


# -- all of them ----------------------------------------------------------------------------------------------------------


def test_failed_or_ended_piece_does_not_stop_the_next(
    suite: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pieces(suite, monkeypatch, good=WRITES, bad=RAISES, silent=SILENT, half=HALF, long=STAYS, last=WRITES)
    out, archive = tmp_path / "out", tmp_path / "out.tar.gz"
    assert suite.main(["--out", str(out), "--archive", str(archive)]) == 1
    verdicts = {name: result["verdict"] for name, result in found(out).items()}
    assert verdicts == {
        "good": "passed",
        "bad": "failed",
        "silent": "failed",
        "half": "failed",
        "long": "over its limit",
        "last": "passed",
    }
    assert found(out)["bad"]["exit_code"] == 1
    assert "no luck" in found(out)["bad"]["output_tail"]
    text = (out / "summary.md").read_text()
    assert "| bad | failed | " in text
    assert "no luck" in text
    with tarfile.open(archive) as packed:
        names = {Path(name).name for name in packed.getnames()}
    assert {"summary.md", "last.json", "bad.log"} <= names
    printed = capsys.readouterr().out
    assert "2 of 6 pieces have passed" in printed
    assert "no luck" in printed


def test_going_on_keeps_the_results_of_before(
    suite: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pieces(suite, monkeypatch, first=WRITES, second=WRITES, third=WRITES)
    there = ["--out", str(tmp_path / "out")]
    assert suite.main([*there, "--piece", "first"]) == 0
    assert set(found(tmp_path / "out")) == {"first"}
    assert suite.main([*there, "--from", "third"]) == 0
    assert set(found(tmp_path / "out")) == {"first", "third"}
    assert "| second | not run | " in (tmp_path / "out" / "summary.md").read_text()
    capsys.readouterr()
    assert suite.main([*there, "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ["passed" in line for line in lines] == [True, False, True]
    assert "about second" in lines[1]


def test_piece_that_might_not_end_in_the_time_is_not_begun(
    suite: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pieces(suite, monkeypatch, first=WRITES, second=WRITES)
    assert suite.main(["--out", str(tmp_path), "--minutes", "1"]) == 1  # less than its limit and the grace
    assert found(tmp_path) == {}
    assert "The time is over; go on with --from first" in capsys.readouterr().out


def test_pieces_of_a_suite_in_the_background_can_be_interrupted(
    suite: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pieces(suite, monkeypatch, long=STAYS)
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as shells start it then
    try:
        assert suite.main(["--out", str(tmp_path)]) == 1
    finally:
        signal.signal(signal.SIGINT, usual)
    assert found(tmp_path)["long"]["exit_code"] == -signal.SIGINT


def test_an_interrupt_ends_the_piece_and_the_summary_is_written(
    suite: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pieces(suite, monkeypatch, first=WRITES, second=f"{STAYS}.5", third=WRITES)
    wait = suite.subprocess.Popen.wait
    started: list[int] = []

    def interrupted(process: Any, timeout: float | None = None) -> int:
        if process.args[0] == "sleep" and process.pid not in started:
            started.append(process.pid)
            raise KeyboardInterrupt
        return int(wait(process, timeout))

    monkeypatch.setattr(suite.subprocess.Popen, "wait", interrupted)
    assert suite.main(["--out", str(tmp_path)]) == 130
    assert not psutil.pid_exists(started[0])
    assert set(found(tmp_path)) == {"first"}
    assert "| first | passed | " in (tmp_path / "summary.md").read_text()


# -- the summary ----------------------------------------------------------------------------------------------------------


def recorded(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


def test_summary_has_the_figures_of_each_kind_of_result(suite: ModuleType) -> None:
    assert suite.figures(recorded("chaos_gpu.json")) == ["50 faults, 0 of them not well"]
    assert suite.figures(recorded("c10d.json"))[0].startswith("all_reduce 4 B: ")
    assert suite.figures(recorded("on_gpus.json"))[0].startswith("2 ranks, 4096: plane ")
    measured = {"microseconds": {"small training step, DDP": {"ratio": 1.0123}}}
    assert suite.figures(measured) == [
        "small training step, DDP: 1.012 times as long, at most 1.02 is the goal"
    ]
    crash = {"number": 3, "rank": 1, "error": "StartError: rank 1 did not start"}
    assert suite.figures({"benchmark": "restarts", "restarts": 9, "crashes": [crash]}) == [
        "9 restarts, 1 crashes",
        "restart 3 of rank 1: StartError: rank 1 did not start",
    ]
    checked = {
        "failed": "rank 1 did not answer",
        "allreduce": {"4 KiB": {"plane": 1.0, "torch": 2.0}},
        "interrupt": {"free_after": 0.25},
    }
    assert suite.figures(checked) == [
        "4 KiB: plane 1.000 ms, torch 2.000 ms",
        "interrupt: the others were free after 0.25 s",
        "rank 1 did not answer",
    ]
    assert suite.figures({"hvdlab": "1.0", "failed": "rank 1 did not answer"}) == ["rank 1 did not answer"]


def test_missing_packages_are_named_before_anything_else_runs(
    suite: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = suite.importlib.metadata.version

    def lacking(name: str) -> str:
        if name in ("msgspec", "tornado"):  # hvdlab's, and one that ipykernel needs
            raise suite.importlib.metadata.PackageNotFoundError(name)
        return "1.0" if name == "pytest-timeout" else str(version(name))

    monkeypatch.setattr(suite.importlib.metadata, "version", lacking)
    monkeypatch.setattr(suite, "BESIDE", ("pytest-timeout>=2.3",))
    missing = suite.missing_packages(rehearse=True)
    assert [name for name in missing if name.startswith("msgspec")]
    assert [name for name in missing if name.startswith("tornado")]
    assert "pytest-timeout>=2.3 (found 1.0)" in missing


# -- the rehearsal --------------------------------------------------------------------------------------------------------


def rehearse(suite: ModuleType, out: Path, names: list[str]) -> dict[str, Any]:
    """Rehearse some pieces; returns their results."""
    chosen = [word for name in names for word in ("--piece", name)]
    code = suite.main(["--rehearse", "--small", "--slow", "10", "--out", str(out), *chosen])
    results = found(out)
    assert {name: result["verdict"] for name, result in results.items()} == dict.fromkeys(names, "passed"), (
        results
    )
    assert code == 0
    return results


def test_a_small_part_is_rehearsed_on_simulated_gpus(suite: ModuleType, tmp_path: Path) -> None:
    results = rehearse(suite, tmp_path, ["machine", "check-gpus"])
    assert results["machine"]["result"]["missing"] == []
    assert results["check-gpus"]["result"]["failed"] == ""
    assert os.path.getsize(tmp_path / "check-gpus.log")


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_all_of_it_is_rehearsed_without_a_gpu(suite: ModuleType, tmp_path: Path) -> None:
    results = rehearse(suite, tmp_path, list(suite.PIECES))
    assert results["training"]["result"]["passed"] == 2
    assert results["restarts"]["result"]["restarts"] == 2
    assert results["watched"]["result"]["faults"] == 1
