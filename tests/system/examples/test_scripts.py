"""Every script of ``examples/`` runs as its own text describes, on small data, and gets to a result that is worth
something."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.ranks.resident import Ranks

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
NOT_TRAINING = {"run.py"}
needs_tensorflow = pytest.mark.skipif(find_spec("tensorflow") is None, reason="needs TensorFlow")


def launch(np: int, script: str, *arguments: str, cwd: Path) -> str:
    """Return standard output of all ranks of ``hvdlab run``."""
    command = [sys.executable, "-m", "hvdlab", "run", "-np", str(np)]
    done = subprocess.run(
        [*command, sys.executable, str(EXAMPLES / script), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def run_as_main(script: str, arguments: tuple[str, ...], directory: str) -> str:
    """Return on a rank the script's standard output."""
    os.chdir(directory)
    sys.argv = [script, *arguments]
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        runpy.run_path(script, run_name="__main__")
    return written.getvalue()


def run(np: int, script: str, *arguments: str, cwd: Path) -> str:
    """Do the same with ranks that are forked with the scripts' imports: importing costs more than most scripts do."""
    binding = "hvdlab.torch" if script.startswith("torch") else "hvdlab.keras"
    with Ranks(np, init=False, imports=[binding, "sklearn.datasets"]) as ranks:
        return "".join(ranks.run(run_as_main, str(EXAMPLES / script), arguments, str(cwd), timeout=150))


def number_in(output: str, pattern: str) -> float:
    found = re.search(pattern, output)
    assert found is not None, output
    return float(found[1])


def last_percentage(output: str) -> float:
    return float(re.findall(r"([\d.]+)%", output)[-1])


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "extra",
    [
        (),
        pytest.param(("--fp16-allreduce", "--gradient-predivide-factor", "2"), marks=pytest.mark.soak),
    ],
    ids=["plain", "fp16"],
)
def test_digits(tmp_path: Path, extra: tuple[str, ...]) -> None:
    output = launch(2, "torch_digits.py", "--epochs", "4", *extra, cwd=tmp_path)
    assert last_percentage(output) > 90
    assert len(re.findall(r"epoch \d", output)) == 4  # by rank 0 alone


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "extra",
    [(), pytest.param(("--sync-batch-norm", "--batches-per-allreduce", "2"), marks=pytest.mark.soak)],
    ids=["plain", "sync"],
)
def test_checkpoints_are_gone_on_from(tmp_path: Path, extra: tuple[str, ...]) -> None:
    first = run(2, "torch_checkpoints.py", "--epochs", "1", *extra, cwd=tmp_path)
    assert "epoch 1:" in first
    then = run(2, "torch_checkpoints.py", "--epochs", "3", *extra, cwd=tmp_path)
    assert "epoch 1:" not in then
    assert "epoch 2:" in then
    assert last_percentage(then) > (60 if extra else 85)
    assert (tmp_path / "out/checkpoints/checkpoint-3.pt").is_file()


@pytest.mark.timeout(180)
def test_synthetic_benchmark(tmp_path: Path) -> None:
    small = ("--width", "4", "--num-iters", "3", "--num-batches-per-iter", "2", "--batch-size", "4")
    output = run(2, "torch_synthetic_benchmark.py", *small, cwd=tmp_path)
    one, both = (number_in(output, pattern) for pattern in (r"median ([\d.]+)", r"2 ranks: ([\d.]+)"))
    assert both == pytest.approx(2 * one, rel=0.01)


@pytest.mark.timeout(180)
def test_gradient_accumulation(tmp_path: Path) -> None:
    output = run(2, "torch_gradient_accumulation.py", "--epochs", "5", cwd=tmp_path)
    assert "28 steps of 64 images" in output
    assert last_percentage(output) > 95


@pytest.mark.timeout(180)
@pytest.mark.parametrize("np", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_adasum(tmp_path: Path, np: int) -> None:
    output = run(np, "torch_adasum.py", "--epochs", "4", cwd=tmp_path)
    assert last_percentage(output) > 80


@pytest.mark.timeout(180)
def test_uneven_data(tmp_path: Path) -> None:
    output = run(3, "torch_uneven_data.py", cwd=tmp_path)
    assert "rank 2 came last" in output
    assert "[19, 38, 57]" in output
    assert last_percentage(output) > 85


@pytest.mark.timeout(180)
def test_process_sets(tmp_path: Path) -> None:
    output = run(4, "torch_process_sets.py", cwd=tmp_path)
    assert {"team 0", "team 1"} == set(re.findall(r"team \d", output))
    together = set(re.findall(r"([\d.]+)% together", output))
    assert len(together) == 1
    assert float(together.pop()) > 85


@needs_tensorflow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "extra", [(), pytest.param(("--fp16-allreduce",), marks=pytest.mark.soak)], ids=["plain", "fp16"]
)
def test_keras_digits(tmp_path: Path, extra: tuple[str, ...]) -> None:
    output = run(2, "keras_digits.py", "--epochs", "4", "--checkpoint", "best.keras", *extra, cwd=tmp_path)
    assert last_percentage(output) > 90
    assert len(re.findall(r"Epoch \d/4", output)) == 4  # by rank 0 alone
    assert (tmp_path / "best.keras").is_file()


@needs_tensorflow
@pytest.mark.timeout(180)
def test_tensorflow_digits(tmp_path: Path) -> None:
    output = run(2, "tensorflow_digits.py", "--steps", "150", "--checkpoint", "digits", cwd=tmp_path)
    assert re.findall(r"step (\d+):", output) == ["50", "100", "150"]
    assert last_percentage(output) > 90
    assert list(tmp_path.glob("digits-*.index"))


@needs_tensorflow
@pytest.mark.timeout(180)
def test_tensorflow1_digits(tmp_path: Path) -> None:
    output = run(2, "tensorflow1_digits.py", "--steps", "300", "--checkpoints", "digits", cwd=tmp_path)
    assert re.findall(r"step (\d+):", output) == ["50", "100", "150"]
    assert last_percentage(output) > 85
    assert (tmp_path / "digits/model.ckpt-150.index").is_file()


@needs_tensorflow
@pytest.mark.timeout(180)
def test_tensorflow_synthetic_benchmark(tmp_path: Path) -> None:
    small = ("--width", "4", "--num-iters", "3", "--num-batches-per-iter", "2", "--batch-size", "4")
    output = run(2, "tensorflow_synthetic_benchmark.py", *small, cwd=tmp_path)
    one, both = (number_in(output, pattern) for pattern in (r"median ([\d.]+)", r"2 ranks: ([\d.]+)"))
    assert both == pytest.approx(2 * one, rel=0.01)


@needs_tensorflow
@pytest.mark.timeout(180)
def test_keras_elastic(tmp_path: Path) -> None:
    output = run(2, "keras_elastic.py", "--epochs", "4", cwd=tmp_path)
    found = re.findall(r"rank \d: accuracy ([\d.]+)%", output)
    assert len(found) == 2
    assert found[0] == found[1]
    assert float(found[0]) > 90


def test_every_script_is_run_by_a_test() -> None:
    tests = Path(__file__).parents[2]
    folders = [tests / "system" / "examples", *(tests / "engines").iterdir()]
    tested = "".join(path.read_text() for folder in folders for path in folder.glob("test_*.py"))
    missing = [p.name for p in EXAMPLES.glob("*.py") if p.name not in tested and p.name not in NOT_TRAINING]
    assert not missing
