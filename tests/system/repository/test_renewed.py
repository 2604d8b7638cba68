"""Shared resources of tests are made again after one that failed, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]
SHARING = """
import pytest

class Shared:
    closed, number = False, 0
    def renew(self):
        assert not self.closed
        self.number += 1

@pytest.fixture(scope="module")
def started():
    made = Shared()
    yield made
    made.closed = True

@pytest.fixture
def shared(started):
    assert started.number != 2
    yield started
    assert started.number != 3

def test_first(shared): assert shared.number == 0
def test_passed(shared): assert shared.number == 0, "nobody failed"
def test_fails(shared): assert False
def test_was_renewed(shared): assert shared.number == 1
def test_fails_again(shared): assert False
def test_whose_setup_fails(shared): pass
def test_whose_teardown_fails(shared): assert shared.number == 3
def test_fails_at_the_end(shared): assert shared.number != 4
"""


def test_what_is_shared_is_renewed_after_a_failure(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").symlink_to(TESTS / "conftest.py")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(SHARING)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "--color=no", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
    )
    told = {
        line.partition("::")[2].partition(" ")[0]: line.split()[0]
        for line in ran.stdout.splitlines()
        if "::" in line
    }
    assert told == {
        "test_first": "PASSED",
        "test_passed": "PASSED",
        "test_fails": "FAILED",
        "test_was_renewed": "PASSED",
        "test_fails_again": "FAILED",
        "test_whose_setup_fails": "ERROR",
        "test_whose_teardown_fails": "ERROR",
        "test_fails_at_the_end": "FAILED",
    }, ran.stdout
