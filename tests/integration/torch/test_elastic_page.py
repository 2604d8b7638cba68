"""The program of ``docs/how-to/elastic.md`` runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs/how-to/elastic.md"


@pytest.mark.timeout(200)
def test_the_program_runs_as_the_page_says(tmp_path: Path) -> None:
    program = next(code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    command = next(line for line in re.findall(r"```bash\nhvdlab (.*)\n```", PAGE.read_text()))
    (tmp_path / "train.py").write_text(program)
    arguments = [
        sys.executable if word == "python" else word for word in command.replace("-np 4", "-np 2").split()
    ]
    done = subprocess.run(
        [sys.executable, "-m", "hvdlab", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert f"rank {rank} has trained 3 epochs" in done.stdout
