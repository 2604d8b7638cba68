"""``hvdlab trace`` on a pool that is kept, and on files."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdlab.collectives.tracing.recording import Recording
from hvdlab.collectives.tracing.trace_file import load_trace, save_recording
from hvdlab.kernel_ext.notebook.pool import Pool
from hvdlab.runner.cli import main
from support.patience import PATIENCE
from support.timeline_traces import steps

SETUP = (
    "import numpy as np\nimport hvdlab.numpy as hvd\nfrom hvdlab.collectives import context\ncontext.init()"
)


@pytest.fixture
def kept(surroundings: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", os.environ["TMPDIR"])
    with Pool.start(2, keep="mine") as pool:
        assert not pool.run(
            f"{SETUP}\nfor _ in range(10): hvd.allreduce(np.ones(3), 'loss')", label="[3]"
        ).errors
        yield pool


@pytest.fixture
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    recording = Recording()
    for rank, batch in steps(4, 5):
        recording.feed(rank, batch)
    return save_recording(recording, tmp_path / "run.json")


def test_a_kept_pool_is_looked_at_from_outside(
    kept: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json.gz"
    assert main(["trace", "save", str(file)]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {file} (20 spans, ")
    assert load_trace(file).count == 20
    assert main(["trace", "summary", "--pool", "mine"]) == 0
    first, _, titles, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("20 spans of 2 ranks in ")
    assert titles.split()[:3] == ["rank", "spans", "last"]
    assert sorted(line.split()[0] for line in lines) == ["0", "1"]
    assert main(["trace", "top", "--once"]) == 0
    loss = capsys.readouterr().out.splitlines()[-1].split()
    assert loss[:6] == ["loss", "allreduce", "cell", "[3]", "line", "5"]
    # The observer is no notebook: the pool is as it was.
    assert not kept.run("hvd.allreduce(np.ones(3), 'loss')").errors
    assert main(["trace", "summary", "--pool", "other"]) == 2
    assert "there is no pool `other`" in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_kept")
def test_files_are_summed_up_and_converted(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "summary", str(trace)]) == 0
    assert capsys.readouterr().out.startswith("800 spans of 4 ranks in 0.0")
    assert main(["trace", "top", "-n", "3", str(trace)]) == 0
    assert capsys.readouterr().out.endswith("and 37 more\n")
    converted = trace.with_suffix(".json.gz")
    assert main(["trace", "save", str(converted), "--from", str(trace)]) == 0
    assert gzip.decompress(converted.read_bytes()) == trace.read_bytes()


@pytest.mark.usefixtures("nothing_kept")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["summary"], "no pool is kept here"),
        (["summary", "nowhere.json"], "nowhere.json: No such file or directory"),
        (["summary", "a.json", "--pool", "b"], "not both"),
        (["save", "x.txt", "--from", "TRACE"], "says no format of a trace"),
        (["save", "nowhere/x.json", "--from", "TRACE"], "No such file or directory"),
        (["show"], "invalid choice: 'show'"),
    ],
)
def test_what_can_not_be_done_is_said_in_one_sentence(
    words: list[str], said: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", *(str(trace) if word == "TRACE" else word for word in words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hvdlab: ")
    assert said in line


def test_top_goes_on_as_long_as_the_pool_does(kept: Pool) -> None:
    command = [sys.executable, "-m", "hvdlab", "trace", "top"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "120"}
    )
    assert process.stdout is not None
    try:
        heads = (line for line in process.stdout if " spans of 2 ranks in " in line)
        assert next(heads).startswith("20 spans")
        assert not kept.run("hvd.allreduce(np.ones(3), 'loss')").errors
        while not (head := next(heads)).startswith("22 spans"):
            assert head.startswith(
                ("20 spans", "21 spans")
            )  # a rank's record may come later than all else that is new
        kept.stop()
        assert process.stdout.read().endswith("the pool has ended\n")
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
