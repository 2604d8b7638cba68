"""The elastic example, with a rank that is lost on the way, alone and restarted by the launcher."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def run(cwd: Path, *launcher: str, arguments: tuple[str, ...], script: str = "elastic_training.py") -> str:
    done = subprocess.run(
        [*launcher, sys.executable, str(EXAMPLES / script), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def accuracies(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"rank \d: accuracy ([\d.]+)%", output)]


@pytest.mark.timeout(220)
def test_alone(tmp_path: Path) -> None:
    (accuracy,) = accuracies(run(tmp_path, arguments=("--epochs", "3")))
    assert accuracy > 90


@pytest.mark.timeout(220)
@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_lost_rank_is_started_anew_and_takes_part_again(tmp_path: Path, lost: int) -> None:
    launcher = (sys.executable, "-m", "hvdlab", "run", "-np", "2", "--min-np", "2")
    output = run(tmp_path, *launcher, arguments=("--epochs", "5", "--lose", str(lost)))
    assert "rank 0: going on with 2 ranks in epoch 1" in output  # the earlier one, of any kind
    assert (tmp_path / "lost").exists()
    found = accuracies(output)
    assert len(found) == 2
    assert found[0] == found[1]
    assert found[0] > 90


@pytest.mark.soak  # three times TensorFlow's import
@pytest.mark.skipif(find_spec("tensorflow") is None, reason="needs TensorFlow")
@pytest.mark.timeout(220)
def test_a_lost_rank_of_keras_takes_part_again(tmp_path: Path) -> None:
    launcher = (sys.executable, "-m", "hvdlab", "run", "-np", "2", "--min-np", "2")
    arguments = ("--epochs", "5", "--lose", "1")
    output = run(tmp_path, *launcher, arguments=arguments, script="keras_elastic.py")
    assert "rank 0: going on with 2 ranks in epoch 1" in output
    assert (tmp_path / "lost").exists()
    found = accuracies(output)
    assert len(found) == 2
    assert found[0] == found[1]
    assert found[0] > 90
