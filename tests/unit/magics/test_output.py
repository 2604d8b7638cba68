"""``%hvd_output``: a cell's output, again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvdlab.magics.view_magics import OutputMagics
from support.fakes.notebook import Notebook
from support.patience import PATIENCE


@pytest.fixture
def started(notebook: Notebook) -> Notebook:
    notebook.run("%hvd_pool start 2")
    return notebook


def test_output_comes_again_with_its_labels(started: Notebook) -> None:
    first = started.run("%%hvd_run\nprint('hello')\nprint('rank', rank)\nerr('careful\\n')")
    started.run("%%hvd_run\nprint('later')")
    again = started.run("%hvd_output 2")
    assert again.stderr == first.stderr
    assert sorted(again.lines) == ["[0,1] hello", "[0] rank 0", "[1] rank 1"]
    assert started.run("%hvd_output").lines == ["[0,1] later"]
    assert started.run("%hvd_output [2] --ranks 1").lines == ["hello", "rank 1"]


def test_values_and_errors_come_again(started: Notebook) -> None:
    started.run("%%hvd_run\nrank * 10")
    (shown,) = started.run("%hvd_output").displays
    assert shown.data["text/plain"] == "[0] 0\n[1] 10"
    started.run("%%hvd_run\nprint('before')\nif rank: raise ValueError('bad batch')")
    again = started.run("%hvd_output")
    assert again.error is None
    assert "[0,1] before" in again.lines
    assert "ValueError: bad batch" in again.stderr
    assert "\x1b" not in again.stderr


def test_what_is_too_much_to_show_can_be_written_to_a_file(
    started: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVDLAB_OUTPUT_SHOWN", "1")
    ran = started.run("%%hvd_run\nfor i in range(9_000): print('step', i)")
    assert any(line.endswith(" step 8999") for line in ran.lines)
    assert not any(line.endswith(" step 8000") for line in ran.lines)
    assert "`%hvd_output 2 --to FILE` writes all of it" in ran.stdout
    assert ran.stderr == ""
    file = tmp_path / "all.txt"
    said = started.run(f"%hvd_output 2 --to {file}")
    assert file.read_text().splitlines() == [f"[0,1] step {i}" for i in range(9_000)]
    assert said.lines == [f"{file.stat().st_size:,} bytes written to {file}"]
    assert started.run("%hvd_output 2 --tail 2 --ranks 1").lines == [
        "── rank 1 ──",
        "step 8998",
        "step 8999",
    ]


def test_hidden_output_is_kept_too(started: Notebook) -> None:
    assert started.run("%%hvd_run --output none\nprint('quiet')").lines == []
    assert started.run("%hvd_output").lines == ["[0,1] quiet"]


def test_a_cell_in_the_background_goes_on_where_it_was_asked_for(
    started: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    ended = threading.Event()

    def write(name: str, text: str) -> None:
        written.append(text)
        if "late" in "".join(written) and "was interrupted" in "".join(written):
            ended.set()

    started.run(
        "%%hvd_run --background --out job\nprint('early')\ntry: block()\nexcept KeyboardInterrupt: print('late')"
    )
    monkeypatch.setattr("hvdlab.magics.screens.write_to_terminal", write)
    monkeypatch.setattr("hvdlab.magics.cell_view.write_to_terminal", write)
    started.run("%hvd_output")
    job = started.shell.user_ns["job"]
    job.interrupt()
    with pytest.raises(KeyboardInterrupt):
        job.wait(PATIENCE)
    assert ended.wait(PATIENCE)
    assert written[0] == "[0,1] early\n"


def test_cell_that_ends_while_it_is_looked_up_is_shown_with_its_end(
    started: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    started.run("%%hvd_run --background --output none --out job\nprint('early')\nblock()")
    make: Callable[..., Any] = OutputMagics._sinks

    def end_meanwhile(*arguments: Any, **more: Any) -> Any:
        job = started.shell.user_ns["job"]
        job.interrupt()
        with pytest.raises(KeyboardInterrupt):
            job.wait(PATIENCE)
        return make(*arguments, **more)

    monkeypatch.setattr(OutputMagics, "_sinks", end_meanwhile)
    again = started.run("%hvd_output")
    assert again.lines == ["[0,1] early"]
    assert "were interrupted" in again.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("%hvd_output 99", "cell 99 has not run on these ranks"),
        ("%hvd_output --ranks 7", "rank 7 is out of range"),
        ("%hvd_output --to /proc/nowhere/x", "/proc/nowhere/x"),
        ("%hvd_output --tail 0", "--tail: a number of lines from 1 was expected, not '0'"),
        ("%hvd_output --tail -3", "a number of lines from 1 was expected, not '-3'"),
    ],
)
def test_mistakes_are_told_in_a_sentence(started: Notebook, line: str, said: str) -> None:
    started.run("%%hvd_run\nprint('x')")
    assert said in started.run(line).usage_error


def test_without_ranks_there_is_nothing_to_show(notebook: Notebook) -> None:
    assert "no ranks are running" in notebook.run("%hvd_output").usage_error
    notebook.run("%hvd_pool start 2")
    assert notebook.run("%hvd_output").usage_error == (
        "%hvd_output: there is no output yet: no cell has run on these ranks"
    )
