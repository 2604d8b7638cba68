"""%%hvd_run and %%hvd_rank in a real shell, over a pool without processes."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from IPython.core.error import UsageError

from hvdlab.collectives import context
from hvdlab.kernel_ext.notebook.cells.results import CellResults
from hvdlab.kernel_ext.notebook.output.error_report import CellFailed
from hvdlab.magics.arguments import check_syntax
from support.fakes.notebook import Notebook
from support.patience import PATIENCE, eventually


def test_equal_lines_are_shown_once_and_others_labelled(notebook: Notebook) -> None:
    ran = notebook.run("%%hvd_run -np 3\nprint('epoch 1')\nprint('loss', rank)\nprint('end')")
    assert ran.lines == ["[0-2] epoch 1", "[0] loss 0", "[1] loss 1", "[2] loss 2", "[0-2] end"]
    assert ran.error is None


def test_variables_stay_between_cells(notebook: Notebook) -> None:
    notebook.run("%%hvd_run -np 2\nx = rank * 10")
    assert notebook.run("%%hvd_run\nprint(x)").lines == ["[0] 0", "[1] 10"]


def test_the_value_of_all_ranks_is_the_result(notebook: Notebook) -> None:
    ran = notebook.run("%%hvd_run -np 4\n3 if rank < 3 else 4")
    assert isinstance(ran.result, CellResults)
    assert list(ran.result) == [3, 3, 3, 4]
    assert notebook.shell.user_ns["_"] is ran.result
    assert "[0-2] 3\n[3]   4" in ran.stdout


def test_a_cell_without_value_has_no_result(notebook: Notebook) -> None:
    assert notebook.run("%%hvd_run -np 2\nx = 1").result is None


def test_out_binds_the_results(notebook: Notebook) -> None:
    notebook.run("%%hvd_run -np 2 --out losses\nrank + 0.5")
    assert list(notebook.shell.user_ns["losses"]) == [0.5, 1.5]


def test_a_new_number_grows_and_shrinks_the_pool(notebook: Notebook) -> None:
    notebook.run("%%hvd_run -np 2\nx = rank")
    notebook.run("%%hvd_run -np 3\ny = size()")
    assert notebook.run("%%hvd_run --ranks 0,1\nprint(x, y)").lines == ["[0] 0 3", "[1] 1 3"]
    notebook.run("%%hvd_run -np 1\nprint(x)")
    assert notebook.pool.size == 1


def test_without_a_number_the_cores_count_and_are_named(notebook: Notebook) -> None:
    np = max(2, len(os.sched_getaffinity(0)))
    ran = notebook.run("%%hvd_run\nx = 1")
    assert ran.lines == [f"started {np} ranks (-np chooses how many)"]
    assert notebook.pool.size == np


def test_one_rank_needs_no_labels(notebook: Notebook) -> None:
    assert notebook.run("%%hvd_run -np 1\nprint('a')").lines == ["a"]


def test_ranks_are_chosen(notebook: Notebook) -> None:
    notebook.run("%%hvd_run -np 6\nx = 1")
    assert notebook.run("%%hvd_run --ranks ::2\nprint('a')").lines == ["[0,2,4] a"]
    assert notebook.run("%%hvd_run --ranks 0,3-5\nprint('a')").lines == ["[0,3-5] a"]
    assert notebook.run("%%hvd_rank 4\nprint(rank)").lines == ["4"]


def test_stderr_stays_stderr(notebook: Notebook) -> None:
    ran = notebook.run("%%hvd_run -np 2\nerr('careful\\n')\nprint('a')")
    assert ran.stderr == "[0,1] careful\n"
    assert ran.lines == ["[0,1] a"]


def test_a_line_magic_runs_the_rest_of_its_line(notebook: Notebook) -> None:
    assert notebook.run("%hvd_run -np 2 print('a  b', rank)").lines == ["[0] a  b 0", "[1] a  b 1"]


def test_a_failure_shows_the_cause_first_and_fails_the_cell(notebook: Notebook) -> None:
    ran = notebook.run("%%hvd_run -np 3\nif rank == 1:\n    raise ValueError('bad')\nblock()")
    assert isinstance(ran.error, CellFailed)
    assert type(ran.error).__name__ == "ValueError"
    assert str(ran.error) == "bad"
    assert ran.lines[0] == "rank 1 failed:"
    assert "line 3, in <module>" in ran.stdout, "the cell's own line numbers, the magic being line 1"
    assert ran.lines[-1] == "ranks 0,2: interrupted"
    assert "hvdlab" not in ran.stdout
    assert notebook.run("%%hvd_run\nprint('goes on')").lines == ["[0-2] goes on"]


def test_leading_blank_lines_count(notebook: Notebook) -> None:
    ran = notebook.run("\n\n%%hvd_run -np 2\n1 / 0")
    assert "line 4, in <module>" in ran.stdout


def test_a_failure_keeps_the_results_under_their_name(notebook: Notebook) -> None:
    notebook.run("%%hvd_run -np 2 --out r\n1 / rank")
    found = notebook.shell.user_ns["r"]
    assert found[1] == 1.0
    with pytest.raises(IndexError, match="rank 0 has no value: ZeroDivisionError: division by zero"):
        found[0]


def test_a_syntax_error_is_found_before_any_rank_runs(notebook: Notebook) -> None:
    notebook.run("%%hvd_run -np 2\nx = 1")
    ran = notebook.run("%%hvd_run\ny = 1\nfor in x:\n    pass")
    assert type(ran.error).__name__ == "SyntaxError"
    assert "line 3" in ran.stdout
    assert ran.stdout.count("for in x") == 1
    assert notebook.run("%%hvd_run\nprint('y' in globals())").lines == ["[0,1] False"]


@pytest.mark.parametrize(
    "source", ["!ls", "%time 1", "await something", "x?", "%%time\nx = 1", "async for i in y: pass"]
)
def test_ipython_syntax_and_await_are_no_syntax_errors(notebook: Notebook, source: str) -> None:
    check_syntax(notebook.shell, source, 1)


def test_a_death_is_told(notebook: Notebook) -> None:
    ran = notebook.run("%%hvd_run -np 2\nif rank: die()")
    assert type(ran.error).__name__ == "RankDied"
    assert str(ran.error) == "rank 1 died: killed by SIGKILL"
    assert "died" not in ran.stderr, "the report tells it"


def test_a_semicolon_hides_the_values_but_keeps_them(notebook: Notebook) -> None:
    ran = notebook.run("%%hvd_run -np 2 --out kept\nrank * 2;")
    assert ran.result is None
    assert list(notebook.shell.user_ns["kept"]) == [0, 2]
    assert notebook.run("%%hvd_run\nrank * 3;").result is None
    assert list(notebook.shell.user_ns["_"]) == [0, 3]
    notebook.run("%%hvd_run --out later --background\nrank * 4;")
    assert list(notebook.shell.user_ns["later"].wait()) == [0, 4]


def test_a_long_value_names_the_variable_that_has_it_whole(notebook: Notebook) -> None:
    ran = notebook.run("%%hvd_run -np 2 --out losses\nimport numpy\nnumpy.arange(99).reshape(-1, 1)")
    assert repr(notebook.shell.user_ns["losses"]).count("more lines; `losses[0]` has all") == 1, ran


def test_lost_ranks_are_mentioned(notebook: Notebook) -> None:
    notebook.run("%%hvd_run -np 3\nx = 1")
    notebook.pool.lost = {2: "killed by SIGKILL"}
    assert "rank 2 is lost (killed by SIGKILL); `%hvd_pool repair`" in notebook.run("%%hvd_run\nx").stdout


def test_the_time_limit_ends_the_cell(notebook: Notebook) -> None:
    ran = notebook.run("%%hvd_run -np 2 --timeout 0.2\nblock()")
    assert type(ran.error).__name__ == "TimeoutError"
    assert "timeout of 0.2 s reached; interrupting ranks 0,1" in ran.stderr


def test_an_interrupt_reaches_the_ranks_and_is_shown_once(notebook: Notebook) -> None:
    notebook.run("%%hvd_run -np 2\nx = 1")
    printed = threading.Barrier(3)
    notebook.pool.push(printed=printed)

    def interrupt() -> None:
        printed.wait(PATIENCE)
        # The run has the signal's handler while it waits for its ranks.
        eventually(lambda: signal.getsignal(signal.SIGINT) is not signal.default_int_handler)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    ran = notebook.run("%%hvd_run\nprint('before')\nprinted.wait()\nblock()")
    thread.join()
    assert isinstance(ran.error, KeyboardInterrupt)
    assert ran.stdout.count("were interrupted") == 1
    assert "[0,1] before" in ran.lines
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert notebook.run("%%hvd_run\nprint(x)").lines == ["[0,1] 1"]


def test_a_cell_in_the_background_returns_a_handle(notebook: Notebook) -> None:
    ran = notebook.run("%%hvd_run -np 2 --background --out job\nblock()")
    assert "runs in the background on ranks 0,1" in repr(ran.result)
    assert not ran.result.done
    ran.result.interrupt()
    assert isinstance(notebook.run("job.wait()").error, KeyboardInterrupt)
    assert isinstance(notebook.shell.user_ns["job"], CellResults)


def test_output_can_be_streamed_or_dropped(notebook: Notebook) -> None:
    code = "print('a')\nprint(rank)"
    ran = notebook.run(f"%%hvd_run -np 2 --output stream\n{code}")
    assert sorted(ran.lines) == ["[0] 0", "[0] a", "[1] 1", "[1] a"]
    assert notebook.run(f"%%hvd_run --output none\n{code}").lines == []


def test_displays_are_labelled_in_a_terminal(notebook: Notebook) -> None:
    ran = notebook.run("%%hvd_run -np 2\nshow({'text/plain': f'table {rank}', 'text/html': '<b>'})")
    assert ran.lines == ["[0] table 0", "[1] table 1"]


BAD = [
    ("%%hvd_run -np 0\n1", "%%hvd_run: -np: a number of ranks from 1 was expected, not '0'"),
    ("%%hvd_run -np x\n1", "%%hvd_run: -np: a number of ranks from 1 was expected, not 'x'"),
    ("%%hvd_run --rank 1\n1", "%%hvd_run: unknown option --rank; did you mean --ranks?"),
    ("%%hvd_run --backgroud\n1", "%%hvd_run: unknown option --backgroud; did you mean --background?"),
    (
        "%%hvd_run --timeout soon\n1",
        "%%hvd_run: --timeout: a number of seconds above 0 was expected, not 'soon'",
    ),
    ("%%hvd_run --out 3x\n1", "%%hvd_run: --out: a variable's name was expected, not '3x'"),
    ("%%hvd_run --out 'x\n1", "the options can not be read: No closing quotation"),
    ("%%hvd_run --ranks 9\n1", "rank 9 is out of range; the pool has ranks 0,1"),
    ("%%hvd_run --ranks 1-0\n1", "--ranks 1-0: write the smaller rank first, 0-1"),
    ("%%hvd_run --ranks a\n1", "--ranks a: write ranks as 3, 2-5 or ::2, separated by commas"),
    ("%%hvd_run --ranks 5:\n1", "--ranks 5:: no rank is left; the pool has ranks 0,1"),
    (
        "%%hvd_run --launcher mpi\n1",
        "--launcher mpi: the ranks that run were started with local; `%hvd_pool stop` ends them",
    ),
    ("%%hvd_run\n  \n", "%%hvd_run: there is no code to run"),
    ("%hvd_run -np 2 --ouput stream", "%hvd_run: unknown option --ouput; did you mean --output?"),
    ("%%hvd_run --min-np 2\n1", "%%hvd_run: --min-np belongs to --elastic, which is missing"),
    ("%%hvd_run --elastic --ranks 1\n1", "%%hvd_run: --elastic is about all ranks; run it without --ranks"),
    (
        "%%hvd_run --elastic --min-np 3 --max-np 2\n1",
        "--min-np 3 is more than --max-np 2; no number of ranks is both",
    ),
    (
        "%%hvd_run --plane nccl\n1",
        "%%hvd_run: --plane: NCCL moves CUDA tensors only, beside a plane for the others, and needs no setting",
    ),
    ("%%hvd_run --plane x\n1", "%%hvd_run: --plane: there is no data plane 'x'; choose one of auto, shm, "),
    ("%hvd_pool resize", "%hvd_pool resize: say how many ranks"),
    ("%hvd_pool resize x", "%hvd_pool resize: a number of ranks from 1 was expected, not 'x'"),
    ("%hvd_pool go", "%hvd_pool: `go` is no command; there are start, status, resize"),
    ("%hvd_push nothing", "%hvd_push: the notebook has no variable `nothing`"),
    ("%autohvd maybe", "%autohvd: `maybe` is no switch; there are on, off"),
]


@pytest.mark.parametrize(("cell", "text"), BAD, ids=[cell.split("\n")[0] for cell, _ in BAD])
def test_bad_input_is_one_sentence(notebook: Notebook, cell: str, text: str) -> None:
    notebook.run("%%hvd_run -np 2\nx = 1")
    ran = notebook.run(cell)
    assert isinstance(ran.error, UsageError)
    assert ran.usage_error.startswith(text)
    assert ran.usage_error.count("\n") == 0
    assert notebook.run("%%hvd_run\nprint(x)").lines == ["[0,1] 1"]


@pytest.mark.parametrize(
    "cell", ["%hvd_pool status", "%%hvd_rank 0\n1", "%hvd_pull x", "%hvd_push x", "%hvd_pool repair"]
)
def test_without_a_pool_the_remedy_is_named(notebook: Notebook, cell: str) -> None:
    assert "no ranks are running; start some with `%hvd_pool start -np 8`" in notebook.run(cell).usage_error


def test_options_of_a_launcher_belong_to_the_start_of_a_pool(notebook: Notebook) -> None:
    assert "--launcher-option python: write it as key=value" in (
        notebook.run("%hvd_pool start -np 2 --launcher-option python").usage_error
    )
    assert notebook.run(
        "%%hvd_run -np 2 --launcher-option python=/x --launcher-option a=b=c\nprint(1)"
    ).lines == ["[0,1] 1"]
    assert notebook.pool.launcher_options == {"python": "/x", "a": "b=c"}
    assert "the ranks that run were started already" in (
        notebook.run("%%hvd_run --launcher-option python=/y\n1").usage_error
    )


def test_a_pool_that_can_not_start_is_told_and_leaves_nothing(notebook: Notebook) -> None:
    assert notebook.run("%%hvd_run -np 2 --launcher slurm\n1").usage_error == (
        "the launcher 'slurm' is not installed; `pip install hvdlab[slurm]` adds it"
    )
    assert notebook.run("%%hvd_run -np 2\nprint(1)").lines == ["[0,1] 1"]


def test_an_interrupted_start_is_one_line(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(notebook.extension.session, "start_pool", interrupted)
        ran = notebook.run("%%hvd_run -np 2\n1")
    assert ran.lines == ["KeyboardInterrupt: interrupted before all ranks were ready; none was kept"]
    assert notebook.run("%%hvd_run -np 2\nprint(1)").lines == ["[0,1] 1"]


def test_help_lists_the_options(notebook: Notebook) -> None:
    assert "--timeout S" in notebook.run("%%hvd_run --help\n1").stdout
    for alone in ("%%hvd_run --help", "%%hvd_run -h\n", "\n%%hvd_rank --help"):
        assert "--timeout S" in notebook.run(alone).stdout, alone
    assert "there is no code to run" in notebook.run("%%hvd_run").usage_error
    advice = notebook.run("%%hvd_run --bogus\n1").usage_error
    assert "`%%hvd_run --help` lists the options" in advice
    assert "--timeout S" in (notebook.extension.shell.find_cell_magic("hvd_run").__doc__ or "")


def test_a_pool_that_broke_down_is_told_in_one_sentence_until_there_is_a_new_one(notebook: Notebook) -> None:
    notebook.run("%%hvd_run -np 2\nx = 1")
    notebook.pool.broken = "the coordinator is lost"
    for source in ("%%hvd_run\nx", "%hvd_pool status", "%%hvd_rank 0\nx", "%%hvd_run\nx"):
        ran = notebook.run(source)
        assert isinstance(ran.error, UsageError)
        assert "the ranks are gone, and their variables with them: the coordinator is lost;" in str(ran.error)
        assert ran.stdout == ""
    assert notebook.run("%%hvd_run -np 3\nsize()").error is None
    notebook.pool.broken = "the coordinator is lost"
    assert notebook.run("%hvd_pool start").error is None


def test_a_cell_is_not_sent_to_a_rank_that_was_given_up_and_still_hangs(notebook: Notebook) -> None:
    notebook.run("%%hvd_run -np 2\nx = 1")
    notebook.pool.hanging = {1: "[3]"}
    error = notebook.run("%%hvd_run\nx").error
    assert isinstance(error, UsageError)
    assert str(error) == (
        "rank 1 still hangs in cell [3], which was given up; `%hvd_pool restart 1` replaces it, `--ranks 0` leaves it out"
    )
    assert notebook.run("%%hvd_run --ranks 0\nx").error is None
    notebook.pool.hanging = {}
    assert notebook.run("%%hvd_run\nx").error is None


def test_magics_that_are_loaded_in_a_rank_do_not_claim_that_no_ranks_run(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "in_rank_of_pool", lambda: True)
    assert "this is a rank" in notebook.run("%hvd_pool status").usage_error


def test_packages_are_installed_once_in_the_notebooks_process(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[str] = []
    monkeypatch.setattr(notebook.shell, "system", commands.append)
    notebook.shell.magics_manager.register_function(
        lambda line: commands.append(f"pip {line}"), "line", "pip"
    )
    ran = notebook.run(
        "%%hvd_run -np 2\n# tools\n%pip install -q six\n!pip3 install seven\nprint('then', rank)"
    )
    assert commands == ["pip install -q six", "pip3 install seven"]
    assert ran.lines[0].startswith("installing once")
    assert ran.lines[-2:] == ["[0] then 0", "[1] then 1"]
    assert notebook.run("%%hvd_rank 1\n%pip install eight").result is None
    assert commands[-1] == "pip install eight"


def test_packages_are_not_installed_on_all_ranks_at_once(notebook: Notebook) -> None:
    ran = notebook.run("%%hvd_run -np 2\nx = 1\n%pip install six")
    assert "put it at the top of the cell" in ran.usage_error


def test_the_line_numbers_of_a_cell_count_lines_that_install(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notebook.shell, "system", lambda command: None)
    ran = notebook.run("%%hvd_run -np 2\n!pip install six\n\n1/0")
    assert "line 4" in ran.stdout + ran.stderr + str(ran.error)
