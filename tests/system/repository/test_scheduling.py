"""Groups of tests, and the order in which they begin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import scheduling
from support.scheduling import Timings, group_of, is_system_test

TESTS = Path(__file__).parents[2]
MODULE = """
import pytest, time

@pytest.mark.parametrize("n", range(3))
def test_it(n): time.sleep({seconds})
"""


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("tests/integration/torch/test_basics.py::test_it[2-float]", "integration/torch 2"),
        ("tests/integration/torch/test_basics.py::test_it", "integration/torch/test_basics"),
        ("tests/system/browser/test_panel.py::test_it", "system/browser"),
        ("tests/integration/launch/test_mpi.py::test_it[a/b]", "integration/launch/test_mpi"),
    ],
)
def test_a_group_is_a_module_unless_resources_span_modules(name: str, group: str) -> None:
    assert group_of(name) == group


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("tests/system/browser/test_panel.py::test_it", True),
        ("tests/chaos/test_campaign.py::test_it[shm]", True),
        ("tests/system/repository/test_house.py::test_it", False),
        ("tests/integration/magics/test_system.py::test_it", False),
    ],
)
def test_tests_of_whole_notebooks_and_campaigns_are_system_tests(name: str, whole: bool) -> None:
    assert is_system_test(name) is whole


def test_long_groups_come_first_and_short_ones_after_unknown_ones() -> None:
    timings = Timings({"short": 1, "long": 100}, {"tests/middle.py::test_it": 10})
    assert sorted(["short", "middle", "new", "long"], key=timings.order) == ["long", "new", "middle", "short"]


def test_a_partly_known_group_keeps_its_committed_time() -> None:
    assert Timings({"one": 100}, {"tests/one.py::test_it": 2}).groups == {"one": 100}


def run(directory: Path, *arguments: str) -> str:
    # Without the variables of the worker that runs this test.
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "--color=no", "-p", "no:cacheprovider", *arguments],
        cwd=directory,
        env={**outer, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_is_ordered_by_the_one_before(tmp_path: Path, workers: int) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "conftest.py").symlink_to(TESTS / "conftest.py")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name, seconds in (("test_a", 0), ("test_b", 0.4), ("test_c", 0)):
        (tests / f"{name}.py").write_text(MODULE.format(seconds=seconds))
    first = run(tmp_path, "-n", str(workers))
    assert "slowest groups" in first
    times = json.loads((tmp_path / scheduling.LAST_RUN).read_text())
    assert len(times) == 9
    assert all(seconds >= 0.4 for name, seconds in times.items() if "test_b" in name)
    second = run(tmp_path, "-n", "0", "-v")
    begun = [
        line.split("::")[0] for line in second.splitlines() if line.startswith("tests/") and "PASSED" in line
    ]
    assert begun[:3] == ["tests/test_b.py"] * 3

    (tests / "test_c.py").unlink()
    run(tmp_path, "-n", "0", "-k", "test_a")
    kept = json.loads((tmp_path / scheduling.LAST_RUN).read_text())
    assert {name.partition("::")[0] for name in kept} == {"tests/test_a.py", "tests/test_b.py"}

    (tests / "data").mkdir()
    scheduling.commit_timings(tmp_path)
    assert json.loads((tmp_path / scheduling.COMMITTED).read_text()) == {"test_b": 1}


def test_runs_side_by_side_keep_the_times_of_both(tmp_path: Path) -> None:
    names = ("test_one.py::test_it", "test_other.py::test_it")
    runs = [Timings.read(tmp_path) for _ in names]
    for name, timings in zip(names, runs, strict=True):
        (tmp_path / name.partition("::")[0]).touch()
        timings.ran[name] = 2.0
    for timings in runs:
        timings.write(tmp_path)
    assert Timings.read(tmp_path).groups == {"test_one": 2.0, "test_other": 2.0}


def test_without_a_run_there_is_nothing_to_commit(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="run `make unit` first"):
        scheduling.commit_timings(tmp_path)
