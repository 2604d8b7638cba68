"""``hvdlab trace`` on a pool that is kept, and on files."""

from __future__ import annotations

import gzip
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdlab.collectives.recording import Recording
from hvdlab.collectives.recording.loading import load
from hvdlab.collectives.recording.saving import save
from hvdlab.kernel_ext.pool import Pool
from hvdlab.runner.command import main
from patience import PATIENCE
from timeline_traces import steps

SETUP = "import numpy as np\nfrom hvdlab.collectives import api, context\ncontext.init()"


@pytest.fixture
def kept(surroundings: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", os.environ["TMPDIR"])
    with Pool.start(2, keep="mine") as pool:
        assert not pool.run(
            f"{SETUP}\nfor _ in range(10): api.allreduce(np.ones(3), 'loss')", label="[3]"
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
    return save(recording, tmp_path / "run.json")


def test_a_kept_pool_is_looked_at_from_outside(
    kept: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json.gz"
    assert main(["trace", "save", str(file)]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {file} (20 spans, ")
    assert load(file).count == 20
    assert main(["trace", "summary", "--pool", "mine"]) == 0
    first, _, titles, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("20 spans of 2 ranks in ")
    assert titles.split()[:3] == ["rank", "spans", "last"]
    assert sorted(line.split()[0] for line in lines) == ["0", "1"]
    assert main(["trace", "top", "--once"]) == 0
    loss = capsys.readouterr().out.splitlines()[-1].split()
    assert loss[:6] == ["loss", "allreduce", "cell", "[3]", "line", "5"]
    # Who looks on is no notebook: the pool is as it was.
    assert not kept.run("api.allreduce(np.ones(3), 'loss')").errors
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
        (["open", "nowhere.json"], "nowhere.json: No such file or directory"),
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


def test_a_file_is_opened_in_perfetto_s_ui_until_ctrl_c(trace: Path, tmp_path: Path) -> None:
    """The browser is started without the token on its command line, which other users can read."""
    browser, written = tmp_path / "browser", tmp_path / "arguments"
    os.mkfifo(written)
    browser.write_text(f'#!/bin/sh\n(echo "$@"; cat "${{1#file://}}") > {written}\n')
    browser.chmod(0o700)
    command = [sys.executable, "-m", "hvdlab", "trace", "open", str(trace)]
    environment = {**os.environ, "BROWSER": f"{browser} %s"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        # Python asks the system for such a name, which need not know it.
        here = re.sub(r"[0-9a-f]+\.localhost", "127.0.0.1", url)
        assert b"Perfetto" in opener.open(here, timeout=PATIENCE).read()
        assert (
            opener.open(f"{here.partition('?')[0]}localtrace", timeout=PATIENCE).read() == trace.read_bytes()
        )
        address = url.partition("?")[0]
        arguments, page = written.read_text().split("\n", 1)
        assert arguments.startswith("file://")
        assert "token=" not in arguments
        assert f"{address}?token=" in page
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_top_goes_on_as_long_as_the_pool_does(kept: Pool) -> None:
    command = [sys.executable, "-m", "hvdlab", "trace", "top"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "120"}
    )
    assert process.stdout is not None
    try:
        heads = (line for line in process.stdout if " spans of 2 ranks in " in line)
        assert next(heads).startswith("20 spans")
        assert not kept.run("api.allreduce(np.ones(3), 'loss')").errors
        assert next(heads).startswith("22 spans")
        kept.stop()
        assert process.stdout.read().endswith("the pool has ended\n")
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
