"""A cell in a rank behaves as in a notebook, and its end is reported in order."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hvdlab.bindings import framework_hooks
from hvdlab.collectives.errors import AbortedError, Cause, CauseKind, Disagreement, MismatchError, Pending
from hvdlab.kernel_ext.wire.cells import CellDone, Output, RunCell
from support.patience import PATIENCE

if TYPE_CHECKING:
    from integration.kernel_ext.rank.conftest import Pool, Rank


def traceback_of(ran: Any) -> str:
    return "\n".join(ran.error.traceback)


# -- values -----------------------------------------------------------------------------------------------------------


def test_a_cell_prints_and_returns_its_value(rank: Rank) -> None:
    ran = rank.run("print('hello')\n6 * 7")
    assert ran.text() == "hello\n"
    assert ran.done.error is None
    assert ran.done.has_value
    assert ran.done.value_repr == "42"
    assert ran.displays[-1].result
    assert ran.displays[-1].data["text/plain"] == "42"


def test_a_cell_without_expression_has_no_value(rank: Rank) -> None:
    for source in ("x = 1", "None", "", "# nothing"):
        ran = rank.run(source)
        assert ran.done.error is None
        assert not ran.done.has_value
        assert not ran.displays


def test_a_semicolon_hides_the_value_but_keeps_it(rank: Rank) -> None:
    ran = rank.run("6 * 7;")
    assert not ran.displays
    assert ran.done.has_value
    assert ran.done.value_repr == "42"


def test_last_values_stay_in_the_rank(rank: Rank) -> None:
    rank.run("'first'", label="[4]")
    rank.run("'second'", label="[5]")
    assert rank.run("_, __, Out[4], _5, In[5]", label="[6]").done.value_repr == (
        "('second', 'first', 'first', 'second', \"'second'\")"
    )


def test_variables_stay_between_cells(rank: Rank) -> None:
    rank.run("x = [1]")
    rank.run("x.append(2)")
    assert rank.run("x").done.value_repr == "[1, 2]"


# -- IPython's syntax -------------------------------------------------------------------------------------------------


def test_magics_and_shell_commands(rank: Rank) -> None:
    try:
        assert rank.run("%precision 3\nimport math\nmath.pi").done.value_repr == "3.142"
    finally:
        rank.run("%precision")  # the shell goes on with it, in other tests
    assert "'one'" in rank.run("words = !echo one\nwords[0]").done.value_repr
    assert rank.run("%%time\n21 * 2").done.value_repr == "42"


def test_a_shell_command_writes_into_the_cell(fd_rank: Rank) -> None:
    ran = fd_rank.run("print('before')\n!echo one; echo two >&2\nprint('after')")
    text = ran.text().replace("\r\n", "\n")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "one" in text + ran.text("stderr")
    assert "two" in text + ran.text("stderr")


def test_question_mark_shows_the_documentation(rank: Rank) -> None:
    ran = rank.run("len?")
    assert ran.done.error is None
    assert "number of items" in ran.text() + "".join(str(d.data) for d in ran.displays)


def test_await_at_top_level(rank: Rank) -> None:
    ran = rank.run("import asyncio\nawait asyncio.sleep(0)\nx = await asyncio.sleep(0, 'awaited')\nx")
    assert ran.done.value_repr == "'awaited'"


def test_tasks_of_a_cell_go_on_after_it(rank: Rank) -> None:
    rank.run(
        "import asyncio\nasync def work():\n    await asyncio.sleep(0)\n    return 7\ntask = asyncio.create_task(work())"
    )
    assert rank.run("await task").done.value_repr == "7"


def test_cells_run_in_order_of_arrival(rank: Rank) -> None:
    def script(pool: Pool) -> None:
        cells = [
            pool.start("import asyncio; seen = []"),
            pool.start("await asyncio.sleep(0.001)\nseen.append('slow')"),
            pool.start("seen.append('quick')"),
            pool.start("seen"),
        ]
        assert [pool.finish(cell).done.value_repr for cell in cells][-1] == "['slow', 'quick']"

    rank.play(script)


def test_code_of_others_runs_between_cells(rank: Rank) -> None:
    rank.run("import asyncio; seen = []")

    async def foreign() -> None:
        async with rank.agent.foreign():
            rank.shell.user_ns["seen"].append("foreign")

    def script(pool: Pool) -> None:
        cell = pool.start("seen.append('begin')\nawait asyncio.sleep(0.01)\nseen.append('end')")
        pool.engine.settle()
        asyncio.run_coroutine_threadsafe(foreign(), rank.loop).result(PATIENCE)
        pool.finish(cell)

    rank.play(script)
    seen = rank.shell.user_ns["seen"]
    assert seen.index("end") == seen.index("begin") + 1
    assert "foreign" in seen


# -- the order of reports ---------------------------------------------------------------------------------------------


def test_the_engine_knows_the_end_before_the_pool(rank: Rank) -> None:
    rank.run("print('x')\nraise ValueError('no\\nsecond line')")
    events = [name for name, _ in rank.engine.log]
    assert events[0] == "begin"
    assert events.index("end") < events.index("CellDone")
    assert events[-1] == "CellDone"
    assert dict(rank.engine.log)["end"] == "ValueError: no"


def test_the_engine_hears_of_a_good_end(rank: Rank) -> None:
    rank.run("1")
    assert ("end", None) in rank.engine.log


def test_an_extensions_failure_does_not_end_the_rank(rank: Rank) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("hook is broken")

    rank.shell.events.register("pre_run_cell", broken)
    rank.shell.events.register("post_run_cell", broken)
    try:
        assert rank.run("1").done.value_repr == "1"
    finally:
        rank.shell.events.unregister("pre_run_cell", broken)
        rank.shell.events.unregister("post_run_cell", broken)
    assert rank.run("2").done.value_repr == "2"


@pytest.mark.parametrize("before_the_cell", [False, True])
def test_cell_ended_by_a_fault_of_ours_ends_for_other_ranks(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, before_the_cell: bool
) -> None:
    def broken(*_: Any) -> None:
        raise AssertionError("a fault of ours")

    with monkeypatch.context() as patch:
        place: tuple[object, str] = (
            (framework_hooks, "modes") if before_the_cell else (rank.agent._runner, "_finish")
        )
        patch.setattr(*place, broken)
        assert rank.run("1").error.evalue == "a fault of ours"
    log = [(kind, what) for kind, what in rank.engine.log if kind in ("begin", "end", "CellDone")]
    assert [kind for kind, _ in log] == ["begin", "end", "CellDone"]
    assert "a fault of ours" in log[1][1]
    assert rank.run("2").done.value_repr == "2"


def test_interrupt_after_a_cell_that_a_fault_kept_from_beginning_is_dropped(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise AssertionError("a fault of ours")

    def script(pool: Pool) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(framework_hooks, "modes", broken)
            assert pool.run("1").error.evalue == "a fault of ours"
        pool.engine.interrupt()
        pool.engine.settle()
        assert pool.run("2").done.error is None

    rank.play(script)


def test_a_fault_of_ours_ends_the_cell_not_the_rank(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise AssertionError("a fault of ours")

    monkeypatch.setattr(rank.agent._runner, "_finish", broken)
    assert rank.run("1").error.evalue == "a fault of ours"
    monkeypatch.undo()
    assert rank.run("2").done.value_repr == "2"


# -- tracebacks -------------------------------------------------------------------------------------------------------


def test_traceback_has_the_notebooks_line_numbers(rank: Rank) -> None:
    ran = rank.run("x = 1\n\nx / 0\n", label="[7]")
    assert ran.error.ename == "ZeroDivisionError"
    assert ran.error.evalue == "division by zero"
    assert "Cell In[7], line 4" in traceback_of(ran)
    assert "x / 0" in traceback_of(ran)


@pytest.mark.parametrize("offset", [0, 1, 5])
def test_every_line_is_where_the_notebook_has_it(rank: Rank, offset: int) -> None:
    source = "\n\n\ndef f(x):\n    return 1 / x\n\n\nf(0)"
    text = traceback_of(rank.run(source, label="[3]", line_offset=offset))
    assert f"line {5 + offset}, in f(x)" in text
    assert f"Cell In[3], line {8 + offset}" in text


def test_functions_of_older_cells_keep_their_place(rank: Rank) -> None:
    rank.run("def f(x):\n    return 1 / x", label="[2]")
    text = traceback_of(rank.run("f(0)", label="[3]"))
    assert "Cell In[2], line 3" in text
    assert "Cell In[3], line 2" in text


def test_the_same_label_twice_keeps_both_sources(rank: Rank) -> None:
    rank.run("def f(x):\n    return 1 / x", label="[2]")
    text = traceback_of(rank.run("\n\n\n\nf(0)", label="[2]"))
    assert "Cell In[2], line 3" in text
    assert "Cell In[2], line 6" in text
    assert "return 1 / x" in text


def test_syntax_errors_are_flagged_and_placed(rank: Rank) -> None:
    ran = rank.run("x = 1\ny = = 2\n", label="[7]")
    assert ran.error.syntax
    assert ran.error.ename == "SyntaxError"
    assert "line 3" in traceback_of(ran)
    assert "y = = 2" in traceback_of(ran)
    assert not ran.text("stderr")
    assert dict(rank.engine.log)["end"].startswith("SyntaxError")


@pytest.mark.parametrize("source", ["return 5", "  x = 1\n y = 2", "x = (", "'unterminated"])
def test_what_does_not_compile_is_a_syntax_error(rank: Rank, source: str) -> None:
    ran = rank.run(source)
    assert ran.error.syntax
    assert not ran.text("stderr")
    assert not ran.text()


def test_a_syntax_error_at_run_time_is_not_the_cells(rank: Rank) -> None:
    assert not rank.run("compile('x = =', 'file.py', 'exec')").error.syntax


def test_chained_exceptions_show_both(rank: Rank) -> None:
    source = "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('second') from e"
    text = traceback_of(rank.run(source, label="[9]"))
    assert "line 3" in text
    assert "line 5" in text
    assert "direct cause" in text


def test_nested_exceptions_show_both(rank: Rank) -> None:
    text = traceback_of(rank.run("try:\n    1 / 0\nfinally:\n    int('x')"))
    assert "ZeroDivisionError" in text
    assert "ValueError" in text


def test_exception_groups_are_shown(rank: Rank) -> None:
    text = traceback_of(rank.run("raise ExceptionGroup('many', [ValueError('a'), KeyError('b')])"))
    assert "ValueError: a" in text
    assert "KeyError: 'b'" in text
    assert "\n\n" not in text, "entries are joined by one line feed"
    assert "<cell" not in text
    assert re.search(r"Cell In\[\d+\], line 2", text)


def test_an_exit_names_the_line_that_called_it(rank: Rank) -> None:
    text = traceback_of(rank.run("import sys\nsys.exit(3)"))
    assert re.search(r"SystemExit.*3\nCell In\[\d+\], line 3: sys\.exit\(3\)$", text)


def test_a_broken_str_does_not_break_the_report(rank: Rank) -> None:
    ran = rank.run(
        "class E(Exception):\n    def __str__(self):\n        raise RuntimeError('no text')\nraise E"
    )
    assert ran.error.ename == "E"
    assert "RuntimeError" in ran.error.evalue
    assert ran.error.traceback


def test_recursion_errors_are_reported(rank: Rank) -> None:
    ran = rank.run("def f(n):\n    return f(n + 1)\nf(0)")
    assert ran.error.ename == "RecursionError"
    assert sum(map(len, ran.error.traceback)) < 1 << 20
    assert "frames in the middle are left out" in traceback_of(ran)
    assert "Cell In[1], line 4" in traceback_of(ran)
    assert rank.run("1").done.value_repr == "1"


def test_a_huge_error_text_is_bounded(rank: Rank) -> None:
    ran = rank.run("raise ValueError('x' * 50_000_000)")
    assert len(ran.error.evalue) < 1 << 17
    assert sum(map(len, ran.error.traceback)) < 1 << 22


def test_sys_exit_ends_the_cell_only(rank: Rank) -> None:
    ran = rank.run("import sys\nsys.exit(3)")
    assert ran.error.ename == "SystemExit"
    assert ran.error.evalue == "3"
    assert rank.run("'alive'").done.value_repr == "'alive'"


def test_exit_ends_the_cell_only(rank: Rank) -> None:
    assert rank.run("exit()").error.ename == "SystemExit"
    assert rank.run("'alive'").done.value_repr == "'alive'"


def test_an_unknown_magic_is_a_usage_error(rank: Rank) -> None:
    ran = rank.run("%no_such_magic")
    assert ran.error.ename == "UsageError"
    assert len(ran.error.traceback) == 1


def test_errors_of_cells_run_by_a_cell_are_shown(rank: Rank) -> None:
    ran = rank.run("get_ipython().run_cell('1 / 0')\n'went on'")
    assert ran.done.error is None
    assert "ZeroDivisionError" in ran.text("stderr")


def test_the_time_of_the_raise_is_told_and_not_that_of_the_report(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[int] = []
    render = rank.shell.InteractiveTB.structured_traceback

    def rendering(*args: Any, **options: Any) -> list[str]:
        rendered.append(time.monotonic_ns())
        return render(*args, **options)

    monkeypatch.setattr(rank.shell.InteractiveTB, "structured_traceback", rendering)
    ran = rank.run("import time\nt = time.monotonic_ns()\n1 / 0")
    assert rank.shell.user_ns["t"] <= ran.error.when <= rendered[0]


# -- errors of collectives --------------------------------------------------------------------------------------------


def aborted(kind: CauseKind = CauseKind.CELL_ENDED) -> AbortedError:
    pending = Pending("allreduce", "loss", (0, 1), (2,))
    return AbortedError(pending, Cause(kind, (2,), "rank 2 failed"), 0, 1)


@pytest.mark.parametrize("kind", [CauseKind.CELL_FAILED, CauseKind.RANK_DIED])
def test_a_rank_that_only_was_stopped_renders_no_traceback_of_ipython(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, kind: CauseKind
) -> None:
    def render(*args: Any, **options: Any) -> list[str]:
        rendered.append(args[1])
        return ["rendered by IPython"]

    rendered: list[BaseException] = []
    monkeypatch.setattr(rank.shell.InteractiveTB, "structured_traceback", render)
    rank.shell.user_ns["error"] = aborted(kind)
    text = traceback_of(rank.run("def step():\n    raise error\nstep()", label="[7]"))
    assert not rendered
    assert "line 3, in step" in text
    assert "rank 2 failed" in text
    # An error that is this rank's own is rendered once, and not a second time for the history of IPython.
    for raised in (aborted(), RuntimeError("own")):
        rank.shell.user_ns["error"] = raised
        rendered.clear()
        assert traceback_of(rank.run("raise error")) == "rendered by IPython"
        assert rendered == [raised]


def test_an_error_is_in_the_history_of_ipython(rank: Rank) -> None:
    history = rank.shell.history_manager
    if not hasattr(history, "exceptions"):
        pytest.skip("this IPython keeps no errors")
    assert history is not None
    rank.run("raise ValueError('bad batch')", label="[41]")
    assert history.exceptions[41] == {"ename": "ValueError", "evalue": "bad batch", "traceback": []}


def test_an_aborted_collective_names_the_culprits(rank: Rank) -> None:
    rank.shell.user_ns["error"] = aborted()
    error = rank.run("raise error").error
    assert error.aborted
    assert error.collective == "allreduce `loss`"
    assert error.culprits == (2,)


def test_an_error_that_comes_of_an_abort_is_one(rank: Rank) -> None:
    rank.shell.user_ns["error"] = aborted()
    assert rank.run(
        "try:\n    raise error\nexcept Exception as e:\n    raise RuntimeError('x') from e"
    ).error.aborted


def test_a_mismatch_is_flagged(rank: Rank) -> None:
    groups = [Disagreement((0,), "allreduce float32[1]", "cell [1] line 2")]
    rank.shell.user_ns["error"] = MismatchError("loss", 0, groups)
    error = rank.run("raise error").error
    assert error.mismatch
    assert not error.aborted


def test_frames_below_the_users_call_are_hidden(rank: Rank) -> None:
    namespace: dict[str, Any] = {"__name__": "hvdlab.torch.mpi_ops", "error": aborted()}
    exec("def outer(f=None):\n    f() if f else inner()\ndef inner():\n    raise error", namespace)  # noqa: S102
    rank.shell.user_ns["allreduce"] = namespace["outer"]
    text = traceback_of(rank.run("def step():\n    allreduce()\nstep()", label="[7]"))
    assert "Cell In[7], line 3, in step()" in text
    assert "inner" not in text
    assert "waited; rank 2 failed\n" in text
    # An exception of the user's own code inside a call of ours keeps our frames between the user's.
    text = traceback_of(rank.run("def mine():\n    raise ValueError('x')\nallreduce(mine)", label="[8]"))
    assert "in mine()" in text


def test_frames_stay_for_a_debugger(rank: Rank) -> None:
    import sys

    namespace: dict[str, Any] = {"__name__": "hvdlab.torch.mpi_ops", "error": aborted()}
    exec("def inner():\n    raise error", namespace)  # noqa: S102
    rank.shell.user_ns["allreduce"] = namespace["inner"]
    rank.run("allreduce()")
    assert sys.last_traceback is not None
    assert sys.last_traceback.tb_next is not None
    assert sys.last_traceback.tb_frame.f_code.co_filename.startswith("<cell")


# -- asking for values ------------------------------------------------------------------------------------------------


def test_ids_are_those_of_the_request(rank: Rank) -> None:
    def script(pool: Pool) -> None:
        pool.engine.mail(RunCell("abc", "[1]", "print(1)"))
        assert pool.expect(Output).cell == "abc"
        assert pool.expect(CellDone).cell == "abc"

    rank.play(script)


@pytest.mark.parametrize(
    ("code", "status"), [("sys.exit(7)", 7), ("1 / 0", 1), ("status = 5", 0), ("sys.exit()", 0)]
)
def test_a_forked_child_ends_where_it_leaves_the_cell(fd_rank: Rank, code: str, status: int) -> None:
    ran = fd_rank.run(
        "import os, sys\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        f"    {code}\n"
        "else:\n"
        "    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
        "status"
    )
    assert ran.done.error is None
    assert ran.done.value_repr == str(status)


def test_a_child_forked_by_a_cell_does_not_disturb(fd_rank: Rank) -> None:
    ran = fd_rank.run(
        "import os\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    print('from the child')\n"
        "    os._exit(0)\n"
        "_ = os.waitpid(pid, 0)\n"
        "print('from the parent')"
    )
    assert ran.text() == "from the child\nfrom the parent\n"
    assert os.getpid() == fd_rank.shell.user_ns["os"].getpid()


def test_input_is_refused_at_the_users_line(rank: Rank) -> None:
    ran = rank.run("name = input('name? ')")
    assert "input() can't ask" in ran.error.evalue
    assert "prompting.py" not in traceback_of(ran)


def test_the_module_of_a_cell_is_known_without_a_search(rank: Rank) -> None:
    import inspect

    ran = rank.run("def f(): pass\n(f.__code__.co_filename,)", label="[91]")
    (file,) = ast.literal_eval(ran.done.value_repr)
    assert inspect.modulesbyfile[file] == "__main__"
    assert inspect.modulesbyfile[os.path.abspath(file)] == "__main__"


def test_an_error_whose_text_is_of_a_subclass_of_str_keeps_its_traceback(rank: Rank) -> None:
    """As a ``KeyError`` in a worker of torch's data loader, whose text has a ``repr`` of its own."""
    ran = rank.run(
        "from torch._utils import KeyErrorMessage\n"
        "class Told(Exception):\n    def __str__(self): return KeyErrorMessage('in worker 0')\n"
        "raise Told"
    )
    assert (ran.error.ename, ran.error.evalue) == ("Told", "in worker 0")
    assert "raise Told" in traceback_of(ran)


def test_what_can_be_sent_of_an_error_is(rank: Rank) -> None:
    """A number in it is none of Python's own."""
    cause = Cause(CauseKind.CELL_FAILED, (np.int64(2),), "why")  # type: ignore[arg-type]  # that is the point
    rank.shell.user_ns["error"] = AbortedError(Pending("allreduce", "loss"), cause)
    ran = rank.run("raise error")
    assert ran.error.ename == "AbortedError"
    assert ran.error.aborted
    assert "raise error" in traceback_of(ran)


@pytest.mark.parametrize(
    ("source", "together"), [("pass", True), ("1 + 1", False), ("print(1)", False), ("1 / 0", False)]
)
def test_the_end_of_a_cell_waits_for_its_mail_only_if_nothing_can_hold_that_up(
    rank: Rank, source: str, together: bool
) -> None:
    rank.run(source)
    assert rank.engine.together == [together]
