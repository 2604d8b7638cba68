"""The commands and programs of ``docs/how-to/moving-from-horovod.md`` run as they stand."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.patience import PROGRAM_PATIENCE

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "moving-from-horovod.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
PROGRAMS = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines()]
BIN = Path(sys.executable).parent


def run(command: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    ours = ("HVDLAB_", "HOROVOD_", "PYTHONPATH")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environ |= {"PATH": f"{BIN}{os.pathsep}{environ['PATH']}", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        command,
        cwd=directory,
        env=environ,
        capture_output=True,
        text=True,
        timeout=PROGRAM_PATIENCE,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran


def test_the_page_has_what_is_tested_here() -> None:
    assert len(PROGRAMS) == 3
    assert [shlex.split(command)[0] for command in COMMANDS] == ["hvdlab", "python", "mpiexec", "torchrun"]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAMS[0])
    words = shlex.split(command)
    program = shutil.which(words[0], path=str(BIN))
    if program is None:
        pytest.skip(f"no {words[0]} in this environment")
    if "torchrun" in words and importlib.util.find_spec("torch.distributed.run") is None:
        pytest.skip("this torch has no torchrun")
    ran = run(words, tmp_path)
    ranks = 2 if "2" in words else 1
    assert re.findall(r"(\d) ranks, loss \d+\.\d{4}", ran.stdout) == [str(ranks)], ran.stdout
    assert ran.stderr.count("`import horovod` means hvdlab") == 1


def test_the_function_runs_on_ranks(tmp_path: Path) -> None:
    (tmp_path / "call.py").write_text(PROGRAMS[1])
    assert run([sys.executable, "call.py"], tmp_path).stdout.splitlines()[-1] == "[0, 1]"


def test_one_line_before_the_imports(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAMS[2] + PROGRAMS[0])
    assert "1 ranks, loss" in run([sys.executable, "train.py"], tmp_path).stdout
