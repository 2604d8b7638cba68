"""The example of Horovod's Ray pattern, in both ways."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

# Ray leaves files and sockets to the collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
EXAMPLE = Path(__file__).parents[3] / "examples/ray_executor.py"


def test_the_example(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["--num-workers", "2"], ["--min-workers", "2", "--max-workers", "2"]):
        monkeypatch.setattr("sys.argv", [str(EXAMPLE), *words])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        loss, _, count, _ = capsys.readouterr().out.split()[1:]
        assert float(loss) < 1
        assert count == "2"
