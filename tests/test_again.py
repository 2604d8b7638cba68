"""What is run once more is told by name, with both verdicts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

AGAIN = Path(__file__).with_name("again.py")
UNSTEADY = """
from pathlib import Path

def test_steady(): pass
def test_broken(): assert False
def test_unsteady():
    mark = Path(__file__).with_name("mark")
    again = mark.exists()
    mark.touch()
    assert again
"""


def test_what_needed_a_second_run_is_told(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "again.py").write_text(AGAIN.read_text())
    (tmp_path / "test_it.py").write_text(UNSTEADY)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    first = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert first.returncode == 1, first.stdout
    then = subprocess.run(
        [sys.executable, "tests/again.py", "-q"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert then.returncode == 1, then.stdout
    assert then.stdout.splitlines()[-3:] == [
        "2 of the tests failed in the first run:",
        "  failed again  test_it.py::test_broken",
        "  passed then   test_it.py::test_unsteady",
    ]
